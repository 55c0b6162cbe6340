"""`turnrl doctor`: one thing at a time is broken on purpose, and all others are still told."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import turnrl
from commands import RECIPE, save
from runs import data, make_module
from turnrl import Check, Finding, Policy, RecipeError
from turnrl.cli import main
from turnrl.plugin.errors import CheckpointError
from turnrl.plugin.hooks import load_classes, load_plugins
from turnrl.policy.settings import Lora
from turnrl.types import Start
from turnrl_doctor import checks
from turnrl_doctor.command import diagnose, format_finding
from turnrl_doctor.miniature import make_miniature

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def recipe(tiny_model, tmp_path, monkeypatch):
    """A function that writes the small recipe, changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)

    def write(**changes):
        contents = copy.deepcopy(RECIPE)
        contents["model"]["policy"]["model"] = str(tiny_model)
        for key, value in changes.items():
            part, names = contents, key.split("__")
            for name in names[:-1]:
                part = part.setdefault(name, {})
            part[names[-1]] = value
        save(contents)
        return "recipe.yaml"

    return write


@pytest.fixture
def doctor(capsys):
    """What the doctor says: its exit code, and (status, text and step) by name."""

    def run(*words):
        code = main(["doctor", *words])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        lines: dict[str, tuple[str, str]] = {}
        name = ""
        for line in out.splitlines():
            if match := re.match(r"(pass|warn|fail)  (\S.*?) {2,}(.*)", line):
                name = match[2]
                lines[name] = match[1], match[3]
            elif line.startswith(" " * 20):
                lines[name] = lines[name][0], f"{lines[name][1]} | {line.strip()}"
        return code, lines

    return run


def failed(lines):
    return {name for name, (status, _) in lines.items() if status == "fail"}


# ------------------------------------------------------------------------- whole


def test_a_recipe_that_is_well_passes_every_line(recipe, doctor):
    code, lines = doctor(recipe())
    assert (code, failed(lines)) == (0, set())
    assert set(lines) >= {
        "versions", "GPU", "run folder", "disk", "model files", "window", "sampler",
        "chat template", "memory plan", "data train", "data val", "tool echo", "sharing",
        "sampling", "rewards", "learning",
    }  # fmt: skip
    assert re.match(r"\d+ turns by Slots", lines["sampling"][1])
    assert lines["rewards"][1] == "Answered, Called score 20 attempts"
    # a call for each of three questions, in two sessions
    shown = '6 of 6 calls succeed, for example echo {"text": "Number 0?"}: 9 letters'
    assert lines["tool echo"][1] == shown
    assert lines["data val"] == ("pass", "3 questions")
    assert "with TurnLevel" in lines["learning"][1]
    assert [path.name for path in Path().iterdir()] == ["recipe.yaml"]  # it writes nothing


def test_without_a_recipe_the_machine_alone_is_examined(doctor):
    code, lines = doctor()
    assert code == 0
    assert set(lines) == {"versions", "GPU"}


def test_a_mistake_in_the_recipe_is_a_line_and_the_machine_is_examined(recipe, doctor):
    code, lines = doctor(recipe(model__group_sise=4))
    assert code == 2
    assert failed(lines) == {"recipe"}
    assert "group_sise" in lines["recipe"][1]
    assert "Did you mean group_size?" in lines["recipe"][1]
    assert {"versions", "GPU"} <= set(lines)


def test_an_accelerator_that_is_not_there_hides_nothing_else(recipe, doctor):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    code, lines = doctor(recipe(trainer__accelerator="gpu"))
    assert code == 2
    assert failed(lines) == {"trainer"}
    assert "sampling" in lines


# ----------------------------------------------------------------- broken on purpose


