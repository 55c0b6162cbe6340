"""The contracts of scoring and credit that a plugin extends: rewards, estimators, sources."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from turnrl.plugin.errors import DataError, PluginError, check_at_least
from turnrl.plugin.hooks import contract
from turnrl.types.engine import SampledPolicy
from turnrl.types.group import Group
from turnrl.types.questions import Question
from turnrl.types.trajectory import Passage, Probe, Trajectory

if TYPE_CHECKING:
    from torch import Tensor


@contract("turnrl_rewards")
class Reward(ABC):  # noqa: B024 - its two kinds have the abstract methods
    """A component of the reward. Extend `TurnReward` or `OutcomeReward`, not this."""

    name: str = ""
    """Name in metrics; the class name in snake_case if empty."""

    by_turn: bool = False
    """True if it scores turns, False if it scores whole trajectories; set by its kind."""

    is_cost: bool = False
    """True if it is a price of acting, such as a price per call. Estimators that treat costs
    separately, such as `CostsAmongRight`, go by this and never by a sign."""

    right_at: float | None = None
    """The score from which an attempt counts as right; None if this reward does not decide that."""

    def __str__(self) -> str:
        return f"reward {type(self).__name__}"

    def check_questions(self, questions: Sequence[Question]) -> None:  # noqa: B027 - optional
        """Refuse questions that lack what the reward needs, such as a column. Runs with all
        questions of a split before any model is loaded.

        Raises:
            DataError: Naming a question, and what it lacks.
        """

    def prepare(
        self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None
    ) -> Mapping[str, float] | None:
        """See all trajectories before any of them is scored, for example to ask a judge about all
        at once, or the policy for log-probabilities.

        Args:
            trajectories: The trajectories that are scored next, of several questions.
            policy: The policy that acted; None when recorded trajectories are scored.
        Returns:
            Figures over all of the trajectories by name, if any. They are logged as
            `train/log/NAME` and `val/log/NAME`, averaged if several rewards use one name.
        Raises:
            RewardError: If something that it needs is broken, such as a judge. The run stops.
        """
        return None

    def rehearsal(self) -> AbstractContextManager[Reward]:
        """The reward that `turnrl doctor` scores with in place of this one: by default this one.
        Override it if scoring leaves something behind, or waits long for a server that is down.

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
        """The reward of the whole trajectory."""


@dataclass(frozen=True)
class Critic:
    """A value head, trained beside the policy. It is linear in the policy's last hidden states,
    each divided by its root mean square and by its width, so that one learning rate suits any
    model.

    Args:
        lr: Learning rate of the head, which has its own parameter group in the optimiser. With an
            optimiser like Adam, one step moves a value by about this much, in units of reward.
        trains_policy: True if the value loss also trains the policy's own weights, False if it
            trains only the head.
    """

    lr: float = 0.1
    trains_policy: bool = True

    def __post_init__(self) -> None:
        check_at_least(0, "critic.", self, "lr", optional=False)


class Attempts(NamedTuple):
    """Trajectories of a policy on several questions, with their probes.

    Args:
        trajectories: For each question, its G trajectories.
        probes: For each question, its probes; none if no estimator asked for them.
        restarted: Number of attempts that began again after the world lost them.
    """

    trajectories: list[list[Trajectory]]
    probes: list[list[Probe]]
    restarted: int = 0


class Scorer(Protocol):
    """Scores attempts for an estimator that prepares its groups."""

    def score(self, trajectories: Sequence[Sequence[Trajectory]]) -> tuple[Group, ...]:
        """The scored group of each question's trajectories."""

    def with_values(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The groups, with the critic's value of each sampled token as `token_values`."""


@contract("turnrl_estimators")
class AdvantageEstimator(ABC):
    """Turns a scored group into credit: a pure function of the group.

    Attributes:
        min_group_size: The smallest G for which the estimator gives any signal.
        probes: Number of continuations to sample from the beginning of each turn, for `prepare`.
        trains_probes: True if `prepare` makes the probes members of the group, from the turn at
            which they branched off: a tree, whose shared turns are learned from once.
        critic: The value head to train, for `token_values`; None for no value head.
        charges_costs: True if a turn reward that is a cost (`Reward.is_cost`) lowers the credit of
            any attempt that calls, right or wrong. Such an estimator can teach a weak policy to
            stop calling, and an alarm warns of it. False if it ignores turn rewards, or treats
            costs separately.
    """

    min_group_size: int = 1
    probes: int = 0
    trains_probes: bool = False
    critic: Critic | None = None
    charges_costs: bool = True

    def check(self, rewards: Sequence[Reward]) -> None:  # noqa: B027 - most take any rewards
        """Refuse rewards that the estimator cannot credit. Called before any weights are loaded.

        Args:
            rewards: The run's rewards.
        Raises:
            RecipeError: Naming what is missing, and what to add.
        """

    def prepare(self, attempts: Attempts, scorer: Scorer) -> Sequence[Group]:
        """The scored group of each question, with everything that the estimator needs in it.

        By default the trajectories are scored, and a critic gives their tokens values. An estimator
        with probes decides here what to do with them.

        Args:
            attempts: The trajectories of each question, and their probes.
            scorer: Scores trajectories.
        Raises:
            PluginError: If an estimator with probes does not override this.
        """
        if self.probes:
            raise PluginError(f"{type(self).__name__} has probes. Define prepare, which gets them.")
        groups = scorer.score(attempts.trajectories)
        return groups if self.critic is None else scorer.with_values(groups)

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
    """A data set that a package ships, named in a recipe by its class: `train: Atlas`.

    If a source also knows the corpus that its questions are about, `turnrl index build --source`
    can build the search index from it.

    Attributes:
        default_splits: The split for each use, `train` and `val`; None if there is none for it.
        uses: Which of the recipe's `data.fields` and `data.config` it uses.
        needs_answers: True to leave out questions that have no accepted answer. Set it to False
            for an environment, which has no answers: its rewards decide what is right.
    """

    uses: tuple[str, ...] = ()
    needs_answers: bool = True
    default_splits: Mapping[str, str | None] = MappingProxyType({"train": "train", "val": "val"})

    @abstractmethod
    def questions(self, split: str) -> Iterable[Question]:
        """All questions of a split, always in the same order.

        You may name splits as you like; a recipe that names none gets `default_splits`.

        Raises:
            DataError: If there is no such split; the message lists the splits there are.
        """

    def at_hand(self, split: str) -> bool:
        """True if a split can be read without downloading it. `turnrl doctor` asks.

        Raises:
            DataError: If the split is neither here nor where it would be downloaded from.
        """
        return True

    def passages(self) -> Iterable[Passage]:
        """The corpus that answers the questions.

        Raises:
            DataError: If the source has none.
        """
        raise DataError(f"{type(self).__name__} has questions but no corpus to build an index from")
