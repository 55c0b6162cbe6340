"""A scheme of turns, a tool and a scripted policy, with which rollouts are played."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter as Tally

import pytest

from turnrl import (
    PolicyMistake,
    Question,
    Reading,
    Rollout,
    Segmenter,
    Stateful,
    Tool,
    ToolCall,
    ToolResult,
)
from turnrl.testing import ScriptedEngine
from turnrl.types import ForkableToolSession
from turnrl_environments import Gymnasium
from turnrl_segmenters import Action

QUESTION = Question("q1", "What is the capital of France?", ("Paris",))
CALL = '[look {"query": "x"}]'


class Brackets(Segmenter):
    """[name {json}] calls a tool, =text answers; a scheme unlike the bundled ones."""

    stop = ("]",)
    tags = ("result",)

    def __init__(self, max_turns: int = 3) -> None:
        self.max_turns = max_turns

    def prompt(self, question, tools):
        return [{"role": "user", "content": question.text}]

    def read(self, text, turn, cut):
        if cut:
            return Reading(format_error="cut short")
        if text.startswith("="):
            return Reading(answer=text[1:])
        calls = []
        for part in text.split(";"):
            name, _, body = part.strip("[]").partition(" ")
            try:
                arguments = dict(json.loads(body))
                calls.append(ToolCall(name, arguments, None if name else "no name"))
            except (ValueError, TypeError, RecursionError) as error:
                calls.append(ToolCall("", error=f"bad JSON: {error}"))
        return Reading(tuple(calls))

    def observe(self, reading, results):
        shown = [f"<result>{r.content}</result>" for r in results]
        return [{"role": "user", "content": "".join(shown) or "call or answer"}]


class Look(Tool):
    """Looks things up, and keeps the queries of each batch of calls."""

    name = "look"
    description = "Looks things up."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, reply=lambda query: f"about {query}", timeout_s=5.0):
        self.reply = reply
        self.timeout_s = timeout_s
        self.batches = []

    def run(self, calls):
        self.batches.append([c.arguments["query"] for c in calls])
        return [ToolResult(self.reply(c.arguments["query"])) for c in calls]


def collect(rollout, chat, says, questions=(QUESTION,), group_size=1):
    """The groups of a rollout. `says` is the policy: a function of the number of the attempt and of
    the turn."""
    groups, _ = collect_with_engine(rollout, chat, says, questions, group_size)
    return groups


def collect_with_engine(rollout, chat, says, questions=(QUESTION,), group_size=1):
    """The groups of a rollout, and the engine that sampled them."""
    engine = ScriptedEngine(chat.tokenizer, says)
    return rollout.play(engine, chat, questions, group_size, (0,)), engine


def play_one(rollout, chat, says):
    """The trajectory of one attempt at one question."""
    ((trajectory,),) = collect(rollout, chat, says)
    return trajectory


def encode(chat, text):
    """The tokens of a text."""
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


def say(*texts):
    """A policy that says these texts, one in each turn of each attempt."""
    return lambda session, turn: texts[turn]


FORGETFUL_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'].split('</think>')[-1] if not loop.last else message['content'] }}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that drops thoughts from every message but the last."""


class Count(ForkableToolSession):
    """A number; it notes how it is closed."""

    def __init__(self, tool, number=0):
        self.tool, self.number = tool, number
        tool.opened.append(self)

    def fork(self):
        return type(self)(self.tool, self.number)

    def close(self):
        self.tool.closed.append(self)


class PatientCount(Count):
    async def fork(self):
        await asyncio.sleep(0.001)
        return Count.fork(self)

    async def close(self):
        await asyncio.sleep(0.02)
        self.tool.closed.append(self)


