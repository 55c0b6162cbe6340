"""Turns that act in an environment: an action in place of a tool call.

    turn    ... <action>left</action>
    reply   the observation, as the user's message

The action becomes a call of the environment's tool, so it is checked, batched and timed like any
other call. There is no answer: the environment ends the attempt, or the last turn does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

from turnrl import Message, Question, Reading, RecipeError, ToolCall, ToolResult, ToolSpec
from turnrl.plugin.errors import check_one_of, is_finite
from turnrl_segmenters.prompted import THOUGHT, PromptedSegmenter, expected_thought

_TAG = re.compile(r"</?action>")
_END = {
    "tag": "give one action inside <action> tags, which ends the turn: <action>...</action>",
    "text": "write one action, and nothing else",
}


@final
class Action(PromptedSegmenter):
    """Turns that are actions in an environment. The action becomes a call of the environment's
    tool.

    Args:
        max_turns: The most turns; the action of the last one is taken too.
        form: `tag` if the action is in `<action>`, after any text; `text` if the action is the
            whole turn.
        tool: The tool that takes the action; by default the only tool, or else `step`.
        argument: The parameter that is the action; by default the one that the tool requires.
        instructions: The system message, word for word; empty for none. By default it explains the
            form and the actions.
        think: `free` if turns begin outside any thought; `opened` if the chat template opens one,
            so that they begin inside it.
    """

    def __init__(
        self,
        max_turns: int = 8,
        form: Literal["tag", "text"] = "tag",
        tool: str | None = None,
        argument: str | None = None,
        instructions: str | None = None,
        think: Literal["free", "opened"] = "free",
    ) -> None:
        self.max_turns, self.form, self.think = max_turns, form, think
        check_one_of(_END, "Action.", self, "form")
        check_one_of(("free", "opened"), "Action.", self, "think")
        self.opened_thought = expected_thought(think)
        self._tool = tool
        self.tool, self.argument, self.instructions = tool or "step", argument, instructions
        self.stop = ("</action>",) if form == "tag" else ()
        self.tags = (*["action"][: form == "tag"], *["think"][: think == "opened"])
        self._schema: Mapping[str, Any] = {}
        self._name = argument or "action"

    def check(self, tools: Sequence[ToolSpec]) -> None:
        """Verify that the tool exists, and that it needs nothing but an action."""
        self._learn(tools)
        names = ", ".join(spec.name for spec in tools) or "none"
        spec = next((spec for spec in tools if spec.name == self.tool), None)
        if spec is None:
            raise RecipeError(
                f"Action.tool is {self.tool!r}, and there is no such tool; there is {names}. Set "
                "tool of the segmenter Action to the tool that takes the action."
            )
        parameters = spec.parameters.get("properties", {})
        required = spec.parameters.get("required", [])
        argument = self.argument or (required[0] if len(required) == 1 else None)
        if argument is None or argument not in parameters or set(required) - {argument}:
            raise RecipeError(
                f"the tool {self.tool!r} takes {', '.join(parameters) or 'nothing'}, of which it "
                f"requires {', '.join(required) or 'none'}; Action gives it one "
                "value. Set argument of the segmenter Action to the parameter that is the action, "
                "or take ReAct, which calls with several."
            )

    def prompt(self, question: Question, tools: Sequence[ToolSpec]) -> list[Message]:
        """The instructions as system message (none if empty), the question as user message."""
        self._learn(tools)
        return super().prompt(question, tools)

    def explain(self, tools: Sequence[ToolSpec]) -> str:
        first = "think if you like, then " if self.form == "tag" else ""
        if self.opened_thought:
            first = "think, close your thought with </think>, then "
        about = "".join(f"\n\n{spec.description}" for spec in tools if spec.name == self.tool)
        return (
            f"You act in an environment, in at most {self.allowance}. In each turn, {first}"
            f"{_END[self.form]}. You then read what you see after it.{about}"
        )

    def read(self, text: str, turn: int, cut: bool) -> Reading:
        """Read the action of one turn: the content of the first closed `<action>`, or the whole
        text; with `think: opened`, what follows the thought. An `<action>` that is not closed is no
        action, and a turn that was cut has none."""
        if cut:
            return Reading(format_error="the turn was too long, so its action was not taken")
        if self.opened_thought:
            _, closed, text = text.partition("</think>")
            if not closed:
                return Reading(format_error="the thought is not closed")
        if self.form == "text":
            action, wrong = text.strip(), None
        else:
            action, wrong = _in_tags(text)
        if not action:
            return Reading(format_error=wrong or "no action")
        call = ToolCall(self.tool, {self._name: self._value(action)})
        return Reading((call,), format_error=wrong)

    def write(self, reading: Reading, thought: str = "") -> str:
        """The action, in its tags if the form has them."""
        fits = [call for call in reading.calls if [*call.arguments] == [self._name]]
        action = fits[0].arguments[self._name] if fits else ""
        text = action if isinstance(action, str) else json.dumps(action)
        alone = len(reading.calls) == 1 and fits and fits[0].name == self.tool
        if not alone or (self.form == "tag" and _TAG.search(text)):
            raise RecipeError(
                f"a turn of Action is one call of {self.tool!r} with {self._name!r}, without tags, "
                f"and not {reading!r:.200}. Demonstrate such calls."
            )
        if self.opened_thought:
            thought = f"{thought or THOUGHT}</think>\n"
        elif self.form == "text":
            thought = ""
        return thought + (f"<action>{text}</action>" if self.form == "tag" else text)

    def observe(self, reading: Reading, results: Sequence[ToolResult]) -> list[Message]:
        """A user message with the observation, or with the fault of the action."""
        shown = [result.content if result.ok else f"Error: {result.content}." for result in results]
        return [{"role": "user", "content": "\n".join(shown) or f"Error: {reading.format_error}."}]

    def _learn(self, tools: Sequence[ToolSpec]) -> None:
        """Note the tool and its parameter, which are the same in all attempts."""
        if self._tool is None:
            self.tool = tools[0].name if len(tools) == 1 else "step"
        for spec in tools:
            if spec.name == self.tool:
                required = spec.parameters.get("required", [])
                self._name = self.argument or (required[0] if required else "action")
                self._schema = spec.parameters.get("properties", {}).get(self._name, {})

    def _value(self, action: str) -> object:
        """The value to pass to the tool: a number if the tool takes numbers, a value of its list
        whatever the case of the letters. Anything else is passed on for the tool to refuse."""
        listed = self._schema.get("enum", ())
        alike = [value for value in listed if str(value).casefold() == action.casefold()]
        if exact := [value for value in alike if str(value) == action] or alike[: len(alike) == 1]:
            return exact[0]
        if self._schema.get("type") in ("integer", "number", "boolean"):
            try:
                value = json.loads(action)
            except (ValueError, RecursionError):
                return action
            # Python reads NaN and Infinity, which a tool does not take
            return value if isinstance(value, bool) or is_finite(value) else action
        return action


def _in_tags(text: str) -> tuple[str, str | None]:
    """The action in the first closed tags, and the turn's format error."""
    tags = list(_TAG.finditer(text))
    end = next((n for n, tag in enumerate(tags) if tag.group() == "</action>"), None)
    if end is None:
        return "", "action is not closed" if tags else "no action"
    if end == 0:
        return "", "action is closed and was not opened"
    action = text[tags[end - 1].end() : tags[end].start()].strip()
    if not action:
        return "", "the action is empty"
    if end > 1:
        return action, "action is opened more than once"
    return action, "text after the action" if text[tags[end].end() :].strip() else None
