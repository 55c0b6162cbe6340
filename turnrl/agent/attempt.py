"""An attempt under way: its histories at the sampler, its sessions at the tools, its turns so far.

A player sees it as `turnrl.Attempt`; the loop of a segmenter drives it by the same methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from turnrl.agent.agent import Agent
from turnrl.agent.conversation import Conversation
from turnrl.agent.messages import to_plain
from turnrl.agent.toolbox import ToolSessions
from turnrl.plugin.errors import DataError, PluginError, describe_value
from turnrl.types import (
    AttemptOver,
    Ending,
    Message,
    Question,
    Reading,
    Reply,
    ToolCall,
    ToolFigures,
    ToolResult,
    ToolSpec,
    Trajectory,
    Turn,
)
from turnrl.types.streams import stream_seed

REFUSALS = 10
"""After this many refused actions in an attempt that is over, its player counts as stuck."""


@final
class Attempt:
    """One attempt at a question, from its opening to its end.

    Args:
        agent: The model, the tools and the limits.
        posed: The question as the data have it, not neutralised.
        key: Integers that name the attempt's random streams; a turn's number is added.
        sessions: Its sessions at the tools, for a branch of another attempt; None for new ones.
        begins: The first turn of its own, for a branch of another attempt.
    """

    def __init__(
        self,
        agent: Agent,
        posed: Question,
        key: tuple[int, ...],
        sessions: ToolSessions | None = None,
        begins: int = 0,
    ) -> None:
        self.agent, self.posed, self.key = agent, posed, key
        self.asked = posed.copied()  # the attempt's own, which its tools may change
        self.sessions = agent.sessions() if sessions is None else sessions
        self.begins = begins
        self.conversations: list[Conversation] = []
        self.turns: tuple[Turn, ...] = ()
        self.ended_by: Ending | None = None
        self.figures: ToolFigures = {}
        self.fault: Exception | None = None  # the first fault of the world or of the player
        self._calls: tuple[ToolCall, ...] = ()  # answered calls of the last turn
        self._called = 0  # number of calls in the last turn, answered or not
        self._running: set[asyncio.Task[Sequence[ToolResult]]] = set()
        self.sampling = False  # True while a turn is sampled
        self.stuck = asyncio.Event()  # set once the player does not stop
        self._refused = 0

    @property
    def question(self) -> Question:
        """See `turnrl.Attempt.question`."""
        inert, asked = self.agent.neutralize, self.asked
        return replace(asked, text=inert(asked.text), system=inert(asked.system))

    @property
    def opening(self) -> str:
        """See `turnrl.Attempt.opening`."""
        return self.agent.neutralize(self.sessions.prompt)

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools, including those that its sessions bring."""
        return self.sessions.specs

    # ------------------------------------------------------------------ what a player does

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        stop: Sequence[str] = (),
    ) -> Reply:
        """See `turnrl.Attempt.reply`."""
        await self.wait_for_calls()
        if len(self.turns) >= self.agent.max_turns:
            self.end("turns")
        await self._refuse_if_over()
        try:
            conversation = self._history_of(_copy_messages(messages), tools)
            if conversation.tokens >= self.agent.max_tokens:
                if not self.turns:
                    raise self.room_error(conversation.tokens)
                self.end("length")
                raise AttemptOver
            return await self.take_turn(
                conversation, (stop,) if isinstance(stop, str) else tuple(stop)
            )
        except Exception as fault:
            self.fault = self.fault or fault
            raise

    async def _refuse_if_over(self) -> None:
        """Raise the attempt's fault, or `AttemptOver` if the attempt is over."""
        if self.ended_by is None and self.fault is None:
            return
        self._refused += 1
        if self._refused > REFUSALS:  # a player that catches even this would go on for ever
            self.stuck.set()
            await asyncio.get_running_loop().create_future()
        raise self.fault or AttemptOver

    def room_error(self, tokens: int) -> DataError:
        """The error for a prompt of `tokens` tokens, which leaves no room to act."""
        return DataError(
            f"question {self.asked.id!r} makes a prompt of {tokens} tokens: no room within "
            f"model.rollout.max_tokens = {self.agent.max_tokens}. Raise it, or leave the question "
            "out."
        )

    def _history_of(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Conversation:
        """The history that these messages extend with the same tools, the latest first, or a new
        one."""
        for conversation in reversed(self.conversations):
            if new_messages := conversation.messages_beyond(messages, tools):
                conversation.append_messages(new_messages)
                return conversation
        self.conversations.append(self.agent.converse(messages, tools))
        return self.conversations[-1]

    async def take_turn(
        self, conversation: Conversation, stop: tuple[str, ...], forced: tuple[int, ...] = ()
    ) -> Reply:
        """Sample the next turn in a history that has room.

        Args:
            conversation: The history.
            stop: Texts that end the turn.
            forced: Token ids that replace the first draws.
        """
        if self.sampling:
            raise PluginError(
                "a player asked for a reply while another is sampled. Await the first."
            )
        sampling, turn = self.agent.sampling, len(self.turns)
        room = min(sampling.max_tokens, self.agent.max_tokens - conversation.tokens)
        seed = stream_seed(*self.key, turn)
        self.sampling = True
        try:
            reply = await conversation.take_turn(
                turn,
                replace(sampling, max_tokens=room, seed=seed, stop=stop, forced_ids=forced),
            )
        except BaseException:  # cancelled, for example: nobody knows what was sampled until then
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
            raise self._record_misuse(
                "a player called a tool while a reply is sampled, so nobody can tell whose turn "
                "the call is. Await the call before you ask for the reply."
            )
        wrong = [c for c in calls if not isinstance(c, ToolCall)] if _is_list(calls) else [calls]
        if wrong:
            raise self._record_misuse(
                f"a player gave {describe_value(wrong[0])} to attempt.call. Give it a list of "
                'calls, such as [turnrl.ToolCall("search", {"query": "..."})].'
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
        # shielded, so that the calls finish even if the player is cancelled: what they do in the
        # world is part of the attempt
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
        """Run calls of the last turn, and record their results in the turn."""
        try:
            results = await self.sessions.answer_calls(calls, len(self.turns) - 1, earlier, unread)
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

    async def wait_for_calls(self) -> None:
        """Wait until no call is under way."""
        while self._running:
            await asyncio.wait(self._running)

    def _last(self, verb: str) -> Turn:
        """The last turn, for `attempt.<verb>`; a fault of the player if there is none."""
        if not self.turns:
            raise self._record_misuse(
                f"a player used attempt.{verb} before its first reply, so there is no turn that it "
                "belongs to. Ask for a reply first."
            )
        return self.turns[-1]

    def _record_misuse(self, what: str) -> PluginError:
        """Record a fault of the player. It counts even if the player catches the error."""
        self.fault = PluginError(what)
        return self.fault

    def _replace_last(self, turn: Turn) -> None:
        self.turns = (*self.turns[:-1], turn)

    def end(self, why: Ending, answer: str | None = None) -> None:
        """End the attempt, unless it has ended already.

        Args:
            why: Why it ends.
            answer: The final answer, recorded even if the attempt has ended already.
        """
        if answer is not None:
            last = self.turns[-1]
            self._replace_last(replace(last, reading=replace(last.reading, answer=answer)))
        self.ended_by = self.ended_by or why

    # ------------------------------------------------------------------ its life

    async def fork(self, key: tuple[int, ...]) -> Attempt:
        """A branch that goes on from here with random streams of its own.

        Raises:
            ToolError: If a tool's session cannot be copied.
        """
        asked = self.asked.copied()
        sessions = await self.sessions.fork(asked)
        branch = Attempt(self.agent, self.posed, key, sessions, len(self.turns))
        branch.asked = asked
        branch.turns = self.turns
        try:
            branch.conversations = [conversation.fork() for conversation in self.conversations]
        except BaseException:
            await sessions.close()
            raise
        return branch

    async def close(self) -> None:
        """Free what the sampler and the tools hold for the attempt, and keep the figures that the
        tools' sessions return."""
        for run in self._running:
            run.cancel()
        for conversation in self.conversations:
            conversation.close()  # first: it holds a lot of device memory
        self.figures = await self.sessions.close() or self.figures

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory of an attempt that has ended."""
        assert self.ended_by is not None, "the attempt goes on"
        *before, last = self.turns
        # nobody read the results of the last turn, so their texts are dropped; but a step in the
        # world did happen, so only calls that act can keep their ok
        acted = [self.sessions.has_acting_call([call]) for call in last.reading.calls]
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
            tools=tuple(spec.name for spec in self.tools),
        )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _copy_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Copies of a player's messages, because the player may change its own later.

    Raises:
        PluginError: If they are not messages, or the last one is the assistant's.
    """
    example = '[{"role": "user", "content": "Who wrote it?"}]'
    if not _is_list(messages) or not messages:
        what = describe_value(messages) if messages else "no messages"
        raise PluginError(
            f"a player gave {what} to attempt.reply. Give it a list of messages, such as {example}."
        )
    checked = tuple(map(to_plain, messages))
    if messages[-1]["role"] == "assistant":
        raise PluginError(
            "a player asked for a reply to a message of the assistant. Add what the model is to "
            "reply to, a message of role user or tool."
        )
    return checked
