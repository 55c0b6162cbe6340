"""An estimator that keeps costs apart from what is paid."""

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final, get_args

import torch
from torch import Tensor

from turnrl import Group, RecipeError, TurnLevel
from turnrl.credit.estimators import GroupRelative, returns_to_go, standardize
from turnrl.credit.why import Contrast, compares
from turnrl.plugin.errors import check_at_least, check_one_of, check_within
from turnrl.types import Reward

_logger = logging.getLogger(__name__)

CostScale = Literal["outcome", "none"]


@final
@dataclass(kw_only=True)
class CostsAmongRight(GroupRelative):
    """MT-GRPO for what is paid; costs count only among attempts with a right answer.

    With R and r without costs, and c_{i,k} = sum_{l >= k} gamma^(l-k) (costs of turn l), plus the
    costs of the outcome:

        A_{i,k} = outcome_coef z(R)_i + turn_coef z_{j reached k}(rho_{.,k})_i
                + cost_coef (c_{i,k} - mean of c_{.,k}) / u     if i is right, else without this

    The mean is over the right attempts that reached turn k; a right attempt that is alone there has
    no third term. With `scale: std` and `cost_scale: outcome`, u is the divisor of z(R),
    max(std(R), min_std). If every attempt of the group is right, std(R) does not show what being
    right is worth, so u is then at least half of what a right attempt earns, the sum of `right_at`:
    about the standard deviation if half of the attempts earned that and half 0. Else u is 1.

    A component is a cost if its class sets `Reward.is_cost`, whatever its sign; an attempt is right
    by `Reward.right_at`. Without a cost this is `TurnLevel`. It changes the objective: the costs of
    a wrong attempt count for nothing, so a policy does not learn to act less before it is right
    (docs/explanation/credit.md). SAAS (arXiv 2605.29796) and PAPO (arXiv
    2603.26535) also compare costs among right answers alone, for whole attempts.

    Args:
        outcome_coef: Weight of the outcome's advantage.
        turn_coef: Weight of the advantage of what turns are paid.
        cost_coef: Weight of the costs' advantage; 0 ignores costs.
        gamma: Discount of later turn rewards and costs.
        cost_scale: `outcome` divides costs as the outcome is divided, `none` leaves them in units
            of reward.
        baseline: `mean` of the trajectories compared, or `leave_one_out`.
        scale: `std` divides by their standard deviation, `none` leaves units of reward.
        min_std: Floor of the standard deviation.
    """

    outcome_coef: float = 1.0
    turn_coef: float = 1.0
    cost_coef: float = 1.0
    gamma: float = 1.0
    cost_scale: CostScale = "outcome"
    charges_costs = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(0, 1, "CostsAmongRight.", self, "gamma")
        check_at_least(0, "CostsAmongRight.", self, "cost_coef", optional=False)
        check_one_of(get_args(CostScale), "CostsAmongRight.", self, "cost_scale")

    def check(self, rewards: Sequence[Reward]) -> None:
        """Refuse costs if no reward defines a right attempt."""
        costs = [cost.name or type(cost).__name__ for cost in rewards if cost.is_cost]
        if costs and all(reward.right_at is None for reward in rewards):
            raise RecipeError(
                f"CostsAmongRight compares costs ({', '.join(costs)}) among the attempts that are "
                "right, and no reward says which are. Add ExactMatch to model.rewards, or set "
                "right_at of the outcome reward that knows (EnvironmentOutcome, FunctionReward, or "
                "a class of yours)."
            )
        for reward in rewards if costs else ():
            if reward.right_at is not None and reward.right_at <= 0:
                raise RecipeError(
                    f"{reward} has right_at = {reward.right_at}, and CostsAmongRight weighs costs "
                    "by what a right attempt earns. Let a right attempt earn more than 0."
                )
        if not costs:
            _logger.warning(
                "CostsAmongRight gives the credit of TurnLevel, because no reward is a cost. If "
                "one is, set is_cost of its class, or of FunctionReward."
            )

    def __call__(self, group: Group) -> Tensor:
        paid = _without_costs(group)
        credit = self.paid_rule(paid)
        if not group.cost_names or len(group.trajectories) < 2:
            return credit
        among, costs = _among(group), _costs_to_go(group, self.gamma)
        differences = standardize(costs, among, self.baseline, "none")
        differences = differences.masked_fill(among.sum(0) == 1, 0.0)  # nobody to compare with
        return credit + self.cost_coef * differences / self.unit(float(paid.outcome.std()), group)

    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        """The first two terms: MT-GRPO of what is paid."""
        return self.paid_rule.advantages(turn_rewards, outcome, reached)

    @property
    def paid_rule(self) -> TurnLevel:
        """Gives credit for what is paid."""
        return TurnLevel(
            outcome_coef=self.outcome_coef,
            turn_coef=self.turn_coef,
            gamma=self.gamma,
            baseline=self.baseline,
            scale=self.scale,
            min_std=self.min_std,
        )

    def unit(self, spread: float, group: Group) -> float:
        """The divisor of the costs.

        Args:
            spread: The standard deviation of what is paid for outcomes.
            group: The group.
        """
        if self.scale == "none" or self.cost_scale == "none":
            return 1.0
        half = _worth(group) / 2 if bool(_find_correct(group).all()) else 0.0
        return max(spread, half, self.min_std)


def _without_costs(group: Group) -> Group:
    """The group without its costs."""
    if not group.cost_names:
        return group
    # summed anew: a cost taken off a float32 sum would leave its rounding
    turns, outcome = (
        sum(
            (p.values for p in group.components.values() if not p.is_cost and p.by_turn == by_turn),
            torch.zeros(total.shape, dtype=torch.float64),
        ).to(total.dtype)
        for by_turn, total in ((True, group.turn_rewards), (False, group.outcome))
    )
    return replace(group, turn_rewards=turns, outcome=outcome)


def _find_correct(group: Group) -> Tensor:
    if (right := group.right) is None:
        raise RecipeError(
            "CostsAmongRight needs to know which attempts are right, and no component of this "
            "group has right_at. Score it with a reward that has right_at, such as ExactMatch."
        )
    return right


def _worth(group: Group) -> float:
    """The least that a right attempt earns: the sum of the components' `right_at`."""
    return sum(part.right_at or 0.0 for part in group.components.values())


def _among(group: Group) -> Tensor:
    """(G, K), the turns that right attempts reached."""
    return _find_correct(group)[:, None] & group.reached


def _costs_to_go(group: Group, gamma: float) -> Tensor:
    """(G, K), the costs from each turn on, including the costs of the outcome."""
    return returns_to_go(group.turn_costs * group.reached, gamma) + group.outcome_costs[:, None]


@compares.register
def _(estimator: CostsAmongRight, group: Group) -> Sequence[Contrast]:
    paid = _without_costs(group)
    terms = [*(compares(estimator.paid_rule, paid) or ())]
    if not group.cost_names or len(group.trajectories) < 2:
        return terms
    among = _among(group)
    costs = Contrast(
        "costs from here on, among right attempts",
        _costs_to_go(group, estimator.gamma),
        torch.arange(among.shape[1]).expand_as(among).masked_fill(~among, -1),
        estimator.cost_coef * among.to(paid.outcome.dtype),
        divisor=estimator.unit(statistics.stdev(paid.outcome.tolist()), group),
    )
    return [*terms, costs]
