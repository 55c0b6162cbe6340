"""Rewards for turns and outcomes, and the rules by which answers are compared.

    qa         the paper's: `ToolExecuted`, `AnswerRetrieved`, `ExactMatch`, `AnswerPresent`,
               `WellFormed`
    calls      costs of calls: `SearchCost`, `Repetition`
    progress   differences of a score of the state: `Progress`, `FirstHit`
    belief     the policy's own probabilities: `InformationGain`, `KLPenalty`
    outcome    `F1`
    judge      a language model's verdict: `LLMJudge`, `LLMJudgeTurn`
    verdicts   prompts filled in, replies read, verdicts cached
    server     a judge's server, as a recipe describes it
    asking     many requests at once
    answers    rules that compare answers: `Number`, `Choice`, `Math`, `Compared`
    numbers    numbers in a text
    expressions   expressions compared by another package, within a time limit

Importing this package loads no torch and no HTTP client. Each is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnrl import hookimpl
from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl_rewards.answers import Choice as Choice
    from turnrl_rewards.answers import Compared as Compared
    from turnrl_rewards.answers import Math as Math
    from turnrl_rewards.answers import Number as Number
    from turnrl_rewards.belief import AnswerLikelihood as AnswerLikelihood
    from turnrl_rewards.belief import InformationGain as InformationGain
    from turnrl_rewards.belief import KLPenalty as KLPenalty
    from turnrl_rewards.calls import Repetition as Repetition
    from turnrl_rewards.calls import SearchCost as SearchCost
    from turnrl_rewards.judge import JudgedState as JudgedState
    from turnrl_rewards.judge import LLMJudge as LLMJudge
    from turnrl_rewards.judge import LLMJudgeTurn as LLMJudgeTurn
    from turnrl_rewards.outcome import F1 as F1
    from turnrl_rewards.progress import AnswerSeen as AnswerSeen
    from turnrl_rewards.progress import FirstHit as FirstHit
    from turnrl_rewards.progress import Progress as Progress
    from turnrl_rewards.progress import StateScore as StateScore
    from turnrl_rewards.progress import SupportSeen as SupportSeen
    from turnrl_rewards.progress import passages_shown as passages_shown
    from turnrl_rewards.qa import AnswerPresent as AnswerPresent
    from turnrl_rewards.qa import AnswerRetrieved as AnswerRetrieved
    from turnrl_rewards.qa import ExactMatch as ExactMatch
    from turnrl_rewards.qa import ToolExecuted as ToolExecuted
    from turnrl_rewards.qa import WellFormed as WellFormed
    from turnrl_rewards.server import JudgeServer as JudgeServer
    from turnrl_rewards.step import StepReward as StepReward

__getattr__, __all__ = make_lazy(__name__, __file__)


@hookimpl
def turnrl_rewards() -> list[str]:
    """The rewards of this package."""
    homes = {
        "qa": ("ToolExecuted", "AnswerRetrieved", "AnswerPresent", "ExactMatch", "WellFormed"),
        "calls": ("SearchCost", "Repetition"),
        "progress": ("FirstHit", "Progress"),
        "belief": ("InformationGain", "KLPenalty"),
        "judge": ("LLMJudgeTurn", "LLMJudge"),
        "step": ("StepReward",),
        "outcome": ("F1",),
    }
    return [f"turnrl_rewards.{home}:{name}" for home, names in homes.items() for name in names]


@hookimpl
def turnrl_answers() -> list[str]:
    """The rules of this package."""
    return [f"turnrl_rewards.answers:{name}" for name in ("Number", "Choice", "Math", "Compared")]
