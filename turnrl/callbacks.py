"""Callbacks that belong to every run: how it began, what to read of it, and what it leaves."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.trainer.states import RunningStage

if TYPE_CHECKING:
    from turnrl.experience import Experience
    from turnrl.module import MTGRPO


def _is_trial(trainer: L.Trainer) -> bool:
    """Whether this is a `fast_dev_run`, which leaves nothing behind."""
    return bool(getattr(trainer, "fast_dev_run", False))


def run_folder(trainer: L.Trainer) -> Path | None:
    """Where a run leaves its files, for itself alone; None if it has no logger.

    A collective call: every process has to make it.
    """
    logger = trainer.logger
    if logger is None:
        return None
    own = getattr(logger, "log_dir", None)  # CSVLogger and TensorBoardLogger keep runs apart
    folder = own or Path(logger.save_dir or "runs", logger.name or "run", str(logger.version or 0))
    return Path(trainer.strategy.broadcast(str(folder)))


class InitialValidation(L.Callback):
    """Score the untrained policy, so that a run's metrics begin with what it began with.

    Lightning's sanity check runs a few batches and logs nothing; this is the whole validation,
    logged at step 0. A resumed run is past that.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        if trainer.global_step > 0 or not trainer.enable_validation or _is_trial(trainer):
            return
        stage = trainer.state.stage
        trainer.state.stage = RunningStage.VALIDATING
        loop.run()
        trainer.state.stage = stage
        pl_module.train()


class IterationLines(ProgressBar):
    """Progress where there is no terminal to redraw: a line per iteration, and so a log."""

    def __init__(self) -> None:
        super().__init__()
        self._start = 0.0
        self._enabled = True

    def disable(self) -> None:
        """Lightning calls this on every process but the first."""
        self._enabled = False

    def enable(self) -> None:
        """The counterpart of `disable`."""
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._enabled:
            total = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
            self._print(
                trainer, f"iteration {trainer.current_epoch + 1:>3}{total}", ("val/", "train/")
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._enabled and trainer.state.fn == "fit" and trainer.global_step == 0:
            self._print(trainer, "untrained", ("val/",))

    def _print(self, trainer: L.Trainer, title: str, kinds: tuple[str, ...]) -> None:
        metrics = trainer.callback_metrics
        shown = [
            f"{kind}{name} {float(metrics[kind + name]):.3f}"
            for kind in kinds
            for name in ("exact_match", "tool_execution")
            if kind + name in metrics
        ]
        seconds = time.perf_counter() - self._start if self._start else 0.0
        print(f"{title}  {seconds:6.1f} s  {'  '.join(shown)}", flush=True)


class LastCheckpoint(Checkpoint):
    """Keep `checkpoints/last.ckpt`, written before the first iteration and after each one.

    It always lies at an iteration's boundary, so a resumed run goes on exactly as if it had not
    stopped. A new file replaces the old one when it is complete, so there is always a good one.
    """

    def __init__(self) -> None:
        self._path: Path | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        if _is_trial(trainer):
            return
        folder = (run_folder(trainer) or Path(trainer.default_root_dir)) / "checkpoints"
        self._path = folder / "last.ckpt"
        written = folder / "last.ckpt.new"
        trainer.save_checkpoint(written, weights_only=False)
        if trainer.is_global_zero:
            written.replace(self._path)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Say how to go on. Weights of mid-iteration would not resume exactly: none are saved."""
        if trainer.is_global_zero and self._path is not None and self._path.is_file():
            print(
                "\nThe last finished iteration is kept. To go on from it, repeat the command with\n"
                f"  --ckpt_path {self._path}",
                file=sys.stderr,
            )


class Export(L.Callback):
    """Leave the trained adapter (or model) in the run's folder, in a form that others can load."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = run_folder(trainer)
        if trainer.is_global_zero and folder and not _is_trial(trainer):
            module = cast("MTGRPO", pl_module)
            module.export(folder / ("model" if module.policy.lora is None else "adapter"))


class Transcripts(L.Callback):
    """Write trajectories of each iteration to be read: who said what, and which credit it got.

    Args:
        count: Trajectories per iteration, from as many questions; 0 for none.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        experience = cast("MTGRPO", pl_module).experience
        folder = run_folder(trainer)
        if not (self.count and experience and trainer.is_global_zero and folder):
            return
        folder = folder / "transcripts"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"iteration_{trainer.current_epoch:04d}.txt"
        (folder / name).write_text(transcript(experience, self.count), encoding="utf-8")


def transcript(experience: Experience, count: int) -> str:
    """A few trajectories as text: the best and worst of each of the first groups, in turns."""
    blocks: list[str] = []
    for number, (group, advantages) in enumerate(
        zip(experience.groups[:count], experience.advantages[:count], strict=True)
    ):
        totals = [s.outcome + sum(s.turn) for s in group.scores]
        extreme = max if number % 2 == 0 else min
        i = extreme(range(len(totals)), key=totals.__getitem__)
        trajectory, scores = group.trajectories[i], group.scores[i]
        lines = [
            f"question   {group.question.text}",
            f"accepted   {' | '.join(group.question.answers[:5])}",
            f"outcome    {scores.outcome:.3f}   ended by {trajectory.stop}",
        ]
        for k, turn in enumerate(trajectory.turns):
            lines.append(
                f"-- turn {k}   reward {scores.turn[k]:.3f}   advantage "
                f"{float(advantages[i, k]):+.3f}"
            )
            lines.append(turn.text)
            lines += [f"   {'result' if r.ok else 'error'}: {r.content}" for r in turn.results]
            if turn.reading.format_error:
                lines.append(f"   form: {turn.reading.format_error}")
        parts: dict[str, Any] = {k: round(v, 3) for k, v in scores.components.items()}
        lines.append("   ".join(f"{k} {v}" for k, v in parts.items()))
        blocks.append("\n".join(lines))
    return ("\n" + "=" * 80 + "\n").join(blocks) + "\n"
