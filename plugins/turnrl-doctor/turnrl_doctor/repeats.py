"""Turn rewards that pay again for a call that was paid before."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from turnrl import Finding, Group, Trajectory, Turn
from turnrl.engines import SampledPolicy
from turnrl.types import Reward


def repeats(
    groups: Sequence[Group],
    rewards: Sequence[Reward],
    turns: int,
    policy: SampledPolicy | None,
) -> Iterator[Finding]:
    """Warn if the same call, made again and again, is paid each time without a price, or earns as
    much as a right answer, word for word or in other words.

    Args:
        groups: Scored attempts.
        rewards: The rewards of the recipe.
        turns: The most turns of an attempt.
        policy: The policy, for rewards that use it.
    """
    right = _right(groups, rewards)
    for attempt in (attempt for group in groups for attempt in group.trajectories):
        called = next((turn for turn in attempt.turns if turn.reading.calls and turn.results), None)
        if called is None or turns < 3:  # the last turn answers
            continue
        # whatever the call found: here every result has the answer
        added = "\n" + "\n".join(attempt.question.answers)
        results = tuple(replace(r, content=r.content + added, ok=True) for r in called.results)
        turn = replace(called, results=results)
        for call, make, prices in (
            ("the same call", lambda turn, k: turn, "SearchCost, Repetition"),
            ("the same call in other words", _in_other_words, "SearchCost"),
        ):
            taken = tuple(make(turn, k) for k in range(turns - 1))
            trick = replace(attempt, turns=taken, ended_by="turns", begins=0)
            pays = _pays(trick, rewards, policy)
            again = [name for name, pay in pays.items() if pay[1] > 1e-6]
            free = call == "the same call" and not any(pay[1] < 0 for pay in pays.values())
            by_turn = [sum(pay) for pay in zip(*pays.values(), strict=True)]
            totals = [*itertools.accumulate(by_turn)]
            honest = right + totals[0] if totals else 0.0
            if again and by_turn[1] > 1e-6 and (free or max(totals) >= honest - 1e-6):
                text = (
                    f"{' and '.join(again)} {'pay' if len(again) > 1 else 'pays'} again each time "
                    f"for {call}: {totals.index(max(totals)) + 1} of them earn {max(totals):.3g}, "
                    f"and one with a right answer earns {honest:.3g}"
                )
                step = (
                    "Pay the first hit alone (FirstHit), pay differences (Progress), or add a "
                    f"price ({prices})."
                )
                yield Finding("warn", "turn rewards", text, step)
                return


def _right(groups: Sequence[Group], rewards: Sequence[Reward]) -> float:
    """What a right answer earns beyond a wrong one."""
    answered = [
        float(outcome)
        for group in groups
        for outcome, attempt in zip(group.outcome, group.trajectories, strict=True)
        if attempt.answer is not None
    ]
    gained = max(answered) - min(answered) if answered else 0.0
    declared = sum(reward.right_at or 0.0 for reward in rewards)
    return gained or declared or max((float(group.outcome.max()) for group in groups), default=0.0)


def _in_other_words(turn: Turn, k: int) -> Turn:
    """The turn, with a number at the end of the texts in its calls."""
    calls = tuple(
        replace(
            call,
            arguments={
                name: f"{value} {k}" if isinstance(value, str) else value
                for name, value in call.arguments.items()
            },
        )
        for call in turn.reading.calls
    )
    return replace(turn, reading=replace(turn.reading, calls=calls))


def _pays(
    attempt: Trajectory, rewards: Sequence[Reward], policy: SampledPolicy | None
) -> dict[str, list[float]]:
    """The pay of each turn reward for each turn. A reward that cannot score the attempt, for
    example because it asks the policy about tokens that nobody sampled, is left out."""
    pays = {}
    for reward in rewards:
        if reward.by_turn:
            scored: Any = reward
            with contextlib.suppress(Exception):  # its own finding has reported its faults
                scored.prepare([attempt], policy)
                pay = [float(scored.score(attempt, k)) for k in range(len(attempt.turns))]
                pays[reward.name or type(reward).__name__] = pay
    return pays
