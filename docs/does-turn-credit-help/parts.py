"""What is trained: the parts of the study, and what stands beside each in its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from os.path import relpath
from pathlib import Path

from measures import (
    EXACT,
    Column,
    Measure,
    learned,
    learned_and_kept,
    learned_and_spent,
    learned_by_tokens,
)

from turnrl.commands.sweep.matrix import SweepRun, read_cells

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"

_NO_BIAS = "baseline: leave_one_out, scale: none"
ESTIMATORS = {
    "MT-GRPO": "TurnLevel",
    "MT-GRPO, unscaled": f"{{class_path: TurnLevel, init_args: {{{_NO_BIAS}}}}}",
    "MT-GRPO, weighted": f"{{class_path: TurnLevel, init_args: {{{_NO_BIAS}, turn_coef: 2.5}}}}",
    "MT-GRPO, one scale": "conditions.Together",
    "GRPO-MR": "Merged",
    "GRPO-MR, unscaled": f"{{class_path: Merged, init_args: {{{_NO_BIAS}}}}}",
    "GRPO-MR, apart": "conditions.Apart",
    "GRPO-OR": "OutcomeOnly",
    "MT-PPO": "TurnCritic",
    "MT-GRPO, released code": "PaperExact",
    "Branched": "{class_path: Branched, init_args: {probes: 2}}",
    "Tree": "{class_path: Tree, init_args: {probes: 2}}",
    "costs among right": "CostsAmongRight",
    "costs among right, in units of reward": (
        "{class_path: CostsAmongRight, init_args: {cost_scale: none}}"
    ),
    "costs apart": "conditions.CostsApart",
    "added first": "conditions.AddedFirst",
    "sign kept": "conditions.SignKept",
    "MT-GRPO, floor 0.5": "{class_path: TurnLevel, init_args: {min_std: 0.5}}",
    "MT-GRPO, gamma 0": "{class_path: TurnLevel, init_args: {gamma: 0.0}}",
    "MT-GRPO, gamma 0.5": "{class_path: TurnLevel, init_args: {gamma: 0.5}}",
    "MT-GRPO, unscaled, gamma 0.5": (
        f"{{class_path: TurnLevel, init_args: {{gamma: 0.5, {_NO_BIAS}}}}}"
    ),
    "costs among right, gamma 0.5": "{class_path: CostsAmongRight, init_args: {gamma: 0.5}}",
}
"""The value of `model.estimator` for each name of the page."""


_WARM = ("--lr", "1e-3", "--to")
STARTERS: dict[str, tuple[str, ...] | dict[str, float]] = {
    "ice": ("warmup", f"{RECIPES}/frozen_lake.yaml", *_WARM),
    "doors": ("warmup", f"{RECIPES}/frozen_lake.yaml", f"{HERE}/doors.yaml", *_WARM),
    "knows-little": {"facts": 0.3},
    "hits-more": {"vague": 0.0, "hasty": 0.2},
    "hits-less": {"vague": 0.5},
    "reads-well": {"reading": 0.7},
}
"""How each policy that some parts start from is made: words of `turnrl`, to which its folder is
added, or what differs from the starter policy of Atlas (see `atlas_starter.phases_with`)."""


@dataclass(frozen=True)
class Sweep:
    """Some estimators with some seeds and all else alike, as `turnrl sweep` gets them.

    Args:
        recipes: Files, of which later ones go over earlier ones.
        seeds: As `0..7`.
        estimators: Their names.
        options: Settings of every run.
        starter: The policy of `STARTERS` that they start from, in `starters` beside this file;
            that of the recipe if not given.
    """

    recipes: tuple[str, ...]
    seeds: str
    estimators: tuple[str, ...]
    options: tuple[str, ...] = ()
    starter: str = ""

    def of(self, *estimators: str) -> Sweep:
        """The same with other estimators."""
        return replace(self, estimators=estimators)

    def over(self, *recipes: str) -> Sweep:
        """The same with recipes of this folder on top."""
        return replace(self, recipes=(*self.recipes, *(f"{HERE}/{name}" for name in recipes)))

    def having(self, *options: str) -> Sweep:
        """The same with more settings."""
        return replace(self, options=(*self.options, *options))

    def begun_with(self, starter: str) -> Sweep:
        """The same from another starter policy."""
        # a path would differ from clone to clone, and with it the digest of the recipe
        model = f"package://starters/{starter}"
        return replace(self.having("--model.policy.model", model), starter=starter)

    @property
    def words(self) -> list[str]:
        """The words after `turnrl sweep`, from the current folder."""
        return [
            *map(relpath, self.recipes),
            "--seeds",
            self.seeds,
            "--set",
            self.set,
            *self.options,
        ]

    def cells(self) -> Sequence[tuple[str, SweepRun]]:
        """Each run, with the name of its estimator."""
        return _cells(self)

    @property
    def set(self) -> str:
        """The value of `--set`."""
        return f"model.estimator={','.join(ESTIMATORS[name] for name in self.estimators)}"


@cache
def _cells(sweep: Sweep) -> Sequence[tuple[str, SweepRun]]:
    """Read once, as many parts stand beside the same runs."""
    names = {ESTIMATORS[name]: name for name in sweep.estimators}
    cells = read_cells([*sweep.recipes, *sweep.options], sweep.seeds, [sweep.set])[1]
    return [(names[cell.settings["model.estimator"]], cell) for cell in cells]


@dataclass(frozen=True)
class Part:
    """A part of the study.

    Args:
        sweeps: What is trained, by a label that says what is changed; `""` if nothing is.
        beside: Runs of other parts that stand in its tables, by label.
        pairs: The estimators that are compared, the first minus the second; none for MT-GRPO with
            each other.
        base: The label of the first of each pair; None if it is that of the second.
        columns: What was learned, of which the first is the area, up to a number of tokens.
        level: Of the intervals of its differences.
        measure: What its runs are judged by.
        world: The runs of the main comparison, at whose shortest the area ends if no run of the
            part is shorter; None to leave them out of account.
    """

    sweeps: Mapping[str, Sweep]
    beside: Mapping[str, Sweep] = field(default_factory=dict)
    pairs: tuple[tuple[str, str], ...] = ()
    base: str | None = None
    columns: Callable[[float, Measure], list[Column]] = learned
    world: Sweep | None = None
    level: float = 0.95
    measure: Measure = EXACT

    def every(self) -> list[tuple[str, Sweep]]:
        """The sweeps with their labels, those that stand beside first."""
        return [*self.beside.items(), *self.sweeps.items()]


OURS, MERGED, OUTCOMES = PAPERS = ("MT-GRPO", "GRPO-MR", "GRPO-OR")
UNSCALED, ALIKE, WEIGHTED = "MT-GRPO, unscaled", "MT-GRPO, one scale", "MT-GRPO, weighted"
WHOLE = APART, WHOLE_UNSCALED = ("GRPO-MR, apart", "GRPO-MR, unscaled")
"""One advantage for the whole attempt."""
FIVE = (OURS, UNSCALED, MERGED, OUTCOMES, "MT-PPO")
SPLIT = (
    (OURS, APART),
    (UNSCALED, WHOLE_UNSCALED),
    (APART, MERGED),
    (WHOLE_UNSCALED, MERGED),
)
PAIRS = (
    *((OURS, other) for other in FIVE[1:]),
    *((one, other) for one in (UNSCALED, "MT-PPO") for other in (MERGED, OUTCOMES)),
    (MERGED, OUTCOMES),
)
RIGHT, RIGHT_IN_UNITS = "costs among right", "costs among right, in units of reward"
OUTCOME = "AnswerPresent, ExactMatch, WellFormed"
LR = "--model.optimizer.init_args.lr"

_SHORT = Sweep((f"{RECIPES}/quickstart.yaml",), "100..101", PAPERS).over("learning-rate.yaml")
_ONE, _FREE = (
    Sweep((f"{RECIPES}/{recipe}.yaml",), "0..7", FIVE)
    .over("curves.yaml")
    .having("--trainer.max_epochs", str(iterations))
    for recipe, iterations in (("quickstart", 30), ("atlas_react", 20))
)
_TWO = _FREE.having("--model.rewards", f"[FirstHit, SearchCost, {OUTCOME}]")
_PAID = _FREE.having(
    "--model.rewards",
    f"[{{class_path: Progress, init_args: {{state: SupportSeen, weight: 1.0}}}}, {OUTCOME}]",
)
_ONE_5, _TWO_5 = (replace(one, seeds="0..4", estimators=PAPERS) for one in (_ONE, _TWO))

_ONE_COSTS, _ONE_COSTS_TWICE = (
    _ONE.having("--model.rewards", f"[ToolExecuted, AnswerRetrieved, {cost}, {OUTCOME}]")
    for cost in ("SearchCost", "{class_path: SearchCost, init_args: {weight: 0.2}}")
)


def _costing(weight: str) -> Sweep:
    """Two hops, with another cost for each search."""
    cost = f"{{class_path: SearchCost, init_args: {{weight: {weight}}}}}"
    return _FREE.having("--model.rewards", f"[FirstHit, {cost}, {OUTCOME}]")


_CHEAP = _costing("0.05")

_OTHERS = ("MT-GRPO, floor 0.5", RIGHT_IN_UNITS, "costs apart", "added first", "sign kept")
"""Other ways with costs."""


def _confirmed(world: Sweep) -> Sweep:
    """The planned test of the rule for costs in a world that has them."""
    return replace(world, seeds="16..31", estimators=(RIGHT, OURS, OUTCOMES))


_CONFIRMED = _confirmed(_TWO)


def _harm(world: Sweep) -> Part:
    """Whether the rule for costs does harm in a world that has them."""
    trained = _confirmed(world)
    pairs = ((RIGHT, OURS), (RIGHT, OUTCOMES), (OURS, OUTCOMES))
    return Part({"": trained}, pairs=pairs, level=1 - 0.05 / 3)  # three worlds


def _eight(world: Sweep, *estimators: str) -> Sweep:
    """The first eight seeds of `_harm`."""
    return replace(world, seeds="16..23", estimators=estimators)


def _doors(turns: int) -> Sweep:
    """A corridor with so many doors, each of which pays at once."""
    world = f"{{environment: doors.Doors, options: {{doors: {turns}}}}}"
    how = f'{{max_turns: {turns}, form: text, instructions: ""}}'
    return (
        Sweep((f"{RECIPES}/frozen_lake.yaml",), "0..7", _SPLIT_OF_DOORS)
        .over("doors.yaml")
        .having("--model.rollout.tools", f"[{{class_path: Environment, init_args: {world}}}]")
        .having("--model.rollout.segmenter", f"{{class_path: Action, init_args: {how}}}")
        .begun_with("doors")
    )


_SPLIT_OF_DOORS = (OURS, APART, UNSCALED, WHOLE_UNSCALED, "MT-GRPO, gamma 0")
_MOVES = Sweep((f"{RECIPES}/frozen_lake.yaml",), "0..4", ()).begun_with("ice")
_MOVES_COST = _MOVES.having(
    "--model.rewards",
    "[{class_path: EnvironmentReward, init_args: {unfinished: 0.0}}, "
    "{class_path: EnvironmentOutcome, init_args: {right_at: 1.0}}, StepCost]",
)
_SOON = ("MT-GRPO, gamma 0.5", "MT-GRPO, unscaled, gamma 0.5")


def _in_both(
    name: str,
    trained: tuple[str, ...],
    beside: tuple[str, ...],
    pairs: tuple[tuple[str, str], ...],
) -> dict[str, Part]:
    """A part with one hop, and the same with two."""
    worlds = {name: _ONE, f"{name}-two-hop": _TWO}
    return {
        n: Part({"": world.of(*trained)}, {"": world.of(*beside)}, pairs, world=world)
        for n, world in worlds.items()
    }


def _again(runs: Sweep, world: Sweep) -> Part:
    """The split with eight more seeds."""
    known = runs.of(OURS, APART)
    return Part(
        {"seeds 8 to 15": replace(known, seeds="8..15")},
        {"all 16 seeds": replace(known, seeds="0..15"), "seeds 0 to 7": known},
        ((OURS, APART),),
        columns=learned_and_kept,
        world=world,
    )


CONDITIONS = {
    "groups": Part(
        {
            f"groups of {size}": _ONE_5.having(
                *("--model.group_size", f"{size}"),
                *("--data.questions_per_iteration", f"{256 // size}"),
            )
            for size in (8, 4)
        },
        {"groups of 16": _ONE_5},
        world=_ONE,
    ),
    "noise": Part(
        {
            "1 in 5 rewards wrong": _ONE_5.having(
                "--model.rewards", f"[ToolExecuted, conditions.Noisy, {OUTCOME}]"
            )
        },
        {"correct rewards": _ONE_5},
        world=_ONE,
    ),
    "temptation": Part(
        {
            "famous places only": _ONE_5.having("--data.train", "conditions.Tempting"),
            "other places only": _ONE_5.having("--data.train", "conditions.Untempting"),
        },
        {"4 in 5 famous": _ONE_5},
        world=_ONE,
    ),
    "no-search-cost": Part(
        {"no search cost": replace(_FREE, seeds="0..4", estimators=PAPERS)},
        {"search cost": _TWO_5},
        world=_TWO,
    ),
    "updates": Part(
        {"two updates": _ONE_5.having("--model.passes_per_iteration", "2")},
        {"one update": _ONE_5},
        world=_ONE,
    ),
}
"""The parts that change one thing of a main comparison, which is the one beside."""

PARTS = {
    "learning-rate": Part(
        {f"lr {rate}": _SHORT.having(LR, rate) for rate in ("1e-4", "2e-4", "4e-4")}
    ),
    "one-hop": Part({"": _ONE}, pairs=PAIRS),
    "two-hop": Part({"": _TWO}, pairs=PAIRS),
    **_in_both("split", WHOLE, (OURS, UNSCALED, MERGED), SPLIT),
    "split-again": _again(_ONE, _ONE),
    **_in_both(
        "scale",
        (ALIKE,),
        (OURS, UNSCALED, MERGED),
        ((ALIKE, OURS), (ALIKE, UNSCALED), (ALIKE, MERGED)),
    ),
    **_in_both("weight", (WEIGHTED,), (OURS, UNSCALED), ((WEIGHTED, OURS), (WEIGHTED, UNSCALED))),
    "larger-turn-rewards": Part(
        {
            f"turn rewards x {times}": _ONE.of(MERGED).having(
                "--model.rewards",
                f"[{{class_path: ToolExecuted, init_args: {{weight: {called}}}}}, "
                f"{{class_path: AnswerRetrieved, init_args: {{weight: {found}}}}}, {OUTCOME}]",
            )
            for times, called, found in ((2.5, 0.5, 1.25), (5.0, 1.0, 2.5))
        },
        {"unchanged turn rewards": _ONE.of(OURS, MERGED)},
        ((OURS, MERGED), (MERGED, MERGED)),
        base="unchanged turn rewards",
        world=_ONE,
    ),
    "paid-hops": Part(
        {"": _PAID.of(OURS, UNSCALED, MERGED, *WHOLE)},
        {"": _TWO.of(OUTCOMES)},
        ((OURS, UNSCALED), (OURS, MERGED), (OURS, OUTCOMES), (MERGED, OUTCOMES), *SPLIT),
        world=_TWO,
    ),
    "paid-hops-again": _again(_PAID, _TWO),
    **CONDITIONS,
    "longer": Part(
        {"60 iterations": _ONE.of(OUTCOMES).having("--trainer.max_epochs", "60")}, world=_ONE
    ),
    "unscaled-rate": Part(
        {f"lr {rate}": _SHORT.of(UNSCALED).having(LR, rate) for rate in ("2e-4", "4e-4", "8e-4")},
        {"lr 2e-4": _SHORT.of(OURS).having(LR, "2e-4")},
        base="lr 2e-4",
    ),
    "higher-rate": Part(
        {"lr 4e-4": _ONE.of(OURS, UNSCALED).having(LR, "4e-4")},
        {"lr 2e-4": _ONE.of(OURS, UNSCALED)},
        base="lr 2e-4",
        world=_ONE,
    ),
    "as-released": Part({"": _ONE.of("MT-GRPO, released code")}, {"": _ONE.of(OURS)}, world=_ONE),
    "equal-tokens": Part(
        {"": _ONE.of("Branched", "Tree").having("--model.group_size", "4")},
        {"": _ONE.of(OURS, UNSCALED)},
        tuple((one, other) for one in (OURS, UNSCALED) for other in ("Branched", "Tree")),
        columns=learned_by_tokens,
        world=_ONE,
    ),
    "harm-one-hop": _harm(_ONE_COSTS),
    "harm-one-hop-twice": _harm(_ONE_COSTS_TWICE),
    "harm-two-hop": _harm(_TWO),
    "cost-of-use": Part(
        {
            "a cost": _eight(_TWO, RIGHT).having("--trainer.max_epochs", "60"),
            "no cost": _eight(_FREE, OURS).having("--trainer.max_epochs", "60"),
        },
        pairs=((RIGHT, OURS),),
        base="a cost",
        columns=learned_and_spent,
    ),
    "cost-alternatives": Part(
        {
            "": _eight(_TWO, *_OTHERS),
            "half the cost": _eight(_CHEAP, OURS),
            "a cost from iteration 7": _eight(_TWO, OURS).over("later-cost.yaml"),
        },
        {"": _eight(_TWO, RIGHT, OURS, OUTCOMES)},
        tuple((one, other) for one in (RIGHT, OUTCOMES) for other in (*_OTHERS, OURS)),
        base="",
        world=_CONFIRMED,
    ),
    "dose": Part(
        {
            "no cost": _eight(_FREE, OURS),
            "cost 0.025": _eight(_costing("0.025"), RIGHT, OURS),
            "cost 0.05": _eight(_CHEAP, RIGHT),
            "cost 0.2": _eight(_costing("0.2"), RIGHT, OURS),
        },
        {"cost 0.05": _eight(_CHEAP, OURS), "cost 0.1": _eight(_TWO, RIGHT, OURS, OUTCOMES)},
        ((OUTCOMES, OURS), (OUTCOMES, RIGHT)),
        base="cost 0.1",
        world=_CONFIRMED,
    ),
    "outcomes-at-best": Part(
        {
            "lr 1e-4": _eight(_TWO, OUTCOMES).having(LR, "1e-4"),
            "lr 4e-4": _eight(_TWO, OUTCOMES).having(LR, "4e-4"),
            "two redraws": _eight(_TWO, OUTCOMES).having("--model.redraws", "2"),
        },
        {"": _eight(_TWO, RIGHT, OUTCOMES)},
        ((RIGHT, OUTCOMES),),
        base="",
        world=_CONFIRMED,
    ),
    "starters": Part(
        {
            name.replace("-", " "): replace(
                _TWO, seeds="16..18", estimators=(RIGHT, OURS, OUTCOMES)
            ).begun_with(name)
            for name in ("knows-little", "hits-more", "hits-less", "reads-well")
        },
        {"bundled": replace(_TWO, seeds="16..18", estimators=(RIGHT, OURS, OUTCOMES))},
        ((RIGHT, OURS), (RIGHT, OUTCOMES), (OURS, OUTCOMES)),
    ),
    "horizon": Part(
        {f"{turns} doors": _doors(turns) for turns in (2, 4, 8, 12)},
        pairs=(
            (OURS, APART),
            (UNSCALED, WHOLE_UNSCALED),
            ("MT-GRPO, gamma 0", OURS),
            ("MT-GRPO, gamma 0", APART),
        ),
        measure=Measure("val/reward/turn", "share of right doors"),
    ),
    "lake": Part(
        {
            "": _MOVES.of(*_SOON, MERGED, OUTCOMES, "MT-PPO"),
            "each move costs": _MOVES_COST.of("costs among right, gamma 0.5", *_SOON, OUTCOMES),
        },
        pairs=(
            *((_SOON[0], other) for other in (_SOON[1], MERGED, OUTCOMES, "MT-PPO")),
            *(("costs among right, gamma 0.5", other) for other in (*_SOON, OUTCOMES)),
        ),
        measure=Measure("val/reward/outcome", "share of attempts at the goal"),
    ),
}
"""The parts, as plan.md has them."""
