"""Processes that learn together and share servers."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from nursery import command
from serving import (
    IGNORE_PEFT_WARNING,
    WINDOW,
    check_record,
    interpreter,
    kind,
    sampled_tokens,
    start_server,
    trained_rows,
    write_recipe,
)
from turnrl import RecipeError
from turnrl.cli import main
from turnrl.engines import RunContext
from turnrl_servers.folders import WeightsFolder

__all__ = ["interpreter", "kind", "start_server", "write_recipe"]  # fixtures
pytestmark = IGNORE_PEFT_WARNING


def fit_in_two(nursery, strategy: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Train `recipe.yaml` in two processes."""
    two = ("--trainer.devices=2", f"--trainer.strategy={strategy}")
    return subprocess.run(
        command("fit", "recipe.yaml", *two, *options),
        env={**os.environ, **nursery.environment, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_processes_that_learn_together_share_the_versions_of_the_first(
    start_server, write_recipe, nursery, strategy
):
    servers = [start_server(*WINDOW) for _ in range(2)]
    write_recipe(url=[server.url for server in servers])
    ran = fit_in_two(nursery, strategy)
    assert ran.returncode == 0, ran.stderr
    check_record(attempts=2 * 8)
    saved = torch.load("runs/recipe/version_0/checkpoints/best.ckpt", weights_only=True)
    exported = load_file("runs/recipe/version_0/adapter/adapter_model.safetensors")
    assert len(exported) == len(saved["state_dict"])
    for name, value in exported.items():
        inner = name.replace(".weight", ".default.weight")
        assert torch.equal(value, saved["state_dict"][f"policy.network.{inner}"])
    for server in servers:
        names = server.model.loads
        assert [name.split("-")[4:] for name in names] == [["0", "0"], ["2", "0"], ["4", "0"]]
    assert not list(Path("runs").rglob("turnrl-weights-*"))


@pytest.mark.slow
def test_processes_that_learn_together_sample_ahead(start_server, write_recipe, nursery):
    servers = [start_server(*WINDOW, "--max-loras", "4") for _ in range(2)]
    write_recipe(url=[server.url for server in servers], keeps=2)
    ran = fit_in_two(nursery, "fsdp2", "--model.max_staleness=1", "--trainer.max_epochs=4")
    assert ran.returncode == 0, ran.stderr
    trained = trained_rows()
    assert len(trained) == 4 * 8
    behind = set()
    for row in trained:
        for version, sampler, learner in sampled_tokens(row):
            behind.add(row["policy_version"] - version)
            assert version < row["policy_version"] or sampler == pytest.approx(learner, abs=1e-4)
    assert behind == {0, 2}  # an iteration has two steps


@pytest.mark.slow
def test_if_the_first_process_fails_the_others_end(start_server, write_recipe, tmp_path, nursery):
    # the first one fails while the others wait for the versions that it gives to the servers
    write_recipe(url=start_server(*WINDOW).url, max_logprob_gap=0)

    def here() -> set[int]:
        return {p.pid for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)}

    before = here()
    ran = fit_in_two(nursery, "ddp")
    assert ran.returncode == 1
    assert "and model.engine.max_logprob_gap is 0." in ran.stderr
    assert "stopped by" not in ran.stderr
    assert here() == before


@pytest.mark.slow
def test_processes_that_share_one_policy_train_all_of_its_weights(
    start_server, write_recipe, nursery
):
    write_recipe(whole=True, url=[start_server(*WINDOW).url for _ in range(2)])
    ran = fit_in_two(nursery, "fsdp2")
    assert ran.returncode == 0, ran.stderr
    check_record(attempts=2 * 8)
    saved = torch.load("runs/recipe/version_0/checkpoints/best.ckpt", weights_only=True)
    exported = load_file("runs/recipe/version_0/model/model.safetensors")
    assert exported.keys() <= {k.removeprefix("policy.network.") for k in saved["state_dict"]}
    for name, value in exported.items():
        assert torch.equal(value, saved["state_dict"][f"policy.network.{name}"])


# ----------------------------------------------------------------------- the folder that they share


def test_each_start_of_each_run_has_a_folder_of_its_own(tmp_path):
    given = str(tmp_path / "given")
    first, second = (WeightsFolder(given, RunContext()) for _ in range(2))
    folders = [first.make(), first.make(), second.make()]
    assert len({folder.name for folder in folders}) == 3  # adapters have their names
    assert {folder.parent for folder in folders} == {tmp_path / "given"}
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"cannot be made .* Set model\.engine\.folder"):
        WeightsFolder(str(tmp_path / "file"), RunContext()).make()


# ------------------------------------------------------------------ settings that they cannot share


def test_the_doctor_refuses_an_engine_that_processes_cannot_share(write_recipe, capsys):
    write_recipe(python="/nowhere/python")
    words = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    assert main(["doctor", "recipe.yaml", *words]) == 1
    refused = (
        r"(?m)^fail  sampler +model\.engine\.python would start a server for each of 2 processes"
    )
    assert re.search(refused, capsys.readouterr().out)


def test_the_doctor_passes_a_server_that_processes_can_share(start_server, write_recipe, capsys):
    write_recipe(whole=True, url=start_server(*WINDOW).url)
    main(["doctor", "recipe.yaml", "--trainer.devices=2", "--trainer.strategy=fsdp2"])
    shown = capsys.readouterr().out
    assert re.search(r"(?m)^pass  sampler +vLLM 0\.0\.0, 1 server$", shown), shown


@pytest.mark.slow
def test_fit_refuses_an_engine_that_processes_cannot_share(write_recipe, interpreter, nursery):
    for engine, whole, message in (
        ({"python": str(interpreter)}, False, "model.engine.python would start a server for ea"),
        ({"url": "http://127.0.0.1:9"}, True, "2 processes train all weights, and a server would"),
    ):
        write_recipe(whole, **engine)
        ran = fit_in_two(nursery, "ddp")
        assert ran.returncode == 2
        assert message in ran.stderr
        assert "Traceback" not in ran.stderr
