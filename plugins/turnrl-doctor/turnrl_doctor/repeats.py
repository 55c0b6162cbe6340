"""Turn rewards that pay again for a call that was paid before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from turnrl import Finding, Group, Reward, SampledPolicy, Trajectory


def repeats(
    groups: Sequence[Group],
    rewards: Sequence[Reward],
    turns: int,
    policy: SampledPolicy | None,
) -> Iterator[Finding]:
    """Warn if the same call, made in every turn, is paid in every turn without a price, or earns as
    much as a right answer.

    Args:
        groups: Scored attempts.
        rewards: The rewards of the recipe.
        turns: The most turns of an attempt.
        policy: The policy, for rewards that use it.
    """
    # a wrong answer may earn all but what is paid for being right
    right = sum(reward.right_at or 0.0 for reward in rewards)
    right = right or max((float(group.outcome.max()) for group in groups), default=0.0)
    for attempt in (attempt for group in groups for attempt in group.trajectories):
        called = next((turn for turn in attempt.turns if turn.reading.calls and turn.results), None)
        if called is None or turns < 3:  # the last turn answers
            continue
        # whatever the call found: here every result has the answer
        said = "\n".join(attempt.question.answers)
        results = tuple(replace(r, content=f"{r.content}\n{said}", ok=True) for r in called.results)
        turn = replace(called, results=results)
        same = replace(attempt, turns=(turn,) * (turns - 1), ended_by="turns", begins=0)
        pays = _pays(same, rewards, policy)
        again = [name for name, pay in pays.items() if pay[-1] > 1e-6]
        priced = any(pay[-1] < 0 for pay in pays.values())
        total, last = (sum(sum(pay[at:]) for pay in pays.values()) for at in (0, -1))
        honest = right + sum(pay[0] for pay in pays.values())
        if again and last > 1e-6 and (not priced or total >= honest):
            text = (
                f"{' and '.join(again)} {'pay' if len(again) > 1 else 'pays'} again each time for "
                f"the same call: {turns - 1} of them earn {total:.3g}, and one with a right answer "
                f"earns {honest:.3g}"
            )
            step = (
                "Pay the first hit alone (FirstHit), pay differences (Progress), or add a price "
                "(SearchCost, Repetition)."
            )
            yield Finding("warn", "turn rewards", text, step)
            return


def _pays(
    attempt: Trajectory, rewards: Sequence[Reward], policy: SampledPolicy | None
) -> dict[str, list[float]]:
    """What each turn reward pays each turn. A reward that cannot score the attempt, for example
    because it asks the policy about tokens that nobody sampled, is left out."""
    pays = {}
    for reward in rewards:
        if reward.by_turn:
            scored: Any = reward
            with contextlib.suppress(Exception):  # its own finding has reported its faults
                scored.prepare([attempt], policy)
                pay = [float(scored.score(attempt, k)) for k in range(len(attempt.turns))]
                pays[reward.name or type(reward).__name__] = pay
    return pays
