"""The words of turnrl, as types.

    Question      what is asked, and the answers that count
    Turn          one stretch of sampled text, what was read in it, and what the tools replied
    Trajectory    a prompt and its turns, token-exact
    Group         the trajectories of one question with their rewards, compared with each other
    Probe         what else might have come of a trajectory, from the beginning of one of its turns
    Critic        a value head beside the policy, which says what is to be expected
    Completion    what an engine sampled in one turn, as `Sampling` told it to

A segmenter (`Segmenter`) says what a turn is, a `Tool` acts, `TurnReward` and `OutcomeReward`
score, an `AdvantageEstimator` turns a group into credit, a `QuestionSource` supplies questions, an
`Engine` turns token ids into more token ids, a `Check` examines a run before it begins. Those are
what a plugin extends. Everything here is standard library only, so `import turnrl` stays cheap.

Axes, wherever tensors appear: B batch, G group, K turn, T token.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from turnrl.answers import AnswerRule, Phrase, answer_rule
from turnrl.errors import DataError, at_least

if TYPE_CHECKING:
    import torch
    from lightning import LightningDataModule, LightningModule
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Message = dict[str, str]
"""A chat message: `{"role": "system" | "user" | "assistant" | "tool", "content": text}`."""

Row = tuple[Sequence[int], Sequence[bool]]
"""Token ids of a sequence, and which of them are asked for; never the first."""

Stop = Literal["answer", "turns", "length"]
"""Why a trajectory ended: it answered, it used all its turns, or it ran out of tokens."""


_PHRASE = Phrase()


class _Unknown(tuple[str, ...]):
    """No answers, because none are known."""


@dataclass(frozen=True)
class Question:
    """A question and every answer that counts as right.

    Args:
        id: Unique within its data set.
        text: The question itself.
        answers: Accepted answers, the preferred one first; a text is the only one. Left out where
            none are known: such a question can be asked, and no answer to it is right.
        metadata: Whatever else the data set says about it.
        rule: How its answers compare; a name or a function stands for what `answer_rule` makes of
            it.
    Raises:
        DataError: If the answers are no texts, or there are none in what is given.
        RecipeError: If there is no such rule.
    """

    id: str
    text: str
    answers: tuple[str, ...] = _Unknown()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rule: AnswerRule = _PHRASE

    def __post_init__(self) -> None:
        given: Any = self.answers
        if isinstance(given, str):
            object.__setattr__(self, "answers", (given,))
        elif isinstance(given, list):
            object.__setattr__(self, "answers", tuple(given))
        texts = isinstance(self.answers, tuple) and all(isinstance(a, str) for a in self.answers)
        if not texts or (not self.answers and not isinstance(given, _Unknown)):
            raise DataError(
                f"question {self.id!r} has the answers {given!r}. Give a text or a tuple of texts, "
                "or leave answers out if none are known."
            )
        object.__setattr__(self, "rule", answer_rule(self.rule))


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
        session: What the tool keeps for the trajectory that calls, if it opened one; set when the
            call is run. It is no part of the record.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    mended: str | None = None
    session: ToolSession | None = field(default=None, compare=False, repr=False)


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
    """

    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    sampler_logprobs: tuple[float, ...] = field(repr=False)
    reading: Reading
    results: tuple[ToolResult, ...] = ()
    observation_ids: tuple[int, ...] = field(default=(), repr=False)
    cut: bool = False

    def __str__(self) -> str:
        lines = [f"   {'result' if r.ok else 'error'}: {r.content}" for r in self.results]
        form = [f"   form: {self.reading.format_error}"] if self.reading.format_error else []
        return "\n".join([self.text, *lines, *form])


