"""Lines on the console: the progress of a run, a row of figures per iteration, and its end.

                          time    left  split  reward exact_match tool_execution
    before training      00:03          val     0.400       0.000          0.000
    iteration   1/40     00:13  6m 40s  train   0.869       0.188          0.312

A row is printed once its iteration is kept, so what the console shows is on disk.
"""

import importlib.util
import logging
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.cli import SaveConfigCallback
from tqdm.auto import tqdm

from turnrl.plugin.text import paint, terminal_columns, wrap_text
from turnrl.watch.card import ExportsPolicy
from turnrl.watch.metrics import SHOWN
from turnrl.watch.trainer import is_trial, run_folder

_COLUMNS = ("reward", "exact_match", "tool_execution")
_HEADER_EVERY = 25
_lightning = logging.getLogger("lightning.pytorch.utilities.rank_zero")


class _Row(NamedTuple):
    title: str
    split: str
    left_s: float | None = None


def iteration_lines(trainer: Any) -> L.Callback | None:
    """Give a run lines in place of Lightning's defaults: a bar, and a summary whose count of FLOPs
    is 0.

    A bar that the user asked for stays, and so do a deeper summary and
    `enable_progress_bar=False`. Any class but Lightning's default counts as asked for. A run from a
    recipe has its lines already, unless the recipe asks for something else.

    Returns:
        The lines; None if the run shows something else.
    """
    bar, rich = trainer.progress_bar_callback, importlib.util.find_spec("rich") is not None
    if isinstance(bar, IterationLines):
        return bar
    if any(isinstance(callback, SaveConfigCallback) for callback in trainer.callbacks):
        return None
    unasked = [
        callback
        for callback in trainer.callbacks
        if type(callback) is (RichProgressBar if rich else TQDMProgressBar)
        or (type(callback) in (ModelSummary, RichModelSummary) and callback._max_depth == 1)
    ]
    trainer.callbacks = [callback for callback in trainer.callbacks if callback not in unasked]
    return IterationLines() if bar in unasked else None


def _is_no_end(record: logging.LogRecord) -> bool:
    """False for Lightning's message that a run reached its end, which would come between rows."""
    return not record.getMessage().startswith("`Trainer.fit` stopped: `max_")


