"""turnrl: train language-model agents that use tools over several turns,
with credit given turn by turn.

The names below are the public interface. The ground types and the plugin contract are imported at
once; whatever needs torch is imported when it is first used, so that `import turnrl` stays fast.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from turnrl.errors import CheckpointError as CheckpointError
from turnrl.errors import DataError as DataError
from turnrl.errors import PluginError as PluginError
from turnrl.errors import RecipeError as RecipeError
from turnrl.errors import ToolError as ToolError
from turnrl.errors import TrainingError as TrainingError
from turnrl.errors import TurnRLError as TurnRLError
from turnrl.plugins import hookimpl as hookimpl
from turnrl.plugins import installed as installed
from turnrl.text import contained_answer as contained_answer
from turnrl.text import contains_answer as contains_answer
from turnrl.text import exact_match as exact_match
from turnrl.text import neutralise as neutralise
from turnrl.text import normalize_answer as normalize_answer
from turnrl.types import AdvantageEstimator as AdvantageEstimator
from turnrl.types import Completion as Completion
from turnrl.types import Engine as Engine
from turnrl.types import Fields as Fields
from turnrl.types import Group as Group
from turnrl.types import Message as Message
from turnrl.types import OutcomeReward as OutcomeReward
from turnrl.types import Passage as Passage
from turnrl.types import Question as Question
from turnrl.types import QuestionSource as QuestionSource
from turnrl.types import Reading as Reading
from turnrl.types import Reward as Reward
from turnrl.types import SampledPolicy as SampledPolicy
from turnrl.types import Sampling as Sampling
from turnrl.types import Segmenter as Segmenter
from turnrl.types import Session as Session
from turnrl.types import SourceOpener as SourceOpener
from turnrl.types import Tool as Tool
from turnrl.types import ToolCall as ToolCall
from turnrl.types import ToolResult as ToolResult
from turnrl.types import ToolSession as ToolSession
from turnrl.types import Trajectory as Trajectory
from turnrl.types import Turn as Turn
from turnrl.types import TurnReward as TurnReward

if TYPE_CHECKING:
    from turnrl.chat import ChatFormat as ChatFormat
    from turnrl.credit import GroupRelative as GroupRelative
    from turnrl.credit import Merged as Merged
    from turnrl.credit import OutcomeOnly as OutcomeOnly
    from turnrl.credit import TurnLevel as TurnLevel
    from turnrl.data import QuestionData as QuestionData
    from turnrl.module import MTGRPO as MTGRPO
    from turnrl.objective import ClippedSurrogate as ClippedSurrogate
    from turnrl.policy import Lora as Lora
    from turnrl.policy import Policy as Policy
    from turnrl.recipe import load as load
    from turnrl.rollout import Rollout as Rollout
    from turnrl.scoring import assign_credit as assign_credit
    from turnrl.scoring import score_group as score_group
    from turnrl.sources import load_questions as load_questions

_LAZY = {
    "ChatFormat": "chat",
    "ClippedSurrogate": "objective",
    "GroupRelative": "credit",
    "Lora": "policy",
    "MTGRPO": "module",
    "Merged": "credit",
    "OutcomeOnly": "credit",
    "Policy": "policy",
    "QuestionData": "data",
    "Rollout": "rollout",
    "TurnLevel": "credit",
    "assign_credit": "scoring",
    "load": "recipe",
    "load_questions": "sources",
    "score_group": "scoring",
}
_GROUND = ("turnrl.errors", "turnrl.plugins", "turnrl.text", "turnrl.types")

__all__ = sorted(
    [*_LAZY, "Message"]
    + [name for name, value in globals().items() if getattr(value, "__module__", "") in _GROUND]
    + ["hookimpl"]
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("turnrl")
    if name in _LAZY:
        return getattr(importlib.import_module(f"turnrl.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'turnrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
