"""Check of an estimator."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from turnrl.testing.contract import reporting_breaches, require
from turnrl.testing.examples import QUESTION, RIGHT, SEARCHED, make_trajectory
from turnrl.types.contracts import AdvantageEstimator
from turnrl.types.group import Group, RewardComponent

if TYPE_CHECKING:
    from torch import Tensor


def check_estimator(estimator: AdvantageEstimator) -> None:
    """Check an estimator on drawn groups of `min_group_size` trajectories and more: that it is a
    pure function, and that its advantages are finite, have the right shape, are zero for turns that
    were not taken, and follow their trajectories if the group is reordered.

    It does not check that the estimator uses any reward, or that it ignores a constant.

    Args:
        estimator: The estimator.
    Raises:
        AssertionError: If a rule is broken, with the rule and the input.
    """
    name, least = type(estimator).__name__, estimator.min_group_size
    require(isinstance(least, int) and least >= 1, f"{name}.min_group_size is {least!r}")
    draw = random.Random(0)
    for size, turns in itertools.product((least, least + 1, least + 6), (1, 2, 4)):
        for drawn in _draw_groups(draw, size, turns):
            order = draw.sample(range(size), size)
            drawn_text = "turns taken {}, outcome and turn rewards {}".format(*drawn)
            with reporting_breaches(f"{name} on a group of shape {(size, turns)} ({drawn_text})"):
                orders, tree = (range(size), range(size), order), estimator.trains_probes
                keys, _, moved_keys = (_members(drawn, members, tree) for members in orders)
                group, same, other = (_group(drawn, members, tree) for members in orders)
                advantages = estimator(group)
                shapes = [tuple(row.shape) for row in advantages]
                tokens = [(len(a.sampled_turns),) for a in group.trajectories]
                by_tokens = isinstance(advantages, tuple)
                fits = shapes == (tokens if by_tokens else [(turns,)] * len(tokens))
                fits = fits and all(row.is_floating_point() for row in advantages)
                rule = "neither a float tensor of that shape nor a tuple with one for each token"
                require(fits, f"gives {advantages!r}, {rule}")
                first = _table(advantages)
                gave = f"gives {first.tolist()}"
                require(first.isfinite().all(), f"{gave}, which is not finite")
                beyond = not by_tokens and first[~group.reached].any()
                require(not beyond, f"{gave}, not zero where not reached")
                for name_of in ("turn_rewards", "outcome", "reached"):
                    untouched = getattr(group, name_of).equal(getattr(same, name_of))
                    require(untouched, f"changes {name_of} of the group")
                again = _table(estimator(group))
                require(first.equal(again), f"{gave}, and the second time {again.tolist()}")
                moved, nearly = _table(estimator(other)), 1e-3 * max(1.0, float(first.abs().max()))
                places = [keys.index(key) for key in moved_keys]
                fair = moved.allclose(first[places], rtol=0, atol=nearly)
                require(fair, f"{gave}, and {moved.tolist()} to its members in the order {order}")


def _table(credit: Tensor | tuple[Tensor, ...]) -> Tensor:
    """A row of numbers for each trajectory, padded with zeros."""
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence([row.clone() for row in credit], batch_first=True)


_Drawn = tuple[list[int], list[list[float]]]


def _draw_groups(draw: random.Random, size: int, turns: int) -> Iterator[_Drawn]:
    """Groups of every kind: for each member the turns that it takes, its outcome and its turn
    rewards.
    """
    random_lengths = [draw.randint(1, turns) for _ in range(size)]
    lengths = ([turns] * size, random_lengths, [turns, *[1] * (size - 1)], [1] * size)
    # powers of two, whose sums are exact, so that equal values stay equal
    for unit, taken in itertools.product((2.0**-3, 2.0**17, 2.0**-23), lengths):
        yield taken, [[draw.randint(-8, 16) * unit for _ in range(turns + 1)] for _ in taken]
    for apart, taken in itertools.product((0.5, 1.5), lengths):
        yield taken, [[0.5 if i else apart] * (turns + 1) for i in range(size)]


def _members(drawn: _Drawn, order: Sequence[int], tree: bool) -> list[tuple[int, int, int]]:
    """The members of a group: for each its trajectory, the trunk that it branched off, and the
    turn.

    In a tree, the next trajectory that takes a turn branches off at the beginning of that turn.
    """
    taken, size = drawn[0], len(order)
    members = [(m, m, -1) for m in order]
    for trunk, k in [(m, k) for m in order for k in range(taken[m] * tree)]:
        following = (m % size for m in range(trunk + 1, trunk + 1 + size))
        members.append((next(m for m in following if taken[m] > k), trunk, k))
    return members


def _group(drawn: _Drawn, order: Sequence[int], tree: bool) -> Group:
    """The drawn group, with its members in the given order."""
    import torch

    members = _members(drawn, order, tree)
    taken, rewards = (torch.tensor(of_all)[[m for m, _, _ in members]] for of_all in drawn)
    begins = torch.tensor([max(k, 0) for _, _, k in members])
    turn = torch.arange(rewards.shape[1] - 1)
    rewards[:, 1:] *= turn < taken[:, None]
    reached = (turn < taken[:, None]) & (turn >= begins[:, None])
    steps = [[*[SEARCHED] * (n - 1), RIGHT] for n in drawn[0]]
    attempts = tuple(
        replace(make_trajectory(*steps[m], text=f"attempt {m}"), begins=max(k, 0))
        for m, _, k in members
    )
    paid = rewards[:, 1:].double()
    parts = {
        "outcome/a": RewardComponent(rewards[:, 0].double(), right_at=0.5),
        "turn/b": RewardComponent(paid.clamp(min=0)),
        "turn/cost": RewardComponent(paid.clamp(max=0), is_cost=True),
    }
    values = rewards[:, 1:].flip(1) * reached
    own = [len(attempt.sampled_turns) for attempt in attempts]
    of_tokens = tuple(row[0] * torch.arange(n) for row, n in zip(values, own, strict=True))
    group = Group(QUESTION, attempts, rewards[:, 1:], rewards[:, 0], reached, parts)
    parents = tuple([*order].index(trunk) for _, trunk, _ in members)
    return replace(
        group,
        state_values=values,
        token_values=of_tokens,
        parents=parents,
    )
