"""The contracts that a plugin extends: tools, segmenters, rewards, estimators, sources."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from turnrl.errors import DataError, PluginError, at_least
from turnrl.plugins import contract
from turnrl.types.engine import SampledPolicy
from turnrl.types.questions import Question
from turnrl.types.sessions import ToolSession
from turnrl.types.trajectory import (
    Group,
    Message,
    Passage,
    Probe,
    Reading,
    ToolCall,
    ToolResult,
    Trajectory,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ToolSpec:
    """Description of a tool, as a segmenter or a chat template shows it to the policy.

    Args:
        name: The name the policy calls it by.
        description: One sentence that the prompt shows to the policy.
        parameters: JSON Schema of the arguments object; calls are validated before they are run.
        examples: Arguments of calls that work, for `turnrl doctor` to try. The policy never sees
            them. Without any the doctor makes some from the schema.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    examples: Sequence[Mapping[str, Any]] = ()


@contract("turnrl_tools")
class Toolset(ABC):
    """Tools that come together: they share a connection, or a session. A `Tool` is a set of one.

    A set is shared by all trajectories. One that keeps something for each of them extends
    `Stateful` besides.

    Attributes:
        timeout_s: A batch, or the opening or closing of a session, that takes longer than this many
            seconds stops the run.
    """

    timeout_s: float = 60.0

    @property
    @abstractmethod
    def specs(self) -> Sequence[ToolSpec]:
        """The tools, always the same ones."""

    def __str__(self) -> str:
        return f"toolset {type(self).__name__}"

    @abstractmethod
    def run(
        self, calls: Sequence[ToolCall]
    ) -> Sequence[ToolResult] | Awaitable[Sequence[ToolResult]]:
        """Answer a batch of valid calls, in order.

        A plain method runs in a worker thread, several at once; an `async def` runs on the event
        loop. Calls that arrive within a few milliseconds of each other come as one batch, to
        whichever tool of the set. Calls of one session come in order, and never in two batches at
        once.

        Args:
            calls: Calls whose name and arguments have been checked.
        Returns:
            One result per call. A mistake of the policy is a result with `ok=False`.
        Raises:
            ToolError: If the world is broken. The run stops; the policy never sees it.
        """

    def check(self) -> None:  # noqa: B027 - optional: most tools need no check
        """Verify that the tools can work (server up, index there). Runs before any model is loaded.

        Raises:
            ToolError: Naming what is missing, and the next step.
        """

    def rehearsal(self) -> AbstractContextManager[Toolset]:
        """What `turnrl doctor` checks and calls in place of this set: by default the set itself.
        Override it if a call changes the world, or if a run has to build something large first.

        Returns:
            A context that gives a set with the same `specs`, and takes back at its end whatever it
            made.
        """
        return contextlib.nullcontext(self)


class Tool(Toolset):
    """Something the policy can call. Subclass it, set the three attributes, write `run`.

    Attributes:
        name: The name the policy calls it by.
        description: One sentence that the prompt shows to the policy.
        parameters: JSON Schema of the arguments object; calls are validated before `run` sees them.
        examples: Arguments of calls that work; see `ToolSpec`.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    examples: Sequence[Mapping[str, Any]] = ()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tool itself."""
        return (ToolSpec(self.name, self.description, self.parameters, self.examples),)

    def __str__(self) -> str:
        return f"tool {self.name!r} ({type(self).__name__})"


class Stateful(ABC):
    """Tools that open a session for each trajectory: `class Notes(Stateful, Tool)`, or
    `class Shop(Stateful, Toolset)`. Their `run` finds the session in `call.session`."""

    @abstractmethod
    def open(self, question: Question) -> ToolSession | Awaitable[ToolSession]:
        """Open a session. Called before the trajectory's prompt is rendered, in a worker thread or
        on the event loop like `run`."""


@contract("turnrl_segmenters")
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

    def check(self, tools: Sequence[ToolSpec]) -> None:  # noqa: B027 - optional: most take any tools
        """Verify that the scheme can work with these tools. Runs before any model is loaded.

        Raises:
            RecipeError: Naming what does not fit, and the next step.
        """

    @abstractmethod
    def prompt(self, question: Question, tools: Sequence[ToolSpec]) -> list[Message]:
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


@contract("turnrl_rewards")
class Reward(ABC):  # noqa: B024 - its two kinds have the abstract methods
    """A component of the reward. Extend `TurnReward` or `OutcomeReward`, not this."""

    name: ClassVar[str] = ""
    """Name in metrics; the class name in snake_case if empty."""

    bounds: tuple[float, float] | None = None
    """The two values that one `score` lies between, in either order; None if that is not known. The
    intervals of `turnrl eval` end there, unless several turns together earned more."""

    def prepare(  # noqa: B027 - optional: most rewards look at one trajectory alone
        self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None
    ) -> None:
        """See all trajectories before any of them is scored: to ask a judge about all at once, or
        the policy for log-probabilities.

        Args:
            trajectories: Those that are scored next, of several questions.
            policy: The policy that acted; None where there is none at hand.
        Raises:
            RewardError: If the world that it needs is broken, such as a judge. The run stops.
        """

    def rehearsal(self) -> AbstractContextManager[Reward]:
        """What `turnrl doctor` scores with in place of this reward: by default the reward itself.
        Override it if scoring leaves something behind, or waits long for a server that is away.

        Returns:
            A context that gives a reward of the same kind.
        """
        return contextlib.nullcontext(self)


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
        trains_policy: Whether the value loss trains the policy's own weights too, or only the head.
    """

    lr: float = 0.1
    coef: float = 0.1
    trains_policy: bool = True

    def __post_init__(self) -> None:
        at_least(0, "critic.", self, "lr", "coef", optional=False)


class Attempts(NamedTuple):
    """Trajectories of a policy on several questions, with their probes.

    Args:
        trajectories: Those of each question, G at each.
        probes: Those of each question; none where no estimator asked for them.
    """

    trajectories: list[list[Trajectory]]
    probes: list[list[Probe]]


class Scorer(Protocol):
    """Scores attempts for an estimator that prepares its groups."""

    def score(self, trajectories: Sequence[Sequence[Trajectory]]) -> tuple[Group, ...]:
        """The trajectories of each question with their rewards."""

    def valued(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The groups with the critic's value of each sampled token, `token_values`."""


@contract("turnrl_estimators")
class AdvantageEstimator(ABC):
    """Turns a scored group into credit: a pure function of the group.

    Attributes:
        min_group_size: The smallest G for which the estimator gives any signal.
        probes: Continuations to be sampled at the beginning of each turn, for `prepare`.
        trains_probes: Whether `prepare` makes them members of the group, from the turn on at which
            they branched off: a tree, whose shared turns are learned from once.
        critic: The value head to be trained, for `token_values`; None for none.
    """

    min_group_size: int = 1
    probes: int = 0
    trains_probes: bool = False
    critic: Critic | None = None

    def prepare(self, attempts: Attempts, scorer: Scorer) -> Sequence[Group]:
        """The scored group of each question, with all that the estimator asks of it.

        By default the trajectories are scored, and a critic gives their tokens values. An estimator
        with probes says here what becomes of them.

        Args:
            attempts: The trajectories of each question, and their probes.
            scorer: Scores trajectories.
        Raises:
            PluginError: If an estimator with probes does not say what becomes of them.
        """
        if self.probes:
            raise PluginError(f"{type(self).__name__} has probes. Define prepare, which gets them.")
        groups = scorer.score(attempts.trajectories)
        return groups if self.critic is None else scorer.valued(groups)

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


@contract("turnrl_datasets")
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
