"""The Lightning loop, on a random model of 100 k parameters that trains in seconds."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import shutil
import subprocess
import sys
from collections import UserList
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.strategies import ModelParallelStrategy

import turnrl.training.module
from runs import adamw, column, data, last, make_module, rows, trainer, warmup, weights
from turnrl import (
    MTGRPO,
    AdvantageEstimator,
    ClippedSurrogate,
    OutcomeOnly,
    OutcomeReward,
    Policy,
    Question,
    RecipeError,
    Rollout,
    TurnLevel,
)
from turnrl.engines import Engine, Session
from turnrl.plugin.errors import CheckpointError, DeviceMemoryError, EngineError, TrainingError
from turnrl.policy.settings import Lora
from turnrl.runs.files import read_table, write_table
from turnrl.testing import check_engine
from turnrl.training.learning import OldLogprobs
from turnrl.training.loader import IterationData
from turnrl.training.trainer_checks import check_trainer
from turnrl.watch.recorder import Recorder
from turnrl_estimators import Branched
from turnrl_slots import Slots
from worlds import Letters


class Spy(Callback):
    """Notes what happens, in order."""

    def __init__(self):
        self.events = []

    def setup(self, trainer, pl_module, stage):
        self.trainer = trainer

    def on_train_epoch_start(self, trainer, pl_module):
        self.events.append("start")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.events.append("step")

    def on_train_epoch_end(self, trainer, pl_module):
        self.events.append("end")


class NotesCollections(AdvantageEstimator):
    """`TurnLevel`, which notes for a spy that an iteration was collected."""

    def __init__(self, spy):
        self.spy, self.rule = spy, TurnLevel()

    def prepare(self, attempts, scorer):
        self.spy.events.append(f"collect {self.spy.trainer.current_epoch}")
        return super().prepare(attempts, scorer)

    def __call__(self, group):
        return self.rule(group)


def spied(tiny_model, spy, **options):
    return make_module(tiny_model, estimator=NotesCollections(spy), **options)


# ------------------------------------------------------------------------------- one iteration


def test_an_iteration_is_an_epoch_that_collects_and_then_steps(tiny_model, tmp_path):
    spy = Spy()
    module = spied(tiny_model, spy, passes_per_iteration=2)
    trainer(tmp_path, 2, [spy], limit_val_batches=0).fit(module, data())
    steps = ["step"] * 4  # 2 passes of 2 steps
    assert spy.events == [
        *["start", "collect 0", *steps, "end"],
        *["start", "collect 1", *steps, "end"],
    ]


def test_the_policy_collects_in_eval_mode_and_learns_in_train_mode(tiny_model, tmp_path):
    modes = set()

    class Modes(Callback):
        """Notes each forward pass: for what it is, and in which mode."""

        def setup(self, trainer, pl_module, stage):
            def note(decoder, _):
                learns = "learn" if torch.is_grad_enabled() else "collect"
                modes.add(("evaluate" if trainer.validating else learns, decoder.training))

            network = pl_module.policy.load()
            network.get_decoder().register_forward_pre_hook(note)

    module = make_module(tiny_model, policy={"gradient_checkpointing": True})
    trainer(tmp_path, 1, [Modes()]).fit(module, data())
    assert modes == {("collect", False), ("evaluate", False), ("learn", True)}


def test_metrics_score_the_untrained_policy_first_and_then_each_iteration(tiny_model, tmp_path):
    trainer(tmp_path).fit(make_module(tiny_model), data())
    metrics = rows(tmp_path)
    first = {k: v for k, v in metrics[0].items() if v}
    curves = ("exact_match", "tool_execution", "answer_in_results", "format")
    rewards = ("turn/called", "outcome/answered", "turn", "outcome", "total")
    assert set(first) == {
        *("step", "epoch", "iteration"),
        *(f"val/{curve}" for curve in (*curves, "findable")),
        *(f"val/reward/{reward}" for reward in rewards),
    }
    # optimiser steps behind the policy: untrained, and after two iterations of two
    assert [row["step"] for row in metrics] == ["0", "2", "4"]
    named = {k for row in metrics for k, v in row.items() if v}
    assert {f"train/{c}" for c in curves} <= named
    assert {
        *("reward/turn/called", "reward/outcome/answered", "reward/turn", "reward/outcome"),
        *("rollout/turns", "rollout/tokens", "rollout/degenerate_groups"),
        *("train/loss", "train/ratio", "train/clip_fraction", "train/entropy", "train/grad_norm"),
    } <= named


def test_metrics_are_means_over_the_trajectories_of_an_iteration(tiny_model, tmp_path):
    module = make_module(tiny_model)
    trainer(tmp_path, 1, limit_val_batches=0).fit(module, data())
    groups = module.experience.groups
    attempts = module.experience.trajectories
    assert len(attempts) == 16
    wanted = {
        "reward/outcome/answered": sum(t.answer is not None for t in attempts) / 16,
        "reward/turn": sum(float(g.turn_rewards.sum()) for g in groups) / 16,
        "rollout/turns": sum(len(t.turns) for t in attempts) / 16,
        "rollout/sampled_tokens": sum(len(t.sampled_turns) for t in attempts) / 16,
        "rollout/truncated": sum(t.ended_by == "length" for t in attempts) / 16,
        "train/format": sum(t.answer is not None for t in attempts) / 16,
    }
    for name, value in wanted.items():
        assert column(tmp_path, name) == [pytest.approx(value)], name
    assert 1 < wanted["rollout/turns"] < 2  # else some of these would be true of anything


def test_each_iteration_logs_learning_time_and_memory(tiny_model, tmp_path):
    trainer(tmp_path, 2).fit(make_module(tiny_model), data())
    (metrics,) = tmp_path.rglob("metrics.csv")
    with metrics.open() as file:
        first, *others = csv.DictReader(file)
    assert (first["train/seconds"], first["train/memory_gb"]) == ("", "")
    for row in others:
        assert 0 < float(row["train/seconds"]) < 60
        assert 0.1 < float(row["train/memory_gb"]) < 20


def test_peak_memory_excludes_the_parent_process():
    held = bytearray(600_000_000)  # resident, and more than the imports below hold
    code = (
        "import torch; from turnrl.policy.memory import peak_bytes; "
        "before = peak_bytes(torch.device('cpu')); new = bytearray(100_000_000); "
        "print(before, peak_bytes(torch.device('cpu')) - before)"
    )
    # not `posix_spawn`, whose child shares no memory: a fork begins with all of its parent's
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, preexec_fn=lambda: None
    )
    before, more = map(int, done.stdout.split())
    assert before < len(held)
    assert 95_000_000 < more < 130_000_000


def test_the_first_ratio_is_exactly_one_and_the_engine_agrees_with_the_learner(
    tiny_model, tmp_path
):
    module = make_module(tiny_model, steps_per_pass=1)
    trainer(tmp_path, 3, limit_val_batches=0).fit(module, data())
    assert column(tmp_path, "train/ratio") == [1.0, 1.0, 1.0]
    assert max(column(tmp_path, "train/logprob_gap")) < 1e-5


def test_later_passes_move_the_ratio_and_are_clipped(tiny_model, tmp_path):
    module = make_module(
        tiny_model, steps_per_pass=1, passes_per_iteration=3, optimizer=adamw(1e-2)
    )
    trainer(tmp_path, 1, limit_val_batches=0).fit(module, data())
    assert column(tmp_path, "train/ratio") != [1.0]
    assert column(tmp_path, "train/clip_fraction")[0] > 0


class ShiftedSession(Session):
    """A session whose log-probabilities are half a nat too high."""

    def __init__(self, session):
        self._session = session

    async def generate(self, new_ids, sampling):
        turn = await self._session.generate(new_ids, sampling)
        return replace(turn, logprobs=tuple(value + 0.5 for value in turn.logprobs))

    def fork(self):
        return ShiftedSession(self._session.fork())

    def close(self):
        self._session.close()


class StaleSession(ShiftedSession):
    """A session that always reports version 0 of the weights."""

    async def generate(self, new_ids, sampling):
        return replace(await self._session.generate(new_ids, sampling), version=0)

    def fork(self):
        return StaleSession(self._session.fork())


class StaleProbes(ShiftedSession):
    """A session whose probes, the forks of its forks, always report version 0 of the weights."""

    depth = 0

    async def generate(self, new_ids, sampling):
        turn = await self._session.generate(new_ids, sampling)
        return replace(turn, version=0) if self.depth > 1 else turn

    def fork(self):
        branch = StaleProbes(self._session.fork())
        branch.depth = self.depth + 1
        return branch


class Meddling(Engine):
    """`Slots` whose sessions report something wrong."""

    def __init__(self, session=ShiftedSession):
        self._slots, self._session = Slots().build(), session
        self.start, self.sync, self.drain = self._slots.start, self._slots.sync, self._slots.drain

    def open(self, prompt_ids):
        return self._session(self._slots.open(prompt_ids))

    def start(self, policy, max_tokens): ...
    def sync(self, version): ...
    async def drain(self): ...
    def close(self):
        self._slots.close()


@pytest.mark.parametrize(
    ("session", "options"), [(StaleSession, {}), (StaleProbes, {"estimator": Branched(probes=1)})]
)
def test_turns_sampled_with_stale_weights_stop_the_run(tiny_model, tmp_path, session, options):
    module = make_module(tiny_model, engine=Meddling(session), **options)
    message = r"^Meddling sampled with weights of version 0, and sync gave it version 2\. Fix"
    with pytest.raises(EngineError, match=message):
        trainer(tmp_path, 2, limit_val_batches=0).fit(module, data())
    assert module.global_step == 2  # the first iteration's weights were those


def test_an_engine_that_ignores_sync_fails_its_check(tiny_policy):
    with pytest.raises(AssertionError, match=r"gives versions \(0, 0\) after sync\(1\) and sync"):
        check_engine(Meddling(StaleSession), tiny_policy)


@pytest.mark.parametrize(
    ("setting", "to_raise", "to_lower"),
    [
        (None, "its memory", "the engine's memory"),
        ("model.engine.share", "model.engine.share", "model.engine.share"),
    ],
)
def test_memory_messages_name_the_engines_setting(tiny_model, caplog, setting, to_raise, to_lower):
    def full(version):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    engine = Meddling()
    engine.memory_setting, engine.capacity = setting, 1
    module = make_module(tiny_model, engine=engine)
    with caplog.at_level("INFO"):
        module.ask("?")
    assert f"Meddling has room for 1 of a group's {module.group_size} trajectories" in caplog.text
    assert f"Raise {to_raise}, or lower model.rollout.max_tokens." in caplog.text
    engine.sync = full
    with pytest.raises(DeviceMemoryError, match=f"while sampling .* Lower {to_lower}, or see"):
        module.ask("?")


def test_the_engine_syncs_once_per_change_of_weights(tiny_model, tmp_path):
    module, synced = make_module(tiny_model, engine=Slots()), []
    sync = module.engine.sync
    module.engine.sync = lambda version: synced.append(version) or sync(version)
    trainer(tmp_path, 2).fit(module, data())
    # two steps an iteration; a validation before each and after the last
    assert synced == [0, 2, 4]
    synced.clear()
    alone = make_module(tiny_model, engine=module.engine)
    for _ in range(2):  # without a Trainer, no steps are counted
        alone.ask("?")
    assert synced == [0, 0]


@pytest.mark.slow
def test_learning_ignores_the_samplers_log_probabilities(tiny_model, tmp_path):
    trained = []
    for name, engine in [("exact", Slots().build()), ("shifted", Meddling())]:
        # a narrow clip, which ratios that are off by half a nat would be cut by
        module = make_module(
            tiny_model,
            engine=engine,
            passes_per_iteration=2,
            objective=ClippedSurrogate(0.05, 0.05),
        )
        trainer(tmp_path / name, 2, limit_val_batches=0).fit(module, data())
        trained.append(weights(module.policy))
    # where the two agree, the sampler's number stands for the learner's: equal to rounding
    assert (trained[0] - trained[1]).abs().mean() < 1e-5
    exact, shifted = (rows(tmp_path / name) for name in ("exact", "shifted"))
    gaps = [[float(row.pop("train/logprob_gap")) for row in run] for run in (exact, shifted)]
    for row, shifted_row in zip(exact, shifted, strict=True):
        assert {k: float(v) for k, v in row.items() if v} == pytest.approx(
            {k: float(v) for k, v in shifted_row.items() if v}, abs=1e-3
        )
    assert max(gaps[0]) < 1e-5
    assert gaps[1] == pytest.approx([0.5, 0.5], abs=1e-4)


class SaysT(OutcomeReward):
    """0.5 for each letter t, 1 at most."""

    def score(self, trajectory):
        return min(1.0, 0.5 * sum(turn.text.count("t") for turn in trajectory.turns))


def test_learning_raises_the_reward(tiny_model, tmp_path):
    module = make_module(
        tiny_model, estimator=OutcomeOnly(), steps_per_pass=1, optimizer=adamw(5e-3)
    )
    module.rewards = [SaysT()]
    trainer(tmp_path, 15, limit_val_batches=0).fit(module, data())
    rewards = column(tmp_path, "reward/outcome")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_the_same_seed_gives_the_same_metrics_to_the_last_digit(tiny_model, tmp_path):
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        trainer(tmp_path / name).fit(make_module(tiny_model, seed=seed), data(seed=seed))
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert rows(tmp_path / "a") != rows(tmp_path / "c")


def test_skipped_steps_do_not_change_the_weight_of_the_steps_taken(tiny_model, tmp_path):
    after_first = []

    class KeepAfterStep(Callback):
        """Notes the weights after each step."""

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            after_first.append(weights(pl_module.policy))

    for limit in (1, 2):
        run = trainer(
            tmp_path / str(limit),
            1,
            [KeepAfterStep()],
            limit_val_batches=0,
            limit_train_batches=limit,
        )
        run.fit(make_module(tiny_model), data())
        assert run.global_step == limit
    alone, first, second = after_first
    assert torch.equal(alone, first)
    assert not torch.equal(first, second)


def test_kl_to_the_reference_starts_at_zero_and_grows(tiny_model, tmp_path):
    module = make_module(
        tiny_model,
        policy={"lora": Lora(r=4)},
        objective=ClippedSurrogate(kl_coef=0.01),
        optimizer=adamw(1e-2),
        steps_per_pass=1,
    )
    trainer(tmp_path, 4, limit_val_batches=0).fit(module, data())
    kl = column(tmp_path, "train/kl")
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert kl[-1] > 1e-5


@pytest.mark.slow
def test_dropout_of_the_base_model_touches_neither_ratios_nor_kl(tiny_model, tmp_path):
    dropping = shutil.copytree(tiny_model, tmp_path / "dropping")
    config = json.loads((dropping / "config.json").read_text())
    assert config["attention_dropout"] == 0
    (dropping / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    for name, model in [("without", tiny_model), ("with", dropping)]:
        module = make_module(
            model,
            policy={"lora": Lora(r=4)},
            objective=ClippedSurrogate(kl_coef=0.01),
            passes_per_iteration=2,
        )
        trainer(tmp_path / name, 1, limit_val_batches=0).fit(module, data())
    assert rows(tmp_path / "with") == rows(tmp_path / "without")


# -------------------------------------------------------------------------- stopping and resuming


def test_a_run_resumed_between_iterations_ends_like_one_that_never_stopped(tiny_model, tmp_path):
    options = {"passes_per_iteration": 2, "scheduler": warmup(6)}
    trainer(tmp_path / "whole", 4).fit(make_module(tiny_model, **options), data())
    trainer(tmp_path / "first", 2).fit(make_module(tiny_model, **options), data())
    resumed = make_module(tiny_model, **options)
    trainer(tmp_path / "second", 4).fit(resumed, data(), ckpt_path=last(tmp_path / "first"))
    whole, second = rows(tmp_path / "whole"), rows(tmp_path / "second")
    assert second == whole[-len(second) :]
    assert len(second) == 2  # a row for each of two iterations


@pytest.mark.parametrize("epochs", [2, 3])
def test_resuming_writes_the_metrics_row_that_a_kill_lost(tiny_model, tmp_path, epochs):
    trainer(tmp_path / "first", 2).fit(make_module(tiny_model), data())
    table = tmp_path / "first" / "version_0" / "metrics.csv"
    whole = read_table(table)
    write_table(table, whole[:-1])
    resumed = trainer(tmp_path / "second", epochs)
    resumed.fit(make_module(tiny_model), data(), ckpt_path=last(tmp_path / "first"))
    assert read_table(table) == whole
    written = table.read_bytes()  # and not once more
    resumed = trainer(tmp_path / "third", epochs)
    resumed.fit(make_module(tiny_model), data(), ckpt_path=last(tmp_path / "first"))
    assert table.read_bytes() == written


@pytest.mark.slow
def test_a_resumed_run_with_adapter_dropout_ends_like_one_that_never_stopped(tiny_model, tmp_path):
    options = {"policy": {"lora": Lora(r=4, dropout=0.5)}, "passes_per_iteration": 2}
    whole = make_module(tiny_model, **options)
    trainer(tmp_path / "whole", 2, limit_val_batches=0).fit(whole, data())
    trainer(tmp_path / "first", 1, limit_val_batches=0).fit(
        make_module(tiny_model, **options), data()
    )
    later = make_module(tiny_model, **options)
    torch.rand(7)  # the process has drawn other numbers by then
    run = trainer(tmp_path / "later", 2, limit_val_batches=0)
    torch.rand(7)
    run.fit(later, data(), ckpt_path=last(tmp_path / "first"))
    assert torch.equal(weights(later.policy), weights(whole.policy))
    assert rows(tmp_path / "later")[-1] == rows(tmp_path / "whole")[-1]


def test_resuming_mid_iteration_collects_again(tiny_model, tmp_path):
    class SaveMidway(Callback):
        """Saves a checkpoint in the middle of iteration 1."""

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    trainer(tmp_path / "a", 2, [SaveMidway()], limit_val_batches=0).fit(
        make_module(tiny_model), data()
    )
    spy = Spy()
    module = spied(tiny_model, spy)
    run = trainer(tmp_path / "b", 3, [spy], limit_val_batches=0)
    run.fit(module, data(), ckpt_path=str(tmp_path / "middle.ckpt"))
    assert [e for e in spy.events if e != "start"] == [
        *["collect 1", "step", "end"],
        *["collect 2", "step", "step", "end"],
    ]


class OutOfTime(Timer):
    """What `max_time` adds; its hour is over after the first step of iteration 1."""

    def __init__(self):
        super().__init__(timedelta(hours=1))

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.over = trainer.global_step == 3
        super().on_train_batch_end(trainer, pl_module, *args)

    def time_elapsed(self, stage=None):
        return 3601.0 if getattr(self, "over", False) else 0.0


# Lightning on a checkpoint with the state of a callback that the next run does not have
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("limit", ["max_steps", pytest.param("max_time", marks=pytest.mark.slow)])
def test_a_run_that_ends_mid_iteration_keeps_the_last_complete_checkpoint(
    tiny_model, tmp_path, limit
):
    whole = trainer(tmp_path / "whole", 3, limit_val_batches=0)
    whole.fit(make_module(tiny_model), data())
    ended = (
        trainer(tmp_path / "ended", 3, limit_val_batches=0, max_steps=3)
        if limit == "max_steps"
        else trainer(tmp_path / "ended", 3, [OutOfTime()], limit_val_batches=0)
    )
    ended.fit(make_module(tiny_model), data())
    assert ended.global_step == 3
    kept = torch.load(last(tmp_path / "ended"), weights_only=False)
    assert (kept["global_step"], kept["epoch"]) == (2, 0)  # iterations have two steps
    again = trainer(tmp_path / "again", 3, limit_val_batches=0)
    again.fit(make_module(tiny_model), data(), ckpt_path=last(tmp_path / "ended"))
    assert again.global_step == whole.global_step == 6
    assert rows(tmp_path / "again") == rows(tmp_path / "whole")[1:]


class Watch(Callback):
    """Notes what the optimiser is about to step with."""

    def __init__(self):
        self.used = []
        self.moments = None

    def on_train_start(self, trainer, pl_module):
        self.moments = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        (group,) = optimizer.param_groups
        self.used.append([group[key] for key in ("lr", "betas", "weight_decay")])


def test_resuming_takes_the_recipes_new_optimizer_settings_and_keeps_adams_moments(
    tiny_model, tmp_path
):
    before = {"optimizer": adamw(3e-3), "scheduler": warmup(1)}
    run = trainer(tmp_path / "first", 2, limit_val_batches=0)
    run.fit(make_module(tiny_model, **before), data())
    saved = torch.load(last(tmp_path / "first"), weights_only=True)["optimizer_states"][0]["state"]
    after = {"optimizer": adamw(1e-3, (0.8, 0.95), 0.1), "scheduler": warmup(7)}
    watch = Watch()
    run = trainer(tmp_path / "second", 4, [watch], limit_val_batches=0)
    run.fit(make_module(tiny_model, **after), data(), ckpt_path=last(tmp_path / "first"))
    # steps 4 to 7: of a warm-up of 7 steps, the 5th to 7th and the first after it
    assert watch.used == [
        [pytest.approx(1e-3 * share), (0.8, 0.95), 0.1] for share in (5 / 8, 6 / 8, 7 / 8, 1)
    ]
    assert saved
    assert watch.moments.keys() == saved.keys()
    for i, state in saved.items():
        assert float(state["step"]) == 4
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(watch.moments[i][name], state[name])


def test_without_a_logger_only_the_checkpoint_is_written(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer(tmp_path, 1, logger=False).fit(make_module(tiny_model), data())
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoints"]


def test_checkpoints_hold_only_the_adapter(tiny_model, tmp_path):
    module = make_module(tiny_model, policy={"lora": Lora(r=4)})
    trainer(tmp_path, 1, limit_val_batches=0).fit(module, data())
    checkpoint = torch.load(last(tmp_path), weights_only=True)
    assert checkpoint["state_dict"]
    assert all("lora_" in name for name in checkpoint["state_dict"])


def test_a_checkpoint_of_another_policy_is_refused(tiny_model, tmp_path):
    run = trainer(tmp_path / "a", 1, limit_val_batches=0)
    run.fit(make_module(tiny_model, policy={"lora": Lora(r=4)}), data())
    for policy, message in [
        ({"lora": Lora(r=8)}, r"its lora is \{'r': 4, 'alpha': 32\}, and \{'r': 8"),
        ({}, "and None in this recipe"),
        ({"lora": Lora(r=4, target_modules=["q_proj"])}, "is only in the checkpoint"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            trainer(tmp_path / "b", 2).fit(
                make_module(tiny_model, policy=policy), data(), ckpt_path=last(tmp_path / "a")
            )


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
    tiny_model, tmp_path
):
    class Ruin(Callback):
        """Puts NaN into the advantages of iteration 1."""

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == 1:
                batch[-1].advantages[:] = float("nan")

    module = make_module(tiny_model)
    with pytest.raises(TrainingError, match=r"the loss is nan at step 2 \(iteration 2\)"):
        trainer(tmp_path, 3, [Ruin()], limit_val_batches=0).fit(module, data())
    checkpoint = torch.load(last(tmp_path), weights_only=True)
    assert checkpoint["global_step"] == 2
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())


# --------------------------------------------------------------------------- what is refused


def test_lightnings_model_parallel_strategy_is_refused():
    """By the trainer alone: a fit would leave torch's process group, and its port, behind."""
    run = Trainer(accelerator="cpu", strategy=ModelParallelStrategy(), logger=False)
    with pytest.raises(
        RecipeError, match=r"is a ModelParallelStrategy\. Take ddp, with .* or fsdp2"
    ):
        check_trainer(run)


