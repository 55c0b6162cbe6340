"""The words of turnrl, as types.

    Question      what is asked, and the answers that count
    Turn          one stretch of sampled text, what was read in it, and what the tools replied
    Trajectory    a prompt and its turns, token-exact
    Scores        the turn rewards and the outcome reward of a trajectory
    Group         the trajectories of one question, which are compared with each other

A segmenter (`Segmenter`) says what a turn is, a `Tool` acts, `TurnReward` and `OutcomeReward`
score, an `AdvantageEstimator` turns scores into credit, a `QuestionSource` supplies questions.
Those are what a plugin extends. Everything here is standard library only, so `import turnrl`
stays cheap.

Axes, wherever tensors appear: B batch, G group, K turn, T token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

Message = dict[str, str]
"""A chat message: `{"role": "system" | "user" | "assistant", "content": text}`."""

Stop = Literal["answer", "turns", "length"]
"""Why a trajectory ended: it answered, it used all its turns, or it ran out of tokens."""


@dataclass(frozen=True)
class Question:
    """A question and every answer that counts as right.

    Args:
        id: Unique within its data set.
        text: The question itself.
        answers: Accepted answers, the preferred one first.
        metadata: Whatever else the data set says about it.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


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
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """What a tool replies to one call.

    Args:
        content: Text for the policy to read. It is untrusted: control tokens and tags in it are
            neutralised before the policy sees it.
        ok: False if the call failed through the policy's own mistake, which it then reads in
            `content`.
        metadata: Anything a reward or a report may want (passage ids, scores). The policy never
            sees it.
    """

    content: str
    ok: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """What a segmenter saw in one turn's text.

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
        logprobs: Log-probability of each sampled token under the sampling distribution, length T_k.
        reading: What the segmenter read in `text`.
        results: One result per call of `reading`, as the policy saw them (cut and neutralised).
        observation_ids: Token ids appended after the turn (results and chat markup); not sampled.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reading: Reading
    results: tuple[ToolResult, ...] = ()
    observation_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trajectory:
    """The prompt and all turns of one attempt at a question,
    exactly as the policy produced and read them.

    Args:
        question: The question attempted.
        prompt_ids: Token ids of the rendered prompt.
        turns: The turns in order; at least one.
        stop: Why it ended.
    """

    question: Question
    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    stop: Stop

    @property
    def answer(self) -> str | None:
        """The final answer, or None if none was given."""
        return self.turns[-1].reading.answer if self.turns else None

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """Every tool result of every turn, in order."""
        return tuple(result for turn in self.turns for result in turn.results)

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All T token ids: prompt, then each turn's sampled tokens and observation."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += turn.token_ids
            ids += turn.observation_ids
        return tuple(ids)

    @cached_property
    def turn_index(self) -> tuple[int, ...]:
        """Turn number of each of the T tokens where it was sampled, -1 elsewhere.

        It is the loss mask and the route of credit. It is not the attention mask, which covers
        observations too.
        """
        index = [-1] * len(self.prompt_ids)
        for k, turn in enumerate(self.turns):
            index += [k] * len(turn.token_ids)
            index += [-1] * len(turn.observation_ids)
        return tuple(index)

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """The sampler's log-probability of each of the T tokens where it was sampled,
        0 elsewhere."""
        values = [0.0] * len(self.prompt_ids)
        for turn in self.turns:
            values += turn.logprobs
            values += [0.0] * len(turn.observation_ids)
        return tuple(values)


@dataclass(frozen=True)
class Scores:
    """The rewards of one trajectory.

    Args:
        turn: Turn rewards, summed over components, length K_i (the turns this trajectory took).
        outcome: Outcome reward, summed over components.
        components: Each component's total for this trajectory, named `turn/...` or `outcome/...`.
    """

    turn: tuple[float, ...]
    outcome: float
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """The G trajectories of one question, with their scores, in the same order."""

    question: Question
    trajectories: tuple[Trajectory, ...]
    scores: tuple[Scores, ...]


class Tool(ABC):
    """Something the policy can call. Subclass it, set the three attributes, write `run`.

    Attributes:
        name: The name the policy calls it by.
        description: One sentence that the prompt shows to the policy.
        parameters: JSON Schema of the arguments object; calls are validated before `run` sees them.
        timeout_s: A batch that takes longer than this many seconds stops the run.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    timeout_s: float = 60.0

    @abstractmethod
    def run(
        self, calls: Sequence[ToolCall]
    ) -> Sequence[ToolResult] | Awaitable[Sequence[ToolResult]]:
        """Answer a batch of valid calls, in order.

        A plain method runs in a worker thread, several at once; an `async def` runs on the event
        loop. Calls that arrive within a few milliseconds of each other come as one batch.

        Args:
            calls: Calls whose name and arguments have been checked.
        Returns:
            One result per call. A mistake of the policy is a result with `ok=False`.
        Raises:
            ToolError: If the world is broken. The run stops; the policy never sees it.
        """

    def check(self) -> None:  # noqa: B027 - optional: most tools need no check
        """Verify that the tool can work (server up, index there). Runs before any model is loaded.

        Raises:
            ToolError: Naming what is missing, and the next step.
        """


