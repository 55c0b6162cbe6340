"""What the study brings of its own: estimators that part what others do at once, a retrieval
reward that is sometimes wrong, a cost that begins later, and questions that tempt more or less."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import lightning as L
import torch
from torch import Tensor

from turnrl import (
    AdvantageEstimator,
    Group,
    Question,
    QuestionSource,
    Trajectory,
    TurnLevel,
    TurnReward,
)
from turnrl.credit.estimators import GroupRelative, returns_to_go, standardize
from turnrl.types import Attempts, Passage, Scorer
from turnrl_atlas import Atlas
from turnrl_rewards.calls import SearchCost
from turnrl_rewards.qa import AnswerRetrieved


@final
@dataclass
class Apart(GroupRelative):
    """One advantage for the whole attempt, of turn and outcome rewards that are normalised apart.

    A_{i,k} = z(R)_i + z(sum_l r_{.,l})_i. In the first turn this is what `TurnLevel` has, and every
    turn gets the same, as `Merged` has it. Later turns of `TurnLevel` have the rewards from there
    on, by their own spread.
    """

    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        """The equation."""
        both = torch.stack([outcome, turn_rewards.sum(1)], 1)
        return self.z(both, torch.ones_like(both).bool()).sum(1, keepdim=True) * reached


@final
class Together(AdvantageEstimator):
    """Credit by turns, scaled alike for all groups of an iteration.

    With rho_{i,k} the turn rewards from turn k on, and "others" those of the group that reached k,

        A_{i,k} = (R_i - mean of the others) / s_R + (rho_{i,k} - mean of the others) / s

    and s_R and s the root mean squares of what stands above them, over all groups of one process.
    `TurnLevel` divides within each group and turn number: there a small cost that is all that
    differs counts as much as a success elsewhere.

    Args:
        min_std: Floor of both.
    """

    min_group_size = 2

    def __init__(self, min_std: float = 0.1) -> None:
        self.min_std = min_std
        self._outcome = self._turn = 1.0

    def prepare(self, attempts: Attempts, scorer: Scorer) -> Sequence[Group]:
        """The groups, of which the scales are taken."""
        groups = super().prepare(attempts, scorer)
        parts = [_differences(group) for group in groups]
        outcomes = torch.cat([outcome.flatten() for outcome, _ in parts])
        turns = torch.cat(
            [turn[group.reached] for (_, turn), group in zip(parts, groups, strict=True)]
        )
        self._outcome, self._turn = (
            max(self.min_std, float(one.square().mean().sqrt())) for one in (outcomes, turns)
        )
        return groups

    def __call__(self, group: Group) -> Tensor:
        outcome, turn = _differences(group)
        return (outcome / self._outcome + turn / self._turn) * group.reached


def _differences(group: Group) -> tuple[Tensor, Tensor]:
    """Outcomes (G, 1) and turn rewards from each turn on (G, K), less the mean of the others."""
    rest = returns_to_go(group.turn_rewards * group.reached, 1.0)
    outcome = group.outcome[:, None]
    everyone = torch.ones_like(outcome).bool()
    return (
        standardize(outcome, everyone, "leave_one_out", "none"),
        standardize(rest, group.reached, "leave_one_out", "none"),
    )


@final
@dataclass
class AddedFirst(GroupRelative):
    """Rewards are added first and normalised after, turn by turn: `Merged` with credit by turns.

    A_{i,k} = z_{j reached k}(R + rho_{.,k})_i, with rho the turn rewards from turn k on.
    """

    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        """The equation."""
        return self.z(returns_to_go(turn_rewards, 1.0) + outcome[:, None], reached)


@final
@dataclass
class SignKept(GroupRelative):
    """The outcome's advantage, of which turn rewards take off blame, as in CalibAdv.

    A_{i,k} = z(R)_i, times 1 - q_{i,k} where it is below 0. q_{i,k} is where the turn rewards from
    turn k on lie between the least (0) and the greatest (1) of those that reached the turn; 0 if
    all are equal.
    """

    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        """The equation."""
        rho = returns_to_go(turn_rewards, 1.0)
        low = rho.masked_fill(~reached, torch.inf).amin(0)
        width = rho.masked_fill(~reached, -torch.inf).amax(0) - low
        q = ((rho - low) / width).where(width > 1e-6, 0.0)
        everyone = torch.ones_like(outcome)[:, None].bool()
        given = self.z(outcome[:, None], everyone).expand_as(rho)
        return torch.where(given < 0, given * (1 - q), given) * reached


@final
@dataclass
class CostsApart(GroupRelative):
    """MT-GRPO of what is paid, and costs of all attempts in units of reward.

    A_{i,k} = z(R)_i + z_{j reached k}(rho_{.,k})_i + c_{i,k} - mean of c_{.,k}, with rho what turns
    are paid from turn k on, and c what they cost.
    """

    def __call__(self, group: Group) -> Tensor:
        costs = group.turn_costs * group.reached
        paid = group.turn_rewards * group.reached - costs
        lost = standardize(returns_to_go(costs, 1.0), group.reached, self.baseline, "none")
        return self.advantages(paid, group.outcome, group.reached) + lost

    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        """What is paid."""
        rule = TurnLevel(baseline=self.baseline, scale=self.scale, min_std=self.min_std)
        return rule.advantages(turn_rewards, outcome, reached)


class Noisy(TurnReward):
    """`AnswerRetrieved`, which says the opposite of a share of the turns that call.

    The text of a turn and its question decide, so the same turn always earns the same. A call that
    failed is a turn that calls.

    Args:
        wrong: The share.
        weight: Reward of a turn that is said to have brought an accepted answer.
    """

    def __init__(self, wrong: float = 0.2, weight: float = 0.5) -> None:
        self.wrong = wrong
        self.weight = weight
        self._true = AnswerRetrieved(weight)

    def score(self, trajectory: Trajectory, turn: int) -> float:
        taken = trajectory.turns[turn]
        paid = self._true.score(trajectory, turn)
        if not taken.results:
            return paid
        draw = random.Random(f"{trajectory.question.id} {turn} {taken.text}").random()
        return self.weight - paid if draw < self.wrong else paid


class CostsLater(L.Callback):
    """A search costs nothing in the first iterations of a run.

    Args:
        free: How many.
    """

    def __init__(self, free: int = 6) -> None:
        self.free = free
        self._weights: dict[SearchCost, float] = {}

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        for reward in pl_module.rewards:
            if isinstance(reward, SearchCost):
                self._weights.setdefault(reward, reward.weight)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for reward, weight in self._weights.items():
            reward.weight = weight if trainer.current_epoch >= self.free else 0.0


class _OneSort(QuestionSource):
    """The questions of `Atlas`, in training those about one sort of places."""

    famous: bool

    def questions(self, split: str) -> Iterable[Question]:
        """The questions of a split."""
        asked = Atlas().questions(split)
        if split != "train":
            return asked
        return [one for one in asked if one.metadata["famous"] == self.famous]

    def passages(self) -> Iterable[Passage]:
        """A page per place."""
        return Atlas().passages()


class Tempting(_OneSort):
    """Trains on questions about famous places only, which the starter policy knows by heart."""

    famous = True


class Untempting(_OneSort):
    """Trains on questions about other places only, of which it knows nothing."""

    famous = False
