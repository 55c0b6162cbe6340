"""Attempts at a question whose turns are made by hand, and a reward for their calls."""

from __future__ import annotations

from trajectories import sampled_turn, trajectory
from turnrl import Question, Reading, ToolCall, TurnReward

QUESTION = Question("q", "The capital?", ("Paris",))
CALL = ToolCall("search", {"query": "capital"})


def turn(calls=0, results=(), answer=None, error=None, tokens=2):
    """A turn of so many tokens that makes so many calls, or answers, or is not well formed."""
    reading = Reading((CALL,) * calls, answer, error)
    return sampled_turn("", (7,) * tokens, (-0.5,) * tokens, reading, tuple(results))


def attempt(*turns, stop="turns"):
    """A trajectory of these turns."""
    return trajectory(QUESTION, (1, 2, 3), turns, stop)


class Calls(TurnReward):
    """0.1 for each call of the turn, and its number."""

    def score(self, trajectory, turn):
        return 0.1 * len(trajectory.turns[turn].reading.calls) + turn
