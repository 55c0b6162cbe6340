"""A whole iteration as `turnrl fit` runs it: rollouts, old log-probabilities, two passes."""

from __future__ import annotations

from turnrl_bench.agent import Watch, module_of, policy_of, sampled_tokens, train
from turnrl_bench.gpu import floors
from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.decoding import Wave
from turnrl_bench.gpu.floors import Cost
from turnrl_bench.gpu.learning import counts_of
from turnrl_bench.gpu.parts import PASSES, RANK
from turnrl_bench.gpu.results import Cases, Found
from turnrl_slots import Slots

_LONG_S = 45
"""After an iteration that took more seconds there is no second one to compare it with."""


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    cases.run("iteration", lambda: _iteration(bench, cases.until))


def _iteration(bench: Bench, until: float) -> Found:
    engine, watch = Slots(), Watch(_LONG_S, until)
    policy = policy_of(bench.model, RANK, quantization="nf4")
    module = module_of(bench.model, policy, engine, PASSES)
    train(module, [watch], bench.model, 2, "gpu" if bench.on_gpu else "cpu")
    assert module.experience is not None
    trajectories, last = module.experience.trajectories, watch.times[-1]
    rolled, before, whole = last["rollouts"], last["before learning"], last["whole step"]
    learned = last["learning"] - before
    tokens = module.policy.budget
    rolling = rollout_costs(bench, dense=engine.decode_weights == "dense")
    learning: list[Cost] = []
    for _, layout in policy.forward_passes(
        [row for t in trajectories for row in t.token_rows], tokens
    ):
        learning += PASSES * floors.learning(bench.net, "nf4", *counts_of(layout))
    peaks = watch.peaks[-1]
    plan = {phase: [int(size), name] for phase, (size, name) in module.memory.planned.items()}
    return {
        "iterations": len(watch.times),
        "first_s": watch.times[0]["whole step"],
        "whole": {"whole_s": whole, **bench.against(whole, [*rolling, *learning])},
        "rollouts": {"rollouts_s": rolled, **bench.against(rolled, rolling)},
        # the pass before the first update computes them, so their least cost is 0
        "old log-probabilities": {"read_s": before},
        "learning": {"learning_s": learned, **bench.against(learned, learning)},
        "memory": {phase: {"peak_bytes": size} for phase, size in peaks.items()},
        "plan": plan or "no plan",
        "chosen": {
            "minibatch_tokens": tokens,
            "gradient_checkpointing": policy.gradient_checkpointing,
        },
        "in_force": dict(engine.in_force),
        "sampled": sampled_tokens(trajectories),
        "tokens_per_s": sampled_tokens(trajectories) / rolled,
        "trajectories": len(trajectories),
        "tokens_each": trajectories[0].tokens,
    }


def rollout_costs(bench: Bench, dense: bool) -> list[Cost]:
    """The least costs of the rollouts.

    Args:
        bench: The bench, for its shape.
        dense: True if the engine samples with a dense copy of the base.
    """
    shape = bench.setting.shape
    rows = shape.prompts * shape.group_size
    lengths = [[n] * rows for n in shape.turn_tokens]
    prompts = [(0,) * shape.prompt_tokens] * shape.prompts
    wave = Wave(prompts, shape.group_size, lengths, (0,) * shape.result_tokens)
    return wave.costs(bench.net, "dense" if dense else "nf4")
