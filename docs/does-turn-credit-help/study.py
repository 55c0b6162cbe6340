"""Trains what the study lacks, and makes its tables and pictures from the lines of its runs.

    python docs/does-turn-credit-help/study.py               all parts, then tables and pictures
    python docs/does-turn-credit-help/study.py one-hop       one part
    python docs/does-turn-credit-help/study.py --draw        tables and pictures of what is there

Each part is a `turnrl sweep`, whose lines are kept in lines/PART.jsonl. Stop it as you like, and
give the same command again: it goes on. To train everything anew, name a new folder with --folder:
lines, tables and pictures are written there.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from turnrl_record.statistics import Difference, over_seeds
from turnrl_sweep import results
from turnrl_sweep.results import Result
from turnrl_sweep.table import area

from turnrl import TurnRLError
from turnrl.cli import main as turnrl

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"
PAGE = "index.md"

UNSCALED = "{class_path: TurnLevel, init_args: {baseline: leave_one_out, scale: none}}"
NAMES = {
    "TurnLevel": "MT-GRPO",
    UNSCALED: "MT-GRPO, unscaled",
    "Merged": "GRPO-MR",
    "OutcomeOnly": "GRPO-OR",
    "TurnCritic": "MT-PPO",
}
"""Estimators as the paper calls them, by their value of `--set model.estimator`."""
ESTIMATORS = f"--set 'model.estimator={','.join(NAMES)}'"
PAPERS = "--set model.estimator=TurnLevel,Merged,OutcomeOnly"
FIVE = f"--seeds 0..4 {PAPERS}"
QUICK = f"{RECIPES}/quickstart.yaml"
ONE_HOP = f"{QUICK} {HERE}/one-hop.yaml"
TWO_HOP = f"{RECIPES}/atlas_react.yaml {HERE}/two-hop.yaml"
OUTCOME = "AnswerPresent, ExactMatch, WellFormed"
RATES = "--set model.optimizer.init_args.lr=1e-4,2e-4,4e-4"
PARTS = {
    "learning-rate": f"{QUICK} {HERE}/learning-rate.yaml --seeds 100..101 {RATES} {PAPERS}",
    "one-hop": f"{ONE_HOP} --seeds 0..7 {ESTIMATORS}",
    "two-hop": f"{TWO_HOP} --seeds 0..7 {ESTIMATORS}",
    "groups": f"{ONE_HOP} {FIVE} --set config={HERE}/groups-4.yaml,{HERE}/groups-8.yaml",
    "noise": f"{ONE_HOP} {FIVE} --model.rewards '[ToolExecuted, conditions.Noisy, {OUTCOME}]'",
    "temptation": f"{ONE_HOP} {FIVE} --set data.train=conditions.Tempting,conditions.Untempting",
    "no-search-cost": f"{TWO_HOP} {FIVE} --model.rewards '[FirstHit, {OUTCOME}]'",
    "updates": f"{ONE_HOP} {FIVE} --model.updates_per_iteration 2",
}
"""The words of each part's `turnrl sweep`, as plan.md has them."""

MATCH, CALLS, FAMOUS = "val/exact_match", "train/tool_execution", "famous/exact_match"
GOOD = 0.7
CALLING, FALLEN = 0.5, 0.25


# ------------------------------------------------------------------------------------- one run


def until_good(run: Result) -> tuple[float, bool]:
    """The first iteration after which held-out exact match is 0.7 or more, and whether there was
    one; else the last iteration."""
    pairs = zip(run.curves["iteration"], run.curves[MATCH], strict=True)
    reached = [
        one for one, match in pairs if one is not None and match is not None and match >= GOOD
    ]
    return (reached[0], True) if reached else (float(run.curves["iteration"][-1] or 0), False)


def collapsed(run: Result) -> bool:
    """True if sampled tool execution was 0.5 or more and 0.25 or less later."""
    calls = [value for value in run.curves[CALLS] if value is not None]
    highest = np.maximum.accumulate(calls)
    return any(v <= FALLEN and high >= CALLING for v, high in zip(calls, highest, strict=True))


def lowest(run: Result) -> float:
    """The least sampled tool execution."""
    return min(value for value in run.curves[CALLS] if value is not None)


def last(run: Result, name: str = MATCH) -> float:
    """A figure of the last validation."""
    return float(run.curves[name][-1] or 0)


def by_iteration(run: Result) -> float:
    """The area under held-out exact match per iteration."""
    return area(_matches(run), _matches(run)[-1][0])


def _matches(run: Result) -> list[tuple[float, float]]:
    """Iteration and held-out exact match."""
    pairs = zip(run.curves["iteration"], run.curves[MATCH], strict=True)
    return [(float(x), float(y)) for x, y in pairs if x is not None and y is not None]


