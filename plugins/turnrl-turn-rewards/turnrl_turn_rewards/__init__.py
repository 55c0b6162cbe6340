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
from turnrl_turn_rewards.belief import AnswerLikelihood as AnswerLikelihood
from turnrl_turn_rewards.belief import InformationGain as InformationGain
from turnrl_turn_rewards.belief import KLPenalty as KLPenalty
from turnrl_turn_rewards.calls import Repetition as Repetition
from turnrl_turn_rewards.calls import SearchCost as SearchCost
from turnrl_turn_rewards.judge import JudgedState as JudgedState
from turnrl_turn_rewards.judge import LLMJudge as LLMJudge
from turnrl_turn_rewards.judge import LLMJudgeTurn as LLMJudgeTurn
from turnrl_turn_rewards.outcome import F1 as F1
from turnrl_turn_rewards.progress import AnswerSeen as AnswerSeen
from turnrl_turn_rewards.progress import FirstHit as FirstHit
from turnrl_turn_rewards.progress import Progress as Progress
from turnrl_turn_rewards.progress import StateScore as StateScore
from turnrl_turn_rewards.progress import SupportSeen as SupportSeen
from turnrl_turn_rewards.progress import passages_shown as passages_shown
from turnrl_turn_rewards.server import Server as Server


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
