"""Share of signal in the advantages that an estimator gives to a policy's own turns."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from turnrl import AdvantageEstimator, Group, Trajectory, assign_credit
from turnrl_estimators.anchored import retrieved

Done = tuple[object, ...]
"""Actions of a trajectory, turn by turn."""


@dataclass(frozen=True)
class Signal:
    """Signal and noise in the advantages that an estimator gives to the turns of one number.

    For each question there are two groups, sampled independently. Of each advantage the mean over
    those of its group is taken off that did the same before the turn: what all actions of a state
    share moves no policy. Of the pairs of trajectories, one from each group, those are taken that
    did the same up to and in the turn; with a and b what is left of their advantages,

        snr = mean(a b) / mean((a - b)^2 / 2).

    If a = m + e with m the worth of doing so, and e what chance made of it in this group, that is
    E[m^2] / E[e^2]: the part of an advantage that comes back in another group, over the part that
    does not. No factor changes it. It says nothing of bias.

    Args:
        estimator: Which.
        turn: The turn's number, from 0.
        advantage: Mean |A| over all trajectories that took it.
        snr: None if no pair did the same, or all pairs agree.
        pairs: How many did the same.
    """

    estimator: str
    turn: int
    advantage: float
    snr: float | None
    pairs: int


def deeds(trajectory: Trajectory) -> Iterator[Done]:
    """For each turn what was done up to and in it, which two trajectories may have in common: of
    each turn whether it was well formed, how many calls it made, which of them succeeded, what they
    brought, and the answer.
    """
    done: Done = ()
    for turn in trajectory.turns:
        succeeded = tuple(result.ok for result in turn.results)
        answer, rule = turn.reading.answer, trajectory.question.rule
        said = None if answer is None else rule.read(answer)
        formed = turn.reading.format_error is None
        done += ((formed, len(turn.reading.calls), succeeded, retrieved(turn), said),)
        yield done


def signals(
    name: str, estimator: AdvantageEstimator, pairs: Sequence[tuple[Group, Group]]
) -> list[Signal]:
    """Measure the advantages that an estimator gives to the turns of a policy, by the turn's
    number.

    Args:
        name: What the estimator is called.
        estimator: One without probes and critic.
        pairs: For each question two groups that were sampled independently.
    Raises:
        PluginError: If the estimator breaks its contract.
    """
    sizes: dict[int, list[float]] = defaultdict(list)
    products: dict[int, list[float]] = defaultdict(list)
    noise: dict[int, float] = defaultdict(float)
    for pair in pairs:
        given = [[*_advantages(group, estimator)] for group in pair]
        for done, advantage in itertools.chain(*given):
            sizes[len(done) - 1].append(abs(advantage))
        for (done, a), (same, b) in itertools.product(*map(_centred, given)):
            if done == same:
                products[len(done) - 1].append(a * b)
                noise[len(done) - 1] += (a - b) ** 2 / 2
    return [
        Signal(
            name,
            turn,
            sum(some) / len(some),
            sum(products[turn]) / noise[turn] if noise[turn] else None,
            len(products[turn]),
        )
        for turn, some in sorted(sizes.items())
    ]


def _advantages(group: Group, estimator: AdvantageEstimator) -> Iterator[tuple[Done, float]]:
    """For each turn what was done by then, and its advantage."""
    credit = assign_credit(group, estimator)
    for row, trajectory in zip(credit.turns, group.trajectories, strict=True):
        yield from zip(deeds(trajectory), row[: len(trajectory.turns)].tolist(), strict=True)


def _centred(given: Sequence[tuple[Done, float]]) -> list[tuple[Done, float]]:
    """The advantages less the mean of those that were given in the same state, where there are
    several."""
    states: dict[Done, list[float]] = defaultdict(list)
    for done, advantage in given:
        states[done[:-1]].append(advantage)
    means = {state: sum(some) / len(some) for state, some in states.items() if len(some) > 1}
    return [(done, a - means[done[:-1]]) for done, a in given if done[:-1] in means]
