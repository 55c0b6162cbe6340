"""What a plugin must keep to, as functions to call in its tests.

    def test_my_tool_keeps_to_the_contract():
        check_tool(MyTool(), good_calls=[{"query": "Utrecht"}], bad_calls=[{"query": ""}])

Each raises an `AssertionError` that says what is broken and with what input. They need no test
framework, no model and no torch.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

import jsonschema

from turnrl.text import neutralise
from turnrl.types import (
    OutcomeReward,
    Question,
    Reading,
    Reward,
    Segmenter,
    Tool,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnReward,
)

__all__ = ["check_reward", "check_segmenter", "check_tool", "example_trajectories"]


def _require(condition: bool, message: str) -> None:
    # not `assert`, which `python -O` leaves out and pytest rewrites in test modules only
    if not condition:
        raise AssertionError(message)


# -------------------------------------------------------------------------------------------- tools


def check_tool(
    tool: Tool,
    good_calls: Sequence[Mapping[str, Any]],
    bad_calls: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Check a tool: its description, its preflight check, and its replies.

    Args:
        tool: The tool, with whatever it needs at hand.
        good_calls: Arguments of calls that must succeed.
        bad_calls: Arguments that are the policy's mistake: the schema rejects them, or the result
            is not `ok` and says why.
    """
    name = type(tool).__name__
    _require(bool(good_calls), f"give check_tool a good call of {name}")
    _require(
        isinstance(tool.name, str) and re.fullmatch(r"\w[\w.-]*", tool.name) is not None,
        f"{name}.name is {tool.name!r}: use letters, digits, _, - and .",
    )
    _require(bool(tool.description.strip()), f"{name}.description is empty")
    _require(tool.timeout_s > 0, f"{name}.timeout_s is {tool.timeout_s}")
    _require(
        tool.parameters.get("type") == "object",
        f"{name}.parameters must be the JSON Schema of an object, not {tool.parameters!r}",
    )
    jsonschema.Draft202012Validator.check_schema(tool.parameters)
    schema = jsonschema.Draft202012Validator(tool.parameters)
    tool.check()

    _require(_run(tool, []) == [], f"{name}.run of no calls must give no results")
    for arguments in good_calls:
        errors = [error.message for error in schema.iter_errors(dict(arguments))]
        _require(not errors, f"{name}.parameters rejects the good call {arguments!r}: {errors}")
    together = _run(tool, good_calls)
    for arguments, result in zip(good_calls, together, strict=True):
        _require(result.ok, f"{name} fails on the good call {arguments!r}: {result.content!r}")
        _require(bool(result.content), f"{name} replies to {arguments!r} with an empty text")
        (alone,) = _run(tool, [arguments])
        _require(
            alone.content == result.content,
            f"{name} replies to {arguments!r} with {alone.content!r} alone and {result.content!r} "
            "in a batch; results must be in the order of the calls",
        )
    for arguments in bad_calls:
        if schema.is_valid(dict(arguments)):
            (result,) = _run(tool, [arguments])
            _require(
                not result.ok, f"{name} accepts the bad call {arguments!r}: {result.content!r}"
            )
            _require(bool(result.content), f"{name} does not say what is wrong with {arguments!r}")


async def _wait(replies: Awaitable[Sequence[ToolResult]]) -> Sequence[ToolResult]:
    return await replies


