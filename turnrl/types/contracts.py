"""The contracts of scoring and credit that a plugin extends: rewards, estimators, sources."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from turnrl.errors import DataError, PluginError, at_least
from turnrl.plugins import contract
from turnrl.types.engine import SampledPolicy
from turnrl.types.group import Group
from turnrl.types.questions import Question
from turnrl.types.trajectory import Passage, Probe, Trajectory

if TYPE_CHECKING:
    from torch import Tensor


class Notes(NamedTuple):
    """What a reward says about the trajectories that it saw, beside what it pays for them.

    Args:
        metrics: Figures of all of them, which become `train/log/NAME` and `val/log/NAME`; those of
            one name from several rewards are averaged.
        columns: By name a value of each trajectory, in their order, for the column `extra` of the
            record.
    """

    metrics: Mapping[str, float] = MappingProxyType({})
    columns: Mapping[str, Sequence[Any]] = MappingProxyType({})


@contract("turnrl_rewards")
class Reward(ABC):  # noqa: B024 - its two kinds have the abstract methods
    """A component of the reward. Extend `TurnReward` or `OutcomeReward`, not this."""

    name: str = ""
    """Name in metrics; the class name in snake_case if empty."""

    by_turn: bool = False
    """Whether it scores turns, or else whole trajectories; set by its kind."""

    bounds: tuple[float, float] | None = None
    """The two values that one `score` lies between, in either order; None if that is not known. The
    intervals of `turnrl eval` end there, unless several turns together earned more."""

    is_cost: bool = False
    """Whether it is a price of acting, such as a price of each call. Estimators that treat costs
    apart, such as `CostsAmongRight`, go by this and never by a sign."""

    right_at: float | None = None
    """Of an outcome reward that says which attempts are right: the least that it gives to a right
    one. None if it does not say."""

    def __str__(self) -> str:
        return f"reward {type(self).__name__}"

    def prepare(
        self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None
    ) -> Notes | None:
        """See all trajectories before any of them is scored: to ask a judge about all at once, or
        the policy for log-probabilities.

        Args:
            trajectories: Those that are scored next, of several questions.
            policy: The policy that acted; None where there is none at hand.
        Returns:
            What it says about them beside their scores, if anything.
        Raises:
            RewardError: If the world that it needs is broken, such as a judge. The run stops.
        """
        return None

    def rehearsal(self) -> AbstractContextManager[Reward]:
        """What `turnrl doctor` scores with in place of this reward: by default the reward itself.
        Override it if scoring leaves something behind, or waits long for a server that is away.

        Returns:
            A context that gives a reward of the same kind.
        """
        return contextlib.nullcontext(self)


class TurnReward(Reward):
    """Scores one turn, given everything up to and including it."""

    by_turn = True

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
        trains_policy: Whether the value loss trains the policy's own weights too, or only the head.
    """

    lr: float = 0.1
    trains_policy: bool = True

    def __post_init__(self) -> None:
        at_least(0, "critic.", self, "lr", optional=False)


class Attempts(NamedTuple):
    """Trajectories of a policy on several questions, with their probes.

    Args:
        trajectories: Those of each question, G at each.
        probes: Those of each question; none where no estimator asked for them.
        restarted: How many attempts were begun again after the world lost them.
    """

    trajectories: list[list[Trajectory]]
    probes: list[list[Probe]]
    restarted: int = 0


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
        charges_costs: Whether a turn reward that is a cost (`Reward.is_cost`) lowers the credit of
            any attempt that calls, right or wrong. Such an estimator can teach a weak policy to
            stop calling, which an alarm says. False if it ignores turn rewards, or treats costs
            apart.
    """

    min_group_size: int = 1
    probes: int = 0
    trains_probes: bool = False
    critic: Critic | None = None
    charges_costs: bool = True

    def check(self, rewards: Sequence[Reward]) -> None:  # noqa: B027 - most take any rewards
        """Refuse rewards that the estimator cannot credit. It is asked before any weights are
        loaded.

        Args:
            rewards: The run's rewards.
        Raises:
            RecipeError: Naming what is missing, and what to add.
        """

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
        needs_answers: Whether a question without an accepted answer is left out. An environment
            has none to give: its rewards say what is right.
    """

    uses: tuple[str, ...] = ()
    needs_answers: bool = True
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
