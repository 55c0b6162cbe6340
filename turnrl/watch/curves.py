"""`curves.svg`: the four curves of a run as a picture, in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from turnrl.runs.files import whole_file
from turnrl.runs.load import Run, open_runs
from turnrl.watch.trainer import writing

_ORDER = ("tool_execution", "answer_in_results", "exact_match", "format")
"""Panels from left to right, as in the report's page."""
_GREY = "#787f89"
"""Reads on white and on black."""
_COLOR = "#0072b2"
_LEGEND = (
    "thick: greedy answers to validation questions; thin: sampled attempts at training questions"
)


class Curves(L.Callback):
    """Draw `curves.svg` when training ends, once the last row of metrics is written."""

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        folder = pl_module.folder
        if trainer.is_global_zero and folder is not None and (folder / "metrics.csv").is_file():
            file = folder / "curves.svg"
            with writing(trainer, file):
                (run,) = open_runs([folder])
                draw_curves(run, file)


def draw_curves(run: Run, file: Path) -> None:
    """Draw the four curves of a run: validation as lines with points, training as thin lines.

    Args:
        run: The run.
        file: The picture, of any format that its suffix names.
    """
    # not `pyplot`, which would keep the figure, and look for a screen
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: Any = {"svg.hashsalt": "turnrl", "svg.fonttype": "none", "font.size": 9}
    settings |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), _GREY)
    settings |= dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), _GREY)
    with rc_context(settings):
        # a layout that is computed takes half of the time
        figure = Figure(figsize=(10, 2.8))
        figure.subplots_adjust(left=0.05, right=0.99, bottom=0.27, top=0.89, wspace=0.08)
        subplots = figure.subplots(1, len(_ORDER), sharey=True)
        for axes, name in zip(subplots, _ORDER, strict=True):
            axes.set_title(name.replace("_", " "))
            axes.set_ylim(-0.03, 1.03)
            axes.set_xlabel("iteration")
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            for split, width in (("val", 1.8), ("train", 0.7)):
                points = [row for row in run.metrics if f"{split}/{name}" in row]
                axes.plot(
                    [row["iteration"] for row in points],
                    [row[f"{split}/{name}"] for row in points],
                    marker="o" if split == "val" else "",
                    color=_COLOR,
                    markersize=3,
                    linewidth=width,
                )
        figure.text(0.05, 0.03, _LEGEND)
        with whole_file(file) as part:
            kind = file.suffix[1:]
            figure.savefig(part, format=kind, metadata={"Date": None}, transparent=True)
