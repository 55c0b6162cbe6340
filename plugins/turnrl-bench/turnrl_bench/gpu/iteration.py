"""A whole iteration as `turnrl fit` runs it: rollouts, old log-probabilities, two updates."""

from __future__ import annotations

import time
from typing import Any, final

import lightning as L

from turnrl import MTGRPO
from turnrl_bench.agent import Watch, module_of, policy_of, sampled_tokens, train
from turnrl_bench.gpu import device, floors
from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.decoding import Wave
from turnrl_bench.gpu.floors import Work
from turnrl_bench.gpu.learning import rows_of, sizes_of
from turnrl_bench.gpu.results import Cases, Found
from turnrl_bench.gpu.shapes import RANK, UPDATES
from turnrl_slots import Slots

_LONG_S = 45
"""After an iteration that took longer there is none to compare it with: there are minutes to do."""


@final
class _Phases(L.Callback):
    """Notes the most memory of both phases, and for how long an iteration may go on. It comes
    before `Watch`, which is then told the time when the device has finished."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.acting: list[int | None] = []
        self.learning: list[int | None] = []
        self.ended = time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device.peak()
        self.ended = time.monotonic()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.acting.append(device.peak())

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device.synchronize()
        self.learning.append(device.peak())
        began, self.ended = self.ended, time.monotonic()
        taken = self.ended - began
        trainer.should_stop = taken > _LONG_S or self.ended + taken > self.until


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    cases.run("iteration", lambda: _iteration(bench, cases.until))


def _iteration(bench: Bench, until: float) -> Found:
    bench.task()
    bench.drop()  # this one is loaded by Lightning
    folder, engine, phases, watch = str(bench.model), Slots(), _Phases(until), Watch()
    module = module_of(folder, policy_of(folder, RANK, quantization="nf4"), engine, UPDATES)
    try:
        train(module, [phases, watch], folder, 2, "gpu" if bench.on_gpu else "cpu")
        return _found(bench, module, phases, watch, dict(engine.in_force))
    finally:
        device.free()


def _found(bench: Bench, module: MTGRPO, phases: _Phases, watch: Watch, in_force: Found) -> Found:
    played = module.experience
    assert played is not None
    trajectories = list(played.trajectories)
    last = watch.times[-1]
    rolled, before, whole = last["rollouts"], last["before learning"], last["whole step"]
    learned = last["learning"] - before
    bench.keep("nf4", module.policy, trajectories)
    rolling, learning = floor_of(bench)
    plan = {phase: [int(size), name] for phase, (size, name) in module.memory.planned.items()}
    return {
        "iterations": len(watch.times),
        "first_s": watch.times[0]["whole step"],
        "whole": {"whole_s": whole, **bench.against(whole, [*rolling, *learning])},
        "rollouts": {"rollouts_s": rolled, **bench.against(rolled, rolling)},
        # the pass before the first update gives them, so that they cost nothing at least
        "old log-probabilities": {"read_s": before},
        "learning": {"learning_s": learned, **bench.against(learned, learning)},
        "memory": {
            "sampling": {"peak_bytes": phases.acting[-1]},
            "learning": {"peak_bytes": phases.learning[-1]},
        },
        "plan": plan or "no plan",
        "chosen": {
            "minibatch_tokens": module.policy.minibatch_tokens,
            "gradient_checkpointing": module.policy.gradient_checkpointing,
        },
        "in_force": in_force,
        "sampled": sampled_tokens(trajectories),
        "tokens_per_s": sampled_tokens(trajectories) / rolled,
        "trajectories": len(trajectories),
        "tokens_each": len(trajectories[0].token_ids),
    }


def floor_of(bench: Bench) -> tuple[list[Work], list[Work]]:
    """The least work of the rollouts, and of all updates."""
    shape, net = bench.setting.shape, bench.net
    rows = shape.prompts * shape.group_size
    lengths = [[n] * rows for n in shape.turn_tokens]
    prompts = [(0,) * shape.prompt_tokens] * shape.prompts
    wave = Wave(prompts, shape.group_size, lengths, (0,) * shape.result_tokens)
    learned: list[Work] = []
    passes = bench.policy("nf4").passes(rows_of(bench), bench.setting.minibatch_tokens)
    for _, layout in passes:
        learned += floors.learning(net, "nf4", *sizes_of(layout))
    return wave.works(net, "nf4"), UPDATES * learned
