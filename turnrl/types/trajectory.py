"""The data of a rollout: questions, turns, trajectories and groups of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, final

from turnrl.errors import RecipeError
from turnrl.text import visible
from turnrl.types.questions import Question
from turnrl.types.sessions import ToolFigures, ToolSession

if TYPE_CHECKING:
    from torch import Tensor


Message = dict[str, str]
"""A chat message: `{"role": "system" | "user" | "assistant" | "tool", "content": text}`."""


TokenRow = tuple[Sequence[int], Sequence[bool]]
"""Token ids of a sequence, and which of them are asked for; never the first."""


Ending = Literal["answer", "turns", "length"]
"""Why a trajectory ended: it answered, it used all its turns, or it ran out of tokens."""


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
        mended: What is wrong with the form of a call that was read all the same, by a lenient
            segmenter. It is run, but its result is not `ok`, so no reward pays for it.
        session: State of the trajectory that calls, if the tool is `Stateful`; set when the call is
            run, like `turn`. Neither is part of the record.
        turn: Number of the turn that calls, from 0.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    mended: str | None = None
    session: ToolSession | None = field(default=None, compare=False, repr=False)
    turn: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True)
class ToolResult:
    """Reply of a tool to one call.

    Args:
        content: Text for the policy to read. It is untrusted: control tokens and tags in it are
            neutralised before the policy sees it.
        ok: False if the call failed through the policy's own mistake, which it then reads in
            `content`, or was read only by mending it.
        metadata: Anything a reward or a report may want (scores, say). The policy never sees it.
            `passage_ids` names what stands in `content`, in order, and `passage_starts` the
            character at which the text of each begins: of a result that is cut, those ids stay
            whose text the policy saw, or the first if the tool gives no starts.
    """

    content: str
    ok: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict)


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
    """One turn: sampled tokens, what was read in them, what came back.

    Args:
        text: The decoded sampled tokens.
        token_ids: Sampled token ids, length T_k.
        sampler_logprobs: Log-probability of each sampled token under the distribution it was drawn
            from, as the engine computed it, length T_k. The learner's own may differ.
        reading: What the segmenter read in `text`.
        results: One result per call of `reading`, as the policy saw them (cut and neutralised), or
            none: calls of the last turn, of a turn that was cut, and of one after which there was
            no room left were never answered, because nothing would have read the answer.
        observation_ids: Token ids appended after the turn (results and chat markup); not sampled.
        cut: Whether the turn ran out of tokens.
        version: Number of the weights that sampled it, in optimiser steps; None if nobody said.
    """

    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    sampler_logprobs: tuple[float, ...] = field(repr=False)
    reading: Reading
    results: tuple[ToolResult, ...] = ()
    observation_ids: tuple[int, ...] = field(default=(), repr=False)
    cut: bool = False
    version: int | None = None

    def __str__(self) -> str:
        lines = [f"   {'result' if r.ok else 'error'}: {r.content}" for r in self.results]
        form = [f"   form: {self.reading.format_error}"] if self.reading.format_error else []
        return visible("\n".join([self.text, *lines, *form]))


@final
@dataclass(frozen=True)
class Trajectory:
    """The prompt and all turns of one attempt at a question,
    exactly as the policy produced and read them. `print` shows the turns.

    A `MessageSampler` writes texts and no tokens. You can score and record such a trajectory, and
    nothing can be learned from it: each of its streams of tokens raises a RecipeError.

    Args:
        question: The question attempted.
        prompt_ids: Token ids of the rendered prompt; None if a `MessageSampler` wrote the turns.
        turns: The turns in order; at least one.
        ended_by: Why it ended.
        begins: Its first turn of its own, if it branched off another trajectory: what was sampled
            before that is the other's to learn from, and context here.
        figures: Numbers that its tool sessions handed over when they closed; a tuple has one per
            turn.
    """

    question: Question
    prompt_ids: tuple[int, ...] | None
    turns: tuple[Turn, ...]
    ended_by: Ending
    begins: int = 0
    figures: ToolFigures = field(default_factory=dict)

    def __repr__(self) -> str:
        ending = self.ended_by
        said = f"answer={self.answer!r}" if ending == "answer" else f"ended_by={ending!r}"
        sizes = (len(turn.token_ids) + len(turn.observation_ids) for turn in self.turns)
        size = f"turns={len(self.turns)}, tokens={len(self.prompt_ids or ()) + sum(sizes)}"
        return f"Trajectory({self.question.text!r}, {size}, {said})"

    def __str__(self) -> str:
        turns = (f"-- turn {k}\n{turn}" for k, turn in enumerate(self.turns, 1))
        asked, ending = f"question   {self.question.text}", f"ended by   {self.ended_by}"
        return "\n".join([visible(asked), *turns, ending])

    @property
    def answer(self) -> str | None:
        """The final answer, or None if none was given."""
        return self.turns[-1].reading.answer if self.turns else None

    @property
    def version(self) -> int | None:
        """Number of the weights that sampled it; None if its turns differ, or nobody said."""
        versions = {turn.version for turn in self.turns}
        return versions.pop() if len(versions) == 1 else None

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """Every tool result of every turn, in order."""
        return tuple(result for turn in self.turns for result in turn.results)

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All T token ids: prompt, then each turn's sampled tokens and observation."""
        return tuple(token for token, _, _ in self._tokens())

    @cached_property
    def turn_index(self) -> tuple[int, ...]:
        """Turn number of each of the T tokens where it was sampled, in a turn of its own; -1
        elsewhere.

        It is the loss mask and the route of credit. It is not the attention mask, which covers
        observations too.
        """
        return tuple(k for _, k, _ in self._tokens())

    @cached_property
    def sampler_logprobs(self) -> tuple[float, ...]:
        """The sampler's log-probability of each of the T tokens where it was sampled,
        0 elsewhere."""
        return tuple(logprob for _, _, logprob in self._tokens())

    @property
    def token_row(self) -> TokenRow:
        """Its tokens as the policy reads them; those that were sampled in turns of its own are
        asked for."""
        return self.token_ids, [k >= 0 for k in self.turn_index]

    def _tokens(self) -> Iterator[tuple[int, int, float]]:
        if self.prompt_ids is None:
            raise RecipeError(
                f"the trajectory of question {self.question.id!r} has no tokens: a sampler of "
                "messages wrote it, which is somebody else's model. It can be scored. To learn, or "
                "to use a reward that reads tokens, collect with an Engine."
            )
        yield from ((token, -1, 0.0) for token in self.prompt_ids)
        for k, turn in enumerate(self.turns):
            ids, logprobs = turn.token_ids, turn.sampler_logprobs
            yield from zip(ids, [k if k >= self.begins else -1] * len(ids), logprobs, strict=True)
            yield from ((token, -1, 0.0) for token in turn.observation_ids)


