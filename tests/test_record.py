"""The record: what a run did, as data that others can read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.callbacks import Callback

import trajectories
import turnrl
from commands import save
from runs import data, make_module, trainer
from trajectories import ids_of, sampled_turn, trajectory
from turnrl import (
    AdvantageEstimator,
    DataError,
    OutcomeOnly,
    Question,
    Reading,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnLevel,
    assign_credit,
)
from turnrl.cli import main
from turnrl.plugin.text import make_visible
from turnrl.rewards.scoring import compute_curves, score_group
from turnrl.runs import columns, record
from turnrl.types import Critic, Sample
from turnrl.watch import recorder as recording
from turnrl.watch.recorder import Recorder


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """A run of two iterations with everything kept, its module, and what was collected."""

    class Kept(Callback):
        experiences: ClassVar[list] = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                self.experiences.append(pl_module.experience)

    folder = tmp_path_factory.mktemp("run")
    module = make_module(tiny_model)
    trainer(folder, callbacks=[Kept(), Recorder(None, tokens=True, transcripts=2)]).fit(
        module, data()
    )
    return folder, module, Kept.experiences


def kept(folder):
    return folder / "version_0" / "record"


def written(rows, folder, name="train-000000-0.parquet"):
    recording.write_rows(list(rows), folder / name)
    return folder


def test_the_record_has_all_of_a_trajectory_and_its_credit(run):
    folder, _, collected = run
    # two steps an iteration; the first evaluation is of the untrained policy
    trained = [f"train-{steps:06d}-0.parquet" for steps in (0, 2)]
    evaluated = [f"val-{steps:06d}-0.parquet" for steps in (0, 2, 4)]
    assert sorted(file.name for file in kept(folder).iterdir()) == trained + evaluated
    for iteration, experience in enumerate(collected):
        rows = record.read(kept(folder) / trained[iteration])
        pairs = zip(experience.groups, experience.credit, record.groups(rows), strict=True)
        for number, (group, credit, members) in enumerate(pairs):
            again = record.restore_group(members)
            assert again.outcome.equal(group.outcome)
            turns = max(len(whole.turns) for whole in group.trajectories)
            assert again.turn_rewards.equal(group.turn_rewards[:, :turns])
            assert again.reached.equal(group.reached[:, :turns])
            for name, part in group.components.items():
                values = part.values[:, :turns] if part.by_turn else part.values
                assert again.components[name].values.equal(values)
            for i, (row, whole) in enumerate(zip(members, group.trajectories, strict=True)):
                place = (row["iteration"], row["policy_version"], row["group"], row["member"])
                assert place == (iteration + 1, 2 * iteration, number, i)
                assert (row["question_id"], row["answer"]) == (group.question.id, whole.answer)
                assert {name: row[name] for name in compute_curves(whole)} == compute_curves(whole)
                assert row["sample_tokens"] == [whole.tokens]
                assert row["group_mean"] == pytest.approx(float(group.totals.mean()))
                assert row["group_std"] == pytest.approx(float(group.totals.std()))
                other = again.trajectories[i]
                assert other.ended_by == whole.ended_by
                assert other.sampled_turns == whole.sampled_turns
                for k, (turn, kept_one) in enumerate(zip(whole.turns, other.turns, strict=True)):
                    for field in dataclasses.fields(Turn):
                        assert getattr(kept_one, field.name) == getattr(turn, field.name)
                    part = row["turns"][k]
                    assert part["advantage"] == float(credit.turns[i, k])
                    assert (part["tokens"], part["sample"]) == (len(ids_of(whole, k)), 0)
    everything = record.read(folder / "version_0", split="train")
    assert {turn["cut"] for row in everything for turn in row["turns"]} == {True, False}
    assert json.loads(everything[0]["estimator"])["class"] == "turnrl.credit.estimators.TurnLevel"
    rows = record.read(folder / "version_0", split="val")
    assert [(row["policy_version"], row["iteration"]) for row in rows[::3]] == [
        *[(0, 0), (2, 1), (4, 2)]
    ]
    assert {(row["group_mean"], row["estimator"]) for row in rows} == {(None, None)}
    assert {turn["advantage"] for row in rows for turn in row["turns"]} == {None}


def test_every_field_of_any_trajectory_is_restored(tmp_path):
    """Parquet holds whatever a type can: a field that is added to `Turn` is in the record too."""
    draw = random.Random(0)
    groups = [trajectories.group(draw, n) for n in range(20)]
    odd = ToolResult("", False, {"a": [1, {"b": None}]}, 0.5, True, "\x00unread")
    call = ToolCall("look", {"at": {"x": [1.5, "é"]}}, "error", "mended")
    reading = Reading((call, ToolCall("")), "answer", "form")
    turn = replace(sampled_turn("text", (1,), (-0.5,), reading, (odd,), cut=True), reward=-1.0)
    groups.append(score_group([trajectory(Question("q", "?"), (1,), (turn,), "answer")], [], 1))
    credit = [assign_credit(group, TurnLevel(gamma=0.9)) for group in groups]
    made = [*recording.record_rows(groups, credit, "train", 3, 2, learner=trajectories.noted)]
    file = tmp_path / "one.parquet"
    recording.write_rows(made, file)
    read = record.read_checked(file)
    assert read == record.read(file) == made
    for row, whole in zip(read, (t for g in groups for t in g.trajectories), strict=True):
        attempt = columns.restore(columns.RecordedAttempt, row)
        for kept_one, original in zip(attempt.turns, whole.turns, strict=True):
            for field in dataclasses.fields(Turn):
                assert getattr(kept_one.turn, field.name) == getattr(original, field.name)
    assert pq.read_schema(file).equals(record.SCHEMA)


def test_datasets_reads_a_record_as_pyarrow_does(run, tmp_path, monkeypatch):
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


def test_transcripts_show_the_best_and_the_worst_attempt_with_their_credit(run):
    folder, _, collected = run
    for iteration, experience in enumerate(collected):
        file = folder / "version_0" / "transcripts" / f"iteration_{iteration + 1:04d}.txt"
        texts = file.read_text(encoding="utf-8").split("\n" + "=" * 80 + "\n")
        assert len(texts) == 2
        for text, group, extreme in zip(texts, experience.groups, (max, min), strict=False):
            assert f"question   {group.question.text}\n" in text
            i = group.totals.tolist().index(extreme(group.totals.tolist()))
            for turn in group.trajectories[i].turns:
                assert make_visible(turn.text) in text  # a random policy says controls too
            advantages = experience.credit[list(experience.groups).index(group)].turns
            assert f"advantage {float(advantages[i, 0]):+.3f}" in text


def test_whole_groups_are_kept_up_to_the_limit_and_at_least_one():
    groups = [group_of(4)] * 5  # of each of two processes
    counts = [
        [recording.count_recorded_groups(groups, most, rank, 2) for rank in (0, 1)]
        for most in (None, 0, 3, 8, 17)
    ]
    assert counts == [[5, 5], [0, 0], [1, 0], [1, 1], [2, 2]]


def group_of(size):
    return score_group([attempt()] * size, [], 1)


def attempt(*results):
    turn = sampled_turn("t", (1,), (-0.5,), Reading((ToolCall("echo"),), "x"), results)
    return trajectory(Question("q", "?", ("x",)), (1,), (turn,), "answer")


def test_tokens_are_recorded_with_the_numbers_of_sampler_and_learner(run):
    folder, module, collected = run
    rows = record.read(kept(folder) / "train-000000-0.parquet")
    trajectories = [t for group in collected[0].groups for t in group.trajectories]
    # the weights of the first iteration are the model's own
    fresh = make_module(module.policy.settings.model).policy
    fresh.load()
    read = fresh.score_tokens(
        [t.token_rows[0] for t in trajectories], 4096, module.rollout.temperature
    )
    for row, whole, (logprobs, entropies, _) in zip(rows, trajectories, read, strict=True):
        sample = whole.sample
        assert tuple(row["token_ids"]) == sample.token_ids
        assert tuple(row["token_ids"][: row["prompt_tokens"]]) == sample.prompt_ids
        assert tuple(row["turn_index"]) == sample.turn_index
        # pieces of text, not of the words that a vocabulary keeps
        assert "".join(row["token_texts"]) == module.policy.tokenizer.decode(sample.token_ids)
        assert len(row["token_texts"]) == len(sample.token_ids)
        sampled = [k >= 0 for k in sample.turn_index]
        for name, expected in (
            ("sampler_logprobs", [*compress(sample.sampler_logprobs, sampled)]),
            ("learner_logprobs", logprobs.tolist()),
            ("entropies", entropies.tolist()),
            ("versions", [0] * sum(sampled)),
        ):
            assert [value is not None for value in row[name]] == sampled
            known = [value for value in row[name] if value is not None]
            assert known == pytest.approx(expected, abs=1e-5)
    # in process and in float32 both compute the same, at 1 for greedy turns too
    for row in record.read(folder / "version_0"):
        pairs = zip(row["sampler_logprobs"], row["learner_logprobs"], strict=True)
        assert all(a == b == None or abs(a - b) < 1e-4 for a, b in pairs)  # noqa: E711


def several(version=0):
    """A branch of three turns in two histories. Its own turns are the last two."""
    first = Sample().read((1, 2)).wrote(0, (3,), (-0.3,), version).read((4,))
    first = first.wrote(2, (5, 6), (-0.5, -0.6), (version + 1, version + 2))
    other = Sample().read((7,)).wrote(1, (8,), (-0.8,), version)
    turns = (Turn("one"), Turn("two", reward=0.5), Turn("three", Reading(answer="x")))
    return Trajectory(Question("q", "?", ("x",)), turns, "answer", (first, other), begins=1)


def test_several_histories_are_recorded_in_sequence(tmp_path):
    def learner(rows):
        assert rows == [*several().token_rows]
        return trajectories.noted(rows)

    group = score_group([several(4)], [], 3)
    made = recording.record_rows([group], [None], "train", 1, 0, learner=learner)
    (row,) = record.read(written(made, tmp_path))
    assert (row["prompt_tokens"], row["sample_tokens"]) == (2, [6, 2])
    assert row["policy_version"] == 0
    assert row["token_ids"] == [1, 2, 3, 4, 5, 6, 7, 8]
    # turn 0 is another's
    assert row["turn_index"] == [-1, -1, -1, -1, 2, 2, -1, 1]
    assert row["versions"] == [None, None, None, None, 5, 6, None, 4]
    assert row["sampler_logprobs"] == [
        None if value is None else pytest.approx(value)
        for value in (None, None, None, None, -0.5, -0.6, None, -0.8)
    ]
    for name in ("learner_logprobs", "entropies"):
        assert [value is not None for value in row[name]] == [k >= 0 for k in row["turn_index"]]
    assert [(turn["tokens"], turn["sample"]) for turn in row["turns"]] == [(1, 0), (1, 1), (2, 0)]
    assert [turn["reward"] for turn in row["turns"]] == [0.0, 0.5, 0.0]


def test_trajectories_of_several_histories_are_rebuilt_from_a_record(tmp_path):
    whole = replace(several(), begins=0)
    group = score_group([whole, attempt()], [], 3)
    (first, other) = record.read(
        written(recording.record_rows([group], [None], "train", 0, 0), tmp_path)
    )
    again = record.restore_group([first, other])
    for kept_one, original in zip(again.trajectories, group.trajectories, strict=True):
        assert sorted(kept_one.sampled_turns) == sorted(original.sampled_turns)
        assert [turn.reward for turn in kept_one.turns] == [turn.reward for turn in original.turns]


def test_a_trajectory_without_tokens_has_rows_and_the_version_passed_in(tmp_path):
    silent = Trajectory(Question("q", "?", ("x",)), (Turn("t", Reading(answer="x")),), "answer")
    group = score_group([silent], [], 1)
    (row,) = record.read(written(recording.record_rows([group], [None], "val", 2, 7), tmp_path))
    assert (row["policy_version"], row["prompt_tokens"], row["sample_tokens"]) == (7, None, [])
    assert [(turn["tokens"], turn["sample"]) for turn in row["turns"]] == [(0, None)]
    assert [row[name] for name in record.TOKENS] == [None] * 7


def test_reward_components_are_kept_by_turn_and_shown_in_transcripts(tmp_path):
    from worlds import Answered, Called

    searched = sampled_turn("look", (1,), (-0.5,), Reading((ToolCall("echo"),)), (ToolResult("4"),))
    answered = sampled_turn("a", (2,), (-0.5,), Reading(answer="a"))
    whole = trajectory(Question("q", "Long?", ("a",)), (1,), (searched, answered), "answer")
    group = score_group([whole], [Answered(), Called()], 3)
    (row,) = record.read(written(recording.record_rows([group], [None], "val", 0, 0), tmp_path))
    values = [Called().score(whole, k) for k in (0, 1)]
    assert values[0] != values[1]
    assert [turn["rewards"] for turn in row["turns"]] == [
        [{"name": "turn/called", "value": value}] for value in values
    ]
    assert row["rewards"] == [
        {"name": "outcome/answered", "value": Answered().score(whole)},
        {"name": "turn/called", "value": sum(values)},
    ]
    text = record.format_transcript(row)
    assert f"-- turn 1   reward {values[0]:.3f} (turn/called {values[0]:.3f})\nlook\n" in text
    assert f"-- turn 2   reward {values[1]:.3f} (turn/called {values[1]:.3f})\na\n" in text


class Broken:
    def __str__(self):
        raise OSError("no text")


@dataclass
class Page:
    title: str


def test_any_metadata_of_results_can_be_recorded(tmp_path):
    circle = {}
    circle["itself"] = circle
    metadata = {
        "passage_ids": ("7", "9"),
        "scores": torch.tensor([0.5, math.nan]),
        3: Page("Peru"),
        "path": Path("a"),
        "odd": "\ud800",
    }
    results = [ToolResult("x", metadata=m) for m in (metadata, {}, circle, {"it": Broken()})]
    group = score_group([attempt(*results)], [], 1)
    (row,) = record.read(written(recording.record_rows([group], [None], "val", 0, 0), tmp_path))
    kept = [result["metadata"] for result in row["turns"][0]["results"]]
    assert json.loads(kept[0]) == {
        **{"passage_ids": ["7", "9"], "scores": [0.5, "nan"], "3": {"title": "Peru"}},
        **{"path": "a", "odd": "\ud800"},
    }
    assert kept[1] == "{}"
    assert "RecursionError" in json.loads(kept[2])
    assert "OSError" in json.loads(kept[3])


class Forgetful(AdvantageEstimator):
    def __init__(self, kept, lost):
        self.kept = kept

    def __call__(self, group):
        return torch.zeros_like(group.turn_rewards)


def test_the_estimator_is_recorded_with_the_arguments_that_it_keeps():
    def recorded_as(estimator):
        row = next(recording.record_rows([group_of(2)], [None], "train", 1, 0, estimator=estimator))
        return json.loads(row["estimator"])

    assert recorded_as(OutcomeOnly(min_std=0.5)) == {
        "name": "OutcomeOnly",
        "class": "turnrl.credit.estimators.OutcomeOnly",
        "arguments": {"baseline": "mean", "scale": "std", "min_std": 0.5},
    }
    critic = {"lr": 0.1, "trains_policy": True}
    assert recorded_as(Forgetful(Critic(), 5)) == {
        "name": "Forgetful",
        "class": f"{__name__}.Forgetful",
        "arguments": {"kept": critic},
    }


# -------------------------------------------------------------------------------------- reading


def test_a_record_is_found_by_its_run_folder_file_or_name(run, tmp_path, monkeypatch):
    folder, _, _ = run
    every = record.list_files(folder / "version_0")
    assert every == sorted(kept(folder).iterdir()) == record.list_files(str(kept(folder)))
    assert record.list_files(every[0]) == [every[0]]
    assert record.list_files(folder / "version_0", split="val") == every[2:]
    # of several runs the newest one that has a record
    monkeypatch.chdir(tmp_path)
    row = trajectories.row()
    for version in (3, 1):
        home = Path("runs", "mine", f"version_{version}", "record")
        written([row | {"split": "val", "group": version}], home, "val-000000-0.parquet")
    os.utime(Path("runs", "mine", "version_3", "record"), (1, 1))
    Path("runs", "mine", "version_9", "record").mkdir(parents=True)
    for run_of in ("mine", "runs/mine", Path("runs/mine").absolute()):
        assert [r["group"] for r in record.read(run_of)] == [1]


def test_the_name_of_a_file_is_parsed_as_it_was_written():
    for split, text in (("val", "val-000048-3.parquet"), ("my-set", "my-set-1234567-0.parquet")):
        name = record.FileName.of(Path("record", text))
        assert (name.split, str(name)) == (split, text)
        assert name == record.FileName(split, name.policy_version, name.process)
    # other names, such as a user's copy
    for text in ("copy.parquet", "my-copy.parquet", "val-000048-new.parquet"):
        assert record.FileName.of(Path(text)).split == Path(text).stem


def test_a_table_reads_only_the_columns_that_are_named(run):
    folder, _, _ = run
    table = record.table(folder / "version_0", ["iteration", "exact_match"], split="train")
    assert table.column_names == ["iteration", "exact_match"]
    assert table.num_rows == 32
    (first, *_) = record.read(folder / "version_0", ["group", "turns"], split="train")
    assert first.keys() == {"group", "turns"}


def test_mistakes_in_naming_a_record_are_errors(run):
    folder, _, _ = run
    with pytest.raises(DataError, match=r"has no split 'vall'\. Take train, val\."):
        record.read(folder / "version_0", split="vall")
    with pytest.raises(DataError, match=r"no column 'exactmatch'\. Did you mean exact_match\?"):
        record.table(folder / "version_0", ["exactmatch"])


def test_a_file_that_is_torn_foreign_or_newer_is_refused(run, tmp_path):
    folder, _, _ = run
    (file, *_) = record.list_files(folder / "version_0")
    whole = file.read_bytes()
    torn = tmp_path / "torn.parquet"
    for part in (whole[:-100], whole[: len(whole) // 2], b""):
        torn.write_bytes(part)
        with pytest.raises(DataError, match=r"torn\.parquet' cannot be read \(.*Copy it again, or"):
            record.read(torn)
    torn.write_bytes(b"PAR1" + bytes(len(whole) // 2) + whole[len(whole) // 2 + 4 :])
    with pytest.raises(DataError, match=r"torn\.parquet' cannot be read"):
        record.read(torn)
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"turns": [1], "text": ["a"]}), foreign)
    with pytest.raises(DataError, match=r"foreign\.parquet' is not a record of turnrl\. Give the"):
        record.read(foreign)
    newer = tmp_path / "newer.parquet"
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({"turnrl.record": "5"}), newer)
    with pytest.raises(DataError, match=r"version 5.* reads 4\. Upd"):
        record.read(newer)


def test_a_lone_surrogate_does_not_stop_the_run(tmp_path):
    # "\\ud800" is legal JSON, so a segmenter that reads JSON can find it in a call or an answer
    odd = Reading((ToolCall("\ud800", error="\ud800"),), "\ud800", "\ud800")
    turn = sampled_turn("text", (1,), (-0.5,), odd, (ToolResult("x"),))
    odd_one = trajectory(Question("\ud800", "\ud800", ("\ud800",)), (1,), (turn,), "turns")
    group = score_group([odd_one], [], 1)
    (row,) = record.read(written(recording.record_rows([group], [None], "train", 0, 0), tmp_path))
    assert len(row["turns"][0]["reading"]["calls"]) == 1


def test_groups_are_numbered_consecutively_across_batches_and_processes():
    groups = [group_of(2)] * 2
    numbers = [
        row["group"]
        for rank in (0, 1)
        for row in recording.record_rows(groups, [None, None], "val", 0, 0, first=rank, step=2)
    ]
    assert sorted(numbers) == [0, 0, 1, 1, 2, 2, 3, 3]


# ----------------------------------------------------------------------------------- figures


def test_figures_are_means_over_questions_with_intervals():
    def row(group, in_results, *rewards, split="val"):
        curves = dict.fromkeys((*record.CURVES, "f1"), 1.0) | {"answer_in_results": in_results}
        size = {"turns": [{"reading": {"calls": [{}]}, "tokens": 3}] * 2, "prompt_tokens": 5}
        parts = [{"name": f"outcome/{n}", "value": v} for n, v in enumerate(rewards)]
        return {
            "split": split,
            "policy_version": 0,
            "group": group,
            "member": 0,
            "rewards": parts,
            **curves,
            **size,
        }

    # two attempts at each of two questions; the second question has no `answer_in_results`
    rows = [row(0, 1.0, 1.0, 0.5), row(0, 0.0, 0.0, 0.5), row(1, None, 1.0, 0.5)]
    rows += [row(1, None, 1.0, 1.5)]
    figures = record.compute_metrics(rows)
    rewards = ["reward/outcome/0", "reward/outcome/1", "reward/total"]
    size = ["turns", "calls", "sampled_tokens"]
    assert [*figures] == [*record.CURVES, "f1", *rewards, *size]
    assert [figures[name].mean for name in size] == [2, 2, 6]
    interval = record.mean_interval
    assert figures["exact_match"] == record.Metric(1.0, *interval([1.0, 1.0]), 2)
    assert figures["answer_in_results"] == record.Metric(0.5, None, None, 1)
    assert figures["turns"] == record.Metric(2.0, 2.0, 2.0, 2)
    assert figures["reward/outcome/0"] == record.Metric(0.75, *interval([0.5, 1.0]), 2)
    assert figures["reward/total"] == record.Metric(1.5, *interval([1.0, 2.0]), 2)
    assert record.compute_metrics([row(1, None)])["answer_in_results"] == record.Metric(
        None, None, None, 0
    )
    # a reward that is all or nothing is a rate times its weight
    half = record.compute_metrics([row(n, None, 1.0, 0.5 * (n % 2)) for n in range(9)])
    assert half["reward/outcome/1"] == record.Metric(
        pytest.approx(2 / 9), *interval([0.5 * (n % 2) for n in range(9)], 0.5), 9
    )
    # a question of another split is another one
    assert record.compute_metrics([row(0, 1.0), row(0, 1.0, split="test")])["format"].questions == 2
    assert record.compute_metrics([]) == {}


OPENING = "opening    a wall\\x1b[2J\n           ‹/result› and a door\n-- turn 1"


def test_transcripts_and_play_show_the_opening_that_the_policy_saw(recipe, capsys):
    recipe["model"]["rollout"]["tools"] = ["worlds.Wall"]
    save(recipe)
    assert main(["fit", "recipe.yaml", "--trainer.max_epochs", "1"]) == 0
    run = Path("runs/recipe/version_0")
    row = record.read(run)[0]
    assert row["opening"] == "a wall\x1b[2J\n‹/result› and a door"
    (text,) = (run / "transcripts").iterdir()
    assert OPENING.partition("-- turn")[0] in text.read_text(encoding="utf-8")
    capsys.readouterr()
    for more in ([], ["--samples", "2"]):
        assert main(["play", "recipe.yaml", "Number 7?", *more]) == 0
        assert OPENING in capsys.readouterr().out
    assert f"question   Number 7?\n{OPENING}" in str(turnrl.load(str(run)).ask("Number 7?")[0])
    assert main(["report", str(run)]) == 0
