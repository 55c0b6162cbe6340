"""The folder of one run of a sweep.

    NAME/version_0/    the run: metrics.csv, config.yaml, record/, checkpoints/, ...
    NAME/version_1/    an attempt that goes on, while it does
    NAME/log.txt       what all attempts printed

`turnrl fit` writes every attempt into a folder of its own. Here they become one run.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from turnrl.recipe.given import listed
from turnrl.run.folders import whole_file

_METRICS = "metrics.csv"
_BEST = Path("checkpoints", "best.ckpt")


def settle(folder: Path) -> Path:
    """Join the attempts at a run into the first of them. If this is stopped, it can be repeated.

    Args:
        folder: The folder of the run's attempts.
    Returns:
        The folder of the run, which is not there if nothing was begun.
    """
    run = folder / "version_0"
    attempts = [path for path in folder.glob("version_*") if path.name[8:].isdigit()]
    for attempt in sorted(attempts, key=lambda path: int(path.name[8:])):
        if attempt != run:
            _join(run, attempt)
    return run


def _join(run: Path, attempt: Path) -> None:
    """Move an attempt over what was there before. Its rows of metrics replace those of the same
    steps, and its best checkpoint a worse one."""
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
    new = _rows(attempt)
    if new:
        begun = _number(new[0]["step"])
        rows = [*(row for row in _rows(run) if _number(row["step"]) < begun), *new]
        with whole_file(run / _METRICS) as path, path.open("w", newline="") as out:
            writer = csv.DictWriter(out, sorted({name for row in rows for name in row}))
            writer.writeheader()
            writer.writerows(rows)
    shutil.rmtree(attempt)


def _rows(run: Path) -> list[dict[str, str]]:
    """The rows of a run's metrics that are whole."""
    file = run / _METRICS
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as read:
        rows = list(csv.DictReader(read))
    return [row for row in rows if row.get("step") and None not in row.values()]


def _number(text: str) -> int:
    return int(float(text))


def _older_is_best(run: Path, attempt: Path) -> bool:
    """True if the best checkpoint of a run is better than the one of an attempt that went on."""
    settings = _monitored(attempt)
    name, sign = settings.get("monitor", "val/exact_match"), 1
    if settings.get("mode") == "min":
        sign = -1
    older, newer = (
        max((sign * float(row[name]) for row in _rows(one) if row.get(name)), default=None)
        for one in (run, attempt)
    )
    if older is None or newer is None or not (run / _BEST).is_file():
        return False
    return older >= newer


def _monitored(attempt: Path) -> Mapping[str, Any]:
    """The settings of the run's own `BestCheckpoint`; none if it has turnrl's."""
    try:
        config = yaml.safe_load((attempt / "config.yaml").read_text("utf-8"))
        for one in listed(config["trainer"]["callbacks"]):
            if str(one["class_path"]).endswith("BestCheckpoint"):
                settings: Mapping[str, Any] = one.get("init_args") or {}
                return settings
    except (OSError, yaml.YAMLError, KeyError, TypeError):  # without a recipe, by the default
        pass
    return {}


def checkpoint(run: Path) -> tuple[Path, int] | None:
    """Where a run goes on.

    Args:
        run: The folder of a run that is settled.
    Returns:
        Its last checkpoint, and the iterations behind that; None if there is none, or if a row of
        metrics is missing because the run was killed between writing the two. Then it begins anew.
    """
    import torch

    file = run / "checkpoints" / "last.ckpt"
    try:
        place = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        done = int(place["epoch"]) + 1 if place["global_step"] else 0
    except Exception:  # none, or not one of ours: torch raises errors of many kinds
        return None
    there = {_number(row["iteration"]) for row in _rows(run) if row.get("iteration")}
    return (file, done) if not done or there >= {*range(done + 1)} else None