def _run(tool: Tool, calls: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
    """The results of a batch, waited for if the tool is asynchronous."""
    batch = [ToolCall(tool.name, arguments) for arguments in calls]
    replies = tool.run(batch)
    if isinstance(replies, Awaitable):
        replies = asyncio.run(_wait(replies))
    _require(
        isinstance(replies, Sequence) and len(replies) == len(batch),
        f"{type(tool).__name__}.run must give a result per call, not {replies!r} for {len(batch)}",
    )
    for reply in replies:
        _require(
            isinstance(reply, ToolResult) and isinstance(reply.content, str),
            f"{type(tool).__name__}.run must give ToolResults with a text, not {reply!r}",
        )
    return list(replies)


# --------------------------------------------------------------------------------------- segmenters


def check_segmenter(segmenter: Segmenter, texts: int = 2000) -> None:
    """Check a segmenter: its prompt, that it reads any text, and that it shows results as they are.

    Args:
        segmenter: The segmenter.
        texts: How many random texts to read.
    """
    name = type(segmenter).__name__
    _require(segmenter.max_turns >= 1, f"{name}.max_turns is {segmenter.max_turns}")
    for attribute in ("stop", "tags"):
        values = getattr(segmenter, attribute)
        _require(
            isinstance(values, tuple) and all(isinstance(v, str) and v for v in values),
            f"{name}.{attribute} must be a tuple of texts, not {values!r}",
        )
    for stop in segmenter.stop:
        tag = re.fullmatch(r"</?(\w+)>", stop)
        _require(
            tag is None or tag[1] in segmenter.tags,
            f"{name} stops at {stop!r}, so {tag and tag[1]!r} must be in its tags: "
            "else a tool result could contain it",
        )
    _check_prompt(segmenter, name)
    for text in _soups(segmenter, texts):
        for turn in (0, segmenter.max_turns - 1):
            reading = _check_read(segmenter, name, text, turn)
            _check_observe(segmenter, name, reading, text)
    reading = segmenter.read("Lorem ipsum dolor sit amet.", 0)
    _require(
        reading.answer is None or reading.format_error is not None or not segmenter.tags,
        f"{name} takes plain text for a well-formed turn: {reading!r}",
    )


def _check_prompt(segmenter: Segmenter, name: str) -> None:
    question = Question("q", "What is the time zone of Utrecht?", ("Europe/Amsterdam",))
    for tools in ([], [_Echo()]):
        messages = segmenter.prompt(question, tools)
        _require(bool(messages), f"{name}.prompt gives no messages")
        for message in messages:
            _require(
                set(message) == {"role", "content"}
                and message["role"] in ("system", "user", "assistant")
                and isinstance(message["content"], str),
                f"{name}.prompt gives {message!r}, which is no chat message",
            )
        _require(messages[-1]["role"] == "user", f"{name}.prompt must end with the user's message")
        _require(
            any(question.text in message["content"] for message in messages),
            f"{name}.prompt leaves the question out",
        )


def _check_read(segmenter: Segmenter, name: str, text: str, turn: int) -> Reading:
    try:
        reading = segmenter.read(text, turn)
    except Exception as error:
        raise AssertionError(
            f"{name}.read must read any text; on {text!r} it raised {type(error).__name__}: {error}"
        ) from error
    what = f"{name}.read gave {reading!r} for {text!r}"
    _require(isinstance(reading, Reading), f"{what}, which is no Reading")
    _require(reading == segmenter.read(text, turn), f"{what}, and something else the second time")
    _require(
        reading.answer is None or isinstance(reading.answer, str), f"{what}: answer is no text"
    )
    for call in reading.calls:
        _require(isinstance(call, ToolCall), f"{what}: {call!r} is no ToolCall")
        _require(bool(call.name) or bool(call.error), f"{what}: a call has neither name nor error")
        _require(isinstance(call.arguments, Mapping), f"{what}: arguments are no mapping")
    _require(
        bool(reading.calls) or reading.answer is not None or bool(reading.format_error),
        f"{what}: a turn that neither calls nor answers needs a format_error",
    )
    return reading


def _check_observe(segmenter: Segmenter, name: str, reading: Reading, text: str) -> None:
    content = neutralise(text, segmenter.tags, [])
    results = [
        ToolResult(content, ok) for ok, _ in zip(_alternating(), reading.calls, strict=False)
    ]
    observation = segmenter.observe(reading, results)
    _require(isinstance(observation, str), f"{name}.observe gave {observation!r}, which is no text")
    _require(bool(observation), f"{name}.observe gave an empty text after {text!r}")
    _require(
        observation.count(content) >= len(results) or not content,
        f"{name}.observe must show each result as it is; {content!r} became {observation!r}",
    )


def _alternating() -> Iterator[bool]:
    while True:
        yield True
        yield False


def _soups(segmenter: Segmenter, count: int) -> Iterator[str]:
    """Texts that a policy might write: nothing, tag soups, broken JSON, any unicode, very long."""
    tags = [f"<{slash}{tag}>" for tag in segmenter.tags for slash in ("", "/")]
    call = '{"name": "echo", "args": {"text": "x"}}'
    pieces = [
        *tags,
        *segmenter.stop,
        call,
        call[:-1],
        "{",
        "[",
        '"',
        "null",
        "\\ud800",
        "\n",
        " ",
        "a",
    ]
    yield from (
        "",
        " ",
        "\x00",
        "[" * 50_000,
        "<" * 10_000,
        "🙂" * 100,
        "\u202e\u0000\ufffd",
        *pieces,
    )
    draw = random.Random(0)
    for _ in range(count):
        soup = draw.choices(pieces, k=draw.randrange(1, 12))
        noise = (chr(draw.choice((draw.randrange(128), draw.randrange(0xD7FF)))) for _ in range(5))
        soup.insert(draw.randrange(len(soup) + 1), "".join(noise) if draw.random() < 0.3 else "")
        yield "".join(soup)


class _Echo(Tool):
    """Repeats a text."""

    name = "echo"
    description = "Repeat a text."
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    }

    def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        return [ToolResult(str(call.arguments["text"])) for call in calls]


