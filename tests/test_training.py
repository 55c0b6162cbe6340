"""The Lightning loop, on a random model of 100 k parameters that trains in seconds."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from worlds import Answered, Called, Echo, Letters

from turnrl import (
    MTGRPO,
    CheckpointError,
    ClippedSurrogate,
    Lora,
    OutcomeOnly,
    OutcomeReward,
    Policy,
    QuestionData,
    RecipeError,
    Rollout,
    TrainingError,
)
from turnrl.callbacks import LastCheckpoint
from turnrl.experience import pack

TIMINGS = ("rollout/seconds", "rollout/tokens_per_s")


def module(model, policy=None, rollout=None, **options):
    settings = {"group_size": 4, "minibatch_size": 8, "learning_rate": 3e-3, **options}
    return MTGRPO(
        Policy(str(model), **(policy or {})),
        Rollout(Letters(), [Echo()], max_turn_tokens=6, **(rollout or {})),
        [Answered(), Called()],
        **settings,
    )


def data(**options):
    return QuestionData("worlds.Numbers", "worlds.Numbers", questions_per_iteration=4, **options)


def trainer(folder, epochs=2, callbacks=(), **options):
    L.seed_everything(0, verbose=False)
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(str(folder), name="", version=0),
        callbacks=[LastCheckpoint(), *callbacks],
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def rows(folder):
    with Path(folder, "version_0", "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in TIMINGS} for row in csv.DictReader(file)]


def last(folder):
    return str(Path(folder, "version_0", "checkpoints", "last.ckpt"))


class Spy(Callback):
    """Notes what happens, in order."""

    def __init__(self):
        self.events = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.events.append("start")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.events.append("step")

    def on_train_epoch_end(self, trainer, pl_module):
        self.events.append("end")


def spied(tiny_model, spy, **options):
    it = module(tiny_model, **options)
    collect = it.collect

    def collecting(questions, iteration):
        spy.events.append(f"collect {iteration}")
        return collect(questions, iteration)

    it.collect = collecting
    return it


def test_an_iteration_is_an_epoch_that_collects_and_then_steps(tiny_model, tmp_path):
    spy = Spy()
    it = spied(tiny_model, spy, updates_per_iteration=2)
    trainer(tmp_path, 2, [spy]).fit(it, data())
    # 4 questions x 4 trajectories / minibatches of 8 = 2 steps an update, 2 updates
    steps = ["step"] * 4
    assert spy.events == [
        *["start", "collect 0", *steps, "end"],
        *["start", "collect 1", *steps, "end"],
    ]


def test_the_policy_collects_in_eval_mode_and_learns_in_train_mode(tiny_model, tmp_path):
    modes = []

    class Modes(Spy):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            modes.append(("learn", pl_module.policy.network.training))

    it = module(tiny_model, policy={"gradient_checkpointing": True})
    act = it.act

    def acting(*args, **kwargs):
        network = it.policy.network
        hook = network.get_decoder().register_forward_pre_hook(
            lambda m, _: modes.append(("collect", m.training))
        )
        trajectories = act(*args, **kwargs)
        hook.remove()
        return trajectories

    it.act = acting
    trainer(tmp_path, 1, [Modes()]).fit(it, data())
    assert {m for m in modes if m[0] == "collect"} == {("collect", False)}
    assert {m for m in modes if m[0] == "learn"} == {("learn", True)}


def test_metrics_begin_with_the_untrained_policy_and_have_the_names_that_matter(
    tiny_model, tmp_path
):
    trainer(tmp_path).fit(module(tiny_model), data())
    metrics = rows(tmp_path)
    first = {k: v for k, v in metrics[0].items() if v}
    curves = ("exact_match", "tool_execution", "answer_in_results", "format")
    assert set(first) == {"step", "epoch", *(f"val/{c}" for c in curves)}
    assert first["step"] == "0"
    named = {k for row in metrics for k, v in row.items() if v}
    assert {f"train/{c}" for c in curves} <= named
    assert {
        *("reward/turn/called", "reward/outcome/answered", "reward/turn", "reward/outcome"),
        *("rollout/turns", "rollout/tokens", "rollout/degenerate_groups"),
        *("train/loss", "train/ratio", "train/clip_fraction", "train/entropy", "train/grad_norm"),
    } <= named


def test_the_first_ratio_is_exactly_one_and_the_engine_agrees_with_the_learner(
    tiny_model, tmp_path
):
    it = module(tiny_model, minibatch_size=16)
    trainer(tmp_path, 3, limit_val_batches=0).fit(it, data())
    steps = [row for row in rows(tmp_path) if row["train/ratio"]]
    assert [float(row["train/ratio"]) for row in steps] == [1.0, 1.0, 1.0]
    assert all(float(row["train/logprob_gap"]) < 1e-5 for row in steps)


def test_later_updates_use_the_samplers_probabilities(tiny_model, tmp_path):
    it = module(tiny_model, minibatch_size=16, updates_per_iteration=3, learning_rate=1e-2)
    trainer(tmp_path, 1, limit_val_batches=0).fit(it, data())
    (row,) = [row for row in rows(tmp_path) if row["train/ratio"]]
    assert float(row["train/ratio"]) != 1.0
    assert float(row["train/clip_fraction"]) > 0


class SaysT(OutcomeReward):
    """0.5 for each letter t, 1 at most."""

    def score(self, trajectory):
        return min(1.0, 0.5 * sum(turn.text.count("t") for turn in trajectory.turns))


def test_learning_raises_the_reward(tiny_model, tmp_path):
    it = module(tiny_model, estimator=OutcomeOnly(), minibatch_size=16, learning_rate=5e-3)
    it.rewards = [SaysT()]
    trainer(tmp_path, 15, limit_val_batches=0).fit(it, data())
    rewards = [float(r["reward/outcome"]) for r in rows(tmp_path) if r["reward/outcome"]]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_the_same_seed_gives_the_same_metrics_to_the_last_digit(tiny_model, tmp_path):
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        trainer(tmp_path / name).fit(module(tiny_model, seed=seed), data(seed=seed))
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert rows(tmp_path / "a") != rows(tmp_path / "c")


def test_a_run_resumed_at_an_iterations_boundary_ends_like_one_that_never_stopped(
    tiny_model, tmp_path
):
    options = {"updates_per_iteration": 2, "warmup_steps": 6}
    trainer(tmp_path / "whole", 4).fit(module(tiny_model, **options), data())
    trainer(tmp_path / "first", 2).fit(module(tiny_model, **options), data())
    resumed = module(tiny_model, **options)
    trainer(tmp_path / "second", 4).fit(resumed, data(), ckpt_path=last(tmp_path / "first"))
    whole, second = rows(tmp_path / "whole"), rows(tmp_path / "second")
    assert second == whole[-len(second) :]
    assert len(second) == 4  # two iterations, a row of training and one of validation each


def test_a_run_resumed_inside_an_iteration_collects_anew(tiny_model, tmp_path):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    trainer(tmp_path / "a", 2, [Stop()]).fit(module(tiny_model), data())
    spy = Spy()
    it = spied(tiny_model, spy)
    trainer(tmp_path / "b", 3, [spy]).fit(it, data(), ckpt_path=str(tmp_path / "middle.ckpt"))
    assert [e for e in spy.events if e != "start"] == [
        *["collect 1", "step", "end"],
        *["collect 2", "step", "step", "end"],
    ]


def test_accumulated_minibatches_step_like_one_large_minibatch(tiny_model, tmp_path):
    weights = []
    for name, size, window in [("one", 16, 1), ("two", 8, 2), ("four", 4, 4)]:
        it = module(tiny_model, minibatch_size=size)
        run = trainer(tmp_path / name, 1, limit_val_batches=0, accumulate_grad_batches=window)
        run.fit(it, data())
        weights.append(torch.cat([p.detach().flatten() for p in it.policy.parameters()]))
    start = Policy(str(tiny_model))
    start.load()
    moved = weights[0] - torch.cat([p.detach().flatten() for p in start.parameters()])
    assert moved.abs().max() > 1e-3
    # Adam divides by the gradient's size, so rounding moves weights whose gradient is
    # next to nothing
    for other in weights[1:]:
        assert (other - weights[0]).abs().mean() < 0.02 * moved.abs().mean()


@pytest.mark.parametrize(
    ("minibatch", "window", "message"),
    [
        (
            6,
            1,
            "4 questions x 4 = 16 trajectories per process, which minibatch_size 6 does not divide",
        ),
        (
            8,
            3,
            "2 minibatches per update, which is no multiple of trainer.accumulate_grad_batches 3",
        ),
    ],
)
def test_minibatches_that_do_not_come_out_even_are_refused(
    tiny_model, tmp_path, minibatch, window, message
):
    run = trainer(tmp_path, 1, limit_val_batches=0, accumulate_grad_batches=window)
    with pytest.raises(RecipeError, match=message):
        run.fit(module(tiny_model, minibatch_size=minibatch), data())


def test_a_precision_that_would_round_small_updates_away_is_refused(tiny_model, tmp_path):
    with pytest.raises(RecipeError, match=r"trainer.precision is 'bf16-true'"):
        trainer(tmp_path, 1, precision="bf16-true").fit(module(tiny_model), data())


def test_without_a_logger_nothing_is_written_but_the_checkpoint(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        callbacks=[LastCheckpoint()],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    run.fit(module(tiny_model), data())
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoints"]


def test_checkpoints_hold_the_adapter_alone(tiny_model, tmp_path):
    it = module(tiny_model, policy={"lora": Lora(r=4)})
    trainer(tmp_path, 1).fit(it, data())
    checkpoint = torch.load(last(tmp_path), weights_only=True)
    assert checkpoint["state_dict"]
    assert all("lora_" in name for name in checkpoint["state_dict"])


def test_a_checkpoint_of_another_policy_is_refused(tiny_model, tmp_path):
    trainer(tmp_path / "a", 1).fit(module(tiny_model, policy={"lora": Lora(r=4)}), data())
    for policy, message in [
        ({"lora": Lora(r=8)}, r"its lora is \{'r': 4, 'alpha': 32\}, the recipe's \{'r': 8"),
        ({}, "the recipe's None"),
        ({"lora": Lora(r=4, target_modules=["q_proj"])}, "is only in the checkpoint"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            trainer(tmp_path / "b", 2).fit(
                module(tiny_model, policy=policy), data(), ckpt_path=last(tmp_path / "a")
            )


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
    tiny_model, tmp_path
):
    class Ruin(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == 1:
                batch.advantages[:] = float("nan")

    it = module(tiny_model)
    with pytest.raises(TrainingError, match=r"the loss is nan at step 2 \(iteration 1\)"):
        trainer(tmp_path, 3, [Ruin()], limit_val_batches=0).fit(it, data())
    checkpoint = torch.load(last(tmp_path), weights_only=True)
    assert checkpoint["global_step"] == 2
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())


def test_kl_to_the_reference_starts_at_zero_and_grows(tiny_model, tmp_path):
    it = module(
        tiny_model,
        policy={"lora": Lora(r=4)},
        objective=ClippedSurrogate(kl_coef=0.01),
        learning_rate=1e-2,
        minibatch_size=16,
    )
    trainer(tmp_path, 4, limit_val_batches=0).fit(it, data())
    kl = [float(row["train/kl"]) for row in rows(tmp_path) if row["train/kl"]]
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert kl[-1] > 1e-5


def test_settings_that_cannot_be_are_refused(tiny_model):
    with pytest.raises(RecipeError, match="group_size is 1, but TurnLevel compares"):
        module(tiny_model, group_size=1)
    with pytest.raises(RecipeError, match=r"policy\.lora is not set"):
        module(tiny_model, objective=ClippedSurrogate(kl_coef=0.1))
    with pytest.raises(RecipeError, match="warmup_steps is -1"):
        module(tiny_model, warmup_steps=-1)
    with pytest.raises(RecipeError, match="minibatch_size is 0"):
        module(tiny_model, minibatch_size=0)
    with pytest.raises(RecipeError, match="rewards is empty"):
        MTGRPO(Policy(str(tiny_model)), Rollout(Letters(), []), [])


def one_trajectory(it, chat_ids=None):
    """A two-turn trajectory that the policy itself sampled."""
    from turnrl import Question, TransformersEngine

    it.policy.load()
    engine = TransformersEngine(it.policy)
    for seed in range(50):
        ((trajectory,),) = it.rollout.collect(
            engine, it.chat, [Question("q", "What?", ("x",))], 1, (seed,)
        )
        if len(trajectory.turns) == 2:
            return trajectory
    raise AssertionError("no trajectory of two turns in 50 seeds")


def test_attention_covers_tool_results_and_the_loss_does_not(tiny_model):
    it = module(tiny_model)
    trajectory = one_trajectory(it)
    batch = pack([trajectory], torch.tensor([[1.0, 2.0]]), torch.ones(1), fresh=True)
    result = [
        i for i, k in enumerate(trajectory.turn_index) if k == -1 and i > len(trajectory.prompt_ids)
    ]
    assert result
    assert batch.attention_mask.all()
    assert not batch.loss_mask[0, result].any()
    assert not batch.weights[0, result].any()
    assert not batch.advantages[0, result].any()
    # a policy that could not attend to results would not notice that they changed
    with torch.no_grad():
        before, _ = it.policy.logprobs(batch.input_ids, batch.attention_mask, batch.loss_mask)
        changed = batch.input_ids.clone()
        changed[0, result[1]] = (changed[0, result[1]] + 1) % 300
        after, _ = it.policy.logprobs(changed, batch.attention_mask, batch.loss_mask)
    first = len(trajectory.turns[0].token_ids)
    assert torch.equal(before[:first], after[:first])
    assert (before[first:] - after[first:]).abs().min() > 1e-4


def test_every_turn_with_credit_reaches_its_tokens(tiny_model):
    it = module(tiny_model)
    trajectory = one_trajectory(it)
    batch = pack([trajectory], torch.tensor([[1.5, -2.5]]), torch.ones(1), fresh=True)
    for k, advantage in [(0, 1.5), (1, -2.5)]:
        at = torch.tensor(trajectory.turn_index) == k
        assert at.any()
        assert (batch.advantages[0, at] == advantage).all()
    assert (batch.advantages != 0).sum() == batch.loss_mask.sum()


def test_two_processes_share_the_questions_and_agree_on_the_weights(tiny_model, tmp_path):
    script = Path(__file__).with_name("ddp_script.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_model), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{r}.pt") for r in range(2)]
    for name, value in ranks[0]["weights"].items():
        assert torch.equal(value, ranks[1]["weights"][name])
    asked = [set(r["asked"]) for r in ranks]
    assert not asked[0] & asked[1]  # a group never spans processes
    assert len(asked[0] | asked[1]) == 8
    assert ranks[0]["steps"] == 4
    assert ranks[0]["stream"] != ranks[1]["stream"]
    run = tmp_path / "ddp" / "version_0"
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert (run / "model" / "model.safetensors").is_file()
    # three questions on two processes: none is scored twice
    assert sorted(ranks[0]["evaluated"] + ranks[1]["evaluated"]) == ["n100", "n101", "n102"]
