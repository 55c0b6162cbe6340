"""An attempt under way: its histories at the sampler, its sessions at the tools, its turns so far.

A player sees it as `turnrl.Attempt`; the loop of a turn scheme drives it by the same methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from turnrl.agent.conversation import Conversation
from turnrl.agent.toolbox import ToolSessions
from turnrl.errors import DataError, PluginError, kind_of
from turnrl.streams import stream_seed
from turnrl.types import (
    AttemptOver,
    Ending,
    Message,
    Question,
    Reading,
    Reply,
    Sampling,
    ToolCall,
    ToolFigures,
    ToolResult,
    ToolSpec,
    Trajectory,
    Turn,
)

_ROLES = ("system", "user", "assistant", "tool")
REFUSALS = 10
"""Actions of an attempt that is over, after which its player is taken to ask for ever."""


@dataclass(frozen=True)
class Rules:
    """What all attempts of a collection share.

    Args:
        sampling: How to sample a turn, of at most so many tokens.
        max_turns: The most turns of an attempt.
        max_tokens: The most tokens of each of its histories.
        converse: Opens a history with these messages; the chat template describes the tools.
        inert: Neutralises tags and control tokens in a text that a player reads.
    """

    sampling: Sampling
    max_turns: int
    max_tokens: int
    converse: Callable[[Sequence[Message], Sequence[ToolSpec]], Conversation]
    inert: Callable[[str], str]


@final
class Attempt:
    """One attempt at a question, from its opening to its end.

    Args:
        rules: The limits, and what opens histories.
        asked: What is asked, as the data have it.
        sessions: Its place at the tools.
        seed: Integers that name its random streams; a turn's number is added.
        begins: Its first turn of its own, if it left another attempt.
    """

    def __init__(
        self,
        rules: Rules,
        asked: Question,
        sessions: ToolSessions,
        seed: tuple[int, ...],
        begins: int = 0,
    ) -> None:
        self.rules, self.asked, self.sessions = rules, asked, sessions
        self.seed, self.begins = seed, begins
        self.conversations: list[Conversation] = []
        self.turns: tuple[Turn, ...] = ()
        self.ended_by: Ending | None = None
        self.figures: ToolFigures = {}
        self.fault: Exception | None = None  # of the world or of the player, once there is one
        self.stuck: asyncio.Future[None] | None = None  # done when its player does not stop
        self._calls: tuple[ToolCall, ...] = ()  # of the last turn, as far as they were answered
        self._called = 0  # calls of the last turn, answered or not
        self._running: set[asyncio.Task[Sequence[ToolResult]]] = set()
        self.sampling = False  # whether a turn is being sampled
        self._refused = 0

    @property
    def question(self) -> Question:
        """See `turnrl.Attempt.question`."""
        inert, asked = self.rules.inert, self.asked
        return replace(asked, text=inert(asked.text), system=inert(asked.system))

    @property
    def opening(self) -> str:
        """See `turnrl.Attempt.opening`."""
        return self.rules.inert(self.sessions.prompt)

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools, its sessions' own included."""
        return self.sessions.specs

    # ------------------------------------------------------------------ what a player does

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        stop: Sequence[str] = (),
    ) -> Reply:
        """See `turnrl.Attempt.reply`."""
        await self.settled()
        if len(self.turns) >= self.rules.max_turns:
            self.end("turns")
        await self._refuse_if_over()
        try:
            conversation = self._history_of(_checked(messages), tools)
            if conversation.tokens >= self.rules.max_tokens:
                if not self.turns:
                    raise self.no_room(conversation.tokens)
                self.end("length")
                raise AttemptOver
            return await self.say(conversation, (stop,) if isinstance(stop, str) else tuple(stop))
        except Exception as fault:
            self.fault = self.fault or fault
            raise

    async def _refuse_if_over(self) -> None:
        """Raise what stands in the way of another action, if anything does.

        A player that catches even that, as a bare `except` does, could ask for ever and never let
        the event loop go. It waits here from some time on, and `let_play` leaves it.
        """
        if self.ended_by is None and self.fault is None:
            return
        self._refused += 1
        if self._refused > REFUSALS and self.stuck is not None:
            if not self.stuck.done():
                self.stuck.set_result(None)
            await asyncio.get_running_loop().create_future()
        raise self.fault or AttemptOver

    def no_room(self, tokens: int) -> DataError:
        """The error that a prompt of so many tokens makes."""
        return DataError(
            f"question {self.asked.id!r} makes a prompt of {tokens} tokens: no room within "
            f"model.rollout.max_tokens = {self.rules.max_tokens}. Raise it, or leave it out."
        )

    def _history_of(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Conversation:
        """The history that these messages extend, the latest first, or a new one."""
        for conversation in reversed(self.conversations):
            if more := conversation.beyond(messages):
                conversation.tell(more)
                return conversation
        self.conversations.append(self.rules.converse(messages, tools))
        return self.conversations[-1]

    async def say(
        self, conversation: Conversation, stop: tuple[str, ...], forced: tuple[int, ...] = ()
    ) -> Reply:
        """Sample the next turn in a history that has room.

        Args:
            conversation: The history.
            stop: Texts that end the turn.
            forced: Tokens to take in place of the first draws.
        """
        if self.sampling:
            raise PluginError(
                "a player asked for a reply while another is sampled. Await the first."
            )
        rules, turn = self.rules, len(self.turns)
        most = min(rules.sampling.max_tokens, rules.max_tokens - conversation.tokens)
        seed = stream_seed(*self.seed, turn)
        self.sampling = True
        try:
            reply = await conversation.say(
                turn,
                replace(rules.sampling, max_tokens=most, seed=seed, stop=stop, forced_ids=forced),
            )
        except BaseException:  # cancelled, for example: what was sampled until then is not known
            conversation.broken = True
            raise
        finally:
            self.sampling = False
        self._calls, self._called = (), 0
        self.turns += (Turn(reply.text, cut=reply.cut),)
        return reply

    def read(self, reading: Reading) -> None:
        """See `turnrl.Attempt.read`."""
        last = self._last("read")
        self._replace_last(
            replace(last, reading=replace(reading, calls=self._calls or reading.calls))
        )

    async def call(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        """See `turnrl.Attempt.call`."""
        self._last("call")
        await self._refuse_if_over()
        if self.sampling:
            raise self._misused(
                "a player called a tool while a reply is sampled, so nobody can tell whose turn "
                "the call is. Await the call before you ask for the reply."
            )
        wrong = [c for c in calls if not isinstance(c, ToolCall)] if _is_list(calls) else [calls]
        if wrong:
            raise self._misused(
                f"a player gave {kind_of(wrong[0])} to attempt.call. Give it a list of calls, such "
                'as [turnrl.ToolCall("search", {"query": "..."})].'
            )
        return await self.run_calls(calls)

    async def run_calls(
        self, calls: Sequence[ToolCall], unread: bool = False
    ) -> tuple[ToolResult, ...]:
        """Run calls of the last turn.

        Args:
            calls: The calls.
            unread: Nobody will read the results, so only calls that act on the world are run.
        """
        # it ends even if a player is in a hurry: what was done in the world is part of the attempt
        run = asyncio.create_task(self._run(calls, self._called, unread))
        self._called += len(calls)
        self._running.add(run)
        run.add_done_callback(self._running.discard)
        results = await asyncio.shield(run)
        if self.fault is not None:
            raise self.fault
        return results

    async def _run(
        self, calls: Sequence[ToolCall], earlier: int, unread: bool
    ) -> tuple[ToolResult, ...]:
        """Run calls of the last turn, and note what came of them."""
        try:
            results = await self.sessions.answer(calls, len(self.turns) - 1, earlier, unread)
        except Exception as fault:
            self.fault = self.fault or fault
            return ()
        self._calls += tuple(calls)
        last = self.turns[-1]
        self._replace_last(
            replace(
                last,
                reading=replace(last.reading, calls=self._calls),
                results=(*last.results, *results),
                reward=last.reward + sum(result.reward for result in results),
            )
        )
        if any(result.done for result in results):
            self.end("tool")
        return results

    async def settled(self) -> None:
        """Wait until no call is under way."""
        while self._running:
            await asyncio.wait(self._running)

    def _last(self, verb: str) -> Turn:
        """The last turn, which a player reads or acts on."""
        if not self.turns:
            raise self._misused(
                f"a player used attempt.{verb} before its first reply, so there is no turn that it "
                "belongs to. Ask for a reply first."
            )
        return self.turns[-1]

    def _misused(self, what: str) -> PluginError:
        """The fault of a player, which counts even if the player catches it."""
        self.fault = PluginError(what)
        return self.fault

    def _replace_last(self, turn: Turn) -> None:
        self.turns = (*self.turns[:-1], turn)

    def end(self, why: Ending, answer: str | None = None) -> None:
        """End it, unless it has ended.

        Args:
            why: Why it ends.
            answer: The final answer, which is noted in any case.
        """
        if answer is not None:
            last = self.turns[-1]
            self._replace_last(replace(last, reading=replace(last.reading, answer=answer)))
        self.ended_by = self.ended_by or why

    # ------------------------------------------------------------------ its life

    async def fork(self, seed: tuple[int, ...]) -> Attempt:
        """A branch that goes on from here with random streams of its own.

        Raises:
            ToolError: If a tool's session cannot be copied.
        """
        sessions = await self.sessions.fork()
        branch = Attempt(self.rules, self.asked, sessions, seed, len(self.turns))
        branch.turns = self.turns
        try:
            branch.conversations = [conversation.fork() for conversation in self.conversations]
        except BaseException:
            await sessions.close()
            raise
        return branch

    async def close(self) -> None:
        """Give back what the sampler and the tools hold for it; keep the figures that the tools'
        sessions hand over."""
        for run in self._running:
            run.cancel()
        for conversation in self.conversations:
            conversation.close()  # at once: what it keeps on the device is large
        self.figures = await self.sessions.close() or self.figures

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory that came of it, once it has ended."""
        assert self.ended_by is not None, "the attempt goes on"
        *before, last = self.turns
        # nobody read the results of the last turn; a step in the world happened all the same, and
        # it alone counts as one
        acted = [self.sessions.acts([call]) for call in last.reading.calls]
        results: tuple[ToolResult, ...] = ()
        if any(acted):
            pairs = zip(last.results, acted, strict=False)
            results = tuple(replace(r.as_unread(), ok=r.ok and changed) for r, changed in pairs)
        turns = (*before, replace(last, results=results))
        samples = tuple(c.sample for c in self.conversations if c.sample and c.sample.sampled)
        return Trajectory(
            question=self.asked,
            turns=turns,
            ended_by=self.ended_by,
            samples=samples,
            begins=self.begins,
            figures=self.figures,
            opening=self.opening,
        )


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _checked(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Copies of messages that a player gave, which may change its own later.

    Raises:
        PluginError: If they are no messages, or leave nothing to reply to.
    """
    example = '[{"role": "user", "content": "Who wrote it?"}]'
    if not _is_list(messages) or not messages:
        what = kind_of(messages) if messages else "no messages"
        raise PluginError(
            f"a player gave {what} to attempt.reply. Give it a list of messages, such as {example}."
        )
    for message in messages:
        if (
            not isinstance(message, dict)
            or message.get("role") not in _ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise PluginError(
                f"a player gave the message {message!r:.200} to attempt.reply. A message has a "
                f"role ({', '.join(_ROLES)}) and a text, such as {example}."
            )
    if messages[-1]["role"] == "assistant":
        raise PluginError(
            "a player asked for a reply to a message of the assistant. Add what the model is to "
            "reply to, a message of role user or tool."
        )
    return tuple(message.copy() for message in messages)
