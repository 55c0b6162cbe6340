"""What strangers send: nothing in it runs without a word and the user's consent."""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import nullcontext as nothing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import trajectories
import turnrl
from commands import fails, forget, save
from turnrl import Policy, RecipeError
from turnrl.cli import main
from turnrl.commands.report.command import write_report as report
from turnrl.plugin.errors import CheckpointError
from turnrl.policy.settings import Lora
from turnrl.recipe.build import build
from turnrl.recipe.invocation import read_invocation
from turnrl.recipe.trust import find_untrusted, is_marked, mark_text
from turnrl.runs.config import load_yaml
from turnrl.runs.files import whole_file
from turnrl.runs.load import open_runs
from turnrl.watch.recorder import write_rows

EVIL = "from pathlib import Path\nPath('RAN').touch()\n"
TOOL = """
import worlds


class Evil(worlds.Echo):
    pass
"""


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """The marks of this test's user, and an `sys.path` that the test may change."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("MY_KEY", "sk-live-0123456789abcdef")
    monkeypatch.setattr(sys, "path", [*sys.path])


def strange(path, change=lambda recipe: None):
    """Write a run's recipe anew, as somebody else's turnrl would."""
    recipe = yaml.safe_load(Path(path).read_text())
    change(recipe)
    Path(path).write_text(yaml.safe_dump(recipe))


def planted(key, value):
    """A function that sets a setting of a recipe."""

    def change(recipe):
        *above, last = key.split(".")
        for name in above:
            recipe = recipe[name]
        recipe[last] = value

    return change


TRAPS = {
    "a class beside the recipe": ("model.rollout.tools", [{"class_path": "evil.Evil"}]),
    "a function of Python": ("model.rollout.tools", ["os.system"]),
    "a list as a text": ("model.rollout.tools", "[os.system]"),
    "a list as a block": ("model.rollout.tools", "- os.system"),
    "a class as a text": ("model.rollout.tools", ["{class_path: subprocess.Popen}"]),
    "a function behind a module of turnrl": ("model.rollout.tools", ["turnrl.cli.os.system"]),
    "a function of turnrl": ("model.rollout.tools", ["turnrl.cli.main"]),
    "a reward": ("model.rewards", ["evil.reward"]),
    "an optimiser": ("model.optimizer", {"class_path": "evil.Evil", "init_args": {"lr": 1.0}}),
    "a source": ("data.val", "evil.rows"),
    "an answer rule": ("data.answers", "evil.rule"),
    "a callback": ("trainer.callbacks", [{"class_path": "evil.Evil"}]),
    "a hook of a callback": (
        "trainer.callbacks",
        [
            {
                "class_path": "lightning.pytorch.callbacks.LambdaCallback",
                "init_args": {"on_fit_start": "os.system"},
            }
        ],
    ),
    "a program": ("model.engine", {"class_path": "VLLM", "init_args": {"python": "./evil"}}),
    "an environment": (
        "model.rollout.tools",
        [{"class_path": "Gymnasium", "init_args": {"id": "evil:Maze-v0"}}],
    ),
    "a program in a text": ("model.engine", "{class_path: VLLM, init_args: {python: ./evil}}"),
    "a program in a text that YAML does not take": (
        "model.engine",
        "{class_path: VLLM, class_path: VLLM, init_args: {python: ./evil}}",
    ),
    "a function in pieces": ("model.rollout.tools", ["os${EMPTY}.system"]),
    "a judge elsewhere, which would get a key": (
        "model.rewards",
        [
            {
                "class_path": "LLMJudge",
                "init_args": {"server": {"base_url": "https://evil.example/v1", "model": "x"}},
            }
        ],
    ),
    "a key for a search": (
        "model.rollout.tools",
        [{"class_path": "WikiSearch", "init_args": {"index": "http://127.0.0.1/?k=${MY_KEY}"}}],
    ),
}


@pytest.fixture
def sent(trained):
    """A run that somebody has sent, in a folder beside the user's own."""
    Path("sent").mkdir()
    run = Path(shutil.move(str(trained), "sent/run"))
    (run / "enc").mkdir()
    for name in ("evil", "torch", "torch_xla", "turnrl"):
        (run / f"{name}.py").write_text(EVIL + TOOL)
        Path(f"{name}.py").write_text(EVIL + TOOL)
    yield run
    forget("evil")


