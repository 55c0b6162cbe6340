"""Check of a player."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence

from turnrl.agent.attempt import Attempt, Rules, let_play
from turnrl.agent.conversation import Conversation
from turnrl.agent.toolbox import Toolbox, ToolSessions
from turnrl.testing.contract import on, require
from turnrl.testing.examples import QUESTION
from turnrl.types.acting import Player, Toolset
from turnrl.types.engine import Reply, Sampling
from turnrl.types.questions import Question
from turnrl.types.sessions import ToolSpec
from turnrl.types.trajectory import Message

_ROLES = {"system", "user", "assistant", "tool"}


def check_player(
    player: Player,
    replies: Sequence[str],
    tools: Sequence[Toolset] = (),
    question: Question = QUESTION,
) -> None:
    """Check a player: that it ends an attempt whatever the model writes, that attempts side by side
    do not mix, and that it stops when an attempt is over.

    Args:
        player: The player.
        replies: Texts of the model, in order, with which an attempt at the question ends by itself:
            with an answer, or by a tool.
        tools: The tools that it calls, with whatever they need at hand.
        question: What is asked.
    Raises:
        AssertionError: If a rule is broken, with the rule and the input.
    """
    name = type(player).__name__
    most = player.max_turns
    require(isinstance(most, int) and most >= 1, f"{name}.max_turns is {most!r}: give 1 or more")
    fits = isinstance(player.tags, tuple) and all(isinstance(tag, str) for tag in player.tags)
    require(fits, f"{name}.tags must be a tuple of texts, not {player.tags!r}")
    require(len(replies) <= most, f"{name}.max_turns is {most}, and there are more replies")

    alone = _play(player, [replies], tools, question)[0]
    with on(f"{name}.play with the replies {[*replies]!r}"):
        ended = alone.ended_by in ("answer", "tool")
        require(ended, f"ended by {alone.ended_by!r}, neither with an answer nor by a tool")
        require(len(alone.turns) == len(replies), f"took {len(alone.turns)} of these replies")
    draw = random.Random(0)
    noise = ["".join(map(chr, draw.choices(range(32, 0x3000), k=20))) for _ in range(most + 1)]
    for texts in ([""] * (most + 1), noise, [*replies[:-1], *noise]):
        _, other = _play(player, [texts, replies], tools, question)
        with on(f"{name}.play beside an attempt with the replies {texts!r}"):
            same = (other.turns, other.ended_by) == (alone.turns, alone.ended_by)
            require(same, "played differently: what belongs to one attempt must live in play")


def _play(
    player: Player, scripts: Sequence[Sequence[str]], tools: Sequence[Toolset], question: Question
) -> list[Attempt]:
    """Attempts side by side, each with a script of its own."""

    async def play(script: Sequence[str], box: Toolbox) -> Attempt:
        def converse(messages: Sequence[Message], specs: Sequence[ToolSpec]) -> Conversation:
            return _Scripted(messages, script, len(attempt.turns))

        rules = Rules(Sampling(1), player.max_turns, len(script), converse, str)
        attempt = Attempt(rules, question, ToolSessions(box), (0,))
        try:
            await attempt.sessions.open(question)
            with on(f"{type(player).__name__}.play with the replies {[*script]!r}"):
                await let_play(player, attempt)
        finally:
            await attempt.close()
        return attempt

    async def side_by_side() -> list[Attempt]:
        box = Toolbox(tools, str, 1000)
        for toolset in tools:
            await toolset.start()
        try:
            return [*await asyncio.gather(*(play(script, box) for script in scripts))]
        finally:
            for toolset in tools:
                await toolset.stop()

    return asyncio.run(side_by_side())


class _Scripted(Conversation):
    """A conversation whose model writes given texts; it has room for as many as there are."""

    def __init__(self, messages: Sequence[Message], script: Sequence[str], used: int) -> None:
        self._script, self.messages, self.tokens = script, (), used
        self.tell(messages)

    async def say(self, turn: int, sampling: Sampling) -> Reply:
        text = self._script[turn]
        self.messages += ({"role": "assistant", "content": text},)
        self.tokens = turn + 1
        return Reply(text)

    def tell(self, messages: Sequence[Message]) -> None:
        for message in messages:
            named = message.get("role") in _ROLES and isinstance(message.get("content"), str)
            require(named, f"gave the message {message!r}; it has a role of {_ROLES} and a text")
        self.messages += tuple(messages)

    def fork(self) -> Conversation:
        return copy.copy(self)

    def close(self) -> None:
        """There is nothing to free."""
