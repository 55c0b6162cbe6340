"""Environments of a few lines, and attempts of a scripted policy in them."""

from __future__ import annotations

import random

import pytest

from turnrl import PolicyMistake, Question, Rollout, ToolResult
from turnrl.testing import ScriptedEngine
from turnrl_environments import Gymnasium
from turnrl_segmenters import Action

QUESTION = Question("seed 0", "Go.", metadata={"seed": 0})


def play(
    chat, tool, says, questions=(QUESTION,), size=1, turns=8, probes=0, tool_name="step", **limits
):
    """The attempts of a scripted policy that acts by its texts."""
    policy = says if callable(says) else lambda session, turn: says[turn % len(says)]
    engine = ScriptedEngine(chat.tokenizer, policy)
    limits = {"max_turn_tokens": 40, "max_tokens": 4000, **limits}
    rollout = Rollout(Action(turns, "text", tool_name), [tool], **limits)
    rollout.check(chat)
    with rollout.live():
        attempts = rollout.begin(engine, chat, list(questions), size, (0,), probes).result()
    assert not engine.open_sessions
    return attempts


def play_one(chat, tool, says, **options):
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
