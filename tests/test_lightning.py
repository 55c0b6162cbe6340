"""Lightning's callbacks and the Trainer's options: each works as its name says, or is refused at
the start. Whatever resumes, loads or writes does so from what its name says, and over nothing."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner

from commands import fails, save
from runs import data, last, make_module, rows, trainer, weights
from turnrl import RecipeError, load
from turnrl.cli import main
from turnrl.plugin.errors import CheckpointError
from turnrl.training.trainer_checks import check_trainer
from turnrl.watch.checkpoints import BestCheckpoint, LastCheckpoint

# remarks of Lightning
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{remark}")
    for remark in (
        *("fast_dev_run", "You're using the WeightAveraging", "used to create the checkpoint"),
        *("with multiple `ModelCheckpoint`", "without a model", "Checkpoint directory"),
        *("there is no last checkpoint", "smaller than the logging interval", "Detect Anomaly"),
        *("nomaly", "configured without a logger", "flops_per_batch"),
        "You are trying to `self.log",
    )
]


def made(folder, own=(), **options):
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": CSVLogger(str(folder), name="", version=0),
        "default_root_dir": folder,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    L.seed_everything(0, verbose=False)
    return L.Trainer(callbacks=[*own], **settings)


@pytest.fixture(scope="module")
def plain(tiny_model, tmp_path_factory):
    """The weights after an iteration without any callback or option."""
    module = make_module(tiny_model)
    made(tmp_path_factory.mktemp("plain")).fit(module, data())
    return weights(module.policy)


class Writer(callbacks.BasePredictionWriter):
    pass


class Ema(callbacks.WeightAveraging):
    """A user's own, which extends a callback that is refused."""


REFUSED = [
    callbacks.BackboneFinetuning(),
    callbacks.BatchSizeFinder(),
    callbacks.GradientAccumulationScheduler({0: 2}),
    callbacks.LearningRateFinder(),
    callbacks.ModelPruning("l1_unstructured"),
    callbacks.StochasticWeightAveraging(1e-3),
    Ema(),
]


@pytest.mark.parametrize("callback", REFUSED, ids=lambda callback: type(callback).__name__)
def test_a_callback_that_changes_weights_or_steps_is_refused_at_the_start(
    tiny_model, tmp_path, callback
):
    module = make_module(tiny_model)
    with pytest.raises(RecipeError, match=rf"callbacks has a {type(callback).__name__}, which"):
        made(tmp_path, [callback]).fit(module, data())
    assert module.policy.network is None


def test_the_other_callbacks_of_lightning_leave_the_weights_as_they_are(
    tiny_model, tmp_path, plain
):
    others = [
        Writer(),
        callbacks.DeviceStatsMonitor(cpu_stats=True),
        callbacks.EarlyStopping("val/exact_match"),
        callbacks.LearningRateMonitor("step"),
        callbacks.ModelCheckpoint(tmp_path / "own", every_n_train_steps=1),
        callbacks.OnExceptionCheckpoint(tmp_path / "own"),
        callbacks.RichModelSummary(2),
        callbacks.SpikeDetection(),
        callbacks.TQDMProgressBar(),
        callbacks.ThroughputMonitor(batch_size_fn=len, window_size=2),
        callbacks.Timer(),
    ]
    module = make_module(tiny_model)
    made(tmp_path, others, enable_progress_bar=True).fit(module, data())
    assert torch.equal(weights(module.policy), plain)
    written = rows(tmp_path)
    assert [(row["iteration"], row["step"]) for row in written] == [("0", "0"), ("1", "2")]
    assert float(written[1]["lr-AdamW"]) == 3e-3
    assert any("DeviceStats" in key and value for key, value in written[1].items())


@pytest.mark.parametrize(
    "options", [{"precision": "bf16-mixed"}, {"overfit_batches": 1}, {"accumulate_grad_batches": 2}]
)
def test_an_option_of_the_trainer_that_changes_a_step_is_refused(tmp_path, options):
    ((name, value),) = options.items()
    with pytest.raises(RecipeError, match=rf"trainer\.{name} is .?{value}"):
        check_trainer(made(tmp_path, **options))


