"""Segmenters: they define a turn, read it, and continue the conversation.

prompted    the system message and the last turn, which all segmenters here share
two_turn    `TwoTurn`: the paper's agent, one tool call and then the answer
react       `ReAct`: thought and action until the answer, with the calls of Qwen and Hermes
search_r1   `SearchR1`: the same with the tags of Search-R1
action      `Action`: an action in an environment, in place of a call
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnrl import hookimpl
from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl_segmenters.action import Action as Action
    from turnrl_segmenters.react import ReAct as ReAct
    from turnrl_segmenters.search_r1 import SearchR1 as SearchR1
    from turnrl_segmenters.two_turn import TwoTurn as TwoTurn

__getattr__, __all__ = make_lazy(__name__, __file__)


@hookimpl
def turnrl_segmenters() -> list[str]:
    """The segmenters of this package."""
    return [
        "turnrl_segmenters.action:Action",
        "turnrl_segmenters.react:ReAct",
        "turnrl_segmenters.search_r1:SearchR1",
        "turnrl_segmenters.two_turn:TwoTurn",
    ]