@pytest.mark.parametrize("cut", [True, False])
def test_a_model_folder_that_is_not_whole_is_named(recipe, doctor, tiny_model, tmp_path, cut):
    folder = shutil.copytree(tiny_model, tmp_path / "half")
    weights = folder / "model.safetensors"
    if cut:
        whole = weights.read_bytes()
        weights.write_bytes(whole[: len(whole) // 3])
        with pytest.raises(RecipeError, match=r"half' cannot be loaded"):
            Policy(str(folder)).build().load()
    else:
        weights.unlink()
    code, lines = doctor(recipe(model__policy__model=str(folder)))
    assert (code, failed(lines)) == (1, {"model files"})
    assert str(folder) in lines["model files"][1]
    # the rest is tried without them
    tried = ("tool echo", "sampling", "rewards", "learning")
    assert {lines[line][0] for line in tried} == {"pass"}


def test_a_tokenizer_without_its_vocabulary_is_refused(recipe, doctor, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "mute")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"] |= {"vocab": {}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, lines = doctor(recipe(model__policy__model=str(folder)))
    assert code == 1
    assert any("makes no tokens" in text for status, text in lines.values() if status == "fail")


def test_a_data_set_that_is_not_there_yet_is_not_downloaded(recipe, doctor, monkeypatch):
    asked = []

    def builder(path, config):
        asked.append(path)
        return SimpleNamespace(cache_dir="nothing/here")

    monkeypatch.setattr("turnrl.data.rows.check_hub", lambda: None)
    monkeypatch.setattr("datasets.load_dataset_builder", builder)
    monkeypatch.setattr("datasets.load_dataset", None)
    code, lines = doctor(recipe(data__train="owner/name"))
    assert code == 0
    assert lines["data train"] == ("pass", "owner/name is on the hub, to be downloaded")
    assert asked == ["owner/name"]


def test_a_data_set_that_the_hub_lacks_is_named(recipe, doctor, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    code, lines = doctor(recipe(data__train="owner/name"))
    assert (code, failed(lines)) == (1, {"data train"})
    assert "cannot load 'owner/name'" in lines["data train"][1]


def test_an_index_that_a_run_will_build_is_not_built(recipe, doctor):
    settings = {"index": "indexes/later", "build_from": "Atlas"}
    tool = {"class_path": "WikiSearch", "init_args": settings}
    code, lines = doctor(recipe(model__rollout__tools=[tool, "worlds.Echo"]))
    assert code == 0
    assert "calls succeed" in lines["tool search"][1]
    assert not Path("indexes").exists()


def test_a_missing_index_is_a_line_of_its_tool(recipe, doctor):
    tool = {"class_path": "WikiSearch", "init_args": {"index": "no-index"}}
    code, lines = doctor(recipe(model__rollout__tools=[tool, "worlds.Echo"]))
    (broken,) = failed(lines)
    assert code == 1
    assert broken.startswith("tool ")
    assert "no-index" in lines[broken][1]
    assert " | " in lines[broken][1]  # the next step
    assert lines["chat template"][0] == "pass"
    assert len([name for name in lines if name.startswith("tool ")]) == 2


@pytest.mark.parametrize(
    ("free", "iterations", "status"),
    [(10**6, 1, "fail"), (2 * 10**7, 1, "pass"), (2 * 10**7, 3000, "fail"), (10**9, -1, "pass")],
)
def test_a_disk_has_to_hold_checkpoints_and_the_record(
    tiny_model, tmp_path, monkeypatch, free, iterations, status
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, free))
    start = Start(torch.device("cpu"), make_module(tiny_model), data(), tmp_path / "runs")
    (finding,) = checks.Disk().run(replace(start, iterations=iterations))
    assert finding.status == status
    assert f"by iteration {iterations if iterations > 0 else 100}" in finding.text
    assert ("save_dir" in finding.advice) == (status == "fail")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RecipeError, match=r"runs.* is a file"):
        [*checks.RunFolder().run(Start(torch.device("cpu"), folder=tmp_path / "runs" / "mine"))]


def test_a_card_prints_its_plan_and_checks_nothing_of_this_machine(recipe, capsys, tiny_model):
    folder = Path(shutil.copytree(tiny_model, "plan/model"))
    (folder / "model.safetensors").unlink()
    words = [recipe(model__policy__model=str(folder)), "--data.train=nowhere.jsonl"]
    assert main(["doctor", *words, "--card=24GB", "--trainer.accelerator=gpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("memory plan for 24GB")
    assert re.findall(r"^(pass|warn|fail)", out, re.MULTILINE) == ["pass"]
    assert main(["doctor", *words, "--card=1MB"]) == 2
    assert main(["doctor", *words, "--card=24GB", "--model.group_sise=4"]) == 2


def test_a_card_without_a_recipe_or_a_size_is_a_mistake(capsys):
    assert main(["doctor", "--card", "24GB"]) == 2
    assert "Name a recipe" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "recipe.yaml", "--card"])
    assert ended.value.code == 2
    assert "--card: expected one argument" in capsys.readouterr().err
    assert main(["doctor", "recipe.yaml", "--card", "24"]) == 2
    assert "--card is '24'; give a size with its unit, such as '24GB'" in capsys.readouterr().err


FORGETS = "{% for m in messages[-1:] %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
ON_SERVER = {"name": "wiki", "url": "http://localhost:9"}
SEARCH = {"index": {"class_path": "Elasticsearch", "init_args": ON_SERVER}}
JUDGE = {"base_url": "http://localhost:9/v1", "model": "judge", "patience_s": 0}
CANNOT_RUN = {
    "a tool that raises": (
        {"model__rollout__tools": ["worlds.Raises"]},
        "tool echo",
        "raised ZeroDivisionError: division by zero in run on echo with arguments {",
        "Fix the tool",
    ),
    "a reward that raises": (
        {"model__rewards": ["worlds.Answered", "worlds.Unfair"]},
        "reward Unfair",
        "reward Unfair on question 'n0' raised TypeError: ",
        "A reward must score any trajectory",
    ),
    "a column that the data lack": (
        {"model__rollout__tools": ["worlds.Aims"], "data__train": "aims.jsonl"},
        "tool echo",
        "raised KeyError: 'goal' in open for question 'b' (its columns: id, question,",
        "name data that have what it needs",
    ),
    "a server that is down": (
        {"model__rollout__tools": [{"class_path": "WikiSearch", "init_args": SEARCH}]},
        "tool search",
        "http://localhost:9 does not answer",
        "Start it",
    ),
    "a judge that is down": (
        {"model__rewards": [{"class_path": "LLMJudge", "init_args": {"server": JUDGE}}]},
        "reward LLMJudge",
        "the judge 'judge' at http://localhost:9/v1 does not answer",
        "Start it",
    ),
    "memory that is too small": (
        {"model__gpu_memory": "1MB"},
        "memory plan",
        "needs at least",
        "Lower model.rollout.max_tokens",
    ),
    "a chat template that forgets": (
        {"model__policy__chat_template": "forgets.jinja"},
        "chat template",
        "is not prefix-preserving",
        "policy.chat_template",
    ),
    "a segmenter that cuts results": (
        {"model__rollout__segmenter": "worlds.Shortens"},
        "segmenter",
        "must show each result as it is",
        "check_segmenter shows the rule",
    ),
    "a model with too few positions": (
        {"model__rollout__max_tokens": 4096},
        "window",
        "4096",
        "Set it to 2048 or less",
    ),
    "a model folder that is missing": (
        {"model__policy__model": "./nowhere/at-all"},
        "recipe",
        "no model folder at './nowhere/at-all'",
        "",
    ),
    "a plugin that is broken": ({}, "recipe", "broken-plugin", "TURNRL_LOAD_PLUGINS"),
}


@pytest.mark.parametrize("what", CANNOT_RUN)
def test_a_recipe_that_cannot_run_fails_with_the_next_step(what, recipe, doctor, broken_plugin):
    changes, line, seen, step = CANNOT_RUN[what]
    rows = [
        {"id": "a", "question": "Where? " * 40, "answers": ["here"], "goal": 1, "room": 2},
        {"id": "c", "question": "Why?", "answers": ["thus"], "goal": 1, "room": 2},
        {"id": "b", "question": "When?", "answers": ["now"], "room": 2},
    ]
    Path("aims.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("long.jsonl").write_text(json.dumps(rows[0]) + "\n")
    Path("forgets.jinja").write_text(FORGETS)
    if "plugin" in what:
        broken_plugin()
    code, lines = doctor(recipe(**changes))
    assert (code > 0, lines[line][0]) == (True, "fail")
    assert len(failed(lines)) == 1, lines  # only one line
    text, _, next_step = lines[line][1].partition(" | ")
    assert seen in text
    assert step in next_step


def test_a_question_that_leaves_no_room_is_left_out_of_the_rehearsal(recipe, doctor):
    rows = [{"question": text, "answers": ["here"]} for text in ("Where? " * 40, "When?")]
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, lines = doctor(recipe(data__train="long.jsonl", model__rollout__max_tokens=64))
    assert (code, failed(lines)) == (0, set())
    assert lines["data train"][0] == "warn"
    assert "leaves out 1 of 2 questions" in lines["data train"][1]


@pytest.fixture
def broken_plugin(tmp_path, monkeypatch):
    """A function that installs a plugin which cannot be imported."""

    def install():
        monkeypatch.syspath_prepend(tmp_path)
        info = tmp_path / "broken_plugin-1.dist-info"
        info.mkdir()
        Path("broken_plugin.py").write_text("import nothing_of_this_name\n")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[turnrl]\nbroken = broken_plugin\n")
        load_plugins.cache_clear()

    yield install
    load_plugins.cache_clear()


class Broken(Check):
    """A check of somebody's that does not work."""

    def run(self, start):
        yield Finding("pass", "begun", "well")
        raise KeyError("what it looked for")


class Leaves(Check):
    """One that ends the program."""

    def settle(self, start):
        raise SystemExit(3)

    def run(self, start):
        raise AssertionError("it is not run")


def test_a_check_that_raises_hides_no_other(recipe, doctor, monkeypatch):
    known = load_classes("turnrl_checks")
    more = {**{check.__name__: check for check in (Leaves, Broken)}, **known}
    monkeypatch.setattr("turnrl_doctor.command.load_classes", lambda hook: more)
    code, lines = doctor(recipe())
    assert code == 1
    assert failed(lines) == {"broken", "leaves"}
    assert "KeyError" in lines["broken"][1]
    assert lines["begun"] == ("pass", "well")
    assert lines["learning"][0] == "pass"


def test_fit_runs_the_quick_half_first(recipe, capsys, monkeypatch):
    def refuse(self, start):
        yield Finding("fail", "run folder", "it is full", "Empty it.")

    monkeypatch.setattr(checks.RunFolder, "run", refuse)
    assert main(["fit", recipe()]) == 2
    assert "RecipeError: run folder: it is full. Empty it." in capsys.readouterr().err


# ------------------------------------------------------------------------- parts


@pytest.fixture
def installed_versions(monkeypatch):
    """A function that says other versions of libraries are installed; None: not at all."""
    real = checks.importlib.metadata.version

    def say(**versions):
        def version(name):
            number = versions.get(name, real(name))
            if number is None:
                raise checks.importlib.metadata.PackageNotFoundError(name)
            return number

        monkeypatch.setattr(checks.importlib.metadata, "version", version)
        return list(checks.Versions().run(Start(torch.device("cpu"))))

    return say


def test_untested_and_missing_versions_give_one_warning(installed_versions):
    (finding,) = installed_versions(torch="1.13.0", tantivy=None)
    assert (finding.status, finding.name) == ("warn", "versions")
    assert "tantivy (not installed), torch 1.13.0" in finding.text
    assert re.search(r"pip install 'tantivy<\d+,>=[\d.]+' 'torch<[\d.]+,", finding.advice)
    assert [f.status for f in installed_versions(torch="2.11.0+cu130")] == ["pass"]


def test_a_run_with_an_untested_version_warns_once_and_continues(
    recipe, caplog, installed_versions
):
    installed_versions(torch="2.99.0")
    assert main(["fit", recipe()]) == 0
    (warning,) = (r.message for r in caplog.records if "not tried" in r.message)
    wanted = "versions: turnrl was not tried with torch 2.99.0. If something fails, run pip install"
    assert warning.startswith(wanted)
    assert "\n" not in warning


def test_the_rehearsal_learns_with_a_miniature_of_the_models_kind_in_4_bits(tiny_model, tmp_path):
    settings = {"quantization": "nf4", "lora": Lora(r=4)}
    small = make_miniature(Policy(str(tiny_model), **settings).build(), tmp_path / "mini")
    text = small.build().config
    assert (text.num_attention_heads, text.num_key_value_heads, text.head_dim) == (4, 2, 16)
    start = Start(torch.device("cpu"), make_module(tiny_model, settings), data())
    lines = {finding.name: finding for finding in diagnose(start)}
    assert [lines[name].status for name in ("sharing", "sampling", "learning")] == ["pass"] * 3


def test_prefix_sharing_that_is_not_in_force_is_a_warning(tiny_model, monkeypatch):
    def refuse(policy, kernel):
        return "of this test"

    monkeypatch.setattr("turnrl.policy.trials.check_sharing", refuse)
    start = Start(torch.device("cpu"), make_module(tiny_model), data())
    lines = {finding.name: finding for finding in diagnose(start)}
    assert lines["sharing"].status == "warn"
    assert "of this test" in lines["sharing"].text


def test_findings_wrap_at_80_columns_on_a_terminal_but_not_in_a_script():
    finding = Finding("warn", "GPU", "word " * 40, "Do this. " * 12)
    narrow = format_finding(finding, 80)
    assert len(narrow) > 4
    assert max(map(len, narrow)) <= 80
    assert narrow[0].startswith("warn  GPU")
    assert all(line.startswith(" " * 20) for line in narrow[1:])
    assert len(format_finding(finding, None)) == 2


def test_build_makes_a_run_and_reads_no_data(recipe):
    path = recipe(data__train="nothing/of-this-name")
    built = turnrl.build([path, "--model.group_size", "6"])
    start = built.start
    assert start.module.group_size == built.module.group_size == 6
    assert start.folder == Path("runs/recipe/version_0")
    assert (start.device.type, start.processes) == ("cpu", 1)
    assert yaml.safe_load(Path(path).read_text())["model"]["group_size"] == 4
    with pytest.raises(CheckpointError, match="no run in 'runs/recipe'"):
        turnrl.build([path, "--ckpt_path=last"])
