"""Optimisers and schedules as components, and what holds of them when a run goes on."""

from __future__ import annotations

import functools

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import ReduceLROnPlateau
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR

from commands import save
from runs import adamw, data, last, make_module, rows, trainer, weights
from turnrl import RecipeError, TurnLevel
from turnrl.recipe.build import build


class Rates(Callback):
    """The learning rate of each step, and the optimiser's state when training begins."""

    def __init__(self):
        self.rates, self.state = [], None

    def on_train_start(self, trainer, pl_module):
        self.state = dict(trainer.optimizers[0].state_dict()["state"])

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])


def run(folder, model, epochs, ckpt=None, **options):
    """Two steps an iteration."""
    rates = Rates()
    module = make_module(model, **options)
    trainer(folder, epochs, [rates], limit_val_batches=0).fit(module, data(), ckpt_path=ckpt)
    return module, rates


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(
            functools.partial(CosineAnnealingLR, T_max=8), id="cosine", marks=pytest.mark.slow
        ),
        pytest.param(
            functools.partial(LinearLR, start_factor=0.2, total_iters=5),
            id="linear",
            marks=pytest.mark.slow,
        ),
        pytest.param(functools.partial(OneCycleLR, max_lr=1e-2, total_steps=8), id="one cycle"),
    ],
)
def test_a_schedule_resumes_as_if_the_run_had_not_stopped(tiny_model, tmp_path, schedule):
    options = {"scheduler": schedule, "optimizer": adamw(3e-3)}
    whole, rates = run(tmp_path / "whole", tiny_model, 4, **options)
    _, first = run(tmp_path / "first", tiny_model, 2, **options)
    second, later = run(tmp_path / "second", tiny_model, 4, last(tmp_path / "first"), **options)
    assert len(set(rates.rates)) > 4
    assert first.rates + later.rates == rates.rates
    assert torch.equal(weights(whole.policy), weights(second.policy))
    assert rows(tmp_path / "second") == rows(tmp_path / "whole")[-2:]


@pytest.mark.slow
def test_another_schedule_holds_from_where_the_run_stands(tiny_model, tmp_path):
    run(tmp_path / "first", tiny_model, 2, scheduler=functools.partial(CosineAnnealingLR, T_max=8))
    warmup = functools.partial(LinearLR, start_factor=0.1, total_iters=9)
    options = {"scheduler": warmup, "optimizer": adamw(1e-2)}
    _, rates = run(tmp_path / "second", tiny_model, 4, last(tmp_path / "first"), **options)
    # after 4 steps of 9, in which 0.1 rises to 1
    assert rates.rates == pytest.approx([1e-2 * (0.1 + 0.9 * step / 9) for step in (4, 5, 6, 7)])
    # and none at all is the optimiser's own rate
    _, rates = run(tmp_path / "third", tiny_model, 4, last(tmp_path / "first"))
    assert rates.rates == [3e-3] * 4


@pytest.mark.slow
def test_another_optimiser_begins_without_moments(tiny_model, tmp_path):
    run(tmp_path / "adam", tiny_model, 1)
    sgd = functools.partial(SGD, lr=0.1, momentum=0.9)
    adam = last(tmp_path / "adam")
    _, rates = run(tmp_path / "sgd", tiny_model, 2, adam, optimizer=sgd)
    assert rates.state == {}
    assert rates.rates == [0.1, 0.1]
    module, rates = run(tmp_path / "back", tiny_model, 3, last(tmp_path / "sgd"))
    assert rates.state == {}
    assert weights(module.policy).isfinite().all()
    _, rates = run(tmp_path / "same", tiny_model, 2, adam)
    assert rates.state != {}


def test_eight_bit_adamw_trains_an_adapter_and_resumes(tiny_model, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    small = functools.partial(bitsandbytes.optim.AdamW8bit, lr=1e-2, min_8bit_size=64)
    try:
        whole, _ = run(tmp_path / "whole", tiny_model, 2, optimizer=small)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"bitsandbytes has no 8-bit optimiser for this device: {error}")
    run(tmp_path / "first", tiny_model, 1, optimizer=small)
    again, _ = run(tmp_path / "b", tiny_model, 2, last(tmp_path / "first"), optimizer=small)
    assert torch.equal(weights(whole.policy), weights(again.policy))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": lambda parameters: None}, r"model\.optimizer makes None"),
        ({"scheduler": lambda optimizer: 0.1}, r"model\.scheduler makes a float"),
        (
            {"scheduler": functools.partial(ReduceLROnPlateau, monitor="val/reward/total")},
            r"model\.scheduler makes a ReduceLROnPlateau",
        ),
    ],
)
def test_a_function_that_makes_another_thing_is_named(tiny_model, tmp_path, options, message):
    with pytest.raises(RecipeError, match=message):
        run(tmp_path, tiny_model, 1, **options)


def test_a_setting_of_the_default_optimiser_or_estimator_needs_no_name(recipe):
    del recipe["model"]["optimizer"]
    save(recipe)
    options = ["--model.optimizer.lr", "1e-5", "--model.estimator.gamma", "0.5"]
    module = build(["recipe.yaml", *options]).module
    made, plain = (
        parts.optimizer([torch.nn.Parameter(torch.zeros(1))]).defaults
        for parts in (module, build(["recipe.yaml"]).module)
    )
    assert made == {**plain, "lr": 1e-5}
    assert module.estimator == TurnLevel(gamma=0.5)
    recipe["model"]["optimizer"] = {"weight_decay": 0.1}
    save(recipe)
    made = build(["recipe.yaml"]).module.optimizer([torch.nn.Parameter(torch.zeros(1))]).defaults
    assert made == {**plain, "weight_decay": 0.1}
