"""`curves.svg`: the four curves of a run as a picture, in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from turnrl.run import record
from turnrl.run.folders import whole_file
from turnrl.run.runs import Run, open_runs

_TIMES = 50
"""So many times what the last drawing took passes before the next."""


class Curves(L.Callback):
    """Draw `curves.svg` after a validation, once its row is in `metrics.csv`.

    Drawing takes at most a fiftieth of the time of a run, so where iterations are short, some
    validations pass without. The end of the run is always drawn.
    """

    def __init__(self) -> None:
        self._due = False
        self._next = 0.0  # on the clock `time.monotonic`

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._due = trainer.state.fn == "fit" and not trainer.sanity_checking

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if time.monotonic() >= self._next:
            self._draw(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._draw(trainer, pl_module)

    def _draw(self, trainer: L.Trainer, module: Any) -> None:
        due, self._due = self._due, False
        if due and trainer.is_global_zero and module.folder is not None:
            began = time.monotonic()
            draw(open_runs([module.folder]), module.folder / "curves.svg")
            self._next = (ended := time.monotonic()) + _TIMES * (ended - began)


def draw(runs: Sequence[Run], file: Path) -> None:
    """Draw the four curves of some runs: validation as lines with points, training as thin lines.

    Args:
        runs: The runs.
        file: The picture, of any format that its suffix names.
    """
    # not `pyplot`, which would keep the figure, and look for a screen
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "turnrl", "font.size": 9}):
        # a layout that is computed takes half of the time
        figure = Figure(figsize=(10, 2.6))
        bottom = 0.19 if len(runs) == 1 else 0.29
        figure.subplots_adjust(left=0.05, right=0.99, bottom=bottom, top=0.88, wspace=0.08)
        subplots = figure.subplots(1, len(record.CURVES), sharey=True)
        for axes, name in zip(subplots, record.CURVES, strict=True):
            axes.set_title(name.replace("_", " "))
            axes.set_ylim(-0.03, 1.03)
            axes.set_xlabel("iteration")
            axes.grid(alpha=0.3)
            for number, run in enumerate(runs):
                for split, style in (("val", "o-"), ("train", "-")):
                    points = [row for row in run.metrics if f"{split}/{name}" in row]
                    axes.plot(
                        [row["iteration"] for row in points],
                        [row[f"{split}/{name}"] for row in points],
                        style,
                        color=f"C{number}",
                        markersize=3,
                        linewidth=1.6 if split == "val" else 0.7,
                        label=run.name if (split, axes) == ("val", subplots[0]) else None,
                    )
        if len(runs) > 1:
            figure.legend(loc="lower center", ncols=len(runs), frameon=False)
        with whole_file(file) as part:
            figure.savefig(part, format=file.suffix[1:], metadata={"Date": None})
