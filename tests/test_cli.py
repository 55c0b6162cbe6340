"""The command line: what it does, and how it says what a user did wrong."""

from __future__ import annotations

import contextlib
import csv
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import turnrl
from commands import fails, save
from rollouts import FORGETFUL_TEMPLATE
from runs import TIMINGS
from turnrl import cli
from turnrl.cli import main
from turnrl.plugin.errors import PluginError, WorldError
from turnrl.plugin.hooks import find_class
from turnrl.recipe.bundled import find_recipe
from turnrl.runs import record

ROOT = Path(__file__).parent.parent


def test_fit_writes_metrics_recipe_checkpoint_transcripts_and_model(recipe, capsys):
    assert main(["fit", "recipe.yaml", "--model.group_size", "8"]) == 0
    run = Path("runs/recipe/version_0")
    with (run / "metrics.csv").open() as file:
        first = next(csv.DictReader(file))
    assert first["step"] == "0"
    assert first["val/exact_match"]
    assert not first["train/loss"]
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["model"]["group_size"] == 8
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert (run / "model" / "model.safetensors").is_file()
    rows = record.read(run)
    assert sum(row["split"] == "train" for row in rows) == 2 * 4 * 8
    # untrained and after each iteration
    assert sum(row["split"] == "val" for row in rows) == 3 * 3
    text = (run / "transcripts" / "iteration_0001.txt").read_text()
    assert "question   Number" in text
    assert "advantage" in text
    printed = capsys.readouterr().out
    assert "before training" in printed
    assert "iteration   2/2" in printed


@pytest.mark.slow
def test_training_again_from_the_saved_recipe_gives_the_same_run(recipe):
    assert main(["fit", "recipe.yaml"]) == 0
    saved = "runs/recipe/version_0/config.yaml"
    assert main(["fit", saved, "--trainer.logger.init_args.name", "again"]) == 0

    def rows(name):
        lines = Path("runs", name, "version_0", "metrics.csv").read_text().splitlines()
        return [{k: v for k, v in row.items() if k not in TIMINGS} for row in csv.DictReader(lines)]

    assert rows("recipe") == rows("again")


def test_a_resumed_run_prints_its_changed_settings_and_uses_them(recipe, trained, capsys):
    checkpoint = "runs/recipe/version_0/checkpoints/last.ckpt"
    capsys.readouterr()
    settings = {"lr": 5e-4, "betas": [0.8, 0.9], "weight_decay": 0.1}
    recipe["model"]["optimizer"]["init_args"] = settings
    recipe["model"]["rollout"]["max_turn_tokens"] = 4
    save(recipe)
    assert main(["fit", "recipe.yaml", "--ckpt_path", checkpoint]) == 0
    printed, err = capsys.readouterr()
    lines = err.splitlines()
    first = lines.index("turnrl: resumes with changed settings:") + 1
    assert lines[first : first + 5] == [
        "  model.optimizer.init_args.betas: [0.9, 0.99] -> [0.8, 0.9]",
        "  model.optimizer.init_args.lr: 0.001 -> 0.0005",
        "  model.optimizer.init_args.weight_decay: 0.0 -> 0.1",
        "  model.rollout.max_turn_tokens: 6 -> 4",
        "  trainer.max_epochs: 1 -> 2",
    ]
    assert sum("->" in line for line in lines) == 5
    # the iteration that was over is ended once more, which is not worth a line
    assert re.findall(r"^iteration +\S+", printed, re.MULTILINE) == ["iteration   2/2"]
    with Path("runs/recipe/version_1/metrics.csv").open() as file:
        assert {float(row["epoch"]) for row in csv.DictReader(file)} == {1}
    saved = torch.load("runs/recipe/version_1/checkpoints/last.ckpt", weights_only=True)
    (group,) = saved["optimizer_states"][0]["param_groups"]
    settings = (group["lr"], list(group["betas"]), group["weight_decay"])
    assert settings == (5e-4, [0.8, 0.9], 0.1)
    sampled = [
        turn["tokens"]
        for r in record.read("runs/recipe/version_1", split="train")
        for turn in r["turns"]
    ]
    assert max(sampled) == 4