@dataclass(frozen=True)
class Trajectory:
    """The prompt and all turns of one attempt at a question,
    exactly as the policy produced and read them. `print` shows the turns.

    Args:
        question: The question attempted.
        prompt_ids: Token ids of the rendered prompt.
        turns: The turns in order; at least one.
        stop: Why it ended.
        begins: Its first turn of its own, if it branched off another trajectory: what was sampled
            before that is the other's to learn from, and context here.
    """

    question: Question
    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    stop: Stop
    begins: int = 0

    def __repr__(self) -> str:
        said = f"answer={self.answer!r}" if self.stop == "answer" else f"stop={self.stop!r}"
        size = f"turns={len(self.turns)}, tokens={len(self.token_ids)}"
        return f"Trajectory({self.question.text!r}, {size}, {said})"

    def __str__(self) -> str:
        turns = (f"-- turn {k}\n{turn}" for k, turn in enumerate(self.turns))
        return "\n".join([f"question   {self.question.text}", *turns, f"ended by   {self.stop}"])

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

    def _tokens(self) -> Iterator[tuple[int, int, float]]:
        yield from ((token, -1, 0.0) for token in self.prompt_ids)
        for k, turn in enumerate(self.turns):
            ids, logprobs = turn.token_ids, turn.sampler_logprobs
            yield from zip(ids, [k if k >= self.begins else -1] * len(ids), logprobs, strict=True)
            yield from ((token, -1, 0.0) for token in turn.observation_ids)


