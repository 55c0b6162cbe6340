"""Check of a reward."""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from turnrl.plugin.errors import is_finite
from turnrl.rewards.functions import FunctionReward
from turnrl.rewards.scoring import convert_rewards
from turnrl.testing.contract import reporting_breaches, require
from turnrl.testing.examples import example_trajectories
from turnrl.types.contracts import OutcomeReward, Reward, TurnReward
from turnrl.types.engine import SampledPolicy
from turnrl.types.trajectory import Trajectory


def check_reward(
    reward: Reward | Callable[..., object],
    trajectories: Mapping[str, Trajectory] | None = None,
    policy: SampledPolicy | None = None,
) -> None:
    """Check a reward: that its scores are finite and the same each time, and
    that garbage earns nothing.

    Args:
        reward: A turn reward, an outcome reward, or a function.
        trajectories: Trajectories to score, by name; `example_trajectories` by default. Those whose
            name begins with `garbage` may earn nothing, unless all others earn at least as much.
        policy: The policy, for a reward that uses one in `prepare`.
    Raises:
        AssertionError: If a rule is broken, with the rule and the input.
    """
    (reward,) = convert_rewards([reward])
    name = type(reward).__name__
    of_turns = reward.by_turn
    kinds = isinstance(reward, TurnReward) + isinstance(reward, OutcomeReward)
    one_kind = kinds == 1 or isinstance(reward, FunctionReward)
    require(one_kind, f"{name} must extend either TurnReward or OutcomeReward")
    named = re.fullmatch(r"[a-z0-9_]*", reward.name)
    require(named, f"{name}.name is {reward.name!r}: use lower case, digits and _, as in metrics")
    score: Callable[..., float] = cast(Any, reward).score
    totals: dict[str, float] = {}
    attempts = trajectories or example_trajectories()
    with reporting_breaches(f"{name}.prepare on {len(attempts)} trajectories"):
        reward.prepare([*attempts.values()], policy)
    for label, trajectory in attempts.items():
        # turn by turn, or once
        for at in itertools.product(range(len(trajectory.turns)), repeat=int(of_turns)):
            with reporting_breaches(f"{name}.score({', '.join(map(repr, (label, *at)))})"):
                first, again = score(trajectory, *at), score(trajectory, *at)
                require(is_finite(first), f"gives {first!r:.80}, which is not a finite number")
                require(first == again, f"gives {first!r}, and the second time {again!r}")
                totals[label] = totals.get(label, 0.0) + first
    least = max(0.0, min(totals.values()))
    paid = {k: total for k, total in totals.items() if k.startswith("garbage") and total > least}
    require(not paid, f"{name} pays for garbage, which may earn nothing: {paid}")
