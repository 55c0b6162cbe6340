"""An attempt under way: its histories at the sampler, its sessions at the tools, its turns so far.

A player sees it as `turnrl.Attempt`; the loop of a turn scheme drives it by the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from turnrl.agent.conversation import Conversation
from turnrl.agent.running import first_error
from turnrl.agent.toolbox import ToolSessions
from turnrl.errors import PluginError, blaming, kind_of
from turnrl.types import (
    AttemptOver,
    Ending,
    Message,
    Player,
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


class Branch(NamedTuple):
    """Where a probe left another attempt.

    Args:
        turn: The first turn of its own.
        seed: The seed of the other attempt, which names the random streams of the turns before.
    """

    turn: int
    seed: tuple[int, ...]


@final
class Attempt:
    """One attempt at a question, from its opening to its end.

    Args:
        rules: The limits, and what opens histories.
        asked: What is asked, as the data have it.
        sessions: Its place at the tools.
        seed: Integers that name its random streams; a turn's number is added.
        branch: Where it left another attempt, if it is a probe.
    """

    def __init__(
        self,
        rules: Rules,
        asked: Question,
        sessions: ToolSessions,
        seed: tuple[int, ...],
        branch: Branch | None = None,
    ) -> None:
        self.rules, self.asked, self.sessions = rules, asked, sessions
        self.seed, self.branch = seed, branch
        self.conversations: list[Conversation] = []
        self.turns: tuple[Turn, ...] = ()
        self.ended_by: Ending | None = None
        self.figures: ToolFigures = {}
        self._calls: tuple[ToolCall, ...] = ()  # of the last turn, as far as they were run
        self._samples = False

    @property
    def question(self) -> Question:
        """See `turnrl.Attempt.question`."""
        return replace(self.asked, text=self.rules.inert(self.asked.text))

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
        if len(self.turns) >= self.rules.max_turns:
            self.end("turns")
        if self.ended_by is not None:
            raise AttemptOver
        conversation = self._history_of(messages, tools)
        if conversation.tokens >= self.rules.max_tokens:
            self.end("length")
            raise AttemptOver
        return await self.say(conversation, tuple(stop))

    def _history_of(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Conversation:
        """The history that these messages extend, the latest first, or a new one."""
        for conversation in reversed(self.conversations):
            if more := conversation.beyond(messages):
                conversation.tell(more)
                return conversation
        self.conversations.append(self.rules.converse(messages, tools))
        return self.conversations[-1]

    async def say(self, conversation: Conversation, stop: tuple[str, ...]) -> Reply:
        """Sample the next turn in a history that has room."""
        if self._samples:
            raise PluginError(
                "a player asked for a reply while another is sampled. Await the first."
            )
        rules, turn = self.rules, len(self.turns)
        most = min(rules.sampling.max_tokens, rules.max_tokens - conversation.tokens)
        # a probe that has to begin again takes the turns before its own with the other's numbers
        before = self.branch is not None and turn < self.branch.turn
        seed = stream_seed(*(self.branch.seed if self.branch and before else self.seed), turn)
        self._samples = True
        try:
            reply = await conversation.say(
                turn, replace(rules.sampling, max_tokens=most, seed=seed, stop=stop)
            )
        finally:
            self._samples = False
        self._calls = ()
        self.turns += (Turn(reply.text, cut=reply.cut),)
        return reply

    def read(self, reading: Reading) -> None:
        """See `turnrl.Attempt.read`."""
        last = self._last("read")
        self._last_is(replace(last, reading=replace(reading, calls=self._calls or reading.calls)))

    async def call(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        """See `turnrl.Attempt.call`."""
        self._last("call")
        if self.ended_by is not None:
            raise AttemptOver
        results = await self.sessions.answer(calls, len(self.turns) - 1, len(self._calls))
        self._calls += tuple(calls)
        last = self.turns[-1]
        self._last_is(
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

    def _last(self, verb: str) -> Turn:
        """The last turn, which a player reads or acts on."""
        if not self.turns:
            raise PluginError(
                f"a player used attempt.{verb} before its first reply, so there is no turn that it "
                "belongs to. Ask for a reply first."
            )
        return self.turns[-1]

    def _last_is(self, turn: Turn) -> None:
        self.turns = (*self.turns[:-1], turn)

    def end(self, why: Ending, answer: str | None = None) -> None:
        """End it, unless it has ended.

        Args:
            why: Why it ends.
            answer: The final answer, which is noted in any case.
        """
        if answer is not None:
            last = self.turns[-1]
            self._last_is(replace(last, reading=replace(last.reading, answer=answer)))
        self.ended_by = self.ended_by or why

    # ------------------------------------------------------------------ its life

    async def fork(self, seed: tuple[int, ...]) -> Attempt:
        """A branch that goes on from here with random streams of its own.

        Raises:
            ToolError: If a tool's session cannot be copied.
        """
        sessions = await self.sessions.fork()
        branch = Attempt(self.rules, self.asked, sessions, seed, Branch(len(self.turns), self.seed))
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
        for conversation in self.conversations:
            conversation.close()  # at once: what it keeps on the device is large
        self.figures = await self.sessions.close() or self.figures

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory that came of it, once it has ended."""
        assert self.ended_by is not None, "the attempt goes on"
        *before, last = self.turns
        # nobody read the results of the last turn; a step in the world happened all the same
        acted = self.sessions.acted(last.reading.calls)
        results = tuple(map(_unread, last.results)) if acted else ()
        turns = (*before, replace(last, results=results))
        samples = tuple(c.sample for c in self.conversations if c.sample is not None)
        begins = self.branch.turn if self.branch else 0
        return Trajectory(self.asked, turns, self.ended_by, samples, begins, self.figures)


async def let_play(player: Player, attempt: Attempt) -> None:
    """Have a player play an attempt to its end.

    Raises:
        PluginError: If the player raises, or breaks its contract.
    """
    what = f"{type(player).__name__}.play on question {attempt.asked.id!r}"
    answer: str | None = None
    try:
        with blaming(PluginError, what, "Fix the player."):
            try:
                answer = await player.play(attempt)
            except BaseExceptionGroup as group:  # of tasks that it began
                others = group.split(AttemptOver)[1]
                raise AttemptOver if others is None else first_error(others) from None
    except AttemptOver:
        pass
    if not attempt.turns:
        raise PluginError(f"{what} asked for no reply. Await attempt.reply at least once.")
    if not isinstance(answer, str | None):
        raise PluginError(f"{what} returned {kind_of(answer)}. Return a text, or None.")
    attempt.end("player" if answer is None else "answer", answer)


def _unread(result: ToolResult) -> ToolResult:
    """A result of which the policy read nothing; the text is kept for people."""
    metadata = {
        k: v for k, v in result.metadata.items() if k not in ("passage_ids", "passage_starts")
    }
    return replace(result, content="", metadata={**metadata, "unread": result.content})


def stream_seed(*key: int) -> int:
    """A random stream's number from what it belongs to; different keys give independent streams."""
    import numpy as np  # which `turnrl.testing` does without

    return int(np.random.SeedSequence([k % 2**32 for k in key]).generate_state(1, np.uint64)[0])
