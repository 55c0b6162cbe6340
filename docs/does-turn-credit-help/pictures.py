"""The pictures of the page."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from measures import CALLS, FAMOUS, ITERATION, MATCH, at
from parts import ESTIMATORS, FIVE, MERGED, OURS, OUTCOMES, RIGHT, WHOLE
from rows import Row, Rows

from turnrl.commands.sweep.results import Result
from turnrl.runs.statistics import student_interval

GREY = "#787f89"
"""Text and axes that read on white and on black."""
LINES = (
    ("#0072b2", "-"),
    ("#56b4e9", (0, (6, 1.5))),
    ("#009e73", "--"),
    ("#d55e00", ":"),
    ("#cc79a7", "-."),
    ("#e69f00", (0, (5, 1, 1, 1, 1, 1))),
    ("#8c6d31", (0, (1, 1))),
    ("#6a51a3", (0, (3, 1, 1, 1))),
)
"""Colours of Okabe and Ito and near them, with dashes that tell them apart without colour."""
TITLES = {
    MATCH: "exact match, held-out places",
    FAMOUS: "exact match, famous places",
    CALLS: "sampled tool execution",
}


def curves(of: Rows, file: Path) -> None:
    """Mean and 95 % interval over seeds, by iteration: held-out and famous exact match, and sampled
    tool execution.

    Args:
        of: The runs.
        file: The picture.
    """
    with _figure(file, 3.1) as figure:
        figure.subplots_adjust(left=0.05, right=0.99, bottom=0.25, top=0.9, wspace=0.08)
        panels = figure.subplots(1, len(TITLES), sharey=True)
        for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
            axes.set_title(title)
            axes.set_xlabel(ITERATION)
            axes.set_ylim(-0.03, 1.03)
            axes.grid(alpha=0.3)
            for row, some in of.runs.items():
                x, y = _common(some, name)
                color, dashes = _line(row.estimator)
                label = str(row) if name == MATCH else None
                axes.plot(x, y.mean(0), color=color, linestyle=dashes, label=label)
                if len(y) > 1:
                    ends = np.clip([student_interval([*v]) for v in y.T], 0, 1).T
                    axes.fill_between(x, *ends, color=color, alpha=0.18, linewidth=0)
        figure.legend(loc="lower center", ncols=len(of.runs), frameon=False)


def forest(parts: Mapping[str, Rows], file: Path) -> None:
    """MT-GRPO's lead in area over the others, with 95 % intervals, a line for each label.

    Args:
        parts: The conditions, by name.
        file: The picture.
    """
    pairs = [(of, *pair) for of in parts.values() for pair in of.pairs]
    labels = [*dict.fromkeys(row.label for *_, row in pairs)]
    others = [*dict.fromkeys(row.estimator for *_, row in pairs)]
    with _figure(file, 0.9 + 0.3 * len(labels)) as figure:
        axes = figure.subplots()
        figure.subplots_adjust(left=0.2, right=0.98, bottom=0.9 / figure.get_figheight(), top=0.98)
        for of, ours, row in pairs:
            gain = of.minus(ours, row, of.columns[0].figure)
            if gain is None:
                continue
            number, (color, _) = others.index(row.estimator), _line(row.estimator)
            place = labels.index(row.label)
            y = place + 0.24 * (number - (len(others) - 1) / 2)
            axes.plot([gain.low, gain.high], [y, y], color=color, linewidth=2)
            axes.plot([gain.change], [y], "o", color=color)
        parts_of = [{row.label: of for of, _, row in pairs}[label] for label in labels]
        for place, (above, below) in enumerate(itertools.pairwise(parts_of)):
            if above is not below:
                axes.axhline(place + 0.5, color=GREY, linewidth=0.5, alpha=0.5)
        axes.axvline(0, color=GREY, linewidth=1)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlabel("MT-GRPO's area minus the other estimator's")
        axes.grid(alpha=0.3, axis="x")
        handles = [axes.plot([], [], "o-", color=_line(one)[0])[0] for one in others]
        figure.legend(handles, others, loc="lower left", ncols=len(others), frameon=False)


WORLDS = {
    "one-hop": ("one search, 8 seeds", "", (OURS, MERGED, OUTCOMES)),
    "no-search-cost": ("two searches, 5 seeds", "no search cost", (OURS, MERGED, OUTCOMES)),
    "harm-two-hop": ("two that cost, 16 new seeds", "", (RIGHT, OURS, OUTCOMES)),
}
"""Parts of the picture for a first look: what its panels are called, the label of their rows, and
which curves they have."""
SHORT = {RIGHT: "CostsAmongRight"}
DASHES = {OURS: "-", MERGED: "--", OUTCOMES: ":", RIGHT: "-."}
THEMES = {
    "light": {OURS: "#0072b2", MERGED: "#009e73", OUTCOMES: "#d55e00", RIGHT: "#8b4a86"},
    "dark": {OURS: "#56b4e9", MERGED: "#2fc99a", OUTCOMES: "#f08a3c", RIGHT: "#e6a5d8"},
}
INK = {"light": "#1f2328", "dark": "#f0f6fc"}


def first_look(every: Mapping[str, Rows], theme: str, file: Path) -> None:
    """Held-out exact match by sampled tokens, to where the area ends: means over seeds, and each
    run as a thin line. Colours are those of Okabe and Ito or near them, on no background.

    Args:
        every: The parts, by name.
        theme: The page behind it, light or dark.
        file: The picture.
    """
    with _figure(file, 3.3, INK[theme]) as figure:
        figure.subplots_adjust(left=0.055, right=0.88, bottom=0.15, top=0.9, wspace=0.5)
        panels = figure.subplots(1, len(WORLDS))
        panels[0].set_ylabel("held-out exact match")
        for axes, (name, (title, label, names)) in zip(panels, WORLDS.items(), strict=True):
            of = every[name]
            tokens = np.linspace(0, of.tokens, 200)
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlabel("sampled tokens")
            axes.set_xlim(0, of.tokens)
            axes.set_ylim(0, 1)
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f} k")
            axes.spines[["top", "right"]].set_visible(False)
            lowest = 0.0
            means = {}
            there = [one for one in names if Row(one, label) in of.runs]
            for estimator in there:
                color = THEMES[theme][estimator]
                some = of.runs[Row(estimator, label)].values()
                runs = [[at(run, x) for x in tokens] for run in some]
                for run in runs:
                    axes.plot(tokens, run, color=color, linewidth=0.6, alpha=0.3)
                means[estimator] = np.mean(runs, axis=0)
                axes.plot(tokens, means[estimator], DASHES[estimator], color=color, linewidth=2.2)
            for estimator in sorted(there, key=lambda name: means[name][-1]):
                height = max(lowest, means[estimator][-1])  # no label on top of another
                lowest = height + 0.06
                axes.annotate(
                    SHORT.get(estimator, estimator),
                    (tokens[-1], height),
                    (6, 0),
                    textcoords="offset points",
                    color=THEMES[theme][estimator],
                    va="center",
                    annotation_clip=False,
                )


def _line(estimator: str) -> tuple[str, Any]:
    """Colour and dashes, the same in every picture but that for a first look."""
    order = [*dict.fromkeys((*FIVE, *WHOLE, *ESTIMATORS))]
    return LINES[order.index(estimator) % len(LINES)]


def _common(some: Mapping[int, Result], name: str) -> tuple[Any, Any]:
    """The iterations after which every seed has a value, and the values, a row for each seed."""
    found = [dict(run.points(name, ITERATION)) for run in some.values()]
    x = sorted(set.intersection(*({*one} for one in found)))
    return np.asarray(x), np.asarray([[one[place] for place in x] for one in found], float)


@contextmanager
def _figure(file: Path, height: float, ink: str = GREY) -> Iterator[Any]:
    """A figure on no background, with text as text, that becomes a file: the same bytes each
    time."""
    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: Any = dict.fromkeys(inks, ink)
    settings |= {"svg.hashsalt": "turnrl", "svg.fonttype": "none", "font.size": 9}
    with rc_context(settings):
        figure = Figure(figsize=(10, height))
        yield figure
        figure.savefig(file, metadata={"Date": None}, transparent=True)
