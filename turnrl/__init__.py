"""turnrl: train language-model agents that use tools over several turns,
with credit given turn by turn.

The names below are the public interface. The ground types and the plugin contract are imported at
once; whatever needs torch is imported when it is first used, so that `import turnrl` stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from turnrl.errors import (
    CheckpointError,
    DataError,
    PluginError,
    RecipeError,
    ToolError,
    TrainingError,
    TurnRLError,
)
from turnrl.plugins import hookimpl, installed
from turnrl.text import contained_answer, contains_answer, exact_match, neutralise, normalize_answer
from turnrl.types import (
    AdvantageEstimator,
    Group,
    Message,
    OutcomeReward,
    Passage,
    Question,
    QuestionSource,
    Reading,
    Reward,
    Scores,
    Segmenter,
    Tool,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnReward,
)

if TYPE_CHECKING:
    from turnrl.credit import Merged, OutcomeOnly, TurnLevel
    from turnrl.data import QuestionData
    from turnrl.engines import Completion, RolloutEngine, Sampling, Session
    from turnrl.engines.transformers import TransformersEngine
    from turnrl.module import MTGRPO
    from turnrl.objective import ClippedSurrogate
    from turnrl.policy import Lora, Policy
    from turnrl.rollout import Rollout

_LAZY = {
    "ClippedSurrogate": "turnrl.objective",
    "Completion": "turnrl.engines",
    "Lora": "turnrl.policy",
    "MTGRPO": "turnrl.module",
    "Merged": "turnrl.credit",
    "OutcomeOnly": "turnrl.credit",
    "Policy": "turnrl.policy",
    "QuestionData": "turnrl.data",
    "Rollout": "turnrl.rollout",
    "RolloutEngine": "turnrl.engines",
    "Sampling": "turnrl.engines",
    "Session": "turnrl.engines",
    "TransformersEngine": "turnrl.engines.transformers",
    "TurnLevel": "turnrl.credit",
}

__version__ = "0.1.0"

__all__ = [
    "MTGRPO",
    "AdvantageEstimator",
    "CheckpointError",
    "ClippedSurrogate",
    "Completion",
    "DataError",
    "Group",
    "Lora",
    "Merged",
    "Message",
    "OutcomeOnly",
    "OutcomeReward",
    "Passage",
    "PluginError",
    "Policy",
    "Question",
    "QuestionData",
    "QuestionSource",
    "Reading",
    "RecipeError",
    "Reward",
    "Rollout",
    "RolloutEngine",
    "Sampling",
    "Scores",
    "Segmenter",
    "Session",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "TrainingError",
    "Trajectory",
    "TransformersEngine",
    "Turn",
    "TurnLevel",
    "TurnRLError",
    "TurnReward",
    "contained_answer",
    "contains_answer",
    "exact_match",
    "hookimpl",
    "installed",
    "neutralise",
    "normalize_answer",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'turnrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