def test_a_strangers_run_names_what_it_would_run_and_runs_nothing(sent, capsys):
    file = sent / "config.yaml"
    ours = file.read_text()
    for trap, (key, value) in TRAPS.items():
        file.write_text(ours)
        strange(file, planted(key, value))
        with pytest.raises(
            RecipeError, match=rf"(?s)not written by you.*{key}.*--trust"
        ) as refused:
            read_invocation("fit", [str(file)])
        assert repr(str(file)) in str(refused.value), trap
    for words in (["eval", str(sent)], ["fit", str(file)]):
        assert "was not written by you on this machine" in fails(capsys, words)
    assert not Path("RAN").exists()


def test_a_strangers_checkpoint_runs_nothing_without_consent(sent, capsys):
    file = sent / "checkpoints" / "last.ckpt"
    saved = torch.load(file, weights_only=True)
    recipe = yaml.safe_load(saved["recipe"])
    recipe["model"]["rollout"]["tools"] = [{"class_path": "evil.Evil"}]
    torch.save({**saved, "recipe": yaml.safe_dump(recipe)}, file)
    for path in (sent, file):
        with pytest.raises(RecipeError, match=r"last.ckpt' was not .* \(.*tools\[0\].*: evil.Evil"):
            turnrl.load(path, checkpoint="last" if path == sent else None)
    assert "evil.Evil" in fails(capsys, ["play", str(file), "a question"])
    assert not Path("RAN").exists()
    (tool,) = turnrl.load(file, trust=True).rollout.tools
    assert type(tool).__name__ == "Evil"
    assert "turnrl: runs or asks what" in capsys.readouterr().err


class Planted:
    def __reduce__(self):
        return Path.touch, (Path("RAN"),)


def test_an_object_in_a_checkpoint_is_refused_without_torchs_advice(trained, capsys):
    file = trained / "checkpoints" / "last.ckpt"
    torch.save({**torch.load(file, weights_only=True), "planted": Planted()}, file)
    for words in (
        ["fit", "recipe.yaml", "--ckpt_path", str(file)],
        ["eval", "recipe.yaml", "--ckpt_path", str(file)],
        ["play", str(file), "a question"],
    ):
        message = fails(capsys, words, code=CheckpointError.exit_code)
        assert f"the checkpoint {str(file)!r} holds" in message
        assert "weights_only" not in message
    assert not Path("RAN").exists()


def test_a_file_that_a_library_looks_for_is_not_imported_from_a_runs_folder(sent):
    strange(sent / "config.yaml", planted("model.rollout.tools", []))
    for options in ([], ["--trust"]):
        with pytest.raises(RecipeError, match=r"worlds\.Letters") if not options else nothing():
            build([str(sent / "config.yaml"), *options])
    assert str(sent.absolute()) not in sys.path
    assert not Path("RAN").exists()


def test_a_run_that_names_only_plugins_needs_no_consent(sent):
    def plain(recipe):
        recipe["model"]["rollout"] |= {"segmenter": "TwoTurn", "tools": []}
        recipe["model"]["rewards"] = ["ExactMatch"]
        recipe["data"] |= {"train": "AtlasQuestions", "val": None}

    strange(sent / "config.yaml", plain)
    assert build([str(sent / "config.yaml")])
    assert {str(sent.absolute()), str(Path.cwd())}.isdisjoint(sys.path)


@pytest.mark.parametrize("name", ["json", "sitecustomize", "signal"])
def test_a_helper_imports_nothing_from_the_current_folder(name, tmp_path, monkeypatch):
    from turnrl_rewards.expressions import _Helper

    monkeypatch.chdir(tmp_path)
    Path(f"{name}.py").write_text(EVIL)
    helper = _Helper()
    assert helper.same("1/2", "0.5")
    helper.close()
    assert not Path("RAN").exists()


