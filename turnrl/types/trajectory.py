"""The data of a rollout: turns, samples and trajectories."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Required, TypedDict, final

from turnrl.plugin.errors import RecipeError
from turnrl.plugin.text import format_labelled, make_visible
from turnrl.types.questions import Question
from turnrl.types.sessions import ToolFigures, ToolSession


class TextPart(TypedDict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(TypedDict):
    """A function's name, and its arguments: a mapping, or the JSON text of one."""

    name: str
    arguments: str | Mapping[str, Any]


class MessageCall(TypedDict, total=False):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"]
    function: Required[CalledFunction]


class Message(TypedDict, total=False):
    """A chat message, in the words of OpenAI's chat completions. Text is the only kind of part that
    a policy reads.

    Args:
        role: `system`, `user`, `assistant` or `tool`.
        content: A text, or its parts; may be None beside `tool_calls`.
        tool_calls: Calls of the assistant, apart from its text.
        tool_call_id: The call that a message of a tool answers.
        name: Name of the tool or of the speaker.
        reasoning_content: A thought of the assistant, apart from its text.
    """

    role: Required[str]
    content: Required[str | Sequence[TextPart] | None]
    tool_calls: Sequence[MessageCall]
    tool_call_id: str
    name: str
    reasoning_content: str


TokenRow = tuple[Sequence[int], Sequence[bool]]
"""Token ids of a sequence, and flags for the tokens that are asked for; never the first."""


Ending = Literal["answer", "tool", "player", "turns", "length"]
"""Why a trajectory ended.

    answer      it answered
    tool        a tool ended it (`ToolResult.done`): an environment reached its end
    player      its player stopped without an answer
    turns       it used all its turns
    length      it ran out of tokens
"""


@dataclass(frozen=True)
class Passage:
    """A piece of text that a search can return.

    Args:
        id: Unique within its corpus.
        title: Title of the page it comes from.
        text: The passage.
    """

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy attempted.

    Args:
        name: The tool's name as the policy wrote it; empty if the call could not be read.
        arguments: Arguments by name.
        error: Why the call could not be read (bad JSON, say). Such a call is never run: the policy
            reads the error as its result.
        session: State of the trajectory that calls, if the tool is `Stateful`; set when the call is
            run, like `turn` and `question`. None of them is part of the record.
        turn: Number of the turn that calls, from 0.
        question: The question of the trajectory, as the data have it; None before the call is run.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    session: ToolSession | None = field(default=None, compare=False, repr=False)
    turn: int = field(default=0, compare=False, repr=False)
    question: Question | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class ToolResult:
    """Reply of a tool to one call.

    Args:
        content: Text for the policy to read. It is untrusted: control tokens and tags in it are
            neutralised before the policy sees it.
        ok: False if the policy's call was wrong (it reads why in `content`).
        metadata: Anything a reward or a report may want (scores, say). The policy never sees it.
            `passage_ids` names the passages in `content`, in order, and `passage_starts` gives the
            character at which the text of each begins. If a result is cut, it keeps the ids whose
            text the policy saw, or only the first if the tool gives no starts.
        reward: What the world pays for this step, as an environment does. The turn's `reward` is
            the sum over the calls that were run, and `StepReward` pays it.
        done: True if the attempt is over: an environment reached its end.
        unread: The text of a result that the policy never read, because it came in the last turn;
            its `content` is empty. None for any other result. turnrl sets it, not the tool.
    """

    content: str
    ok: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict)
    reward: float = 0.0
    done: bool = False
    unread: str | None = None

    @property
    def informs(self) -> bool:
        """True if the policy read it and the call succeeded. The policy never reads the results of
        a last turn that acted on the world."""
        return self.ok and self.unread is None

    @property
    def passage_ids(self) -> tuple[str, ...] | None:
        """Ids of the passages in `content`, in order; None if the tool names none."""
        ids = self.metadata.get("passage_ids")
        return tuple(ids) if isinstance(ids, list | tuple) else None

    @property
    def raised(self) -> str | None:
        """The class of a function's exception that the policy reads as `content`, if any."""
        return self.metadata.get("raised")

    def shown_as(self, content: str) -> ToolResult:
        """The result as the policy reads it, with `content` cut and made safe, and without the
        passages whose text begins after the cut. If the tool does not give where passages begin,
        only the first is kept."""
        ids = self.passage_ids
        if ids is None or len(content) >= len(self.content):
            return replace(self, content=content)
        starts = self.metadata.get("passage_starts", (0,))
        shown = [i for i, start in zip(ids, starts, strict=False) if start < len(content)]
        return replace(self, content=content, metadata={**self.metadata, "passage_ids": shown})

    def as_unread(self) -> ToolResult:
        """The result as one that the policy never reads; its text is kept for people."""
        of_passages = ("passage_ids", "passage_starts")
        kept = {key: value for key, value in self.metadata.items() if key not in of_passages}
        return replace(self, content="", metadata=kept, unread=self.content)