def test_more_steps_than_trajectories_are_refused(tiny_model, tmp_path):
    message = "steps_per_pass is 17, but there are only 4 questions x 4 = 16 trajectories"
    with pytest.raises(RecipeError, match=message):
        trainer(tmp_path, 1).fit(make_module(tiny_model, steps_per_pass=17), data())


def test_trajectories_longer_than_the_models_positions_are_refused(tiny_model, tmp_path):
    module = make_module(tiny_model, rollout={"max_tokens": 2049})
    with pytest.raises(RecipeError, match=r"max_tokens is 2049, .* positions for 2048 tokens"):
        trainer(tmp_path, 1).fit(module, data())


def test_impossible_settings_are_refused(tiny_model):
    with pytest.raises(RecipeError, match="group_size is 1, but TurnLevel compares"):
        make_module(tiny_model, group_size=1)
    with pytest.raises(RecipeError, match=r"Set model\.policy\.lora.* objective\.kl_coef"):
        make_module(tiny_model, objective=ClippedSurrogate(kl_coef=0.1))
    with pytest.raises(RecipeError, match=r"model\.steps_per_pass is 0"):
        make_module(tiny_model, steps_per_pass=0)
    with pytest.raises(RecipeError, match=r"policy\.minibatch_tokens is 0"):
        Policy(str(tiny_model), minibatch_tokens=0).build()
    for name in ("per_iteration", "transcripts"):
        with pytest.raises(RecipeError, match=rf"record\.{name} is -1; it must be at least 0"):
            Recorder(**{name: -1})
    with pytest.raises(RecipeError, match="rewards is empty"):
        MTGRPO(Policy(str(tiny_model)), Rollout(Letters(), []), [])


