"""Rewards for what a turn contributes, without a judge.

    calls      what calls cost: `SearchCost`, `Repetition`
    progress   a score of the state turned into differences: `Progress`, `FirstHit`
    belief     what the policy itself holds likely: `InformationGain`, `KLPenalty`
    outcome    `F1`

Importing this package does not load torch, which is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnrl import Reward, hookimpl
from turnrl_turn_rewards.belief import AnswerLikelihood, InformationGain, KLPenalty
from turnrl_turn_rewards.calls import Repetition, SearchCost
from turnrl_turn_rewards.outcome import F1
from turnrl_turn_rewards.progress import AnswerSeen, FirstHit, Progress, StateScore, SupportSeen

__all__ = [
    "F1",
    "AnswerLikelihood",
    "AnswerSeen",
    "FirstHit",
    "InformationGain",
    "KLPenalty",
    "Progress",
    "Repetition",
    "SearchCost",
    "StateScore",
    "SupportSeen",
]


@hookimpl
def turnrl_rewards() -> Iterable[type[Reward]]:
    """The rewards of this package."""
    return [
        SearchCost,
        Repetition,
        FirstHit,
        Progress,
        InformationGain,
        KLPenalty,
        F1,
    ]
