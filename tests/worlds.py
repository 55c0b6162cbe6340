"""A small world in which training can be tested: one tool, one segmenter, two rewards."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import replace

from turnrl import (
    OutcomeReward,
    Player,
    Question,
    QuestionSource,
    Reading,
    Segmenter,
    Stateful,
    Tool,
    ToolCall,
    ToolResult,
    TurnReward,
)
from turnrl.engines import Engine
from turnrl.types import ToolSession
from turnrl_slots import Slots


class Numbers(QuestionSource):
    """Twelve questions to train on and three to evaluate with."""

    def questions(self, split):
        first, count = {"train": (0, 12), "val": (100, 3)}[split]
        return [
            Question(f"n{i}", f"Number {i}?", (f"answer {i}",)) for i in range(first, first + count)
        ]


class Letters(Segmenter):
    """A turn whose text has an `a` answers; any other calls the tool with the text."""

    max_turns = 2
    stop = tuple("eiours<>")
    tags = ("result",)

    def prompt(self, question, tools):
        return [{"role": "user", "content": question.text}]

    def read(self, text, turn, cut):
        if "a" in text and not cut:
            return Reading(answer=text)
        return Reading((ToolCall("echo", {"text": text}),))

    def observe(self, reading, results):
        text = "".join(f"<result>{r.content}</result>" for r in results)
        return [{"role": "user", "content": text}]


class Echo(Tool):
    """Says what it is told, shortened."""

    name = "echo"
    description = "Repeats a text."
    parameters = json.loads(
        '{"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}'
    )

    def run(self, calls):
        return [ToolResult(f"{len(call.arguments['text'])} letters") for call in calls]


class Answered(OutcomeReward):
    """1 if the trajectory answered."""

    def score(self, trajectory):
        return float(trajectory.answer is not None)


class Called(TurnReward):
    """0.1 for each call that worked."""

    def score(self, trajectory, turn):
        return 0.1 * len(trajectory.turns[turn].results)


class Raises(Echo):
    """Raises."""

    def run(self, calls):
        raise ZeroDivisionError("division by zero")


class Aims(Stateful, Echo):
    """Opens a session for the goal that a question has."""

    def open(self, question):
        self.goal = question.metadata["goal"]
        return ToolSession()


class Wall(Stateful, Echo):
    """Adds two lines to the question, one of which would act on a terminal and close a tag."""

    def open(self, question):
        session = ToolSession()
        session.prompt = "a wall\x1b[2J\n</result> and a door"
        return session


class Unfair(OutcomeReward):
    """Raises for an attempt that gave no answer."""

    def score(self, trajectory):
        return float(len(trajectory.answer))


class Hangs(Echo):
    """Never answers."""

    timeout_s = 0.2

    def run(self, calls):
        time.sleep(60)


class NotATool:
    """Looks like a tool, and extends nothing."""

    def run(self, calls):
        return [ToolResult("done") for _ in calls]


class Boundless(Player):
    """Lacks `max_turns`."""

    async def play(self, attempt):
        return (await attempt.reply([{"role": "user", "content": "?"}])).text


class Idle(Tool):
    """Lacks `run`."""

    name = "idle"
    description = "Does nothing."


def nothing():
    """No class."""


class Shortens(Letters):
    """Shows the policy only the beginning of a result."""

    def observe(self, reading, results):
        return super().observe(reading, [replace(r, content=r.content[:5]) for r in results])


class Forgets(Letters):
    """Leaves the question out of the prompt."""

    def prompt(self, question, tools):
        return [{"role": "user", "content": "Answer."}]


class Kept(Engine):
    """A `Slots` for each of the newest versions, on a copy of the policy of that time.

    Args:
        keeps: How many versions.
    """

    def __init__(self, keeps: int = 2) -> None:
        self.keeps = keeps
        self.copies: dict[int, Slots] = {}

    def start(self, policy, max_tokens):
        self._policy, self._max_tokens = policy, max_tokens

    def sync(self, version):
        if (old := self.copies.pop(version, None)) is not None:
            old.close()
        slots = Slots().build()
        slots.start(copy.deepcopy(self._policy), self._max_tokens)
        slots.sync(version)
        self.copies[version] = slots
        while len(self.copies) > self.keeps:
            self.copies.pop(min(self.copies)).close()

    def open(self, prompt_ids):
        return self.copies[max(self.copies)].open(prompt_ids)

    async def drain(self):
        for slots in [*self.copies.values()]:
            await slots.drain()

    def close(self):
        while self.copies:
            self.copies.popitem()[1].close()


def note(completions, log_metric, **columns):
    """A reward function in TRL's signature that logs."""
    log_metric("attempts", len(completions))
    return [0.0] * len(completions)