class Segmenter(ABC):
    """Says what a turn is: how the task is put, where a turn stops, what it means,
    how results are shown.

    Attributes:
        max_turns: K, the most turns a trajectory may take; at least 1.
        stop: Strings that end a turn as soon as the sampled text contains one.
        tags: Tag names with a meaning in this scheme; they are neutralised in tool results.
    """

    max_turns: int
    stop: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @abstractmethod
    def prompt(self, question: Question, tools: Sequence[Tool]) -> list[Message]:
        """The chat messages that open a trajectory; the last one is the user's."""

    @abstractmethod
    def read(self, text: str, turn: int) -> Reading:
        """What the policy did in one turn. Total: any text gives a `Reading`, none raises.

        Args:
            text: The turn's sampled text.
            turn: Its number, from 0; the last is `max_turns - 1`.
        """

    @abstractmethod
    def observe(self, reading: Reading, results: Sequence[ToolResult]) -> str:
        """The user message that the policy reads after a turn.

        Args:
            reading: What was read in the turn; `format_error` is worth repeating to the policy.
            results: One result per call, contents already neutralised.
        """


class Reward(ABC):  # noqa: B024 - its two kinds have the abstract methods
    """A component of the reward. Extend `TurnReward` or `OutcomeReward`, not this."""

    name: ClassVar[str] = ""
    """Name in metrics; the class name in snake_case if empty."""


class TurnReward(Reward):
    """Scores one turn, given everything up to and including it."""

    @abstractmethod
    def score(self, trajectory: Trajectory, turn: int) -> float:
        """The reward of turn number `turn` (from 0)."""


class OutcomeReward(Reward):
    """Scores a whole trajectory."""

    @abstractmethod
    def score(self, trajectory: Trajectory) -> float:
        """The reward of how the trajectory ended."""


class AdvantageEstimator(ABC):
    """Turns the rewards of a group into one advantage per turn: a pure function.

    Attributes:
        min_group_size: The smallest G for which the estimator gives any signal.
    """

    min_group_size: int = 1

    @abstractmethod
    def __call__(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        """Credit for each turn of each trajectory of one group.

        Args:
            turn_rewards: (G, K), reward of each turn; zero where not reached.
            outcome: (G,), outcome reward of each trajectory.
            reached: (G, K), bool, whether the trajectory took that turn.
        Returns:
            (G, K), advantages; zero where not reached.
        """


class QuestionSource(ABC):
    """A data set that a package brings along, used by its class name: `train: Atlas`.

    A source that also knows the corpus its questions are about lets `turnrl index build --source`
    build the search index.
    """

    @abstractmethod
    def questions(self, split: str) -> Iterable[Question]:
        """All questions of a split, always in the same order.

        Splits are free to name; a recipe that names none asks for `train` and `val`.

        Raises:
            DataError: If there is no such split; the message lists those there are.
        """

    def passages(self) -> Iterable[Passage]:
        """The corpus that answers the questions.

        Raises:
            DataError: If the source has none.
        """
        from turnrl.errors import DataError

        raise DataError(f"{type(self).__name__} has questions but no corpus to build an index from")
