"""The signal-to-noise ratio of the advantages that an estimator gives to a policy's turns."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from turnrl import AdvantageEstimator, Group, Trajectory, assign_credit
from turnrl_estimators.anchored import retrieved

Done = tuple[object, ...]
"""The actions of a trajectory, turn by turn."""


@dataclass(frozen=True)
class Signal:
    """Signal and noise in the advantages that an estimator gives to all turns with one number.

    Each question has two independent groups. First each advantage is centred: it loses the mean
    over the members of its group that did the same before the turn, because a part that all actions
    of a state share moves no policy. Then any two trajectories from different groups that did the
    same up to and including the turn form a pair. With a and b their centred advantages,

        snr = mean(a b) / mean((a - b)^2 / 2).

    If a = m + e, with m the true worth of the actions and e the noise of this group, this is
    E[m^2] / E[e^2]: the repeatable part of an advantage over the rest. It does not depend on scale,
    and does not measure bias.

    Args:
        estimator: Its name.
        turn: The turn's number, from 0.
        advantage: Mean |A| over all trajectories with this turn.
        snr: The ratio; None if there are no pairs, or all pairs agree.
        pairs: The number of pairs.
    """

    estimator: str
    turn: int
    advantage: float
    snr: float | None
    pairs: int


def deeds(trajectory: Trajectory) -> Iterator[Done]:
    """The actions up to and including each turn, in a form that two trajectories can share. Each
    turn contributes its form, its number of calls, which of them succeeded, their results, and its
    answer."""
    done: Done = ()
    for turn in trajectory.turns:
        succeeded = tuple(result.ok for result in turn.results)
        answer, rule = turn.reading.answer, trajectory.question.rule
        read = None if answer is None else rule.read(answer)
        formed = turn.reading.format_error is None
        done += ((formed, len(turn.reading.calls), succeeded, retrieved(turn), read),)
        yield done


def signals(
    name: str, estimator: AdvantageEstimator, pairs: Sequence[tuple[Group, Group]]
) -> list[Signal]:
    """Measure the advantages that an estimator gives to a policy's turns, by turn number.

    Args:
        name: The estimator's name.
        estimator: An estimator without probes or critic.
        pairs: Two independently sampled groups for each question.
    Raises:
        PluginError: If the estimator breaks its contract.
    """
    sizes: dict[int, list[float]] = defaultdict(list)
    products: dict[int, list[float]] = defaultdict(list)
    noise: dict[int, float] = defaultdict(float)
    for pair in pairs:
        by_group = [[*_advantages(group, estimator)] for group in pair]
        for done, advantage in itertools.chain(*by_group):
            sizes[len(done) - 1].append(abs(advantage))
        for (done_a, a), (done_b, b) in itertools.product(*map(_centred, by_group)):
            if done_a == done_b:
                products[len(done_a) - 1].append(a * b)
                noise[len(done_a) - 1] += (a - b) ** 2 / 2
    return [
        Signal(
            name,
            turn,
            sum(turn_sizes) / len(turn_sizes),
            sum(products[turn]) / noise[turn] if noise[turn] else None,
            len(products[turn]),
        )
        for turn, turn_sizes in sorted(sizes.items())
    ]


def _advantages(group: Group, estimator: AdvantageEstimator) -> Iterator[tuple[Done, float]]:
    """The actions up to each turn, and its advantage."""
    credit = assign_credit(group, estimator)
    for row, trajectory in zip(credit.turns, group.trajectories, strict=True):
        yield from zip(deeds(trajectory), row[: len(trajectory.turns)].tolist(), strict=True)


def _centred(advantages: Sequence[tuple[Done, float]]) -> list[tuple[Done, float]]:
    """Subtract from each advantage the mean in its state; drop an advantage alone in its state."""
    states: dict[Done, list[float]] = defaultdict(list)
    for done, advantage in advantages:
        states[done[:-1]].append(advantage)
    means = {state: sum(row) / len(row) for state, row in states.items() if len(row) > 1}
    return [(done, a - means[done[:-1]]) for done, a in advantages if done[:-1] in means]