def test_max_tokens_beyond_the_models_positions_is_refused_before_it_loads(
    recipe, capsys, tiny_model
):
    (Path(shutil.copytree(tiny_model, "empty")) / "model.safetensors").unlink()
    arguments = ["fit", "recipe.yaml", "--model.policy.model", "./empty"]
    message = fails(capsys, [*arguments, "--model.rollout.max_tokens", "2049"])
    assert "rollout.max_tokens is 2049, and './empty' has positions for 2048 tokens" in message
    assert "Set it to 2048 or less" in message
    # with no more than it has, the weights are what is missed
    assert "model.safetensors" in fails(capsys, [*arguments, "--model.rollout.max_tokens", "2048"])


def test_help_explains_settings_and_components_from_their_docstrings(capsys):
    assert main(["fit", "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "--model.group_size" in printed
    assert "G, trajectories per question" in printed
    assert "--model.policy.quantization" in printed
    # only a named class is imported, so another process has to name it
    command = [sys.executable, "-m", "turnrl", "fit", "--model.rewards.help", "ExactMatch"]
    asked = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "weight" in asked.stdout
    assert main(["fit", "--model.estimator.help", "TurnLevel"]) == 0
    assert "Discount of later turn rewards" in " ".join(capsys.readouterr().out.split())


def test_plugins_are_listed_with_distribution_version_hooks_and_components(capsys):
    assert main(["plugins"]) == 0
    printed = capsys.readouterr().out
    for word in (
        "segmenters",
        f"(turnrl {turnrl.__version__})",
        "turnrl_segmenters",
        "core",
        "turnrl_estimators  TurnLevel, OutcomeOnly, Merged",
        "turnrl_engines     Slots",
        "turnrl_commands    doctor",
        "TwoTurn",
        "WikiSearch",
        "ExactMatch",
    ):
        assert word in printed


def test_a_missing_or_forgetful_chat_template_is_refused(recipe, capsys, tiny_model):
    folder = shutil.copytree(tiny_model, "bare")
    (Path(folder) / "chat_template.jinja").unlink()
    assert "chat_template is not set" in fails(
        capsys, ["fit", "recipe.yaml", "--model.policy.model", "./bare"]
    )
    Path("forgetful.jinja").write_text(FORGETFUL_TEMPLATE)
    message = fails(
        capsys, ["fit", "recipe.yaml", "--model.policy.chat_template", "forgetful.jinja"]
    )
    assert "is not prefix-preserving" in message


def test_a_missing_or_incompatible_search_index_is_refused(recipe, capsys):
    tool = {"class_path": "WikiSearch", "init_args": {"index": "nowhere"}}
    recipe["model"]["rollout"]["tools"] = [tool]
    save(recipe)
    message = fails(capsys, ["fit", "recipe.yaml"], code=1)
    assert "nowhere" in message
    assert "turnrl index build" in message
    passage = {"id": "1", "title": "Paris", "text": "Paris is in France."}
    Path("corpus.jsonl").write_text(json.dumps(passage) + "\n")
    build = "index build --source corpus.jsonl --index old"
    assert main(build.split()) == 0
    capsys.readouterr()
    tool["init_args"]["index"] = "old"
    save(recipe)
    description = Path("old", "turnrl-index.json")
    description.write_text(description.read_text().replace('"format": 1', '"format": 999'))
    message = fails(capsys, ["fit", "recipe.yaml"], code=1)
    assert "old" in message
    assert "999" in message
    assert "turnrl index build" in message


def test_a_checkpoint_of_another_base_model_is_refused(recipe, trained, capsys, tiny_model):
    network = AutoModelForCausalLM.from_pretrained(shutil.copytree(tiny_model, "other"))
    network.get_input_embeddings().weight.data[0] += 1
    network.save_pretrained("other")
    capsys.readouterr()
    checkpoint = "runs/recipe/version_0/checkpoints/last.ckpt"
    command = ["recipe.yaml", "--model.policy.model", "./other", "--ckpt_path", checkpoint]
    for verb in ("fit", "eval"):
        assert "made with another policy: its weights" in fails(capsys, [verb, *command])
    # the same model in another place is the same policy
    shutil.copytree(tiny_model, "moved")
    moved = ["--model.policy.model", "./moved", "--ckpt_path", checkpoint]
    assert main(["eval", "recipe.yaml", *moved]) == 0


def test_a_failing_tool_stops_the_run(recipe, capsys):
    tools = ["--model.rollout.tools", "[worlds.Raises]"]
    message = fails(capsys, ["fit", "recipe.yaml", *tools], code=1)
    assert "tool 'echo' (Raises) raised ZeroDivisionError" in message


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(recipe, capsys):
    assert main(["fit", "recipe.yaml", "--model.optimizer.lr", "1e30"]) == 1
    message = capsys.readouterr().err
    assert "turnrl: TrainingError: " in message
    assert "is nan" in message
    assert "Traceback" not in message
    assert "--ckpt_path runs/recipe/version_0/checkpoints/last.ckpt" in message
    assert Path("runs/recipe/version_0/checkpoints/last.ckpt").is_file()


def command(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "turnrl", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell starts what runs in the background with Ctrl-C off
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_stops_cleanly_and_the_run_can_be_resumed(recipe):
    # components by their short names, in a process that has imported none of them yet
    components = ("--model.engine", "Slots", "--model.estimator", "OutcomeOnly")
    running = command("fit", "recipe.yaml", "--trainer.max_epochs", "500", *components)
    lines = []
    for line in running.stdout:
        lines.append(line)
        if line.startswith("iteration   2/"):
            break
    time.sleep(0.3)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "Traceback" not in err
    assert "--ckpt_path runs/recipe/version_0/checkpoints/last.ckpt" in err
    checkpoint = "runs/recipe/version_0/checkpoints/last.ckpt"
    done = torch.load(checkpoint, weights_only=True)["epoch"] + 1
    printed = sum(line.startswith("iteration") for line in [*lines, *out.splitlines()])
    assert printed <= done <= printed + 1  # a line is printed once its checkpoint is kept
    resume = ["--trainer.max_epochs", str(done + 1), "--ckpt_path", checkpoint]
    assert main(["fit", "recipe.yaml", *resume]) == 0
    with Path("runs/recipe/version_1/metrics.csv").open() as file:
        assert {float(row["epoch"]) for row in csv.DictReader(file)} == {done}


def test_a_command_run_in_a_program_frees_its_objects(recipe):
    class Mine:
        """An object that only a collection of garbage can free, once it holds itself."""

    mine = Mine()
    mine.itself, gone = mine, weakref.ref(mine)
    assert main(["fit", "recipe.yaml", "--print_config"]) == 0
    del mine
    gc.collect()
    assert gone() is None


RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


VARIANTS = sorted((ROOT / "recipes" / "variants").glob("*.yaml"))


@pytest.fixture
def dry(tmp_path, monkeypatch):
    """Runs `turnrl fit` with all components made, up to where anything would be loaded; gives what
    would have been trained, and by which trainer."""
    import lightning as L

    made = []

    def stop(self, model, *args, **kwargs):
        made[:] = model, self

    def fit(*arguments):
        # whatever accelerator the recipe asks for, this machine has a CPU
        assert main(["fit", *map(str, arguments), "--trainer.accelerator", "cpu"]) == 0
        return made

    monkeypatch.setattr(L.Trainer, "fit", stop)
    monkeypatch.chdir(tmp_path)
    return fit


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_parses_and_instantiates(path, dry):
    import lightning as L

    model, _ = dry(path)
    assert isinstance(model, L.LightningModule)


@pytest.mark.parametrize("path", VARIANTS, ids=lambda p: p.stem)
def test_every_variant_overrides_its_recipe(path, dry):
    (command,) = re.findall(r"^#   turnrl fit (.+)$", path.read_text(), re.MULTILINE)
    files = [Path(find_recipe(name)) for name in command.split()]
    assert files[1:] == [path]
    model, trainer = dry(*files)
    settings = yaml.safe_load(path.read_text())
    for name, value in settings.get("model", {}).get("policy", {}).items():
        assert getattr(model.policy.settings, name) == value
    assert trainer.num_devices == settings.get("trainer", {}).get("devices", 1)


def test_a_run_without_a_logger_leaves_user_files_alone(recipe):
    Path("config.yaml").write_text("my: precious")
    assert (
        main(["fit", "recipe.yaml", "--trainer.max_epochs", "1", "--trainer.logger", "false"]) == 0
    )
    assert Path("config.yaml").read_text() == "my: precious"


def test_a_run_that_ends_mid_iteration_prints_that(recipe, capsys):
    assert main(["fit", "recipe.yaml", "--trainer.max_steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert "\niteration " not in printed
    assert "stopped inside iteration   1/2" in printed


def test_a_command_does_not_load_unrelated_plugins(tmp_path):
    code = (
        "import sys\n"
        "from turnrl.cli import main\n"
        "main(['fit', 'no.yaml'])\n"
        "others = ('turnrl_', 'turnrl.commands.')\n"
        "print(sorted(name for name in sys.modules if name.startswith(others)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['turnrl.commands.parser']"


@pytest.mark.parametrize("verb", ["doctor", "index"])
def test_a_command_excluded_by_the_variable_gets_a_message_with_the_fix(verb, nursery, tmp_path):
    environment = {**os.environ, **nursery.environment, "TURNRL_LOAD_PLUGINS": "segmenters"}
    arguments = [nursery.bin / "turnrl", verb, "quickstart"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    advice = f". TURNRL_LOAD_PLUGINS is 'segmenters': add {verb}, or the plugin that brings it."
    assert advice in done.stderr


@pytest.mark.parametrize("kind", [WorldError, PluginError])
def test_an_error_inside_a_package_can_be_shown_with_its_traceback(monkeypatch, capsys, kind):
    def raises(arguments):
        raise kind("the tool broke") from OSError("no disk")

    monkeypatch.setattr(cli, "_dispatch", raises)
    message = fails(capsys, ["fit"], code=kind.exit_code)
    assert message == f"turnrl: {kind.__name__}: the tool broke (TURNRL_DEBUG=1 shows where.)"
    monkeypatch.setenv("TURNRL_DEBUG", "1")
    with pytest.raises(kind, match="the tool broke"):
        main(["fit"])


def test_a_short_name_excluded_by_the_variable_gets_a_message_with_the_fix(monkeypatch):
    monkeypatch.setenv("TURNRL_LOAD_PLUGINS", "segmenters")
    wanted = (
        "no installed Tool. TURNRL_LOAD_PLUGINS is 'segmenters': add the plugin that brings it."
    )
    with pytest.raises(LookupError, match=re.escape(wanted)):
        find_class("WikiSearch", {}, turnrl.Tool)


def test_everyday_commands_are_listed_first_with_a_short_line_each(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.suppress(SystemExit):
        main(["--help"])
    lines = re.findall(r"^    (\S+)\s{2,}(\S.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _ in lines][:5] == ["fit", "eval", "recipes", "doctor", "compare"]
    assert all(len(text) <= 56 and ":" not in text for _, text in lines)


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "RANK", "NODE_RANK", "SLURM_PROCID"])
def test_the_first_process_of_several_prints_why_all_failed(monkeypatch, capsys, variable):
    """It ends the others, which print their own fault only if it has none."""
    monkeypatch.setenv(variable, "1")
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    # Lightning kills the first process for any other code than 0 of one that it started
    assert main(["fit", "missing.yaml"]) == (0 if variable == "LOCAL_RANK" else 143)
    timer.join()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(cli, "_FIRST_S", 0.01)
    assert main(["fit", "missing.yaml"]) == 2
    assert "no recipe at 'missing.yaml'" in capsys.readouterr().err
