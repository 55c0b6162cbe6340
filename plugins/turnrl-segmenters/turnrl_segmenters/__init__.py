"""Turn schemes: they define a turn, read it, and continue the conversation.

scheme      the system message and the last turn, which all schemes share
two_turn    `TwoTurn`: the paper's agent, one tool call and then the answer
react       `ReAct`: thought and action until the answer, with the calls of Qwen and Hermes
search_r1   `SearchR1`: the same with the tags of Search-R1
action      `Action`: an action in an environment, in place of a call
calls       reads the tool calls of `ReAct`, and mends malformed ones if `lenient`
"""

from __future__ import annotations

from collections.abc import Iterable

from turnrl import Segmenter, hookimpl
from turnrl_segmenters.action import Action as Action
from turnrl_segmenters.react import ReAct as ReAct
from turnrl_segmenters.search_r1 import SearchR1 as SearchR1
from turnrl_segmenters.two_turn import TwoTurn as TwoTurn


@hookimpl
def turnrl_segmenters() -> Iterable[type[Segmenter]]:
    """The segmenters of this package."""
    return [Action, ReAct, SearchR1, TwoTurn]