class NoSampler(OldLogprobs):
    """No sampler's log-probabilities stand in for the learner's, as with older weights."""

    changes = {"sampler_differs": True}

    def __init__(self, tokens, read, settings, uneven_passes):
        super().__init__(tokens, read, replace(settings, **self.changes), uneven_passes)


class ReadAhead(NoSampler):
    """Reads ahead what the first step would give, as with dropout."""

    changes = {"sampler_differs": True, "dropout": True}


def counted(compute, counts, rows):
    """Computes the log-probabilities of rows, and notes how many there were."""
    counts.append(len(rows))
    return compute(rows)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_passes_learn_the_same_with_old_log_probabilities_read_ahead_or_kept(
    tiny_model, tmp_path, monkeypatch, steps
):
    """With one step per pass, the first step's own forward pass computes them all."""
    options = {"passes_per_iteration": 2, "steps_per_pass": steps}
    learned, ahead = [], []
    for name, old_logprobs in (("kept", NoSampler), ("ahead", ReadAhead)):
        module = make_module(tiny_model, **options)
        monkeypatch.setattr(turnrl.training.module, "OldLogprobs", old_logprobs)
        monkeypatch.setattr(module, "score_tokens", partial(counted, module.score_tokens, ahead))
        trainer(tmp_path / name, epochs=2).fit(module, data())
        learned.append(weights(module.policy))
    assert torch.allclose(*learned, atol=2e-5)
    ahead = [rows for rows in ahead if rows > 1]  # not of the check before a checkpoint
    if steps == 1:  # 16 trajectories, twice, in the second run alone
        assert sum(ahead) == 2 * 16
    else:
        assert sum(ahead) == 2 * 8 + 2 * 16