def test_other_options_of_the_trainer_leave_the_weights_as_they_are(tiny_model, tmp_path, plain):
    options = {
        **{"num_sanity_val_steps": 2, "log_every_n_steps": 5, "gradient_clip_algorithm": "value"},
        **{"deterministic": True, "inference_mode": False, "use_distributed_sampler": False},
        **{"profiler": "simple", "detect_anomaly": True, "plugins": [AsyncCheckpointIO()]},
        **{"sync_batchnorm": True, "reload_dataloaders_every_n_epochs": 1, "min_steps": 1},
        **{"max_time": "00:01:00:00", "enable_model_summary": True},
    }
    module = make_module(tiny_model)
    made(tmp_path, **options).fit(module, data())
    torch.use_deterministic_algorithms(False)
    assert torch.equal(weights(module.policy), plain)


def test_a_trial_leaves_nothing_and_steps_and_validations_can_be_limited(tiny_model, tmp_path):
    run = made(tmp_path / "trial", fast_dev_run=1)
    run.fit(make_module(tiny_model), data())
    assert run.global_step == 1
    assert not any((tmp_path / "trial").rglob("*.*"))
    run = made(tmp_path / "few", limit_train_batches=1, limit_val_batches=0)
    run.fit(make_module(tiny_model), data())
    assert run.global_step == 1
    assert not any("val/reward/total" in row for row in rows(tmp_path / "few"))
    made(tmp_path / "often", val_check_interval=1).fit(make_module(tiny_model), data())
    validated = [row["step"] for row in rows(tmp_path / "often") if row["val/reward/total"]]
    assert validated == ["0", "1", "2"]


@pytest.mark.parametrize("find", ["lr_find", "scale_batch_size"])
def test_the_tuner_is_refused(tiny_model, tmp_path, find):
    module = make_module(tiny_model)
    module.lr = 1e-3
    module.batch_size = 2
    with pytest.raises(RecipeError, match=r"trainer\.callbacks has a .*Finder"):
        getattr(Tuner(made(tmp_path)), find)(module, datamodule=data())


# ---------------------------------------------------------------------------- resuming


@pytest.fixture(scope="module")
def each_step(tiny_model, tmp_path_factory):
    """Checkpoints of each of four steps in two iterations, and the weights at the end."""
    folder = tmp_path_factory.mktemp("steps")
    keep = callbacks.ModelCheckpoint(
        folder / "own", "{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False
    )
    module = make_module(tiny_model)
    trainer(folder, 2, [keep]).fit(module, data())
    return folder / "own", weights(module.policy)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_resuming_at_the_end_of_an_iteration_is_exact(tiny_model, tmp_path, each_step, step):
    folder, whole = each_step
    module = make_module(tiny_model)
    trainer(tmp_path, 2).fit(module, data(), ckpt_path=str(folder / f"step={step}.ckpt"))
    assert torch.equal(weights(module.policy), whole) == (step == 2)
    assert [(r["iteration"], r["step"]) for r in rows(tmp_path)][-1] == ("2", "4")
    saved = torch.load(last(tmp_path), weights_only=True)
    counts = saved["loops"]["fit_loop"]["epoch_progress"]["current"]
    assert counts["ready"] == counts["started"] == 2


def test_best_and_last_mean_the_checkpoints_of_the_run(tiny_model, tmp_path):
    best = BestCheckpoint()
    run = made(tmp_path, [LastCheckpoint(), best], max_epochs=2)
    module = make_module(tiny_model)
    run.fit(module, data())
    folder = tmp_path / "version_0" / "checkpoints"
    for name in ("best", "last"):
        run.validate(module, data(), ckpt_path=name, verbose=False)
        saved = torch.load(folder / f"{name}.ckpt", weights_only=True)["state_dict"]
        for key, weight in module.policy.trainable_state().items():
            assert torch.equal(weight, saved[f"policy.{key}"])


