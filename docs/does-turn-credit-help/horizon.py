"""What to expect of the part `horizon`, before anything is trained: the noise of each estimator's
gradient in the corridor of doors, by the number of doors. Sampled, not enumerated as in
`turnrl credit-check`: even groups of four have 10^13 forms with twelve doors.

    python docs/does-turn-credit-help/horizon.py

Noise is the variance of the estimate for each trajectory of a group, over the squared length of its
mean, so no factor of the advantages changes it: half of the noise needs half of the trajectories.
"""

from __future__ import annotations

import torch
from conditions import Apart

from turnrl import TurnLevel
from turnrl.credit.estimators import GroupRelative

UNSCALED = {"baseline": "leave_one_out", "scale": "none"}
RULES: dict[str, GroupRelative] = {
    "MT-GRPO": TurnLevel(),
    "GRPO-MR, apart": Apart(),
    "MT-GRPO, unscaled": TurnLevel(**UNSCALED),
    "GRPO-MR, unscaled": Apart(**UNSCALED),  # unscaled, the sum of two differences is that of one
    "MT-GRPO, gamma 0": TurnLevel(gamma=0.0),
}


def noise(
    rule: GroupRelative, doors: int, size: int = 8, groups: int = 20_000, right: float = 0.25
) -> float:
    """The noise of a rule.

    Args:
        rule: The estimator.
        doors: K, the number of turns. Each has a logit of its own for the right way.
        size: G, trajectories of a group.
        groups: How many are sampled.
        right: The probability of the right way, in each turn.
    """
    draw = torch.Generator().manual_seed(0)
    chosen = (torch.rand(groups, size, doors, generator=draw) < right).double()
    reached = torch.ones(size, doors, dtype=torch.bool)
    estimates = torch.stack(
        [
            (rule.advantages(one / doors, one.prod(1), reached) * (one - right)).mean(0)
            for one in chosen
        ]
    )
    variance = size * estimates.var(0).sum()
    return float(variance / estimates.mean(0).square().sum())


def main() -> None:
    """Print the table."""
    counts = (2, 4, 8, 12)
    print(f"{'doors':20}" + "".join(f"{doors:8}" for doors in counts))
    for name, rule in RULES.items():
        print(f"{name:20}" + "".join(f"{noise(rule, doors):8.1f}" for doors in counts))


if __name__ == "__main__":
    main()
