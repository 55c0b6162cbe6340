"""Lightning's doors: every callback and every option of the Trainer, tried once. Each works as its
name says, or is refused at the start with the reason. Whatever resumes, loads or writes does so
from what its name says, and over nothing."""

from __future__ import annotations

import inspect
import logging
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


NO_EFFECT = None
# the argument is the run's folder; a text is in the message that refuses the callback
CALLBACKS = {
    "BackboneFinetuning": (lambda _: callbacks.BackboneFinetuning(), "which weights are trained"),
    "BaseFinetuning": (lambda _: callbacks.BaseFinetuning(), "which weights are trained"),
    "BasePredictionWriter": (lambda _: Writer(), NO_EFFECT),
    "BatchSizeFinder": (lambda _: callbacks.BatchSizeFinder(), "an iteration collects its own"),
    "Callback": (lambda _: callbacks.Callback(), NO_EFFECT),
    "Checkpoint": (lambda _: callbacks.Checkpoint(), NO_EFFECT),
    "DeviceStatsMonitor": (lambda _: callbacks.DeviceStatsMonitor(cpu_stats=True), NO_EFFECT),
    "EMAWeightAveraging": (lambda _: callbacks.EMAWeightAveraging(), "validates one set"),
    "EarlyStopping": (lambda _: callbacks.EarlyStopping("val/exact_match"), NO_EFFECT),
    "GradientAccumulationScheduler": (
        lambda _: callbacks.GradientAccumulationScheduler({0: 2}),
        "a batch is a whole step",
    ),
    "LambdaCallback": (lambda _: callbacks.LambdaCallback(on_fit_end=print), NO_EFFECT),
    "LearningRateFinder": (lambda _: callbacks.LearningRateFinder(), "no such meaning"),
    "LearningRateMonitor": (lambda _: callbacks.LearningRateMonitor("step"), NO_EFFECT),
    "ModelCheckpoint": (
        lambda at: callbacks.ModelCheckpoint(at / "own", every_n_train_steps=1),
        NO_EFFECT,
    ),
    "ModelPruning": (lambda _: callbacks.ModelPruning("l1_unstructured"), "puts masks"),
    "ModelSummary": (lambda _: callbacks.ModelSummary(2), NO_EFFECT),
    "OnExceptionCheckpoint": (lambda at: callbacks.OnExceptionCheckpoint(at / "own"), NO_EFFECT),
    "ProgressBar": (lambda _: callbacks.ProgressBar(), NO_EFFECT),
    "RichModelSummary": (lambda _: callbacks.RichModelSummary(2), NO_EFFECT),
    "RichProgressBar": (lambda _: callbacks.RichProgressBar(), NO_EFFECT),
    "SpikeDetection": (lambda _: callbacks.SpikeDetection(), NO_EFFECT),
    "StochasticWeightAveraging": (
        lambda _: callbacks.StochasticWeightAveraging(1e-3),
        "validates one set",
    ),
    "TQDMProgressBar": (lambda _: callbacks.TQDMProgressBar(), NO_EFFECT),
    "ThroughputMonitor": (
        lambda _: callbacks.ThroughputMonitor(batch_size_fn=len, window_size=2),
        NO_EFFECT,
    ),
    "Timer": (lambda _: callbacks.Timer(), NO_EFFECT),
    "WeightAveraging": (lambda _: Ema(), "has a Ema, which validates one set of weights"),
}
_BARS = ("ProgressBar", "RichProgressBar", "TQDMProgressBar")


def test_every_callback_of_lightning_is_decided():
    assert {*CALLBACKS} == {*callbacks.__all__}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_leaves_the_weights_as_they_are_or_is_refused(tiny_model, tmp_path, plain, name):
    make, refused = CALLBACKS[name]
    shown = {"enable_progress_bar": True} if name in _BARS else {}
    run = made(tmp_path, [make(tmp_path)], **shown)
    module = make_module(tiny_model)
    if refused is not None:
        with pytest.raises(RecipeError, match=refused):
            run.fit(module, data())
        assert module.policy.network is None  # at the start
        return
    run.fit(module, data())
    assert torch.equal(weights(module.policy), plain)
    written = rows(tmp_path)
    assert [(row["iteration"], row["step"]) for row in written] == [("0", "0"), ("1", "2")]
    if name == "LearningRateMonitor":
        assert float(written[1]["lr-AdamW"]) == 3e-3
    if name == "DeviceStatsMonitor":
        assert any("DeviceStats" in key and value for key, value in written[1].items())


def of_steps(number):
    return lambda run, *_: run.global_step == number


def has_no_validation(_, folder, *__):
    return not any("val/reward/total" in row for row in rows(folder))


def validates_each_step(_, folder, *__):
    return [row["step"] for row in rows(folder) if row["val/reward/total"]] == ["0", "1", "2"]


def leaves_nothing(run, folder, *_):
    return run.global_step == 1 and not any(folder.rglob("*.*"))


def differs(_, __, trained, plain):
    return not torch.equal(trained, plain)