def test_a_link_in_a_strangers_folder_leads_no_file_elsewhere(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "page.html.new").symlink_to(tmp_path / "mine")
    with whole_file(tmp_path / "page.html") as new:
        new.write_text("theirs")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "page.html").read_text() == "theirs"


def test_an_object_in_a_models_weights_is_refused_without_torchs_advice(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    torch.save({"planted": Planted()}, tmp_path / "model/pytorch_model.bin")
    with pytest.raises(RecipeError, match="code in them could run") as refused:
        Policy(str(tmp_path / "model")).build().load("cpu")
    assert "weights_only" not in str(refused.value)
    adapter = {"r": 4, "lora_alpha": 8, "peft_type": "LORA", "init_lora_weights": True}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(
        json.dumps(adapter | {"base_model_name_or_path": str(tiny_model)})
    )
    torch.save({"planted": Planted()}, tmp_path / "adapter/adapter_model.bin")
    with pytest.raises(RecipeError, match="code in them could run") as refused:
        Policy(str(tmp_path / "adapter"), lora=Lora(4, 8)).build().load("cpu")
    assert "weights_only" not in str(refused.value)
    assert not Path("RAN").exists()


def test_code_of_a_model_is_refused_without_transformers_question(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model/config.json"
    strange_config = {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | strange_config))
    (tmp_path / "model/evil.py").write_text(EVIL)
    with pytest.raises(RecipeError, match="brings its own code"):
        Policy(str(tmp_path / "model")).build().load("cpu")
    assert not Path("RAN").exists()


def test_a_users_own_runs_need_no_consent_and_a_changed_one_does(trained, recipe, monkeypatch):
    # `trained` is of another state folder, so it is written again
    assert main(["fit", "recipe.yaml", "--trainer.max_epochs", "1"]) == 0
    run = Path("runs/recipe/version_1")
    assert type(turnrl.load(run).rollout.tools[0]).__name__ == "Echo"
    shutil.copytree(run, "moved/run")
    assert build(["moved/run/config.yaml"])
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("group_size: 4", "group_size: 2"))
    with pytest.raises(RecipeError, match=r"worlds\.Echo"):
        build([str(run / "config.yaml")])
    monkeypatch.setenv("XDG_STATE_HOME", "elsewhere")
    with pytest.raises(RecipeError, match=r"worlds\.Echo"):
        turnrl.load(run)


def test_a_recipe_with_a_module_beside_it_needs_no_consent_in_the_users_folder(recipe, capsys):
    Path("mine").mkdir()
    Path("mine/own_tools.py").write_text(TOOL)
    recipe["model"]["rollout"]["tools"] = ["own_tools.Evil"]
    save(recipe, "mine/recipe.yaml")
    Path("mine/checkpoints").mkdir()  # as a run without a logger leaves
    assert build(["mine/recipe.yaml"])
    os.chdir("mine")
    assert build(["recipe.yaml"])
    os.chdir("..")
    Path("other").mkdir()
    os.chdir("other")
    message = fails(capsys, ["fit", "../mine/recipe.yaml"])
    assert "model.rollout.tools[0]: own_tools.Evil" in message
    assert build(["../mine/recipe.yaml", "--trust"])
    forget("own_tools")


def test_what_plugins_bring_needs_no_consent(recipe):
    for file in sorted(Path(__file__).parents[1].glob("recipes/**/*.yaml")):
        assert find_untrusted(yaml.safe_load(file.read_text()), ()) == {}, file


def test_a_mark_that_nobody_here_wrote_is_none(tmp_path, monkeypatch):
    text = mark_text("a: 1\n")
    assert is_marked(text)
    assert not is_marked(text.replace("1", "2", 1))
    assert not is_marked("a: 1\n")
    assert not is_marked("a: 1\n# written here by turnrl: é\n")
    assert (tmp_path / "state/turnrl/key").stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert not is_marked(text)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert mark_text("a: 1\n") == "a: 1\n"


