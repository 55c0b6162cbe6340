"""turnrl: train language-model agents that use tools over several turns,
with credit given turn by turn.

The names below are the public interface. The ground types and the plugin contract are imported at
once; whatever needs torch is imported when it is first used, so that `import turnrl` stays fast.
"""

import importlib
import importlib.metadata
import itertools
from typing import TYPE_CHECKING, Any

from turnrl.answers import *  # noqa: F403 - `__all__` leaves out helpers of this and the next
from turnrl.errors import *  # noqa: F403
from turnrl.errors import in_short as in_short
from turnrl.errors import of_the_device as of_the_device
from turnrl.errors import out_of_memory as out_of_memory
from turnrl.plugins import HOOKS as HOOKS
from turnrl.plugins import hookimpl as hookimpl
from turnrl.plugins import installed as installed
from turnrl.plugins import load_plugins as load_plugins
from turnrl.text import *  # noqa: F403 - and what they import themselves
from turnrl.types import *  # noqa: F403 - the same

if TYPE_CHECKING:
    from turnrl import record as record
    from turnrl.agent.chat import ChatFormat as ChatFormat
    from turnrl.agent.rollout import Rollout as Rollout
    from turnrl.agent.toolbox import call_tools as call_tools
    from turnrl.agent.toolbox import read_call as read_call
    from turnrl.credit import GroupRelative as GroupRelative
    from turnrl.credit import Merged as Merged
    from turnrl.credit import OutcomeOnly as OutcomeOnly
    from turnrl.credit import TurnLevel as TurnLevel
    from turnrl.credit import returns_to_go as returns_to_go
    from turnrl.credit import standardize as standardize
    from turnrl.data import QuestionData as QuestionData
    from turnrl.module import MTGRPO as MTGRPO
    from turnrl.objective import ClippedSurrogate as ClippedSurrogate
    from turnrl.policy.adapter import Lora as Lora
    from turnrl.policy.compute import dense_weight as dense_weight
    from turnrl.policy.layout import takes_ragged as takes_ragged
    from turnrl.policy.model import Policy as Policy
    from turnrl.recipe.build import build as build
    from turnrl.recipe.build import load as load
    from turnrl.recipe.given import bundled_recipes as bundled_recipes
    from turnrl.recipe.given import recipe_like as recipe_like
    from turnrl.run.folders import run_folder as run_folder
    from turnrl.run.folders import writable_part as writable_part
    from turnrl.scoring import assign_credit as assign_credit
    from turnrl.scoring import score_group as score_group
    from turnrl.sources import load_questions as load_questions
    from turnrl.sources import open_source as open_source
    from turnrl.sources import reach_hub as reach_hub

_LAZY = {
    "agent.chat": ["ChatFormat"],
    "policy.compute": ["dense_weight"],
    "credit": [
        "GroupRelative",
        "Merged",
        "OutcomeOnly",
        "TurnLevel",
        "returns_to_go",
        "standardize",
    ],
    "data": ["QuestionData"],
    "run.folders": ["run_folder", "writable_part"],
    "recipe.given": ["bundled_recipes", "recipe_like"],
    "policy.layout": ["takes_ragged"],
    "module": ["MTGRPO"],
    "objective": ["ClippedSurrogate"],
    "policy.adapter": ["Lora"],
    "policy.model": ["Policy"],
    "recipe.build": ["build", "load"],
    "agent.rollout": ["Rollout"],
    "scoring": ["assign_credit", "score_group"],
    "sources": ["load_questions", "open_source", "reach_hub"],
    "agent.toolbox": ["call_tools", "read_call"],
}
_MOVED = {"answers": ["Choice", "Compared", "Math", "Number"]}
"""Public before 0.8, and named by recipes that runs have saved."""
_GROUND = ("turnrl.answers", "turnrl.text", "turnrl.types")

__all__ = sorted(
    [
        name
        for name, value in globals().items()
        if getattr(value, "__module__", "").startswith(_GROUND)
    ]
    + [name for name in globals() if name.endswith("Error")]
    + [
        *itertools.chain(*_LAZY.values()),
        "Figures",
        "HOOKS",
        "Message",
        "Row",
        "Status",
        "hookimpl",
        "in_short",
        "installed",
        "load_plugins",
        "of_the_device",
        "out_of_memory",
        "record",
    ]
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("turnrl")
    if name == "record":
        return importlib.import_module("turnrl.record")
    for module, names in (*_LAZY.items(), *_MOVED.items()):
        if name in names:
            return getattr(importlib.import_module(f"turnrl.{module}"), name)
    raise AttributeError(f"module 'turnrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