def duration(seconds: float) -> str:
    """A duration in at most seven characters."""
    minutes, hours, days = (int(seconds // size) for size in (60, 3600, 86400))
    if days:
        return f"{days}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60}m"
    return f"{minutes}m {int(seconds) % 60}s" if minutes else f"{int(seconds)}s"


class IterationLines(ProgressBar):
    """Prints a row of figures per iteration and per validation, within 80 columns.

    Args:
        announced: True if a command has printed where the run writes.
    """

    is_enabled = True

    def __init__(self, announced: bool = False) -> None:
        super().__init__()
        self._announced = announced
        self._folder: Path | None = None
        self._start = self._trained_from = time.perf_counter()
        self._done = 0
        self._printed = 0
        self._validated = False
        self._pending: list[tuple[_Row, dict[str, float]]] = []
        self._last: dict[str, float] = {}
        self._first: tuple[str, dict[str, float]] = ("", {})
        self._learned = self._trains = False

    def disable(self) -> None:
        """Nothing: Lightning calls this in every process but the first, and only the first
        prints."""

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        _lightning.removeFilter(_is_no_end)
        self._trains = False

    def print(self, *args: object, **kwargs: object) -> None:
        """Print at once, also into a pipe; on a terminal, wrapped at words."""
        columns = terminal_columns(sys.stdout)
        super().print(*(wrap_text(str(part), columns) for part in args), flush=True, **kwargs)

    def _print_line(self, text: str) -> None:
        if self.trainer.is_global_zero:
            self.print(text)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = self._trained_from = time.perf_counter()
        self._done, self._validated, self._pending, self._last = 0, False, [], {}
        self._first = ("", {})
        self._learned, self._trains = False, True
        _lightning.addFilter(_is_no_end)
        self._folder = run_folder(trainer)  # a collective call
        trial = is_trial(trainer)
        if not (self._announced or trial):
            alone = f"only checkpoints/ in {trainer.default_root_dir}: trainer.logger is false"
            self._print_line(f"writing to {self._folder or alone}")
        count = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
        self._print_line(f"{count:,} trained parameters on {_name(pl_module.device)}")
        validates = trainer.enable_validation and sum(trainer.num_val_batches) > 0
        if trainer.global_step == 0 and validates and not trial:
            self._print_line("evaluating the policy before training")
        else:
            self._print_line("collecting trajectories")

    def on_train_batch_end(self, *args: object, **kwargs: object) -> None:
        self._learned = True

    def on_exception(self, *args: object) -> None:
        _lightning.removeFilter(_is_no_end)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if trainer.global_step == 0:
            self._add(trainer, _Row("before training", "val"))
            self._trained_from = time.perf_counter()
        elif trainer.is_last_batch:
            self._validated = True
        else:
            self._add(trainer, _Row(f"at step {trainer.global_step}", "val"))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._learned and trainer.is_last_batch:
            return  # a resumed run first ends the iteration that was complete
        self._learned = False
        total = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        title = f"iteration {trainer.current_epoch + 1:>3}{total}"
        self._done += 1
        if trainer.is_last_batch:
            self._add(trainer, _Row(title, "train", self._left(trainer)))
        else:
            self._print_line(f"stopped inside {title}, which has no checkpoint")
        if self._validated:
            self._add(trainer, _Row("validation", "val"))
        self._validated = False

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print()  # the first moment after the checkpoint; the row is in metrics.csv as well

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Print why the run ended, what training changed, where the policy is, and how to see it
        act."""
        if not self._trains:
            return  # nothing was left to train, and `ResumeNotes` prints that
        if self._validated:
            self._add(trainer, _Row("validation", "val"))
        self._print()
        for stop in trainer.early_stopping_callbacks:
            if why := _reason(stop):
                self._print_line(f"stopped early after iteration {trainer.current_epoch}: {why}")
        if 0 < trainer.max_steps <= trainer.global_step:
            self._print_line(f"stopped at step {trainer.global_step}: trainer.max_steps is reached")
        self._compare()
        if is_trial(trainer):
            return
        folder = self._folder or Path(trainer.default_root_dir)
        exports = (c for c in trainer.callbacks if isinstance(c, ExportsPolicy))  # type: ignore[attr-defined]
        name, place = next((c.exported for c in exports if c.exported), ("", pl_module.position))
        for kind in ("model", "adapter"):
            if self._folder and (path := folder / kind).is_dir():
                which = f" ({name}, of iteration {place.iteration})" if name else ""
                self._print_line(f"the trained {kind} is in {path}{which}")
        # in a world that tools act on, a question of your own is not a task
        if not any(tool.acts for tool in pl_module.rollout.toolsets):
            by_recipe = (folder / "config.yaml").is_file()
            agent = "module"
            if name and (by_recipe or place.step != trainer.global_step):
                module = "" if by_recipe else ", module=module"
                agent = f'turnrl.load("{self._folder}"{module})'
            self._print_line(f'ask it: {agent}.ask("a question")')
        if self._folder and (folder / "record").is_dir():
            self._print_line(f"see what it does: turnrl report {self._folder}")

    def _compare(self) -> None:
        """Print the figures of the run's first row beside the last figures of the same split."""
        title, first = self._first
        if first:
            self._print_line(f"\n{'':22}  {' '.join(title.split()):>15}  {'final':>7}")
        for name, value in first.items():
            self._print_line(f"{name:22}  {value:15.3f}  {self._last[name]:7.3f}")

    def _add(self, trainer: L.Trainer, row: _Row) -> None:
        """Keep a row, with its figures as they are now, until it may be printed."""
        logged = trainer.callback_metrics
        figures = {name: float(logged[name]) for name in SHOWN[row.split] if name in logged}
        self._last |= figures
        self._first = self._first if self._first[1] else (row.title, figures)
        self._pending.append((row, figures))

    def _print(self) -> None:
        width = max(17, *(len(row.title) for row, _ in self._pending)) if self._pending else 17
        passed = tqdm.format_interval(time.perf_counter() - self._start)
        for row, figures in self._pending:
            if self._printed % _HEADER_EVERY == 0 and figures:
                names = " ".join(_COLUMNS)
                header = f"{'':{width}} {'time':>8} {'left':>7}  split  {names}"
                self._print_line(paint(header, "dim"))
            self._printed += 1
            left = "" if row.left_s is None else duration(row.left_s)
            values = zip(_COLUMNS, SHOWN[row.split], strict=True)
            shown = " ".join(
                f"{figures[name]:{max(6, len(column))}.3f}" if name in figures else " " * 6
                for column, name in values
            )
            line = f"{row.title:{width}} {passed:>8} {left:>7}  {row.split:5}  {shown}"
            line = line.rstrip()
            self._print_line(paint(line, "strong") if row.split == "val" else line)
        self._pending.clear()

    def _left(self, trainer: L.Trainer) -> float | None:
        """Seconds that the remaining iterations will take at the pace so far."""
        to_come = [
            total - done
            for total, done in (
                (trainer.max_epochs or -1, trainer.current_epoch + 1),
                (trainer.max_steps, trainer.global_step),
            )
            if total > 0
        ]
        if trainer.max_steps > 0:
            to_come[-1] = -(-to_come[-1] // int(trainer.num_training_batches))
        pace = (time.perf_counter() - self._trained_from) / self._done
        return min(to_come) * pace if to_come else None


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return "the CPU" if device.type == "cpu" else str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def _reason(stop: EarlyStopping) -> str:
    """Why an early stopping stopped the run; empty if it did not."""
    return (stop.stopping_reason_message or "").removesuffix(" Signaling Trainer to stop.")