@dataclass(frozen=True)
class Probe:
    """A continuation of a trajectory: what else might have come of it.

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
        components: Each component's total for each trajectory, named `turn/...` or `outcome/...`.
        state_values: (G, K), what the policy earns on average from the beginning of each turn on,
            turn rewards and outcome; zero where not reached. Given to an estimator with `probes`.
        token_values: For each trajectory (N_i,), what a critic expects of each of its N_i sampled
            tokens before it is sampled. Given to an estimator with a `critic`.
        parents: For each trajectory the member that it branched off, at the beginning of the turn
            `begins`; its own number if it did not. Given to an estimator that `trains_probes`.
    """

    question: Question
    trajectories: tuple[Trajectory, ...]
    turn_rewards: Tensor
    outcome: Tensor
    reached: Tensor
    components: tuple[Mapping[str, float], ...] = ()
    state_values: Tensor | None = None
    token_values: tuple[Tensor, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def trunks(self) -> list[int]:
        """The members that branched off no other: what the policy does when it is asked."""
        members = range(len(self.trajectories))
        return [i for i in members if not self.parents or self.parents[i] == i]

    @property
    def totals(self) -> Tensor:
        """(G,), the sum of all rewards of each trajectory."""
        return self.outcome + self.turn_rewards.sum(1)


class ToolSession:
    """State that a tool keeps for one trajectory: an interpreter, a browser, a sandbox. Extend it.

    `fork` and `close` may take their time, and may be coroutines.
    """

    def fork(self) -> ToolSession | Awaitable[ToolSession]:
        """A copy that goes its own way from here. A session that cannot be copied leaves this."""
        raise NotImplementedError(f"a {type(self).__name__} cannot be copied")

    def close(self) -> Awaitable[None] | None:
        """Give back what the session holds. Called once, however the trajectory ends; where a run
        is being stopped, perhaps while `run` still works on it in its thread."""


class Tool(ABC):
    """Something the policy can call. Subclass it, set the three attributes, write `run`.

    A tool is shared by all trajectories, and most keep nothing between calls. One that does opens a
    session for each trajectory: `open` makes it, `run` finds it in `call.session`.

    Attributes:
        name: The name the policy calls it by.
        description: One sentence that the prompt shows to the policy.
        parameters: JSON Schema of the arguments object; calls are validated before `run` sees them.
        timeout_s: A batch, or the opening or closing of a session, that takes longer than this many
            seconds stops the run.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    timeout_s: float = 60.0

    def __str__(self) -> str:
        return f"tool {self.name!r} ({type(self).__name__})"

    @abstractmethod
    def run(
        self, calls: Sequence[ToolCall]
    ) -> Sequence[ToolResult] | Awaitable[Sequence[ToolResult]]:
        """Answer a batch of valid calls, in order.

        A plain method runs in a worker thread, several at once; an `async def` runs on the event
        loop. Calls that arrive within a few milliseconds of each other come as one batch. Calls of
        one session come in order, and never in two batches at once.

        Args:
            calls: Calls whose name and arguments have been checked.
        Returns:
            One result per call. A mistake of the policy is a result with `ok=False`.
        Raises:
            ToolError: If the world is broken. The run stops; the policy never sees it.
        """

    def open(self, question: Question) -> ToolSession | Awaitable[ToolSession | None] | None:
        """Open the tool's state for one trajectory; None (the default) for a tool without state.

        Called before the trajectory's first call, in a worker thread or on the event loop like
        `run`.
        """
        return None

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
        tags: Tag names with a meaning in this scheme; they are neutralised in questions and tool
            results.
        tools_in_template: Whether the model's own chat template describes the tools (`tools=`);
            otherwise `prompt` does.
    """

    max_turns: int
    stop: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    tools_in_template: bool = False

    def check(self, tools: Sequence[Tool]) -> None:  # noqa: B027 - optional: most take any tools
        """Verify that the scheme can work with these tools. Runs before any model is loaded.

        Raises:
            RecipeError: Naming what does not fit, and the next step.
        """

    @abstractmethod
    def prompt(self, question: Question, tools: Sequence[Tool]) -> list[Message]:
        """The chat messages that open a trajectory; the last one is the user's.

        Args:
            question: What is asked; its text is already neutralised.
            tools: What the policy can call.
        """

    @abstractmethod
    def read(self, text: str, turn: int, cut: bool) -> Reading:
        """Read what the policy did in one turn. Total: any text gives a `Reading`, none raises.

        Args:
            text: The turn's sampled text.
            turn: Its number, from 0; the last is `max_turns - 1`.
            cut: Whether the turn ran out of tokens. What a cut turn began and did not end is not
                there: half an answer is none. Its calls are never run.
        """

    @abstractmethod
    def observe(self, reading: Reading, results: Sequence[ToolResult]) -> list[Message]:
        """Messages that the policy reads after a turn: of role `user` or `tool`, at least one.

        Args:
            reading: What was read in the turn; `format_error` is worth repeating to the policy.
            results: One result per call, contents already neutralised.
        """


class Reward(ABC):  # noqa: B024 - its two kinds have the abstract methods
    """A component of the reward. Extend `TurnReward` or `OutcomeReward`, not this."""

    name: ClassVar[str] = ""
    """Name in metrics; the class name in snake_case if empty."""

    def prepare(  # noqa: B027 - optional: most rewards look at one trajectory alone
        self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None
    ) -> None:
        """See all trajectories before any of them is scored: to ask a judge about all at once, or
        the policy for log-probabilities.

        Args:
            trajectories: Those that are scored next, of several questions.
            policy: The policy that acted; None where there is none at hand.
        Raises:
            ToolError: If the world that the reward needs is broken. The run stops.
        """


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


@dataclass(frozen=True)
class Critic:
    """A value head, trained beside the policy: linear in the policy's last hidden states, which are
    divided by their root mean square and their number, so that one rate does for any model.

    Args:
        lr: Learning rate of the head, which is a group of its own in the optimiser. An optimiser of
            Adam's kind moves a value by about as much a step, in units of reward.
        coef: Weight of the value loss beside the policy's.
        trunk: Whether the value loss trains the policy's own weights too, or the head alone.
    """

    lr: float = 0.1
    coef: float = 0.1
    trunk: bool = True

    def __post_init__(self) -> None:
        at_least(0, "critic.", self, "lr", "coef")


class AdvantageEstimator(ABC):
    """Turns a scored group into credit: a pure function of the group.

    Attributes:
        min_group_size: The smallest G for which the estimator gives any signal.
        probes: Continuations to be sampled at the beginning of each turn, for `state_values`.
            They are scored, and not trained on.
        trains_probes: Whether they are members of the group instead, from the turn on at which
            they branched off: a tree, whose shared turns are learnt from once.
        critic: The value head to be trained, for `token_values`; None for none.
    """

    min_group_size: int = 1
    probes: int = 0
    trains_probes: bool = False
    critic: Critic | None = None

    @abstractmethod
    def __call__(self, group: Group) -> Tensor | tuple[Tensor, ...]:
        """Credit for each turn of each trajectory of one group.

        Args:
            group: Trajectories with `turn_rewards` (G, K), `outcome` (G,) and `reached` (G, K).
        Returns:
            A tensor (G, K), advantages of turns; zero where not reached. Or, from an estimator that
            credits tokens, a tuple with a tensor (N_i,) for each trajectory, an advantage for each
            token that was sampled in a turn of its own, in order. A group whose credit is all zero
            counts as one that teaches nothing.
        """


@dataclass(frozen=True)
class Fields:
    """Where the rows of a file or hub data set keep what turnrl needs.

    A dotted path such as `answer.aliases` reaches into nested fields.

    Args:
        id: Field of the question's id; null numbers the rows.
        question: Field of the question's text.
        answers: Field, or fields, of accepted answers: a text, a list, or a list in a text.
        answer_pattern: Regular expression that finds the answer within such a text: its first
            group, or all of it. GSM8K's answers end with `#### 42`, which is `'#### (.*)'`; in YAML
            it needs the quotes. By default the whole text is the answer.
    Raises:
        DataError: If the pattern is no regular expression.
    """

    id: str | None = "id"
    question: str = "question"
    answers: str | list[str] = "answers"
    answer_pattern: str = ""

    def __post_init__(self) -> None:
        try:
            re.compile(self.answer_pattern)
        except (re.error, TypeError) as error:
            what = f"data.fields.answer_pattern {self.answer_pattern!r} is no regular expression"
            raise DataError(f"{what}: {error}. Mend it; '#### (.*)' is one.") from error

    def answer_in(self, text: str) -> str | None:
        """The answer within a text of an answers' field; None if the pattern is not there."""
        if not self.answer_pattern:
            return text
        found = re.search(self.answer_pattern, text)
        answer = found and found[min(1, found.re.groups)]
        return answer.strip() if answer is not None else None


class QuestionSource(ABC):
    """A data set that a package brings along, used by its class name: `train: Atlas`.

    A source that also knows the corpus its questions are about lets `turnrl index build --source`
    build the search index.

    Attributes:
        default_splits: The split for each use, `train` and `val`; None if it has none for it.
        uses: Which of the recipe's `data.fields` and `data.config` it heeds.
    """

    uses: tuple[str, ...] = ()
    default_splits: Mapping[str, str | None] = MappingProxyType({"train": "train", "val": "val"})

    @abstractmethod
    def questions(self, split: str) -> Iterable[Question]:
        """All questions of a split, always in the same order.

        Splits are free to name; a recipe that names none asks for `default_splits`.

        Raises:
            DataError: If there is no such split; the message lists those there are.
        """

    def at_hand(self, split: str) -> bool:
        """True if a split can be read without downloading it. `turnrl doctor` asks.

        Raises:
            DataError: If it is neither here nor where it would be downloaded from.
        """
        return True

    def passages(self) -> Iterable[Passage]:
        """The corpus that answers the questions.

        Raises:
            DataError: If the source has none.
        """
        raise DataError(f"{type(self).__name__} has questions but no corpus to build an index from")


class SourceOpener(Protocol):
    """Opens data sets by a name that is no class's, a file say, or what they are in memory.

    Attributes:
        names: Names it is sure to know, offered where another was meant.
        takes: What it takes, for messages: `a file (.jsonl, ...)`.
    """

    names: Sequence[str]
    takes: str

    def __call__(
        self, name: Any, fields: Fields | None, config: str | None
    ) -> QuestionSource | None:
        """The data set of a name, or None if the name is not of its kind.

        Args:
            name: As the recipe has it; or, from Python, an object that is neither a source nor a
                list of questions, a `datasets.Dataset` say.
            fields: Where rows keep what is needed, if the recipe says.
            config: A configuration of the data set, if the recipe names one.
        Raises:
            DataError: If the name is of its kind and there is no such data set.
        """


@dataclass(frozen=True)
class Sampling:
    """Settings to sample one turn.

    Args:
        max_tokens: The most tokens to sample; at least 1.
        temperature: Logits are divided by it; 0 takes the likeliest token.
        seed: Random stream of this turn. With an engine that is `seeded`, the same seed and history
            give the same tokens, whatever else is in the batch.
        stop: Strings that end the turn when the sampled text contains one.
        end_ids: Token ids that end the turn.
        forced_ids: Tokens to take in place of the first draws, for a replay or a measurement; their
            log-probabilities are the model's all the same. An engine that cannot take them raises
            NotImplementedError.
        top_k: Draw from that many of the likeliest tokens; 0 from all.
        min_p: Draw from tokens whose probability is at least this share of the likeliest's.
        top_p: Draw from the fewest likeliest tokens that `top_k` and `min_p` leave whose
            probabilities, of those left, add up to this. All three are judged at the temperature;
            log-probabilities are of what was drawn from; a greedy turn heeds none of them. An
            engine that cannot cut distributions raises NotImplementedError.
    """

    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    top_p: float = 1.0

    @property
    def truncated(self) -> bool:
        """True if it draws from a part of the distribution."""
        return self.temperature > 0 and (self.top_k > 0 or self.min_p > 0 or self.top_p < 1)


@dataclass(frozen=True)
class Completion:
    """Tokens sampled in one turn.

    Args:
        token_ids: Sampled ids, an end-of-turn token included.
        logprobs: Log-probability of each under the distribution it was drawn from.
        reason: An end token (`end`), a stop string (`stop`), or `max_tokens` (`length`).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: Literal["end", "stop", "length"]


class Session(ABC):
    """One trajectory's history inside an engine. It generates one turn at a time."""

    @abstractmethod
    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Append `new_ids` after everything so far, then sample.

        Raises:
            RuntimeError: If the session is closed, generates already, was cancelled while it
                generated, or is older than the engine's last `sync`.
        """

    @abstractmethod
    def fork(self) -> Session:
        """A new session that shares everything so far: a group at its prompt,
        a branch at a turn."""

    @abstractmethod
    def close(self) -> None:
        """Free what the session holds. Closing twice is harmless."""


class Attend(Protocol):
    """Computes the attention of a forward pass over tokens that are laid out in a way of its own.

    Sent along with `SampledPolicy.hidden(..., attend=...)`, in place of a mask.
    """

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """Attention output of the pass's tokens in one layer.

        Args:
            layer: Its number, from 0.
            query: (B, heads, T, D), with their positions rotated in.
            key: (B, key-value heads, T, D), of the same tokens.
            value: The same.
            scale: Of the scores; None for one over the root of D.
            window: The furthest that a token of this layer sees, itself included; None for all.
        Returns:
            (B, T, heads, D).
        """


class SampledPolicy(Protocol):
    """Acting policy, as far as an engine or a reward may use it; `turnrl.Policy` is one."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""

    @property
    def config(self) -> PretrainedConfig:
        """The model's configuration, which needs no weights."""

    def load(self, device: torch.device | str = "cpu") -> PreTrainedModel:
        """The network, loaded if it was not."""

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor, **kwargs: Any
    ) -> Tensor:
        """Last hidden states, (B, T) -> (B, T, H). `attend`, an `Attend`, computes the attention
        where it is given; NotImplementedError if the model's code cannot take one."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., V), in float32."""

    def read(
        self, rows: Sequence[Row], minibatch_tokens: int, temperature: float = 1.0
    ) -> Sequence[tuple[Tensor, ...]]:
        """For each sequence the log-probabilities (N_i,) of the tokens that are asked for, first;
        then the entropies of what they were drawn from, and a critic's values. In eval mode,
        without a gradient, on the CPU; at most so many tokens are computed at once, but one
        sequence at least, and what sequences begin with in common is read once."""

    def reference(self) -> AbstractContextManager[None]:
        """Within it the policy is the one that training began from; it has to have an adapter."""

    def export(self, folder: str | Path) -> Path:
        """Write the adapter, or the whole model if there is none."""