@dataclass(frozen=True)
class Reading:
    """Content of one turn's text, as a segmenter read it.

    Args:
        calls: Tool calls attempted, unreadable ones included.
        answer: The final answer, if the turn gives one; it ends the trajectory.
        format_error: What is wrong with the turn's form, or None if it is well formed.
    """

    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    format_error: str | None = None


@dataclass(frozen=True)
class Turn:
    """One turn: a stretch of sampled text, what was read in it, and the results. Its tokens are in
    the trajectory's `samples`.

    Args:
        text: The decoded sampled tokens.
        reading: What was read in `text`.
        results: One result per call of `reading`, as the policy read them (cut and neutralised).
            Empty if the calls were never run, or if no room was left to read the results. Results
            of a last turn that acted on the world (`Toolset.acts`) are kept with their texts
            emptied, because the policy never read them (`ToolResult.informs` is False). A call in
            that turn that does not act is not run, so its result is not `ok`.
        reward: What the world paid for the turn: the sum over all calls that were run.
        cut: True if the turn ran out of tokens.
    """

    text: str
    reading: Reading = Reading()
    results: tuple[ToolResult, ...] = ()
    reward: float = 0.0
    cut: bool = False

    def __str__(self) -> str:
        lines = [
            f"{'result' if r.ok else 'error'}: "
            + (r.content if r.unread is None else f"(not read) {r.unread}")
            for r in self.results
        ]
        if self.reading.format_error:
            lines.append(f"form: {self.reading.format_error}")
        return make_visible(
            "\n".join([self.text, *(textwrap.indent(line, "   ") for line in lines)])
        )


