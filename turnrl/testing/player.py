"""Check of a player."""

from __future__ import annotations

import asyncio
import copy
import random
import warnings
from collections.abc import Sequence
from operator import ne

from turnrl.agent.agent import Agent
from turnrl.agent.attempt import Attempt
from turnrl.agent.conversation import Conversation
from turnrl.agent.player_loop import run_player
from turnrl.agent.running import on_loop
from turnrl.agent.toolbox import Toolbox
from turnrl.plugin.errors import RecipeError, check_at_least, check_attributes
from turnrl.testing.contract import Breach, reporting_breaches, require
from turnrl.testing.examples import QUESTION
from turnrl.types.acting import Player, Toolset
from turnrl.types.engine import Reply, Sampling
from turnrl.types.questions import Question
from turnrl.types.sessions import ToolSpec
from turnrl.types.trajectory import Message


def check_player(
    player: Player,
    replies: Sequence[str],
    tools: Sequence[Toolset] = (),
    question: Question = QUESTION,
) -> None:
    """Check a player: that it ends an attempt whatever the model writes, that attempts side by side
    do not mix, and that it stops when an attempt is over. Warn about failed
    calls, and about a history that probably should have continued.

    Args:
        player: The player.
        replies: Texts of the model, in order, with which an attempt at the question ends by itself:
            with an answer, or by a tool.
        tools: The tools that it calls. Everything they need must be at hand.
        question: The question.
    Raises:
        AssertionError: If a rule is broken, with the rule and the input.
    """
    name = type(player).__name__
    try:
        check_attributes(name, player, {"max_turns": "4"})
        check_at_least(1, f"{name}.", player, "max_turns", whole=True, optional=False)
    except RecipeError as error:
        raise Breach(str(error)) from None
    fits = isinstance(player.tags, tuple) and all(isinstance(tag, str) for tag in player.tags)
    require(fits, f"{name}.tags must be a tuple of texts, not {player.tags!r}")
    limit = player.max_turns
    require(len(replies) <= limit, f"{name}.max_turns is {limit}, and there are more replies")

    (alone,) = _play(player, [replies], tools, question)
    with reporting_breaches(f"{name}.play with the replies {[*replies]!r}"):
        seen = _describe_turns(alone)
        asked = "asked for another reply" if alone.ended_by == "length" else "returned None"
        require(
            alone.ended_by in ("answer", "tool"),
            f"{asked} after these replies, and ended neither with an answer nor by a tool. Give "
            f"replies with which it ends, or mend how it reads them. {seen}",
        )
        require(
            len(alone.turns) == len(replies),
            f"ended by {alone.ended_by!r} after {len(alone.turns)} of {len(replies)} replies. Give "
            f"those that it takes, or mend why it ends early. {seen}",
        )
        if hints := _hints(alone, tools):
            warnings.warn(f"{name}.play with the replies {[*replies]!r}: {hints}", stacklevel=2)
    draw = random.Random(0)
    noise = ["".join(map(chr, draw.choices(range(32, 0x3000), k=20))) for _ in range(limit + 1)]
    for texts in ([""] * (limit + 1), noise, [*replies[:-1], *noise]):
        _, other = _play(player, [texts, replies], tools, question)
        with reporting_breaches(f"{name}.play beside an attempt with the replies {texts!r}"):
            same = (other.turns, other.ended_by) == (alone.turns, alone.ended_by)
            require(same, "played differently: what belongs to one attempt must live in play")


def _describe_failures(attempt: Attempt) -> str:
    """Sentences about the calls that failed."""
    turns = enumerate(attempt.turns, 1)
    failed = [(k, r.content) for k, turn in turns for r in turn.results if not r.ok]
    return "".join(f" In turn {k} a call failed: {text!r}." for k, text in failed)


def _describe_turns(attempt: Attempt) -> str:
    """Sentences about the attempt's turns and calls."""
    calls = sum(len(turn.results) for turn in attempt.turns)
    return f"Turns: {len(attempt.turns)}, calls: {calls}.{_describe_failures(attempt)}"


def _hints(attempt: Attempt, tools: Sequence[Toolset]) -> str:
    """Hints at probable mistakes in an attempt that ended well."""
    hints = _describe_failures(attempt)
    if hints and not tools:
        hints += " Pass check_player the tools that it calls: tools=[...]."
    histories = [c for c in attempt.conversations if isinstance(c, _Scripted)]
    on = "Send every reply back word for word, and a message of the user or a tool after the last."
    for n, new in enumerate(histories[1:], 1):
        began = f" History {n + 1} began, because"
        for old in histories[:n]:
            differ = (two for two in zip(old.messages, new.opening, strict=False) if ne(*two))
            was, sent = next(differ, ({"role": ""}, {}))
            if was["role"] == "assistant":
                why = f"the model replied {was['content']!r}, and {sent!r} was sent back"
                return f"{hints}{began} {why}. {on}".strip()
            if not was["role"] and old.tools != new.tools:
                given = ", ".join(tool.name for tool in new.tools) or "none"
                why = f"its tools changed to {given}. Give each reply the same tools."
                return f"{hints}{began} {why}".strip()
    return hints.strip()


def _play(
    player: Player, scripts: Sequence[Sequence[str]], tools: Sequence[Toolset], question: Question
) -> list[Attempt]:
    """Attempts side by side, each with its own script."""

    async def play(script: Sequence[str], box: Toolbox) -> Attempt:
        attempt = Attempt(_ScriptedAgent(player.max_turns, script, box), question, (0,))
        try:
            await attempt.sessions.open(attempt.asked)
            with reporting_breaches(f"{type(player).__name__}.play with the replies {[*script]!r}"):
                await run_player(player, attempt)
        except Breach as breach:
            raise Breach(f"{breach}{_describe_failures(attempt)}") from breach.__cause__
        finally:
            await attempt.close()
        return attempt

    async def side_by_side() -> list[Attempt]:
        box = Toolbox(tools, str, 1000)
        for toolset in tools:
            await toolset.start()
        try:
            ends = await asyncio.gather(*(play(s, box) for s in scripts), return_exceptions=True)
        finally:
            for toolset in tools:
                await toolset.stop()
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return [end for end in ends if isinstance(end, Attempt)]

    return on_loop(side_by_side())


class _ScriptedAgent(Agent):
    """An agent whose model writes scripted texts, with room for exactly these."""

    sampling = Sampling(1)

    def __init__(self, max_turns: int, script: Sequence[str], box: Toolbox) -> None:
        self.max_turns, self.max_tokens, self.box = max_turns, len(script), box
        self.script, self.written = script, 0

    def converse(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Conversation:
        return _Scripted(self, messages, tools)

    def neutralize(self, text: str) -> str:
        return text


class _Scripted(Conversation):
    """A history of a scripted agent, whose tokens are the texts written so far."""

    def __init__(
        self, agent: _ScriptedAgent, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> None:
        self._agent, self.messages, self.tokens = agent, (), agent.written
        self.tools = tuple(tools)
        self.append_messages(messages)
        self.opening: tuple[Message, ...] = tuple(messages)

    async def take_turn(self, turn: int, sampling: Sampling) -> Reply:
        text = self._agent.script[turn]
        self.messages += ({"role": "assistant", "content": text},)
        self.tokens = self._agent.written = turn + 1
        return Reply(text)

    def append_messages(self, messages: Sequence[Message]) -> None:
        self.messages += tuple(messages)

    def fork(self) -> Conversation:
        return copy.copy(self)

    def close(self) -> None:
        """There is nothing to free."""