BOMBS = {
    "lists": "a: &a [x]\n"
    + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "itself": "a: &a [*a]\n",
    "nesting": "a: " + "[" * 100_000,
    "dashes": "a:\n " + "- " * 20_000,
    "digits": "a: " + "9" * 5_000,
    "a tag": "a: !!python/object/apply:os.system [touch RAN]\n",
    "a date": "a: 2024-13-45\n",
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.timeout(20)
def test_yaml_that_stands_for_more_than_any_recipe_is_refused_at_once(bomb, trained, capsys):
    (trained / "config.yaml").write_text(BOMBS[bomb])
    for words in (["fit", str(trained / "config.yaml")], ["eval", str(trained)]):
        assert "config.yaml' is not a YAML mapping" in fails(capsys, words)
    (run,) = open_runs([trained])
    assert run.problems[0].startswith("config.yaml cannot be read")
    with pytest.raises(yaml.YAMLError):
        load_yaml(BOMBS[bomb])
    assert not Path("RAN").exists()


def test_an_alias_that_a_person_writes_is_read():
    assert load_yaml("a: &a [1, 2]\nb: *a\nc: {<<: {x: 1}, y: 2}") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": {"x": 1, "y": 2},
    }


ODD = {
    "a null": lambda row: row | {"turns": None},
    "a null turn": lambda row: row | {"turns": [None]},
    "no text": lambda row: row | {"turns": [{**row["turns"][0], "text": None}]},
    "tokens beyond memory": lambda row: row | {"turns": [{**row["turns"][0], "tokens": 10**12}]},
    "a prompt beyond memory": lambda row: row | {"prompt_tokens": 10**12},
    "a beginning beyond the turns": lambda row: row | {"begins": 99},
    "a beginning before them": lambda row: row | {"begins": -1},
    "a parent of another group": lambda row: row | {"parent": 99},
    "a list as the estimator": lambda row: row | {"estimator": "[]"},
    "a number as its name": lambda row: row | {"estimator": '{"name": 1, "arguments": {}}'},
    "a class that is no text": lambda row: (
        row | {"estimator": '{"name": "x", "class": [], "arguments": {}}'}
    ),
    "nesting": lambda row: row | {"estimator": "[" * 100_000},
}


@pytest.mark.parametrize("odd", ODD)
def test_a_record_with_an_odd_value_is_left_out_or_shown(odd, tmp_path):
    run = trajectories.run(tmp_path / "run", iterations=1)
    (file,) = (run / "record").glob("*.parquet")
    changed = [ODD[odd](row) for row in pq.read_table(file).to_pylist()]
    write_rows(changed, file)
    report([run], tmp_path / "page.html")
    assert "</html>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("kind", ["string", "binary", "bool_", "float64"])
def test_a_record_with_columns_of_another_type_is_named(kind, tmp_path):
    run = trajectories.run(tmp_path / "run", iterations=1)
    (file,) = (run / "record").glob("*.parquet")
    table = pq.read_table(file)
    odd = pa.array([None] * len(table), getattr(pa, kind)())
    changed = table.set_column(table.column_names.index("turns"), "turns", odd)
    pq.write_table(changed.replace_schema_metadata({"turnrl.record": "4"}), file)
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    (opened,) = open_runs([run])
    assert list(opened.groups()) == []
    assert "left out" in opened.problems[0]
    pq.write_table(table.replace_schema_metadata({"turnrl.record": "two"}), file)
    (opened,) = open_runs([run])
    assert list(opened.groups()) == []


def test_a_report_imports_nothing_for_a_record(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("evil", "antigravity_too"):
        (tmp_path / f"{name}.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    run = trajectories.run(tmp_path / "run", iterations=1)
    (file,) = (run / "record").glob("*.parquet")
    before = {*sys.modules}
    for path in ("evil.Rule", "antigravity.x", "idlelib.idle.x", "pip.__main__.x"):
        noted = json.dumps({"name": "Rule", "class": path, "arguments": {}})
        write_rows([row | {"estimator": noted} for row in pq.read_table(file).to_pylist()], file)
        report([run], tmp_path / "page.html")
    assert not {"evil", "antigravity", "idlelib", "idlelib.idle", "pip.__main__"} & (
        {*sys.modules} - before
    )
    assert not Path("RAN").exists()
