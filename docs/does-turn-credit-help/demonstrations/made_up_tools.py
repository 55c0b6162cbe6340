"""Demonstrations with tools that do not exist, from which the policy learns to call any tool.

Each trace makes up its tools, arguments, question and results. An argument repeats a stretch of the
question. There is no arithmetic: numbers are only copied, and no word or sign means an operation.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from demonstrations.forms import FORMS, SEARCH, Trace, arguments
from demonstrations.trace_writers import FAILED, KNOW, LOOK_UP, Habits, TraceWriter, facts
from turnrl import ToolResult, ToolSpec

_ABOUT = ("What is the {} of {}?", "Which {} does {} have?", "Name the {} of {}.", "{} of {}?")
"""Questions that name a subject, which may be a tool's name or part of an argument."""
_PLAIN = ("What is {}?", "Give {}.", "Find {} for me.", "Tell me {}.", "How much is {}?", "{}?")
"""Questions that consist of the argument."""
_JOINTS = ("and", "to", "in", "for", "with", "from", "by")
"""Words between two arguments."""


@dataclass(frozen=True)
class Task:
    """A question for which a made-up tool is to be called.

    Args:
        text: The question.
        tools: The available tools.
        tool: The tool to call.
        given: The right arguments.
        subject: The word for the requested value.
    """

    text: str
    tools: Sequence[ToolSpec]
    tool: ToolSpec
    given: Mapping[str, str]
    subject: str


class MadeUpTools(TraceWriter):
    """Calls a tool that does not exist, then answers with its result, in both forms."""

    def trace(self, habits: Habits, rng: random.Random) -> Trace:
        form, task = rng.choice(FORMS), drawn_task(rng)
        draw = rng.random()
        if draw < habits.direct:
            return form.trace(task.text, task.tools, form.answering(KNOW, _value(rng)))
        if draw < habits.direct + habits.malformed:
            failed = form.malformed(task.tool, task.given, task.tools, rng)
            last = form.answering(FAILED, _value(rng))
            return form.trace(task.text, task.tools, form.calling(LOOK_UP, *failed), last)
        values = task.given
        if draw < habits.direct + habits.malformed + habits.vague:
            values = {name: _elsewhere(task.text, rng) for name in values}
        shown, thought, value = _result(task.subject, habits, rng)
        read = form.calling(LOOK_UP, form.call(task.tool, values), ToolResult(shown))
        return form.trace(task.text, task.tools, read, form.answering(thought, value))


def _toolset(rng: random.Random) -> list[ToolSpec]:
    """One to three tools. The first is made up, and is the one to call."""
    tools = [_tool(rng) for _ in range(rng.choices((1, 2, 3), (0.6, 0.25, 0.15))[0])]
    if len(tools) > 1 and rng.random() < 0.4:
        tools[-1] = SEARCH
    return tools if len({tool.name for tool in tools}) == len(tools) else _toolset(rng)


def _tool(rng: random.Random) -> ToolSpec:
    name = "_".join(_word(rng) for _ in range(rng.choice((1, 1, 2))))
    names = list(dict.fromkeys(_word(rng) for _ in range(rng.choices((1, 2, 3), (70, 22, 8))[0])))
    properties = {argument: {"type": "string"} for argument in names}
    parameters = {"type": "object", "properties": properties, "required": names}
    return ToolSpec(name, "A tool that does not exist.", parameters)


def drawn_task(rng: random.Random) -> Task:
    """A question for a tool, which mentions the tool's name if there are others."""
    tool, *others = _toolset(rng)
    names = arguments(tool)
    pieces = [_stretch(rng, longest=5 if len(names) == 1 else 2) for _ in names]
    content = f" {rng.choice(_JOINTS)} ".join(pieces)
    subject = tool.name.replace("_", " ") if others else _word(rng)
    if not others and rng.random() < 0.6:
        text = rng.choice(_PLAIN).format(content)
    else:
        text = rng.choice(_ABOUT).format(subject, content)
        if len(names) == 1 and rng.random() < 0.3:
            pieces = [f"{subject} of {content}"]
    tools = rng.sample([tool, *others], 1 + len(others))
    return Task(text, tools, tool, dict(zip(names, pieces, strict=True)), subject)


def _result(subject: str, habits: Habits, rng: random.Random) -> tuple[str, str, str]:
    """The reply of a tool, the thought that reads it, and the answer."""
    values = [_value(rng) for _ in range(3)]
    right = 0 if rng.random() < habits.reading else 1
    kind = rng.random()
    if kind < 0.5:
        return values[0], "It gives the answer.", values[right]
    if kind < 0.65:
        listed = ", ".join(values)
        return listed, "It gives the answer.", (listed, values[1])[right]
    subjects = [subject, _word(rng)]
    sentences = [f"Its {of} is {value}." for of, value in zip(subjects, values, strict=False)]
    thought = f"It gives the {subjects[right]}."
    if kind < 0.8:
        return f"{sentences[0]}", thought, values[right]
    return " ".join(rng.sample(sentences, 2)), thought, values[right]


def _elsewhere(text: str, rng: random.Random) -> str:
    """Another stretch of a question."""
    words = text.rstrip("?.").split()
    start = rng.randrange(len(words))
    return " ".join(words[start : start + rng.randint(1, 4)])


def _stretch(rng: random.Random, longest: int) -> str:
    """A number, a name, or a few numbers and words."""
    draw = rng.random()
    if draw < 0.15:
        return _number(rng)
    if draw < 0.4:
        return facts().name(rng) if rng.random() < 0.5 else rng.choice(facts().names)
    units = (_number, _word)
    return " ".join(rng.choice(units)(rng) for _ in range(rng.randint(1, longest)))


def _value(rng: random.Random) -> str:
    """A number, a name, or a word."""
    draw = rng.random()
    if draw < 0.5:
        return _number(rng)
    return facts().name(rng) if draw < 0.75 else _word(rng)


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10 ** rng.randint(1, 4)))


def _word(rng: random.Random) -> str:
    """A word that does not exist: letters, syllables, or parts of names."""
    draw = rng.random()
    if draw < 0.15:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 5)))
    if draw < 0.5:
        count = rng.randint(1, 3)
        syllables = (rng.choice("bcdfghjklmnprstvz") + rng.choice("aeiou") for _ in range(count))
        return f"{''.join(syllables)}{rng.choice(('', '', *'nrstl'))}"
    return "".join(filter(str.isalpha, facts().name(rng).lower()))[:9]
