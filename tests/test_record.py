"""The record: what a run did, as data that others can read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runs import data, last, module, trainer
from turnrl import Question, Reading, ToolCall, ToolResult, Trajectory, Turn
from turnrl.run import record
from turnrl.scoring import curves, score_group


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """A run of two iterations with everything kept, its module, and what was collected."""
    folder, collected = tmp_path_factory.mktemp("run"), []
    it = module(tiny_model, record_per_iteration=None, transcripts_per_iteration=2)
    collect = it.collector.collect

    def collecting(*given):
        collected.append(collect(*given))
        return collected[-1]

    it.collector.collect = collecting
    trainer(folder).fit(it, data())
    return folder, it, collected


def kept(folder):
    return folder / "version_0" / "record"


def documented(text):
    """Names of the columns that a docstring lists, line by line."""
    names = re.findall(r"^    ((?:\w+, )*\w+)(?: {2,}|$)", text, re.MULTILINE)
    return [name for line in names for name in line.split(", ")]


def test_the_columns_that_are_documented_are_those_that_are_written(run):
    folder, _, _ = run
    for file in kept(folder).iterdir():
        schema = pq.read_schema(file)
        assert sorted(schema.names) == sorted(documented(record.__doc__))
        assert schema.equals(record.SCHEMA)
        turn = schema.field("turns").type.value_type
        (fields,) = re.findall(r"turns\s+a list of \{(.*?)\}", record.__doc__, re.DOTALL)
        written = sorted(turn[i].name for i in range(turn.num_fields))
        assert written == sorted(re.split(r",\s+", fields))


def test_each_iteration_and_each_evaluation_is_a_file_of_its_own(run):
    folder, _, _ = run
    assert sorted(file.name for file in kept(folder).iterdir()) == [
        # two steps an iteration; the first evaluation is of the untrained policy
        *("train-000000-0.parquet", "train-000002-0.parquet"),
        *("val-000000-0.parquet", "val-000002-0.parquet", "val-000004-0.parquet"),
    ]


def test_rows_agree_with_what_was_learnt_from(run):
    folder, _, collected = run
    for iteration, experience in enumerate(collected):
        rows = iter(record.read(kept(folder), f"train-{2 * iteration:06d}-*.parquet"))
        for number, (group, advantages) in enumerate(
            zip(experience.groups, experience.credit, strict=True)
        ):
            totals = [
                float(group.outcome[i]) + sum(group.turn_rewards[i].tolist()) for i in range(4)
            ]
            for i, trajectory in enumerate(group.trajectories):
                row = next(rows)
                assert (row["iteration"], row["policy_version"]) == (iteration + 1, 2 * iteration)
                assert (row["split"], row["group"], row["member"]) == ("train", number, i)
                assert row["question_id"] == group.question.id
                assert row["question"] == group.question.text
                assert tuple(row["answers"]) == group.question.answers
                assert (row["stop"], row["answer"]) == (trajectory.stop, trajectory.answer)
                assert {name: row[name] for name in curves(trajectory)} == curves(trajectory)
                assert row["prompt_tokens"] == len(trajectory.prompt_ids)
                assert row["outcome"] == float(group.outcome[i])
                parts = {part["name"]: part["value"] for part in row["rewards"]}
                totals_of = group.component_totals
                assert parts == {name: float(part[i]) for name, part in totals_of.items()}
                assert row["group_mean"] == pytest.approx(sum(totals) / 4, abs=1e-6)
                deviation = sum((x - sum(totals) / 4) ** 2 for x in totals) / 3
                assert row["group_std"] == pytest.approx(deviation**0.5, abs=1e-6)
                assert len(row["turns"]) == len(trajectory.turns)
                for k, (turn, found) in enumerate(zip(trajectory.turns, row["turns"], strict=True)):
                    assert found["reward"] == float(group.turn_rewards[i, k])
                    assert found["advantage"] == float(advantages[i, k])
                    assert (found["text"], found["cut"]) == (turn.text, turn.cut)
                    assert found["tokens"] == len(turn.token_ids)
                    assert found["format_error"] == turn.reading.format_error
                    assert found["results"] == [
                        {"content": r.content, "ok": r.ok} for r in turn.results
                    ]
                    assert [
                        (call["name"], json.loads(call["arguments"]), call["error"])
                        for call in found["calls"]
                    ] == [(c.name, dict(c.arguments), c.error) for c in turn.reading.calls]
        assert next(rows, None) is None
    everything = record.read(kept(folder), "train-*")
    assert any(result for row in everything for turn in row["turns"] for result in turn["results"])
    assert {turn["cut"] for row in everything for turn in row["turns"]} == {True, False}


def test_an_evaluation_has_a_row_for_each_question_and_no_credit(run):
    folder, _, _ = run
    rows = record.read(kept(folder), "val-*")
    assert [(row["policy_version"], row["iteration"]) for row in rows[::3]] == [
        *[(0, 0), (2, 1), (4, 2)]
    ]
    assert [row["question_id"] for row in rows] == ["n100", "n101", "n102"] * 3
    assert {(row["split"], row["group_mean"], row["group_std"]) for row in rows} == {
        ("val", None, None)
    }
    assert {turn["advantage"] for row in rows for turn in row["turns"]} == {None}


def test_datasets_reads_it_as_pyarrow_does(run, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder, _, _ = run
    files = sorted(map(str, kept(folder).glob("*.parquet")))
    loaded = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    table = pa.concat_tables([pq.read_table(file) for file in files])
    assert loaded.to_list() == table.to_pylist() == record.read(kept(folder))
    assert len(loaded) == 2 * 16 + 3 * 3


def test_transcripts_show_the_best_and_the_worst_with_their_credit(run):
    folder, _, collected = run
    for iteration, experience in enumerate(collected):
        file = folder / "version_0" / "transcripts" / f"iteration_{iteration + 1:04d}.txt"
        texts = file.read_text(encoding="utf-8").split("\n" + "=" * 80 + "\n")
        assert len(texts) == 2
        for text, group, extreme in zip(texts, experience.groups, (max, min), strict=False):
            assert f"question   {group.question.text}\n" in text
            i = group.totals.tolist().index(extreme(group.totals.tolist()))
            for turn in group.trajectories[i].turns:
                assert turn.text in text
            advantages = experience.credit[list(experience.groups).index(group)]
            assert f"advantage {float(advantages[i, 0]):+.3f}" in text


def test_as_many_trajectories_are_kept_as_the_recipe_says_and_evaluations_whole(
    tiny_model, tmp_path
):
    for most in (5, 0):
        it = module(tiny_model, record_per_iteration=most)
        trainer(tmp_path / str(most), 1).fit(it, data())
        files = {
            file.name: len(record.read(file.parent, file.name))
            for file in kept(tmp_path / str(most)).iterdir()
        }
        wanted = {"val-000000-0.parquet": 3, "val-000002-0.parquet": 3}
        assert files == (wanted | {"train-000000-0.parquet": 5} if most else wanted)


def test_an_evaluation_of_a_checkpoint_is_recorded_as_of_its_iteration(run, tmp_path, tiny_model):
    folder, _, _ = run
    questions = data()
    questions.split = "train"
    trainer(tmp_path).validate(module(tiny_model), questions, ckpt_path=last(folder), verbose=False)
    (file,) = kept(tmp_path).iterdir()
    assert file.name == "train-000004-0.parquet"
    rows = record.read(kept(tmp_path))
    assert len(rows) == 12
    assert {(row["split"], row["policy_version"], row["iteration"]) for row in rows} == {
        ("train", 4, 2)
    }


def test_a_file_is_replaced_when_the_new_one_is_complete(tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def fails(table, where, **options):
        Path(where).write_text("half a fi")
        raise Stop

    file = tmp_path / "record" / "train-000000-0.parquet"
    row = dict.fromkeys(record.SCHEMA.names)
    record.write([row | {"split": "first"}], file)
    with monkeypatch.context() as broken:
        broken.setattr(pq, "write_table", fails)
        with pytest.raises(Stop):
            record.write([row | {"split": "second"}], file)
    assert [r["split"] for r in record.read(file.parent)] == ["first"]
    record.write([row | {"split": "second"}], file)
    assert [r["split"] for r in record.read(file.parent)] == ["second"]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_half_a_surrogate_pair_that_the_policy_wrote_does_not_stop_the_run(tmp_path):
    # "\\ud800" is legal JSON, so a segmenter that reads JSON can find it in a call or an answer
    odd = Reading((ToolCall("\ud800", error="\ud800"),), "\ud800", "\ud800")
    turn = Turn("text", (1,), (-0.5,), odd, (ToolResult("x"),))
    attempt = Trajectory(Question("\ud800", "\ud800", ("\ud800",)), (1,), (turn,), "turns")
    group = score_group([attempt], [], 1)
    record.write(
        list(record.rows([group], [None], "train", 0, 0)), tmp_path / "train-000000-0.parquet"
    )
    (row,) = record.read(tmp_path)
    assert len(row["turns"][0]["calls"]) == 1


def test_groups_are_numbered_through_over_batches_and_processes():
    attempt = Trajectory(
        Question("q", "?", ("x",)), (1,), (Turn("t", (1,), (-0.5,), Reading(answer="x")),), "answer"
    )
    groups = [score_group([attempt, attempt], [], 1)] * 2
    found = [
        row["group"]
        for rank in (0, 1)
        for row in record.rows(groups, [None, None], "val", 0, 0, first=rank, step=2)
    ]
    assert sorted(found) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_an_evaluation_in_several_batches_gives_each_question_a_number(tiny_model, tmp_path):
    trainer(tmp_path, 1).validate(module(tiny_model), data(val_batch_size=1), verbose=False)
    found = record.read(tmp_path / "version_0" / "record")
    assert [row["group"] for row in found] == [0, 1, 2]