def test_a_state_dict_is_loaded_or_refused(tiny_model, tmp_path):
    trained = make_module(tiny_model)
    trainer(tmp_path, 1, limit_val_batches=0).fit(trained, data())
    saved = torch.load(last(tmp_path), weights_only=True)["state_dict"]
    fresh = make_module(tiny_model)
    fresh.load_state_dict(saved)  # its policy is not loaded yet
    assert torch.equal(weights(fresh.policy), weights(trained.policy))
    name = sorted(saved)[0]
    less = {key: value for key, value in saved.items() if key != name}
    for broken in ({}, less, {f"model.{key}": value for key, value in saved.items()}):
        with pytest.raises(CheckpointError, match="the weights lack policy"):
            fresh.load_state_dict(broken)
    with pytest.raises(CheckpointError, match=r"hold the unknown policy\.other"):
        fresh.load_state_dict({**saved, "policy.other": saved[name]})
    assert fresh.load_state_dict(less, strict=False).missing_keys == [name]


# ---------------------------------------------------------------------------- folders


def test_a_folder_with_a_run_is_not_written_over(tiny_model, tmp_path):
    trainer(tmp_path, 1).fit(make_module(tiny_model), data())
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    with pytest.raises(RecipeError, match="holds a run already"):
        trainer(tmp_path, 1).fit(make_module(tiny_model), data())
    with pytest.raises(RecipeError, match="holds a run already"):
        trainer(tmp_path, 1).validate(make_module(tiny_model), data())
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before
    # a run that goes on in its folder keeps its rows
    trainer(tmp_path, 2).fit(make_module(tiny_model), data(), ckpt_path=last(tmp_path))
    assert [row["step"] for row in rows(tmp_path)] == ["0", "2", "4"]


def test_the_checkpoint_of_a_run_without_a_logger_is_not_written_over(tiny_model, tmp_path):
    for epochs, path in ((1, None), (2, str(tmp_path / "checkpoints" / "last.ckpt"))):
        run = made(tmp_path, [LastCheckpoint()], logger=False, max_epochs=epochs)
        run.fit(make_module(tiny_model), data(), ckpt_path=path)
    with pytest.raises(RecipeError, match="is the checkpoint of another run"):
        made(tmp_path, [LastCheckpoint()], logger=False).fit(make_module(tiny_model), data())


def test_a_recipe_with_a_fixed_version_does_not_write_over_a_run(recipe, capsys):
    recipe["trainer"] |= {
        "max_epochs": 1,
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "version": 0}},
    }
    save(recipe)
    assert main(["fit", "recipe.yaml"]) == 0
    before = {f: f.read_bytes() for f in Path("runs").rglob("*") if f.is_file()}
    assert "runs/recipe/version_0 holds a run already" in fails(
        capsys, ["fit", "recipe.yaml", "--seed_everything", "9"]
    )
    assert {f: f.read_bytes() for f in Path("runs").rglob("*") if f.is_file()} == before
    # it goes on there
    again = ["--trainer.max_epochs", "2", "--ckpt_path", "runs/recipe/version_0"]
    assert main(["fit", "recipe.yaml", *again]) == 0


# ---------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_a_run_exports_the_policy_that_load_takes(recipe, tiny_model, capsys, lora):
    """The best one: here the last one is no better, so it is of iteration 1."""
    recipe["model"]["policy"] |= {"lora": lora}
    recipe["model"]["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1e-3}}
    save(recipe)
    assert main(["fit", "recipe.yaml"]) == 0
    said = capsys.readouterr().out
    run = Path("runs/recipe/version_0")
    kind = "model" if lora is None else "adapter"
    assert f"the trained {kind} is in {run}/{kind} (best.ckpt, of iteration 1)" in said
    card = (run / kind / "README.md").read_text()
    assert "| checkpoint | `best.ckpt` of the run |" in card
    assert "| iterations | 1, in 2 optimiser steps |" in card
    best, final = load(run), load(run, checkpoint="last")
    policy = {"model": str(run / kind), **({"lora": lora} if lora else {})}
    save({**recipe, "model": {**recipe["model"], "policy": policy}}, "exported.yaml")
    exported = load("exported.yaml")
    row = ([5, 9, 33, 71, 120, 8], [False] + [True] * 5)
    read = [module.policy.score_tokens([row])[0].logprobs for module in (best, exported, final)]
    assert torch.equal(read[0], read[1])
    assert not torch.equal(read[0], read[2])