@final
@dataclass(frozen=True)
class Sample:
    """An append-only history of T tokens, as the policy read and wrote them.

    Args:
        token_ids: (T,), the tokens.
        turn_index: (T,), the turn that sampled each token; -1 if it was not sampled (prompt, tool
            result, chat markup). It is the loss mask and the route of credit. It is not the
            attention mask, which covers all tokens.
        sampler_logprobs: (T,), log-probability of each sampled token under the distribution it was
            drawn from, as the engine computed it; 0 elsewhere. The learner's own may differ.
        versions: (T,), the number of optimiser steps behind the weights that sampled each token;
            -1 elsewhere.
    """

    token_ids: tuple[int, ...] = ()
    turn_index: tuple[int, ...] = ()
    sampler_logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    def read(self, ids: Sequence[int]) -> Sample:
        """The history after the policy read these tokens."""
        nowhere = (-1,) * len(ids)
        return self._extended(ids, nowhere, (0.0,) * len(ids), nowhere)

    def wrote(
        self,
        turn: int,
        ids: Sequence[int],
        logprobs: Sequence[float],
        version: int | Sequence[int] = 0,
    ) -> Sample:
        """The history after the policy sampled these tokens in a turn.

        Args:
            turn: The turn's number.
            ids: (N,), the tokens.
            logprobs: (N,), their log-probabilities.
            version: The weights that sampled them: one number, or one for each token.
        """
        versions = (version,) * len(ids) if isinstance(version, int) else version
        return self._extended(ids, (turn,) * len(ids), logprobs, versions)

    def _extended(self, *columns: Sequence[Any]) -> Sample:
        own = (self.token_ids, self.turn_index, self.sampler_logprobs, self.versions)
        return Sample(*((*a, *b) for a, b in zip(own, columns, strict=True)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> bool:
        """True if the policy sampled any of it."""
        return any(turn >= 0 for turn in self.turn_index)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens before the first sampled one."""
        sampled = (n for n, turn in enumerate(self.turn_index) if turn >= 0)
        return self.token_ids[: next(sampled, None)]


@final
@dataclass(frozen=True)
class Trajectory:
    """All turns of one attempt at a question, and the tokens exactly as the policy read and
    produced them. `print` shows the turns.

    A `MessageSampler` writes texts and no tokens. You can score and record such a trajectory, but
    not learn from it: asking for its tokens raises a RecipeError.

    Args:
        question: The question attempted.
        turns: The turns in order; at least one.
        ended_by: Why it ended.
        samples: Its token histories: one, or more if the history was rewritten on the way, for
            example by an agent that summarises its context. Each turn was sampled in one of them.
            Empty if a `MessageSampler` wrote the turns.
        begins: The first turn of its own, if it branched off another trajectory. Earlier turns are
            only context here; the policy learns from them in the other trajectory.
        figures: Numbers that its tool sessions handed over when they closed; a tuple has one number
            per turn.
        opening: Text that its tool sessions added to the question, as the policy read it, such as
            the first observation of an environment. Empty if they added nothing.
        tools: Names of the tools that it could call.
    """

    question: Question
    turns: tuple[Turn, ...]
    ended_by: Ending
    samples: tuple[Sample, ...] = field(default=(), repr=False)
    begins: int = 0
    figures: ToolFigures = field(default_factory=dict)
    opening: str = ""
    tools: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __repr__(self) -> str:
        ending = self.ended_by
        end = f"answer={self.answer!r}" if ending == "answer" else f"ended_by={ending!r}"
        size = f"turns={len(self.turns)}, tokens={self.tokens}"
        return f"Trajectory({self.question.text!r}, {size}, {end})"

    def __str__(self) -> str:
        turns = (f"-- turn {k}\n{turn}" for k, turn in enumerate(self.turns, 1))
        asked, ending = f"question   {self.question.text}", f"ended by   {self.ended_by}"
        opening = [make_visible(format_labelled("opening", self.opening))] if self.opening else []
        return "\n".join([make_visible(asked), *opening, *turns, ending])

    @property
    def answer(self) -> str | None:
        """The final answer, or None if none was given."""
        return self.turns[-1].reading.answer if self.turns else None

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """Every tool result of every turn, in order."""
        return tuple(result for turn in self.turns for result in turn.results)

    @property
    def sample(self) -> Sample:
        """The only sample.

        Raises:
            ValueError: If there are several.
        """
        (sample,) = self._histories
        return sample

    @property
    def tokens(self) -> int:
        """Number of tokens in all samples."""
        return sum(map(len, self.samples))

    @cached_property
    def token_rows(self) -> tuple[TokenRow, ...]:
        """Each sample as the policy reads it; tokens sampled in the trajectory's own turns are
        asked for. Samples without such tokens are left out."""
        rows = ((s.token_ids, [k >= self.begins for k in s.turn_index]) for s in self._histories)
        return tuple(row for row in rows if any(row[1]))

    @cached_property
    def sampled_turns(self) -> tuple[int, ...]:
        """(N,), the turn of each token sampled in the trajectory's own turns, in the order of
        `token_rows`."""
        return tuple(k for s in self._histories for k in s.turn_index if k >= self.begins)

    @cached_property
    def sampler_logprobs(self) -> tuple[float, ...]:
        """(N,), the sampler's log-probability of each of the same tokens."""
        return self._own("sampler_logprobs")

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """(N,), the version of the weights that sampled each of the same tokens."""
        return self._own("versions")

    def _own(self, column: Literal["sampler_logprobs", "versions"]) -> tuple[Any, ...]:
        return tuple(
            value
            for sample in self._histories
            for value, turn in zip(getattr(sample, column), sample.turn_index, strict=True)
            if turn >= self.begins
        )

    def history(self, turn: int) -> tuple[int, ...]:
        """Token ids that the policy had read when a turn began. For the number after the last turn,
        all ids of the sample in which the last turn was sampled."""
        for sample in self._histories:
            if turn in sample.turn_index:
                return sample.token_ids[: sample.turn_index.index(turn)]
        return max(self._histories, key=lambda sample: max(sample.turn_index, default=-1)).token_ids

    def read_before(self, turn: int) -> tuple[int, ...]:
        """Token ids that the policy read right before a turn: everything since the previous reply
        in the same history, or a whole prompt."""
        before = self.history(turn)
        (sample,) = [s for s in self._histories if turn in s.turn_index][:1] or [Sample()]
        sampled = [n for n, k in enumerate(sample.turn_index[: len(before)]) if k >= 0]
        return before[max(sampled, default=-1) + 1 :]

    @property
    def _histories(self) -> tuple[Sample, ...]:
        if not self.samples:
            raise RecipeError(
                f"the trajectory of question {self.question.id!r} has no tokens: a model that only "
                "takes messages wrote it. It can be scored. To learn, or to use a reward that "
                "reads tokens, collect with an Engine."
            )
        return self.samples


@dataclass(frozen=True)
class Probe:
    """Another continuation of a trajectory, from the start of one of its turns.

    Args:
        member: Number of the trajectory in its group.
        trajectory: The whole continuation; its own turns begin where it branched off.
    """

    member: int
    trajectory: Trajectory