# ------------------------------------------------------------------------------------------ rewards


def check_reward(reward: Reward, trajectories: Mapping[str, Trajectory] | None = None) -> None:
    """Check a reward: finite numbers, the same each time, and nothing to gain by garbage.

    Args:
        reward: A turn reward or an outcome reward.
        trajectories: What to score, by name; `example_trajectories` by default. Those whose name
            begins with `garbage` may earn nothing, unless every other one earns as much.
    """
    name = type(reward).__name__
    _require(
        isinstance(reward, TurnReward) != isinstance(reward, OutcomeReward),
        f"{name} must extend either TurnReward or OutcomeReward",
    )
    _require(
        re.fullmatch(r"[a-z0-9_]*", reward.name) is not None,
        f"{name}.name is {reward.name!r}: use lower case, digits and _, as in metrics",
    )
    totals = {}
    for label, trajectory in (trajectories or example_trajectories()).items():
        scores = _score(reward, trajectory)
        for score in scores:
            _require(
                isinstance(score, int | float) and math.isfinite(score),
                f"{name} gave {score!r} for {label!r}, which is not a finite number",
            )
        _require(
            scores == _score(reward, trajectory),
            f"{name} scores {label!r} differently the second time",
        )
        totals[label] = sum(scores)
    least = min(totals.values())
    for label, total in totals.items():
        _require(
            not label.startswith("garbage") or total <= max(0.0, least),
            f"{name} pays {total} for {label!r}: garbage may earn nothing",
        )


def _score(reward: Reward, trajectory: Trajectory) -> list[float]:
    if isinstance(reward, TurnReward):
        return [reward.score(trajectory, k) for k in range(len(trajectory.turns))]
    if isinstance(reward, OutcomeReward):
        return [reward.score(trajectory)]
    raise AssertionError(f"{type(reward).__name__} must extend TurnReward or OutcomeReward")


def example_trajectories() -> dict[str, Trajectory]:
    """Attempts at one question, by name: good ones, failed ones, and garbage."""
    call = ToolCall("search", {"query": "Utrecht"})
    page = ToolResult("Utrecht is in the time zone Europe/Amsterdam.")
    searched = (Reading((call,)), (page,))
    right = (Reading(answer="Europe/Amsterdam"), ())
    garbled = (Reading(format_error="no tool call or answer"), ())
    unreadable = Reading((ToolCall("", error="bad JSON"),), None, "bad JSON")

    def attempt(
        *turns: tuple[Reading, tuple[ToolResult, ...]],
        text: str = "some text",
        answers: tuple[str, ...] = ("Europe/Amsterdam", "CET"),
    ) -> Trajectory:
        taken = tuple(
            Turn(text, (7, 8, 9), (-0.1, -0.2, -0.3), reading, results, (5,) if results else ())
            for reading, results in turns
        )
        question = Question("q", "What is the time zone of Utrecht?", answers)
        answered = taken[-1].reading.answer is not None
        return Trajectory(question, (1, 2, 3), taken, "answer" if answered else "turns")

    return {
        "right after a search": attempt(searched, right),
        "right without a search": attempt(right),
        "wrong after a search": attempt(searched, (Reading(answer="Asia/Tokyo"), ())),
        "answer among others": attempt(searched, (Reading(answer="Europe/Amsterdam or Asia"), ())),
        "nothing found": attempt((Reading((call,)), (ToolResult("no results"),)), right),
        "failed call": attempt((Reading((call,)), (ToolResult("no such tool", False),)), right),
        "unreadable call": attempt((unreadable, (ToolResult("bad JSON", False),)), right),
        "two calls, one failed": attempt(
            (Reading((call, call)), (page, ToolResult("unknown tool", False))), right
        ),
        "no accepted answers": attempt(searched, right, answers=()),
        "garbage": attempt(garbled, garbled),
        "garbage that names the answer": attempt(garbled, garbled, text="Europe/Amsterdam"),
        "garbage of one turn": attempt(garbled),
        "garbage with an empty answer": attempt(
            (Reading(answer="", format_error="the answer is empty"), ()), answers=("", "the")
        ),
    }