# ----------------------------------------------------------------------------------- one part


class Setting(NamedTuple):
    """An estimator, as the paper calls it, and in short what else was set: `lr 1e-4`."""

    estimator: str
    rest: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


@dataclass(frozen=True)
class Part:
    """The runs of one part.

    Args:
        name: Of the part.
        runs: By setting, each by seed.
    """

    name: str
    runs: Mapping[Setting, Mapping[int, Result]]

    @property
    def tokens(self) -> float:
        """The sampled tokens that every run reached."""
        return min(run.points(MATCH)[-1][0] for some in self.runs.values() for run in some.values())

    def area(self, run: Result) -> float:
        """The primary measure: the area under held-out exact match per sampled token."""
        return area(run.points(MATCH), self.tokens)

    def gain(
        self, first: Setting, second: Setting, figure: Callable[[Result], float]
    ) -> Difference | None:
        """What the second setting has more of a figure, paired by seed; None below two seeds."""
        one, other = self.runs.get(first, {}), self.runs.get(second, {})
        seeds = sorted(one.keys() & other.keys())
        if len(seeds) < 2:
            return None
        return over_seeds([figure(one[s]) for s in seeds], [figure(other[s]) for s in seeds])


def part(name: str, folder: Path) -> Part:
    """The runs of a part that are done.

    Args:
        name: Of the part.
        folder: The folder with `lines`.
    Raises:
        TurnRLError: If a setting has runs of two recipes, which are not to be mixed.
    """
    file = folder / "lines" / f"{name}.jsonl"
    found, problems = results.read(file)
    for problem in problems:
        print(problem)
    runs: dict[Setting, dict[int, Result]] = {}
    digests: dict[Setting, str] = {}
    for (digest, seed), run in found.items():
        setting = _setting(run.settings)
        if digests.setdefault(setting, digest) != digest:
            raise TurnRLError(f"{file} has runs of two recipes for {setting}. Keep those of one.")
        runs.setdefault(setting, {})[seed] = run
    order = {name: place for place, name in enumerate(NAMES.values())}
    ordered = sorted(runs, key=lambda one: (one.rest, order.get(one.estimator, len(order))))
    return Part(name, {one: dict(sorted(runs[one].items())) for one in ordered})


def _setting(settings: Mapping[str, str]) -> Setting:
    rest = []
    for key, value in settings.items():
        if key == "config":
            rest.append(Path(value).stem)
        elif key != "model.estimator":
            rest.append(f"{key.rpartition('.')[2]} {value}")
    estimator = settings["model.estimator"]
    return Setting(NAMES.get(estimator, estimator), ", ".join(rest))


# ------------------------------------------------------------------------------------- tables


def figures(of: Part) -> Iterator[str]:
    """The table of what was learned: a row for each setting, means over its seeds."""
    yield "| | seeds | area | its sd | at the end | iterations to 0.7 | never 0.7 |"
    yield "|---|---|---|---|---|---|---|"
    for setting, some in of.runs.items():
        runs = [*some.values()]
        areas = [of.area(run) for run in runs]
        yield _row(
            setting,
            len(runs),
            _mean(areas),
            f"{np.std(areas, ddof=1):.3f}" if len(runs) > 1 else "",
            _mean([last(run) for run in runs]),
            _mean([_iterations(run) for run in runs], 1),
            sum(not until_good(run)[1] for run in runs),
        )


def habits(of: Part) -> Iterator[str]:
    """The table of how it was done: tool use, memory and cost."""
    yield (
        "| | tool execution, least | tool execution, end | collapses | famous places, end "
        "| sampled tokens | minutes |"
    )
    yield "|---|---|---|---|---|---|---|"
    for setting, some in of.runs.items():
        runs = [*some.values()]
        yield _row(
            setting,
            _mean([lowest(run) for run in runs], 2),
            _mean([last(run, CALLS) for run in runs], 2),
            sum(collapsed(run) for run in runs),
            _mean([last(run, FAMOUS) for run in runs], 2),
            f"{np.mean([last(run, 'sampled_tokens') for run in runs]):,.0f}",
            _mean([last(run, "seconds") / 60 for run in runs], 1),
        )


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def gains(of: Part, base: str = "MT-GRPO") -> Iterator[str]:
    """The table of paired differences: what one estimator has more than each other where all else
    is set alike."""
    yield f"| {base} less | area | at the end | iterations to 0.7 | area per iteration |"
    yield "|---|---|---|---|---|"
    measures = {of.area: 3, last: 3, _iterations: 1, by_iteration: 3}
    for other in of.runs:
        ours = other._replace(estimator=base)
        found = [(of.gain(other, ours, figure), digits) for figure, digits in measures.items()]
        if other != ours and all(one for one, _ in found):
            yield _row(other, *(_difference(*one) for one in found))


