"""The checkpoints of a run: their names, and their positions in training."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from turnrl.plugin.errors import CheckpointError, suggest_name
from turnrl.runs.find import KEPT, list_runs

LATEST = ("best", "last")
"""Checkpoints of a run by name, the preferred one first."""
EXPORTED = ("model", "adapter")
"""Folders of a run that hold the policy exported at its end."""


class Position(NamedTuple):
    """A policy's position in training.

    Args:
        iteration: Number of iterations that it has learned from, including one under way.
        step: Number of optimiser steps behind its weights.
    """

    iteration: int
    step: int


def read_position(checkpoint: Mapping[str, Any]) -> Position:
    """The position in training of a checkpoint's policy."""
    steps: int = checkpoint["global_step"]
    current = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {})
    # a checkpoint that is saved after a run counts one more epoch
    iterations = current.get("current", {}).get("ready", checkpoint["epoch"] + 1)
    return Position(iterations if steps else 0, steps)


def newest_checkpoint(home: Path, name: str) -> Path:
    """A checkpoint of the newest run that has it; see `list_runs`.

    Args:
        home: The folder of the runs.
        name: `last` or `best`.
    Raises:
        CheckpointError: If no run has it.
    """
    for run in list_runs(home):
        if file := find_named_checkpoint(run, (name,)):
            return file
    raise CheckpointError(
        f"ckpt_path is {name!r}, and no run in {str(home)!r} has a {name}.ckpt (best.ckpt "
        "comes with the first validation: trainer.check_val_every_n_epoch). Give the path of "
        "one, or of a run's folder."
    )


def find_named_checkpoint(folder: Path, names: Iterable[str] = LATEST) -> Path | None:
    """The checkpoint in a folder, or in its `checkpoints`, with the first of the names that exists;
    None if there is none."""
    for name in names:
        for home in (folder / "checkpoints", folder):
            if (file := home / f"{name}.ckpt").is_file():
                return file
    return None


def find_checkpoint(folder: Path, names: Iterable[str] = LATEST) -> Path | None:
    """The checkpoint of `find_named_checkpoint`, or else the newest: a run made from
    Python may have Lightning's own callback, which gives checkpoints other names."""
    files = [*folder.glob(KEPT), *folder.glob("*.ckpt")]
    last = max(files, key=lambda file: (file.stat().st_mtime_ns, file.name), default=None)
    return find_named_checkpoint(folder, names) or last


def find_exported(folder: Path) -> Path | None:
    """The first of a folder, its `model` and its `adapter` that holds an exported policy; None if
    none does."""
    for path in (folder, *(folder / name for name in EXPORTED)):
        if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
            return path
    return None


def checkpoint_to_resume(path: str) -> str:
    """The checkpoint that a path means: a file means itself. A run's folder, or its `model` or
    `adapter`, means the run's `last.ckpt`, or else its newest checkpoint.

    Raises:
        CheckpointError: If there is no checkpoint, or the file is not one.
    """
    if "://" in path or zipfile.is_zipfile(path):
        return path
    folder = Path(path)
    if folder.is_file():
        raise CheckpointError(f"{path!r} is not a checkpoint. Give a last.ckpt of a run.")
    if not folder.is_dir():
        near = suggest_name(path, LATEST) or " Runs keep theirs in their checkpoints/."
        raise CheckpointError(f"no checkpoint at {path!r}.{near}")
    if file := find_checkpoint(folder.parent if folder.name in EXPORTED else folder, ("last",)):
        return checkpoint_to_resume(str(file))
    exported = find_exported(folder)
    if exported is None:
        raise CheckpointError(f"no checkpoint in {path!r}. {runs_with_checkpoints(folder)}")
    whole = (exported / "config.json").is_file()
    step = "Take its model as the policy" if whole else "Begin with its adapter"
    raise CheckpointError(
        f"no checkpoint in {path!r}. {step}: --ckpt_path null --model.policy.model {exported}"
    )


def runs_with_checkpoints(folder: Path) -> str:
    """`Runs in it: runs/quickstart/version_0.`: the next step for a folder that is not a run."""
    runs = sorted({str(file.parents[1]) for file in folder.glob(f"*/{KEPT}")})
    return f"Runs in it: {', '.join(runs)}." if runs else "Give the folder of a run that has one."
