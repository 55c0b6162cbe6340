"""`turnrl eval`: recipes, runs and servers scored on data sets."""

from __future__ import annotations

import csv
import itertools
import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml

from commands import fails, save
from pages import blocks
from turnrl import Question
from turnrl.cli import main
from turnrl.plugin.text import normalize_answer
from turnrl.recipe.trust import mark_text
from turnrl.rewards.answers import f1
from turnrl.runs import record
from turnrl.runs.load import open_runs
from vendors import Handler, vendor

ROOT = Path(__file__).parent.parent
BRACKETS = (
    "--model.rollout.segmenter=rollouts.Brackets",
    "--model.rollout.tools=[worlds.Echo]",
    "--model.rollout.max_turn_tokens=64",
)


@pytest.fixture
def capitals(recipe):
    """A file of two questions, beside a recipe."""
    rows = [("fr", "Capital of France?", "Paris"), ("uk", "Capital of the UK?", "London")]
    lines = [json.dumps({"id": i, "question": q, "answers": [a]}) for i, q, a in rows]
    Path("capitals.jsonl").write_text("\n".join(lines))
    return "capitals.jsonl"


def scored(capsys, *arguments):
    """The figures of a command that prints them as JSON, and nothing else on standard output."""
    capsys.readouterr()
    assert main(["eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


BORING = "lightning.pytorch.demos.boring_classes.Boring"


def test_eval_of_a_recipe_that_cannot_be_scored(recipe, capsys):
    Path("other.yaml").write_text(f"model: {BORING}Model\ndata: {BORING}DataModule\n")
    assert "plays MTGRPO on QuestionData" in fails(capsys, ["eval", "other.yaml"])
    assert "nothing to score" in fails(
        capsys, ["eval", "recipe.yaml", "--trainer.limit_val_batches", "0"]
    )


def test_a_run_is_scored_by_its_best_checkpoint_or_else_its_last(recipe, trained, capsys):
    run = Path("runs/recipe/version_0")
    chosen = "best.ckpt was chosen by a validation"

    def printed(*arguments):
        capsys.readouterr()
        assert main(["eval", *arguments]) == 0
        return capsys.readouterr().out

    for word in (str(run), "recipe"):
        page = printed(word)
        assert f"checkpoint {run}/checkpoints/best.ckpt" in page
        assert chosen in page
        assert "--questions, or score the last checkpoint with --ckpt_path last" in page
        assert "3 questions, greedy" in page
    for other in (["--questions", "worlds.Numbers"], ["--split", "train"]):
        assert chosen not in printed("recipe", *other)
    page = printed("recipe", "--ckpt_path", "last", "--data.val_limit", "2")
    assert f"checkpoint {run}/checkpoints/last.ckpt" in page
    assert chosen not in page
    (run / "checkpoints" / "best.ckpt").unlink()
    assert f"checkpoint {run}/checkpoints/last.ckpt" in printed("recipe")
    message = fails(capsys, ["eval", "recipe", "--ckpt_path=best"])
    assert "has no best.ckpt in checkpoints/" in message
    # its evaluations lie apart from it, and it stays the newest of its name
    assert sorted(path.name for path in Path("runs").iterdir()) == ["recipe", "recipe-eval"]
    assert len(list(Path("runs/recipe-eval").iterdir())) == 6


def noted(folder):
    return yaml.safe_load((Path(folder) / "config.yaml").read_text())


@pytest.mark.slow
def test_an_evaluation_takes_the_recipe_of_a_run_and_not_its_checkpoint_or_folder(recipe, capsys):
    assert main(["fit", "recipe.yaml", "--trainer.max_epochs", "1"]) == 0
    began = Path("runs/recipe/version_0/checkpoints/last.ckpt")
    more = ["--ckpt_path", str(began), "--trainer.max_epochs", "2"]
    assert main(["fit", "recipe.yaml", *more, "--trainer.logger.save_dir", "out"]) == 0
    began.unlink()
    (run,) = Path("out/recipe").iterdir()
    assert scored(capsys, str(run))["checkpoint"] == f"{run}/checkpoints/best.ckpt"
    figures = scored(capsys, str(run), "--trainer.logger.save_dir", "scores")
    assert figures["folder"] == "scores/recipe-eval/version_0"
    assert noted(figures["folder"])["ckpt_path"] == f"{run}/checkpoints/best.ckpt"
    # what stands in a later recipe counts as an option does, and so does null
    Path("chosen.yaml").write_text("ckpt_path: last")
    figures = scored(capsys, str(run), "chosen.yaml")
    assert figures["checkpoint"] == f"{run}/checkpoints/last.ckpt"
    assert figures["folder"] == "runs/recipe-eval/version_1"
    assert scored(capsys, str(run), "--ckpt_path", "null")["checkpoint"] is None


@pytest.mark.slow
def test_a_run_notes_its_command_and_its_config_is_a_recipe_again(recipe, capsys):
    assert main(["fit", "recipe.yaml", "--trainer.max_epochs", "1"]) == 0
    run = "runs/recipe/version_0"
    assert noted(run)["command"] == "fit"
    folder = scored(capsys, run)["folder"]
    assert noted(folder)["command"] == "eval"
    again = scored(capsys, f"{folder}/config.yaml")["folder"]
    assert noted(again)["command"] == "eval"
    assert noted(scored(capsys, f"{run}/config.yaml")["folder"])["command"] == "eval"
    assert main(["fit", f"{run}/config.yaml", "--ckpt_path", run]) == 0
    message = fails(capsys, ["fit", "recipe.yaml", "--command", "eval"])
    assert "unknown key 'command'" in message


def test_each_data_set_has_its_lines_and_all_have_theirs(recipe, capitals, capsys):
    command = ["recipe.yaml", "--questions", "worlds.Numbers", capitals, "--data.val_limit", "2"]
    report = scored(capsys, *command)
    sets = {
        name: record.read("runs/recipe-eval/version_0", split=name)
        for name in ("Numbers", "capitals")
    }
    assert [row["question_id"] for row in sets["capitals"]] == ["fr", "uk"]
    assert len(sets["Numbers"]) == 2
    assert list(report["figures"]) == ["Numbers", "capitals", "overall"]
    for name, rows in {**sets, "overall": [*itertools.chain(*sets.values())]}.items():
        figures = report["figures"][name]
        turns = [len(row["turns"]) for row in rows]
        assert figures["turns"]["mean"] == pytest.approx(sum(turns) / len(turns))
        tokens = [sum(turn["tokens"] for turn in row["turns"]) for row in rows]
        assert figures["sampled_tokens"]["mean"] == pytest.approx(sum(tokens) / len(tokens))
        assert figures["exact_match"]["questions"] == len(rows)
        assert all(
            f["low"] <= f["mean"] <= f["high"] for f in figures.values() if f["low"] is not None
        )
    sizes = {"turns", "calls", "sampled_tokens"}
    rewards = {"reward/outcome/answered", "reward/turn/called", "reward/total"}
    assert {*report["figures"]["overall"]} == {*record.CURVES, "f1"} | sizes | rewards
    with Path("runs/recipe-eval/version_0/metrics.csv").open() as file:
        columns = next(csv.reader(file))
    assert {"Numbers/exact_match", "capitals/exact_match"} <= set(columns)
    # the same questions in the same order, whatever the seed
    again = scored(capsys, *command, "--seed_everything", "7")
    assert again["figures"] == report["figures"]
    ids = [
        [row["question_id"] for row in record.read(f"runs/recipe-eval/version_{n}")] for n in (0, 1)
    ]
    assert ids[0] == ids[1]
    same = f"[{capitals}, {{class_path: Atlas, init_args: {{}}}}, {capitals}]"
    assert main(["eval", "recipe.yaml", "--questions", same]) == 0
    printed = capsys.readouterr().out
    for name in ("capitals", "Atlas", "capitals-3", "overall"):
        assert re.search(rf"^{name}/exact_match +0\.000", printed, re.MULTILINE)


def test_samples_are_averaged_per_question_and_drawn_the_same_again(recipe, capsys):
    def texts(version):
        rows = record.read(f"runs/recipe-eval/version_{version}")
        return {(row["group"], row["member"]): row["turns"][0]["text"] for row in rows}

    first, again = (scored(capsys, "recipe.yaml", "--samples", "3") for _ in range(2))
    assert first["figures"] == again["figures"]
    figures = first["figures"]["val"]
    assert {"mean@3", "pass@2", "pass@3"} <= set(figures)
    assert figures["turns"]["questions"] == 3
    samples = texts(0)
    assert [*samples] == [(n, member) for n in range(3) for member in range(3)]
    assert len(set(samples.values())) > 3  # sampled, and not one greedy trajectory thrice
    assert main(["eval", "recipe.yaml", "--samples", "1", "--seed_everything", "1"]) == 0
    assert "3 questions, 1 sampled of each" in capsys.readouterr().out
    other = texts(2)
    assert [*other] == [(n, 0) for n in range(3)]
    assert any(other[place] != samples[place] for place in other)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_attempt():
    draw = random.Random(0)
    right = [[float(draw.random() < chance) for _ in range(6)] for chance in (0.1, 0.3, 0.5, 0.9)]
    rows = [
        {"split": "val", "policy_version": 0, "group": n, "member": i, "exact_match": value}
        for n, attempts in enumerate(right)
        for i, value in enumerate(attempts)
    ]
    passes = record.pass_at_k(rows)
    assert [*passes] == ["mean@6", "pass@2", "pass@4", "pass@6"]
    for k in (2, 4, 6):
        shares = []
        for attempts in right:
            subsets = list(itertools.combinations(attempts, k))
            shares.append(sum(any(subset) for subset in subsets) / len(subsets))
        assert passes[f"pass@{k}"].mean == pytest.approx(sum(shares) / 4)
    assert passes["mean@6"].mean == pytest.approx(sum(map(sum, right)) / 24)
    assert record.pass_at_k([]) == {}


def test_pass_at_k_leaves_out_questions_without_answers_and_branches():
    def rows(group, matches, **columns):
        place = {"split": "val", "policy_version": 0, "group": group} | columns
        return [place | {"member": i, "exact_match": match} for i, match in enumerate(matches)]

    unknown = rows(0, [None] * 3)
    nothing = record.Metric(None, None, None, 0)
    assert record.pass_at_k(unknown) == dict.fromkeys(("mean@3", "pass@2", "pass@3"), nothing)
    # of 2 of 4 and 1 of 3: pass@2 is 1 - 1/6 and 1 - 1/3, pass@3 is 1 and 1
    mixed = [*unknown, *rows(1, [1.0, 1.0, 0.0, 0.0]), *rows(2, [1.0, 0.0, 0.0])]
    mixed += rows(2, [1.0, 1.0], parent=0)
    passes = record.pass_at_k(mixed)
    assert [figure.questions for figure in passes.values()] == [2, 2, 2]
    assert passes["mean@3"].mean == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert passes["pass@2"].mean == pytest.approx((5 / 6 + 2 / 3) / 2)
    assert passes["pass@3"].mean == 1.0


def test_f1_is_squads():
    def squad(answer, accepted):
        answer, accepted = normalize_answer(answer).split(), normalize_answer(accepted).split()
        shared = sum((Counter(answer) & Counter(accepted)).values())
        if shared == 0:
            return 0.0
        precision, recall = shared / len(answer), shared / len(accepted)
        return 2 * precision * recall / (precision + recall)

    draw = random.Random(0)
    words = ["the", "Paris", "paris!", "of", "France", "is", ""]
    for _ in range(200):
        answer = " ".join(draw.choices(words, k=draw.randint(0, 5)))
        accepted = tuple(" ".join(draw.choices(words, k=3)) for _ in range(2))
        wanted = max(squad(answer, reference) for reference in accepted)
        assert f1(answer, Question("q", "?", accepted)) == pytest.approx(wanted)
    # 2 of the 3 words answer are among the 2 accepted: 2 x 2 / (3 + 2)
    assert f1("in New York", Question("q", "?", ("New York",))) == pytest.approx(0.8)
    assert f1(None, Question("q", "?", ("New York",))) == 0.0
    assert f1("4", Question("q", "?", ("4",), rule="number")) is None


def test_a_server_is_scored_by_the_recipes_turns_without_any_weights(recipe, capitals, capsys):
    bare = Path("bare")
    shutil.copytree(
        recipe["model"]["policy"]["model"], bare, ignore=shutil.ignore_patterns("*.safetensors")
    )
    says = lambda messages, n: "=Paris" if len(messages) > 2 else '[echo {"text": "x"}]'  # noqa: E731
    with vendor(says) as server:
        address = ["--endpoint.base_url", server.url, "--endpoint.model", "big"]
        command = ["recipe.yaml", *BRACKETS, *address, "--model.policy.model", str(bare)]
        report = scored(capsys, *command, "--questions", capitals, "--samples", "2")
    assert len(server.bodies) == 2 * 2 * 2
    assert report["endpoint"] == {"base_url": server.url, "model": "big"}
    figures = report["figures"]["capitals"]
    assert {figures[name]["mean"] for name in ("exact_match", "f1", "mean@2", "pass@2")} == {0.5}
    assert (figures["turns"]["mean"], figures["calls"]["mean"]) == (2, 1)
    assert figures["tool_execution"]["mean"] == 1.0
    assert figures["sampled_tokens"] == {"mean": None, "low": None, "high": None, "questions": 0}
    folder = Path(report["folder"])
    rows = record.read(folder)
    assert {row["prompt_tokens"] for row in rows} == {None}
    assert [(row["question_id"], row["member"], row["answer"]) for row in rows] == [
        (name, member, "Paris") for name in ("fr", "uk") for member in (0, 1)
    ]
    assert yaml.safe_load((folder / "config.yaml").read_text())["endpoint"]["model"] == "big"
    with (folder / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["capitals/exact_match"]) == 0.5
    # as its record says, so a report shows it
    assert (row["iteration"], row["epoch"]) == ("0", "0")
    (run,) = open_runs([folder])
    assert [shown["capitals/exact_match"] for shown in run.metrics] == [0.5]
    assert {body["temperature"] for body in server.bodies} == {1.0}


_SETS = """
from turnrl import Question, QuestionSource
from lightning.pytorch.loggers import CSVLogger

class Unanswered(QuestionSource):
    default_splits, needs_answers = {"train": None, "val": ""}, False

    def questions(self, split):
        return [Question("a", "Where?"), Question("b", "Who?")]

class Broken(CSVLogger):
    def log_metrics(self, *args, **kwargs):
        raise ValueError("no quota")
"""


def test_questions_without_answers_are_sampled_and_scored_beside_others(recipe, capitals, capsys):
    Path("sets.py").write_text(_SETS)
    with vendor(lambda messages, n: "=Paris") as server:
        address = ["--endpoint.base_url", server.url, "--endpoint.model", "big"]
        sources = ["--questions", "sets.Unanswered", capitals, "--samples", "2"]
        figures = scored(capsys, "recipe.yaml", *BRACKETS, *address, *sources)["figures"]
    assert figures["Unanswered"]["pass@2"]["mean"] is None
    assert figures["Unanswered"]["turns"]["questions"] == 2
    assert (figures["overall"]["pass@2"]["mean"], figures["overall"]["pass@2"]["questions"]) == (
        figures["capitals"]["pass@2"]["mean"],
        2,
    )


def test_what_a_server_replied_is_recorded_before_anything_can_fail(recipe, capitals, capsys):
    Path("sets.py").write_text(_SETS)
    logger = ["--trainer.logger", "{class_path: sets.Broken, init_args: {save_dir: logs}}"]
    with vendor(lambda messages, n: "=Paris") as server:
        address = ["--endpoint.base_url", server.url, "--endpoint.model", "big"]
        command = ["eval", "recipe.yaml", *BRACKETS, *address, *logger, "--questions", capitals]
        assert "no quota" in fails(capsys, command, 1)
        asked = len(server.bodies)
        # nothing is asked if a later data set cannot be read
        command = ["eval", "recipe.yaml", *BRACKETS, *address, "--questions", capitals, "no.jsonl"]
        fails(capsys, command)
    assert asked == len(server.bodies) == 2
    (file,) = Path("logs").rglob("capitals-*.parquet")
    assert [row["answer"] for row in record.read(file)] == ["Paris", "Paris"]


def test_the_servers_can_be_in_their_own_recipe(recipe, capitals, capsys):
    with vendor(lambda messages, n: "=London") as server:
        page = next(p.text for p in blocks("docs/howto/evaluate.md") if "endpoint:" in p.text)
        Path("vendor.yaml").write_text(page.replace("https://api.example.com/v1", server.url))
        assert main(["eval", "recipe.yaml", "vendor.yaml", *BRACKETS, "--questions", capitals]) == 0
    printed = capsys.readouterr().out
    assert f"asking 'a-model' at {server.url}" in printed
    assert re.search(r"capitals/exact_match +0\.500", printed)
    assert "sampled_tokens" not in printed
    assert [body["temperature"] for body in server.bodies] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (lambda *_: 503, r"'big' at http\S+ does not answer .* Start it, correct base_url"),
        (lambda *_: 401, r"OPENAI_API_KEY is not set \(api_key_env\)"),
        (None, r"sent '<h1>It works!</h1>', which is no chat completion"),
    ],
)
def test_a_server_that_cannot_be_scored_is_named(recipe, capsys, monkeypatch, says, message):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if says is None:

        def greets(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<h1>It works!</h1>")

        monkeypatch.setattr(Handler, "do_POST", greets)
    with vendor(says) as server:
        address = f"{{base_url: '{server.url}', model: big, patience_s: 0, concurrency: 1}}"
        assert re.search(message, fails(capsys, ["eval", "recipe.yaml", "--endpoint", address], 1))
    assert not Path("runs").exists()


def test_mistakes_in_an_evaluation_are_answered_with_the_next_step(recipe, tiny_model, capsys):
    message = fails(capsys, ["eval", "recipe.yaml", "--samples", "0"])
    assert "samples is 0; it must be 1 or more. Leave it out for one greedy" in message
    message = fails(capsys, ["eval", "recipe.yaml", "--data.val", "null"])
    assert "data.val is not set" in message
    assert "--questions FILE" in message
    message = fails(capsys, ["eval", "recipe.yaml", "--endpoint", "gpt"])
    assert "endpoint is 'gpt'; it must be a mapping with keys of base_url, model" in message
    Path("empty").mkdir()
    assert "the folder 'empty' has no config.yaml" in fails(capsys, ["eval", "empty"])
    message = fails(capsys, ["eval", str(tiny_model)])
    assert "'turnrl eval RECIPE --model.policy.model" in message
    Path("runs/young/version_0").mkdir(parents=True)
    Path("runs/young/version_0/config.yaml").write_text(mark_text(yaml.safe_dump(recipe)))
    message = fails(capsys, ["eval", "young"])
    assert "has no checkpoint, no model/ and no adapter/. Wait for its first" in message
    # its recipe alone can be scored, as the message says
    assert main(["eval", message.rsplit(" ", 1)[1], "--data.val_limit", "1"]) == 0


@pytest.mark.slow
def test_a_checkpoint_beside_a_server_is_refused(recipe, capsys):
    assert main(["fit", "recipe.yaml", "--trainer.max_epochs", "1"]) == 0
    address = ["--endpoint", "{base_url: 'http://127.0.0.1:9', model: big, patience_s: 0}"]
    message = fails(capsys, ["eval", "recipe.yaml", "--ckpt_path", "last", *address])
    assert "and the endpoint 'big' acts instead of the policy. Leave one of them out" in message
    # of a run its recipe is taken, and no checkpoint
    assert "'big' at http://127.0.0.1:9 does not answer" in fails(
        capsys, ["eval", "recipe", *address], 1
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_a_merged_adapter_is_scored_as_its_run(recipe, capsys):
    recipe["model"]["policy"]["lora"] = {"r": 4}
    save(recipe)
    assert main(["fit", "recipe.yaml"]) == 0
    adapter = Path("runs/recipe/version_0/adapter")
    Path("adapter").symlink_to(adapter)
    (merge,) = (p.text for p in blocks("docs/howto/evaluate.md") if p.language == "python")
    exec(merge, {})
    by_run = scored(capsys, str(adapter))
    assert by_run["checkpoint"] == "runs/recipe/version_0/checkpoints/last.ckpt"
    merged = ["--model.policy.model", "merged", "--model.policy.lora", "null"]
    assert scored(capsys, "recipe.yaml", *merged)["figures"] == by_run["figures"]
    message = fails(capsys, ["eval", "adapter", *merged])
    assert "It holds an adapter: 'turnrl play RECIPE --checkpoint adapter' asks it, and" in message
    assert message.endswith("'turnrl eval RECIPE --model.policy.model adapter' scores it.")
    as_model = ["--model.policy.model", "adapter", "--model.policy.lora.r", "4"]
    assert scored(capsys, "recipe.yaml", *as_model)["figures"] == by_run["figures"]
