"""The folders of runs as reports and comparisons read them, with a sentence for each missing
part."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from turnrl.plugin.errors import DataError, summarize_error
from turnrl.runs import record
from turnrl.runs.config import COMMAND, SEEDS, flatten_settings, load_yaml
from turnrl.runs.files import read_table
from turnrl.runs.find import find_run

_PLACES = ("trainer.logger", "trainer.default_root_dir", "record.")
_WRITTEN = ("json", "trainer.enable_progress_bar", "trainer.enable_model_summary")
_CHECKPOINT = "ckpt_path"


@dataclass
class Run:
    """One run.

    Args:
        folder: Its folder.
        name: Short name, different from those of the other runs.
        settings: The settings in `config.yaml`, by dotted keys; empty without that file.
        metrics: The rows of `metrics.csv`, without empty cells.
        files: The files of its record.
        problems: Missing or broken parts, one line each.
    """

    folder: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def seed(self) -> tuple[object, ...]:
        """The seeds that its recipe sets."""
        return tuple(self.settings.get(name) for name in SEEDS)

    @property
    def was_evaluated(self) -> bool:
        """True if `turnrl eval` made it."""
        return self.settings.get(COMMAND) == "eval"

    @property
    def scored(self) -> str:
        """The checkpoint that it evaluated; empty if there was none."""
        path = self.settings.get(_CHECKPOINT)
        return str(path) if self.was_evaluated and path not in (None, "null") else ""

    def groups(self, most: int | None = None) -> Iterator[list[record.Row]]:
        """The groups of its record, one file in memory at a time. A file that cannot be read is
        skipped and added to the problems.

        Args:
            most: Approximate number of trajectories to yield, but at least one group per file; None
                for all.
        """
        # shown only on a terminal, if this takes long
        for file in tqdm(self.files, self.name, delay=1, leave=False, disable=None, unit="files"):
            try:
                rows = record.read_checked(file)
            except DataError as error:
                self.problems.append(f"left out: {error}")
                continue
            share = len(rows) if most is None else most // len(self.files)
            for members in record.groups(rows):
                yield members
                share -= len(members)
                if share <= 0:
                    break


def open_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs at the given places, in order.

    Args:
        paths: Runs, as `turnrl.runs.find_run` takes them.
    Raises:
        DataError: If there is no run at one of them, or if a run is named twice.
    """
    folders = [find_run(path, "figures") for path in paths]
    for number, folder in enumerate(folders):
        if folder.resolve() in {earlier.resolve() for earlier in folders[:number]}:
            raise DataError(f"the run {str(folder)!r} is named twice. Name each once.")
    return [_open_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """Short names of runs. `version_0` alone would not identify a run."""
    whole = [folder.resolve() for folder in folders]
    versions = [path.name.startswith("version_") for path in whole]
    homes = zip(whole, versions, strict=True)
    names = [path.parent.name if version else path.name for path, version in homes]
    return names if len({*names}) == len(names) else shorten_paths(whole, 1 + any(versions))


def shorten_paths(paths: Sequence[Path], least: int = 1) -> list[str]:
    """The shortest distinct ends of paths, each of at least `least` parts."""
    for depth in range(least, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len({*names}) == len({*paths}):
            return names
    return [str(path) for path in paths]


def _open_run(folder: Path, name: str) -> Run:
    run = Run(folder, name)
    config = folder / "config.yaml"
    try:
        contents = load_yaml(config.read_text(encoding="utf-8")) or {}
        run.settings = dict(flatten_settings(contents))
    except FileNotFoundError:
        run.problems.append("no config.yaml: its settings are not known")
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, TypeError) as error:
        run.problems.append(f"config.yaml cannot be read: {summarize_error(error)}")
    metrics = folder / "metrics.csv"
    try:
        rows = [dict(_parse_numbers(row)) for row in read_table(metrics)]
        run.metrics = [row for row in rows if "iteration" in row]
        if not metrics.is_file():
            run.problems.append("no metrics.csv: there are no curves")
        elif not run.metrics:
            run.problems.append("metrics.csv has no row: there are no curves")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        run.problems.append(f"metrics.csv cannot be read: {summarize_error(error)}")
    try:
        run.files = record.list_files(folder)
    except DataError:
        run.problems.append("no record: there are no trajectories")
    return run


def _parse_numbers(row: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    for name, text in row.items():
        with contextlib.suppress(ValueError):
            if math.isfinite(value := float(text)):
                yield name, value


def differing_settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The settings in which runs differ, with the value of each run, which is empty for a run
    without the setting. Settings of a run's output do not count."""
    every = [run.settings for run in runs if run.settings]
    names: Iterable[str] = dict.fromkeys(name for settings in every for name in settings)
    return {
        name: [str(run.settings.get(name, "")) for run in runs]
        for name in names
        if not _is_output(name) and len({settings.get(name) for settings in every}) > 1
    }


def _is_output(name: str) -> bool:
    """True for a setting that decides where or what a run writes, and changes no figure."""
    return name.startswith(_PLACES) or name in (*_WRITTEN, COMMAND)


def group_experiments(runs: Sequence[Run]) -> list[list[int]]:
    """The numbers of the runs by experiment. Runs of one experiment have the same settings but for
    their seeds, and each has seeds of its own.

    Evaluations of one experiment also score checkpoints of the same name, `best.ckpt` of seeds 0
    and 1, and each its own. So two checkpoints of one run never count as two seeds, nor does one
    checkpoint that was evaluated with two seeds.
    """
    alike: dict[object, list[int]] = {}
    for number, run in enumerate(runs):
        alike.setdefault(_identity(run) or number, []).append(number)
    parts: list[list[int]] = []
    for numbers in alike.values():
        seeds = {runs[number].seed for number in numbers}
        scored = [runs[number].scored for number in numbers]
        apart = len({*scored}) == len(scored) or not any(scored)
        one = apart and len(seeds) == len(numbers)
        parts += [numbers] if one else [[number] for number in numbers]
    return sorted(parts)


def _identity(run: Run) -> str:
    """The settings of a run without seeds and output, and the name of the checkpoint that it
    scored; empty if they are unknown."""
    apart = (*SEEDS, _CHECKPOINT)
    kept = {k: v for k, v in run.settings.items() if k not in apart and not _is_output(k)}
    parts = [kept, Path(run.scored).name, run.was_evaluated]
    return json.dumps(parts, sort_keys=True) if kept else ""