# NO_EFFECT on the weights; a text that is in the refusal; or what to look at afterwards
OPTIONS = {
    "accelerator": ("cpu", NO_EFFECT),
    "strategy": ("auto", NO_EFFECT),
    "devices": (1, NO_EFFECT),
    "num_nodes": (1, NO_EFFECT),
    "precision": ("bf16-mixed", "trained weights are kept in 32-true"),
    "logger": (False, NO_EFFECT),
    "callbacks": (None, NO_EFFECT),  # the table above
    "fast_dev_run": (1, leaves_nothing),
    "max_epochs": (2, of_steps(4)),
    "min_epochs": (1, NO_EFFECT),
    "max_steps": (1, of_steps(1)),
    "min_steps": (1, NO_EFFECT),
    "max_time": ("00:01:00:00", NO_EFFECT),
    "limit_train_batches": (1, of_steps(1)),
    "limit_val_batches": (0, has_no_validation),
    "limit_test_batches": (1, NO_EFFECT),
    "limit_predict_batches": (1, NO_EFFECT),
    "overfit_batches": (1, "each iteration asks other questions"),
    "val_check_interval": (1, validates_each_step),
    "check_val_every_n_epoch": (1, NO_EFFECT),
    "num_sanity_val_steps": (2, NO_EFFECT),
    "log_every_n_steps": (5, NO_EFFECT),
    "enable_checkpointing": (False, NO_EFFECT),
    "enable_progress_bar": (True, NO_EFFECT),
    "enable_model_summary": (True, NO_EFFECT),
    "accumulate_grad_batches": (2, "a batch is a whole step"),
    "gradient_clip_val": (1e-9, differs),
    "gradient_clip_algorithm": ("value", NO_EFFECT),
    "deterministic": (True, NO_EFFECT),
    "benchmark": (True, NO_EFFECT),
    "inference_mode": (False, NO_EFFECT),
    "use_distributed_sampler": (False, NO_EFFECT),
    "profiler": ("simple", NO_EFFECT),
    "detect_anomaly": (True, NO_EFFECT),
    "barebones": (True, NO_EFFECT),
    "plugins": (AsyncCheckpointIO, NO_EFFECT),
    "sync_batchnorm": (True, NO_EFFECT),
    "reload_dataloaders_every_n_epochs": (1, NO_EFFECT),
    "default_root_dir": ("elsewhere", NO_EFFECT),
    "enable_autolog_hparams": (False, NO_EFFECT),
    "model_registry": ("own/model", NO_EFFECT),  # only of Lightning's cloud
}


def test_every_option_of_the_trainer_is_decided():
    assert {*OPTIONS} == {*inspect.signature(L.Trainer).parameters}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "callbacks"])
def test_an_option_does_what_its_name_says_or_is_refused(
    tiny_model, tmp_path, plain, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    value, expected = OPTIONS[name]
    options = {name: [value()] if name == "plugins" else value}
    if name == "barebones":  # Lightning itself refuses it beside these
        options = {"logger": None, "num_sanity_val_steps": None, "barebones": True}
        options |= {
            "log_every_n_steps": None,
            "enable_progress_bar": None,
            "enable_model_summary": None,
        }
    run = made(tmp_path, **options)
    module = make_module(tiny_model)
    if isinstance(expected, str):
        with pytest.raises(RecipeError, match=expected):
            run.fit(module, data())
        return
    run.fit(module, data())
    trained = weights(module.policy)
    if expected is NO_EFFECT:
        assert torch.equal(trained, plain)
    else:
        assert expected(run, tmp_path, trained, plain)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("find", ["lr_find", "scale_batch_size"])
def test_the_tuner_is_refused(tiny_model, tmp_path, find):
    module = make_module(tiny_model)
    module.lr = 1e-3
    module.batch_size = 2
    with pytest.raises(RecipeError, match=r"trainer\.callbacks has a .*Finder"):
        getattr(Tuner(made(tmp_path)), find)(module, datamodule=data())


class OwnAverage(L.Callback):
    """Average weights as a user might write it: in force while a validation lasts."""

    def on_fit_start(self, trainer, pl_module):
        kept = pl_module.policy.trainable_parameters()
        self.average = {name: p.detach().clone() for name, p in kept.items()}

    def on_train_batch_end(self, trainer, pl_module, *args):
        for name, p in pl_module.policy.trainable_parameters().items():
            self.average[name].lerp_(p.detach(), 0.1)

    def on_validation_start(self, trainer, pl_module):
        for name, p in pl_module.policy.trainable_parameters().items():
            own = p.detach().clone()
            p.data.copy_(self.average[name])
            self.average[name] = own

    on_validation_end = on_validation_start


class Shrinks(L.Callback):
    """Changes the weights after they were validated."""

    def on_train_epoch_end(self, trainer, pl_module):
        for p in pl_module.policy.trainable_parameters().values():
            p.data.mul_(0.9)


@pytest.mark.parametrize("callback", [OwnAverage, Shrinks])
def test_a_checkpoint_of_other_weights_than_were_validated_is_refused(
    tiny_model, tmp_path, callback
):
    run = made(tmp_path, [callback(), LastCheckpoint()])
    with pytest.raises(RecipeError, match=rf"since their validation .*\({callback.__name__}\)"):
        run.fit(make_module(tiny_model), data())


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
def test_resuming_inside_an_iteration_is_said_and_at_its_end_is_exact(
    tiny_model, tmp_path, each_step, caplog, step
):
    folder, whole = each_step
    module = make_module(tiny_model)
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, 2).fit(module, data(), ckpt_path=str(folder / f"step={step}.ckpt"))
    exact = step == 2
    assert torch.equal(weights(module.policy), whole) == exact
    inside = f"saved inside iteration {1 + step // 2}, after 1 step of it"
    assert (inside in caplog.text) == (not exact)
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
    with pytest.raises(CheckpointError, match=r"Call turnrl\.load"):
        type(fresh).load_from_checkpoint(last(tmp_path))


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
    read = [module.policy.read([row])[0].logprobs for module in (best, exported, final)]
    assert torch.equal(read[0], read[1])
    assert not torch.equal(read[0], read[2])
