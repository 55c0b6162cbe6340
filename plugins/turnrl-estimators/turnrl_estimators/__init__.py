"""Further estimators, and an exact check of any estimator.

    relative   PerTurnIndex, PaperExact, DiscountedReturn: rewards compared within a group
    anchored   GroupInGroup: turns compared that were taken in the same state
    valued     Branched, Tree, TurnCritic: turns judged by the values of states
    costs      CostsAmongRight: costs compared among attempts with a right answer
    toy        a decision process so small that bias and variance can be computed exactly
    command    `turnrl credit-check`

The classes need torch, so they are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnrl import hookimpl
from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl_estimators.anchored import GroupInGroup as GroupInGroup
    from turnrl_estimators.costs import CostsAmongRight as CostsAmongRight
    from turnrl_estimators.relative import DiscountedReturn as DiscountedReturn
    from turnrl_estimators.relative import PaperExact as PaperExact
    from turnrl_estimators.relative import PerTurnIndex as PerTurnIndex
    from turnrl_estimators.valued import Branched as Branched
    from turnrl_estimators.valued import Tree as Tree
    from turnrl_estimators.valued import TurnCritic as TurnCritic

__getattr__, __all__ = make_lazy(__name__, __file__)


@hookimpl
def turnrl_estimators() -> list[str]:
    """The estimators of this package."""
    homes = {
        "relative": ("PerTurnIndex", "PaperExact", "DiscountedReturn"),
        "anchored": ("GroupInGroup",),
        "valued": ("Branched", "Tree", "TurnCritic"),
        "costs": ("CostsAmongRight",),
    }
    return [f"turnrl_estimators.{home}:{name}" for home, names in homes.items() for name in names]


@hookimpl
def turnrl_commands() -> list[str]:
    """`turnrl credit-check`."""
    return ["turnrl_estimators.command:add_credit_command"]
