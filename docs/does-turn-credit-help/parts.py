"""What is trained: the parts of the study, and what stands beside each in its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from turnrl_sweep.matrix import Cell, read_cells

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"

_UNSCALED = "{baseline: leave_one_out, scale: none}"
ESTIMATORS = {
    "MT-GRPO": "TurnLevel",
    "MT-GRPO, unscaled": f"{{class_path: TurnLevel, init_args: {_UNSCALED}}}",
    "MT-GRPO, weighted": (
        "{class_path: TurnLevel, init_args: {baseline: leave_one_out, scale: none, turn_coef: 2.5}}"
    ),
    "MT-GRPO, one scale": "conditions.Together",
    "GRPO-MR": "Merged",
    "GRPO-MR, unscaled": f"{{class_path: Merged, init_args: {_UNSCALED}}}",
    "GRPO-MR, apart": "conditions.Apart",
    "GRPO-OR": "OutcomeOnly",
    "MT-PPO": "TurnCritic",
    "as released": "PaperExact",
    "Branched": "{class_path: Branched, init_args: {probes: 2}}",
    "Tree": "{class_path: Tree, init_args: {probes: 2}}",
}
"""The value of `model.estimator` for each name of the page."""


@dataclass(frozen=True)
class Sweep:
    """Some estimators with some seeds and all else alike, as `turnrl sweep` gets them.

    Args:
        recipes: Files, of which later ones go over earlier ones.
        seeds: As `0..7`.
        estimators: Their names.
        options: Settings of every run.
    """

    recipes: tuple[str, ...]
    seeds: str
    estimators: tuple[str, ...]
    options: tuple[str, ...] = ()

    def of(self, *estimators: str) -> Sweep:
        """The same with other estimators."""
        return replace(self, estimators=estimators)

    def over(self, *recipes: str) -> Sweep:
        """The same with recipes of this folder on top."""
        return replace(self, recipes=(*self.recipes, *(f"{HERE}/{name}" for name in recipes)))

    def having(self, *options: str) -> Sweep:
        """The same with more settings."""
        return replace(self, options=(*self.options, *options))

    @property
    def words(self) -> list[str]:
        """The words after `turnrl sweep`."""
        return [*self.recipes, "--seeds", self.seeds, "--set", self._set, *self.options]

    def cells(self) -> list[tuple[str, Cell]]:
        """Each run, with the name of its estimator."""
        names = {ESTIMATORS[name]: name for name in self.estimators}
        cells = read_cells([*self.recipes, *self.options], self.seeds, [self._set])[1]
        return [(names[cell.settings["model.estimator"]], cell) for cell in cells]

    @property
    def _set(self) -> str:
        return f"model.estimator={','.join(ESTIMATORS[name] for name in self.estimators)}"


@dataclass(frozen=True)
class Part:
    """A part of the study.

    Args:
        sweeps: What is trained, by a label that says what is changed; `""` if nothing is.
        beside: Runs of other parts that stand in its tables, by label.
        pairs: The estimators that are compared, the first minus the second; none for MT-GRPO with
            each other.
        base: The label of the first of each pair; None if it is that of the second.
        by_tokens: True to measure all by sampled tokens, nothing by iterations.
    """

    sweeps: Mapping[str, Sweep]
    beside: Mapping[str, Sweep] = field(default_factory=dict)
    pairs: tuple[tuple[str, str], ...] = ()
    base: str | None = None
    by_tokens: bool = False


PAPERS = ("MT-GRPO", "GRPO-MR", "GRPO-OR")
FIVE = ("MT-GRPO", "MT-GRPO, unscaled", "GRPO-MR", "GRPO-OR", "MT-PPO")
CONTROLS = ("GRPO-MR, apart", "GRPO-MR, unscaled")
PAIRS = (
    *((PAPERS[0], other) for other in FIVE[1:]),
    ("MT-GRPO, unscaled", "GRPO-MR"),
    ("MT-PPO", "GRPO-MR"),
)
SCALE = tuple(("MT-GRPO, one scale", other) for other in FIVE[:3])
WEIGHT = tuple(("MT-GRPO, weighted", other) for other in FIVE[:2])
SPLIT = (
    ("MT-GRPO", "GRPO-MR, apart"),
    ("MT-GRPO, unscaled", "GRPO-MR, unscaled"),
    ("GRPO-MR, apart", "GRPO-MR"),
    ("GRPO-MR, unscaled", "GRPO-MR"),
)
OUTCOME = "AnswerPresent, ExactMatch, WellFormed"
LR = "--model.optimizer.init_args.lr"

_SHORT = Sweep((f"{RECIPES}/quickstart.yaml",), "100..101", PAPERS).over("learning-rate.yaml")
_ONE = Sweep((f"{RECIPES}/quickstart.yaml",), "0..7", FIVE).over("one-hop.yaml")
_TWO = Sweep((f"{RECIPES}/atlas_react.yaml",), "0..7", FIVE).over("two-hop.yaml")
_ONE_5, _TWO_5 = (replace(one, seeds="0..4", estimators=PAPERS) for one in (_ONE, _TWO))

PARTS = {
    "learning-rate": Part(
        {f"lr {rate}": _SHORT.having(LR, rate) for rate in ("1e-4", "2e-4", "4e-4")}
    ),
    "one-hop": Part({"": _ONE}, pairs=PAIRS),
    "two-hop": Part({"": _TWO}, pairs=PAIRS),
    "split": Part({"": _ONE.of(*CONTROLS)}, {"": _ONE.of(*FIVE[:3])}, SPLIT),
    "split-two-hop": Part({"": _TWO.of(*CONTROLS)}, {"": _TWO.of(*FIVE[:3])}, SPLIT),
    "scale": Part({"": _ONE.of("MT-GRPO, one scale")}, {"": _ONE.of(*FIVE[:3])}, SCALE),
    "scale-two-hop": Part({"": _TWO.of("MT-GRPO, one scale")}, {"": _TWO.of(*FIVE[:3])}, SCALE),
    "weight": Part({"": _ONE.of("MT-GRPO, weighted")}, {"": _ONE.of(*FIVE[:2])}, WEIGHT),
    "weight-two-hop": Part({"": _TWO.of("MT-GRPO, weighted")}, {"": _TWO.of(*FIVE[:2])}, WEIGHT),
    "paid-hops": Part(
        {
            "": _TWO.of(*FIVE[:3], *CONTROLS).having(
                "--model.rewards",
                "[{class_path: Progress, init_args: {state: SupportSeen, weight: 1.0}}, "
                f"{OUTCOME}]",
            )
        },
        {"": _TWO.of("GRPO-OR")},
        (*PAIRS[1:3], *SPLIT),
    ),
    "groups": Part(
        {f"groups of {n}": _ONE_5.over(f"groups-{n}.yaml") for n in (4, 8)},
        {"groups of 16": _ONE_5},
    ),
    "noise": Part(
        {
            "reward wrong in 1 of 5": _ONE_5.having(
                "--model.rewards", f"[ToolExecuted, conditions.Noisy, {OUTCOME}]"
            )
        },
        {"reward right": _ONE_5},
    ),
    "temptation": Part(
        {
            "famous places": _ONE_5.having("--data.train", "conditions.Tempting"),
            "other places": _ONE_5.having("--data.train", "conditions.Untempting"),
        },
        {"four of five famous": _ONE_5},
    ),
    "no-search-cost": Part(
        {"no search cost": _TWO_5.having("--model.rewards", f"[FirstHit, {OUTCOME}]")},
        {"search cost": _TWO_5},
    ),
    "updates": Part(
        {"two updates": _ONE_5.having("--model.updates_per_iteration", "2")},
        {"one update": _ONE_5},
    ),
    "unscaled-rate": Part(
        {
            f"lr {rate}": _SHORT.of("MT-GRPO, unscaled").having(LR, rate)
            for rate in ("2e-4", "4e-4", "8e-4")
        },
        {"lr 2e-4": _SHORT.of("MT-GRPO").having(LR, "2e-4")},
        base="lr 2e-4",
    ),
    "as-released": Part({"": _ONE.of("as released")}, {"": _ONE.of("MT-GRPO")}),
    "equal-tokens": Part(
        {"": _ONE.of("Branched", "Tree").having("--model.group_size", "4")},
        {"": _ONE.of("MT-GRPO")},
        by_tokens=True,
    ),
}
"""The parts, as plan.md has them."""