def _iterations(run: Result) -> float:
    return until_good(run)[0]


def _mean(values: Sequence[float], digits: int = 3) -> str:
    return f"{np.mean(values):.{digits}f}"


def _difference(one: Difference | None, digits: int) -> str:
    if one is None:
        return ""
    less = one.second - one.first
    return f"{less:+.{digits}f} [{one.low:+.{digits}f}, {one.high:+.{digits}f}]"


def put(page: Path, name: str, rows: Iterator[str]) -> None:
    """Put a table between its marks in a page."""
    text = page.read_text("utf-8")
    marks = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    pattern = re.compile(f"(?<={re.escape(marks[0])}).*?(?={re.escape(marks[1])})", re.DOTALL)
    page.write_text(pattern.sub(lambda _: "\n".join(rows) + "\n", text), "utf-8")


# ----------------------------------------------------------------------------------- pictures


def picture(of: Part, file: Path, most: int | None = None) -> None:
    """Draw the mean and its 95 % interval over seeds: held-out and famous exact match, and sampled
    tool execution, by iteration.

    Args:
        of: The runs.
        file: The picture.
        most: Iterations that are shown; None for all.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from scipy import stats

    titles = {
        MATCH: "exact match, held-out places",
        FAMOUS: "exact match, famous places",
        CALLS: "sampled tool execution",
    }
    with rc_context({"svg.hashsalt": "turnrl", "font.size": 9}):
        figure = Figure(figsize=(10, 3.1))
        figure.subplots_adjust(left=0.05, right=0.99, bottom=0.25, top=0.9, wspace=0.08)
        for axes, (name, title) in zip(
            figure.subplots(1, 3, sharey=True), titles.items(), strict=True
        ):
            axes.set_title(title)
            axes.set_xlabel("iteration")
            axes.set_ylim(-0.03, 1.03)
            axes.grid(alpha=0.3)
            for number, (setting, some) in enumerate(of.runs.items()):
                curves = [run.curves for run in some.values()]
                known = [n for n, v in enumerate(curves[0][name]) if v is not None]
                x = np.asarray([curves[0]["iteration"][n] for n in known], float)
                y = np.asarray([[one[name][n] for n in known] for one in curves], float)
                shown = x <= (most or x[-1])
                x, y = x[shown], y[:, shown]
                axes.plot(
                    x, y.mean(0), color=f"C{number}", label=str(setting) if name == MATCH else None
                )
                if len(y) > 1:
                    half = stats.t.ppf(0.975, len(y) - 1) * y.std(0, ddof=1) / len(y) ** 0.5
                    low, high = np.clip([y.mean(0) - half, y.mean(0) + half], 0, 1)
                    axes.fill_between(x, low, high, color=f"C{number}", alpha=0.18, linewidth=0)
        figure.legend(loc="lower center", ncols=len(of.runs), frameon=False)
        figure.savefig(file, metadata={"Date": None})


def draw(folder: Path) -> None:
    """The tables and pictures that the page has marks and links for, of the parts with a run."""
    page = folder / PAGE
    if not page.exists():
        shutil.copy(HERE / PAGE, page)
    for name in PARTS:
        one = part(name, folder)
        if one.runs:
            put(page, f"{name}: figures", figures(one))
            put(page, f"{name}: differences", gains(one))
            put(page, f"{name}: habits", habits(one))
            if f"({name}.svg)" in page.read_text("utf-8"):
                picture(one, folder / f"{name}.svg")
    print(f"tables and pictures are in {folder}", flush=True)


# ------------------------------------------------------------------------------------ command


def main(words: Sequence[str] | None = None) -> int:
    """Run parts, then make tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; or all")
    parser.add_argument("--folder", type=Path, default=HERE, help="where lines and page are")
    parser.add_argument("--jobs", help="runs at a time; the number of cores if not given")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    given = parser.parse_args(words)
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}. There are {', '.join(PARTS)}.")
    lines = given.folder / "lines"
    lines.mkdir(parents=True, exist_ok=True)
    runs = Path("runs") / given.folder.name
    jobs = ["--jobs", given.jobs] if given.jobs else []
    # conditions.py, for the runs too
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(HERE), os.environ.get("PYTHONPATH")))
    )
    worst = 0
    for name in () if given.draw else given.parts or PARTS:
        print(f"\n{name}", flush=True)
        where = ["-o", str(runs / name), "--results", str(lines / f"{name}.jsonl")]
        code = turnrl(["sweep", *shlex.split(PARTS[name]), *where, *jobs])
        if code not in (0, 1):  # 1 is of a run that failed: the others count
            return code
        worst = max(worst, code)
    try:
        draw(given.folder)
    except TurnRLError as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 1
    return worst


if __name__ == "__main__":
    sys.exit(main())
