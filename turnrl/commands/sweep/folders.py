"""The folder of one run of a sweep.

    NAME/version_0/    the run: metrics.csv, config.yaml, record/, checkpoints/, ...
    NAME/version_1/    an attempt that resumes it, while it runs
    NAME/log.txt       the output of all attempts

`turnrl fit` writes every attempt into its own folder. Here the attempts are joined into one run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml

from turnrl.commands.sweep.results import MAIN
from turnrl.recipe.merging import listed
from turnrl.runs.config import load_yaml
from turnrl.runs.files import read_table, write_table

_METRICS = "metrics.csv"
_BEST = Path("checkpoints", "best.ckpt")


def join_attempts(folder: Path) -> Path:
    """Join the attempts at a run into the first of them. If it is interrupted, it can be repeated.

    Args:
        folder: The folder of the run's attempts.
    Returns:
        The folder of the run, which does not exist if no attempt was begun.
    """
    run = folder / "version_0"
    attempts = [path for path in folder.glob("version_*") if path.name[8:].isdigit()]
    for attempt in sorted(attempts, key=lambda path: int(path.name[8:])):
        if attempt != run:
            _join(run, attempt)
    return run


def _join(run: Path, attempt: Path) -> None:
    """Move an attempt's files over the run's. Its rows of metrics replace those from its first step
    on, and its best checkpoint replaces a worse one."""
    older_is_best = _older_is_best(run, attempt)
    for file in sorted(attempt.rglob("*")):
        place = file.relative_to(attempt)
        unfinished = file.suffix == ".new"
        if file.is_dir() or unfinished or place == Path(_METRICS):
            continue
        if place == _BEST and older_is_best:
            continue
        (run / place).parent.mkdir(parents=True, exist_ok=True)
        file.replace(run / place)
    if new := _rows(attempt):
        begun = _number(new[0]["step"])
        kept = [row for row in _rows(run) if _number(row["step"]) < begun]
        write_table(run / _METRICS, [*kept, *new])
    shutil.rmtree(attempt)


def _rows(run: Path) -> list[dict[str, str]]:
    return [row for row in read_table(run / _METRICS) if "step" in row]


def _number(text: str) -> int:
    return int(float(text))


def _older_is_best(run: Path, attempt: Path) -> bool:
    """True if the best checkpoint of a run is at least as good as that of the attempt that resumed
    it, by the settings of the run's own `BestCheckpoint`, or else by turnrl's defaults."""
    name, sign = MAIN[0], 1
    try:
        config = load_yaml((attempt / "config.yaml").read_text("utf-8"))
        for callback in listed(config["trainer"]["callbacks"]):
            if str(callback["class_path"]).endswith("BestCheckpoint"):
                settings: Mapping[str, str] = callback.get("init_args") or {}
                name = settings.get("monitor") or name
                sign = -1 if settings.get("mode") == "min" else 1
    except (OSError, yaml.YAMLError, KeyError, TypeError):  # no recipe, or no callback in it
        pass
    if not any(name in row for row in _rows(attempt)) and name == MAIN[0]:
        name = MAIN[1]  # as `BestCheckpoint` does
    older, newer = (
        [sign * float(row[name]) for row in _rows(part) if name in row] for part in (run, attempt)
    )
    return bool(older and newer and (run / _BEST).is_file()) and max(older) >= max(newer)


def checkpoint(run: Path) -> tuple[Path, int] | None:
    """The checkpoint that a run can be resumed from.

    Args:
        run: The folder of a settled run.
    Returns:
        Its last checkpoint, and the number of iterations behind it. None if there is no checkpoint,
        or if a row of metrics is missing because the run was killed between writing the two; then
        the run begins anew.
    """
    import torch

    file = run / "checkpoints" / "last.ckpt"
    try:
        place = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        done = int(place["epoch"]) + 1 if place["global_step"] else 0
    except Exception:  # missing, or foreign: torch raises errors of many kinds
        return None
    there = {_number(row["iteration"]) for row in _rows(run) if "iteration" in row}
    return (file, done) if not done or there >= {*range(done + 1)} else None
