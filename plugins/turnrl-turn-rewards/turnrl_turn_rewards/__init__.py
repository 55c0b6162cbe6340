"""Rewards for what a turn contributes, without a judge and with one.

    calls      what calls cost: `SearchCost`, `Repetition`
    progress   a score of the state turned into differences: `Progress`, `FirstHit`
    belief     what the policy itself holds likely: `InformationGain`, `KLPenalty`
    outcome    `F1`
    judge      a language model's verdict: `LLMJudge`, `LLMJudgeTurn`
    verdicts   prompts filled in, replies read, verdicts kept
    server     where a judge is, as a recipe says it
    asking     many requests at once

Importing this package loads neither torch nor an HTTP client; each is imported when it is first
used.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnrl import Reward, hookimpl
from turnrl_turn_rewards.belief import AnswerLikelihood, InformationGain, KLPenalty
from turnrl_turn_rewards.calls import Repetition, SearchCost
from turnrl_turn_rewards.judge import JudgedState, LLMJudge, LLMJudgeTurn
from turnrl_turn_rewards.outcome import F1
from turnrl_turn_rewards.progress import (
    AnswerSeen,
    FirstHit,
    Progress,
    StateScore,
    SupportSeen,
    passages_shown,
)
from turnrl_turn_rewards.server import Server

__all__ = [
    "F1",
    "AnswerLikelihood",
    "AnswerSeen",
    "FirstHit",
    "InformationGain",
    "JudgedState",
    "KLPenalty",
    "LLMJudge",
    "LLMJudgeTurn",
    "Progress",
    "Repetition",
    "SearchCost",
    "Server",
    "StateScore",
    "SupportSeen",
    "passages_shown",
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
        LLMJudgeTurn,
        F1,
        LLMJudge,
    ]