def test_stale_sampler_log_probabilities_never_stand_in_for_the_learners(tiny_model):
    settings = ({}, {"max_staleness": 1})
    of_runs = [make_module(tiny_model, **options).learning_settings for options in settings]
    assert [facts.sampler_differs for facts in of_runs] == [False, True]


@pytest.mark.slow
def test_a_mixed_precision_run_resumes_exactly(tiny_model, tmp_path):
    policy = {"dtype": "bfloat16"}
    trainer(tmp_path / "whole", epochs=3).fit(make_module(tiny_model, policy), data())
    trainer(tmp_path / "first", epochs=2).fit(make_module(tiny_model, policy), data())
    resumed = make_module(tiny_model, policy)
    trainer(tmp_path / "rest", epochs=3).fit(resumed, data(), ckpt_path=last(tmp_path / "first"))
    row, wanted = rows(tmp_path / "rest")[-1], rows(tmp_path / "whole")[-1]
    assert row == {name: value for name, value in wanted.items() if name in row}
    assert {p.dtype for p in resumed.policy.parameters()} == {torch.float32}
    # the sampler computes in bfloat16 as well, so the two are near, and not equal
    assert all(1e-5 < gap < 0.2 for gap in column(tmp_path / "whole", "train/logprob_gap"))


class Ladder(IterationData):
    """Data of a user's own: which questions an iteration asks, and nothing else."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def iteration_questions(self, iteration, rank, world_size):
        self.asked.append(iteration)
        return [Question(str(n), f"{n}?", (str(n),)) for n in range(iteration + 1)]

    def val_dataloader(self):
        return UserList([[Question("1", "1?", ("1",))]])  # a plain list is one of loaders


def test_a_custom_data_module_trains_if_it_gives_each_iterations_questions(tmp_path, tiny_model):
    module, ladder = make_module(tiny_model), Ladder()
    trainer(tmp_path, 3).fit(module, ladder)
    assert ladder.asked == [0, 0, 1, 2], "first to count the steps, then once an iteration"
    assert [len(module.experience.groups), module.global_step] == [3, 6]


def test_each_process_and_iteration_has_its_own_random_stream(tiny_model, monkeypatch):
    module = make_module(tiny_model)
    module.policy.load()
    samples, streams = [], []
    for rank in (0, 1):
        monkeypatch.setattr(type(module), "global_rank", rank)
        for iteration in (0, 1):
            streams.append(module.stream(iteration))
            experience = module.collect([Question("n", "Number 3?", ("x",))], iteration)
            samples.append([trajectory.sample.token_ids for trajectory in experience.trajectories])
    assert len({*streams}) == 4
    assert all(first != second for first, second in itertools.combinations(samples, 2))