class Counter(Stateful, Tool):
    """Adds to a number that each trajectory has for itself."""

    name = "add"
    description = "Add to your number."
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
    }
    session = Count
    timeout_s = 5.0

    def __init__(self):
        self.opened, self.closed, self.batches = [], [], []
        self.busy = Tally()

    def open(self, question):
        return self.session(self)

    def run(self, calls):
        self.batches.append([call.session for call in calls])
        self.busy.update({call.session for call in calls})
        assert max(self.busy.values(), default=0) <= 1, "a session is in two batches at once"
        results = [self.add(call) for call in calls]
        self.busy.subtract({call.session for call in calls})
        return results

    def add(self, call):
        call.session.number += call.arguments["n"]
        return ToolResult(str(call.session.number))

    def check_closed(self, count):
        """Every session was closed, once."""
        assert len(self.opened) == count
        assert Tally(map(id, self.closed)) == Tally(map(id, self.opened))


class PatientCounter(Counter):
    session = PatientCount

    async def open(self, question):
        await asyncio.sleep(0.002)
        return Counter.open(self, question)

    async def run(self, calls):
        await asyncio.sleep(0.002)
        return Counter.run(self, calls)


class SlowlyMade(Counter):
    """Plain methods that give awaitables."""

    def open(self, question):
        time.sleep(0.005)
        return PatientCounter.open(self, question)

    def run(self, calls):
        return PatientCounter.run(self, calls)


SEEDED = Question("seed 0", "Go.", metadata={"seed": 0})


def play(
    chat, tool, says, questions=(SEEDED,), size=1, turns=8, probes=0, tool_name="step", **limits
):
    """The attempts of a scripted policy that acts by its texts."""
    policy = says if callable(says) else lambda session, turn: says[turn % len(says)]
    engine = ScriptedEngine(chat.tokenizer, policy)
    limits = {"max_turn_tokens": 40, "max_tokens": 4000, **limits}
    rollout = Rollout(Action(turns, "text", tool_name), [tool], **limits)
    rollout.check(chat)
    with rollout.running_tools():
        attempts = rollout.begin(engine, chat, list(questions), size, (0,), probes).result()
    assert not engine.open_sessions
    return attempts


def play_episode(chat, tool, says, **options):
    """The only attempt."""
    ((trajectory,),) = play(chat, tool, says, **options).trajectories
    return trajectory


class Room:
    """An environment with the methods of Gymnasium's class, which it does not extend.

    Args:
        step: What `step` returns, or a function of the room and the action that returns it.
        reset: What `reset` returns, or a function that returns it.
        close: Called by `close`.
    """

    made: list[Room] = []

    def __init__(self, step=None, reset=("a room", {}), close=None):
        self.gives, self.begins, self.ends = step, reset, close
        self.turn = self.closed = 0
        Room.made.append(self)

    def reset(self, seed=None):
        self.seed = seed
        return self.begins() if callable(self.begins) else self.begins

    def step(self, action):
        self.turn += 1
        if callable(self.gives):
            return self.gives(self, action)
        return self.gives or (f"{action}, {self.turn}", 1.0, False, False, {})

    def close(self):
        self.closed += 1
        if self.ends is not None:
            self.ends()


@pytest.fixture(autouse=True)
def rooms():
    """The rooms that a test has made."""
    Room.made.clear()
    return Room.made


def room(**options):
    """The tool of a policy that acts in a `Room`."""
    return Gymnasium(make=Room, options=options)


class Guess:
    """Guess a number from 0 to 9."""

    def __init__(self, top: int = 9) -> None:
        self.top = top

    def reset(self, seed: int) -> str:
        self.number, self.guesses = random.Random(seed).randint(0, self.top), 0
        return f"A number from 0 to {self.top}."

    def guess(self, number: int) -> ToolResult:
        """Guess the number.

        Args:
            number: Your guess.
        """
        if number > self.top:
            raise PolicyMistake("too large")
        if number < 0:
            raise ValueError("negative")
        self.guesses += 1
        right = number == self.number
        return ToolResult("yes" if right else "no", reward=float(right) - 0.1, done=right)

    def get_reward(self) -> float:
        return 1 / self.guesses