@dataclass(frozen=True)
class Probe:
    """Another continuation of a trajectory, from the start of one of its turns.

    Args:
        member: Number of the trajectory in its group.
        trajectory: The whole of it; its own turns begin where it branched off.
    """

    member: int
    trajectory: Trajectory


@dataclass(frozen=True, eq=False)
class Group:
    """G trajectories of one question and their rewards, in the same order.

    Args:
        question: The question.
        trajectories: G attempts at it, trajectory i with K_i turns.
        turn_rewards: (G, K), reward of each turn, summed over components; zero after the last.
        outcome: (G,), outcome reward of each trajectory, summed over components.
        reached: (G, K), bool: whether the trajectory took that turn, as one of its own.
        components: Each reward by its name: (G, K) for `turn/...`, zero after the last turn, and
            (G,) for `outcome/...`; in float64.
        state_values: (G, K), what the policy earns on average from the beginning of each turn on,
            turn rewards and outcome; zero where not reached. Given to an estimator with `probes`.
        token_values: For each trajectory (N_i,), what a critic expects of each of its N_i sampled
            tokens before it is sampled. Given to an estimator with a `critic`.
        parents: For each trajectory the member that it branched off, at the beginning of the turn
            `begins`; its own number if it did not. Given to an estimator that `trains_probes`.
        bounds: The least and the most that one score of a reward can be, by its name, of the
            rewards that say so (`Reward.bounds`).
    """

    question: Question
    trajectories: tuple[Trajectory, ...]
    turn_rewards: Tensor
    outcome: Tensor
    reached: Tensor
    components: Mapping[str, Tensor] = field(default_factory=dict)
    state_values: Tensor | None = None
    token_values: tuple[Tensor, ...] = ()
    parents: tuple[int, ...] = ()
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def trunks(self) -> list[int]:
        """The members that branched off no other: what the policy does when it is asked."""
        members = range(len(self.trajectories))
        return [i for i in members if not self.parents or self.parents[i] == i]

    @property
    def component_totals(self) -> dict[str, Tensor]:
        """Each component's total for each trajectory, (G,)."""
        parts = self.components.items()
        return {name: part.sum(1) if part.ndim == 2 else part for name, part in parts}

    @property
    def totals(self) -> Tensor:
        """(G,), the sum of all rewards of each trajectory."""
        return self.outcome + self.turn_rewards.sum(1)