class Engine(ABC):
    """Turns token ids into more token ids. Its options are its own; its life is

        start -> (sync -> open, generate ... -> drain) for every collection -> close

    Attributes:
        seeded: Whether the same seed and history give the same tokens. An engine that cannot
            promise it says so.
        capacity: How many sessions it can hold at once, known once it has started; None for any
            number. It may grow while a collection shows how much of `max_tokens` they need. The
            engine serves more, but has to read their histories again: a caller that can wait begins
            no more than these.
    """

    seeded: bool = True
    capacity: int | None = None

    def check(self, policy: SampledPolicy, max_tokens: int) -> None:  # noqa: B027 - optional
        """Verify that the engine can work, as far as that shows before any weights are loaded.

        Args:
            policy: Its tokenizer and configuration are there, its weights are not.
            max_tokens: As in `start`.
        Raises:
            RecipeError: Naming the setting, and the next step.
        """

    @property
    def in_force(self) -> Mapping[str, str]:
        """The choices that the engine made when it started, for people to read: which attention,
        with CUDA graphs or without. Empty before it starts."""
        return {}

    @abstractmethod
    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """Get ready to sample a policy whose weights are loaded.

        Args:
            policy: Whose weights act.
            max_tokens: The longest history, prompt included, that a session will have.
        Raises:
            RecipeError: If the engine cannot sample this policy faithfully.
        """

    @abstractmethod
    def sync(self, version: int) -> None:
        """The weights have changed. Sessions opened before must not go on: what they remember was
        computed with older weights.

        Args:
            version: Number of optimiser steps behind the weights.
        """

    @abstractmethod
    def open(self, prompt_ids: Sequence[int]) -> Session:
        """A session whose history is the prompt, at least one token; forks share the work of
        reading it. Sessions may generate concurrently, from one event loop."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait until nothing is being sampled (turns that were cancelled may still be under way),
        and give back the memory that only sampling needs."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything. Closing twice is harmless; `start` may follow."""


Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of `turnrl doctor`.

    Args:
        status: `fail` if a run would stop, `warn` if it would be slower or worse than it could be.
        name: The thing that was examined: `GPU`, `index`.
        text: What was seen, in one line.
        step: The next step for the user; empty for `pass`.
    """

    status: Status
    name: str
    text: str
    step: str = ""


@dataclass
class Start:
    """A run that is about to begin, before any weights are loaded.

    Args:
        device: Where the weights will go.
        module: The recipe's module; None if the machine alone is examined.
        data: The recipe's data; None if there is none at hand.
        folder: Where the run will write; None if it will not.
        processes: How many learn together.
    """

    device: torch.device
    module: LightningModule | None = None
    data: LightningDataModule | None = None
    folder: Path | None = None
    processes: int = 1


class Check(ABC):
    """Something that `turnrl doctor` examines. `turnrl fit` runs the quick ones before it starts.

    Attributes:
        quick: Whether it takes well under a second, so that every start can afford it.
    """

    quick: bool = True

    def settle(self, start: Start) -> None:  # noqa: B027 - optional: most checks only look
        """Fill in settings that the recipe leaves open (null). Called before any check is run.

        Raises:
            RecipeError: If no value would do.
        """

    @abstractmethod
    def run(self, start: Start) -> Iterable[Finding]:
        """Examine the machine, and the recipe's parts where there are any."""
