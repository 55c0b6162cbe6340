"""The folders of runs as reports and comparisons read them: what is there, and in words what is
not."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from turnrl.errors import DataError, in_short
from turnrl.recipe.folders import find_run
from turnrl.recipe.given import COMMAND, SECTIONS
from turnrl.recipe.moved import renamed
from turnrl.run import record

SEEDS = ("seed_everything", "model.seed", "data.seed")
"""Settings in which runs of one recipe may differ and still be the same experiment."""

_PLACES = ("trainer.logger", "trainer.default_root_dir")
_WRITTEN = (
    *("json", "trainer.enable_progress_bar", "trainer.enable_model_summary"),
    *("model.record_per_iteration", "model.record_tokens", "model.transcripts_per_iteration"),
)
_CHECKPOINT = "ckpt_path"


@dataclass
class Run:
    """One run.

    Args:
        folder: Its folder.
        name: Short name, unlike those of the other runs.
        settings: What `config.yaml` sets, by dotted keys; empty without that file.
        metrics: The rows of `metrics.csv`, without empty cells.
        files: The files of its record.
        problems: What is missing or broken, one line each.
    """

    folder: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def groups(self, most: int | None = None) -> Iterator[list[record.Row]]:
        """The groups of its record, one file in memory at a time. A file that cannot be read is
        left out and becomes one of the problems.

        Args:
            most: About how many trajectories to give, a group of each file at least; None for all.
        """
        # on a terminal, and where it takes long
        for file in tqdm(self.files, self.name, delay=1, leave=False, disable=None, unit="files"):
            try:
                rows = record.read(file)
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
    """The runs at some places, in order.

    Args:
        paths: Runs, as `turnrl.find_run` takes them.
    Raises:
        DataError: If there is no run at one of them, or one is named twice.
    """
    folders = [find_run(path, "figures") for path in paths]
    for number, folder in enumerate(folders):
        if folder.resolve() in {other.resolve() for other in folders[:number]}:
            raise DataError(f"the run {str(folder)!r} is named twice. Name each once.")
    return [_opened(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders that tell them apart; `version_0` alone says nothing."""
    whole = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in whole)):
        names = ["/".join(path.parts[-depth:]) for path in whole]
        if depth == 1 and any(name.startswith("version_") for name in names):
            names = [
                path.parent.name if path.name.startswith("version_") else path.name
                for path in whole
            ]
        if len({*names}) == len(names):
            return names
    return [str(path) for path in whole]


def _opened(folder: Path, name: str) -> Run:
    run = Run(folder, name)
    config = folder / "config.yaml"
    try:
        contents = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
        run.settings = dict(_flat(renamed(contents)))
    except FileNotFoundError:
        run.problems.append("no config.yaml: its settings are not known")
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, TypeError) as error:
        run.problems.append(f"config.yaml cannot be read: {in_short(error)}")
    try:
        run.metrics = _metrics(folder / "metrics.csv")
        if not run.metrics:
            run.problems.append("metrics.csv has no row: there are no curves")
    except FileNotFoundError:
        run.problems.append("no metrics.csv: there are no curves")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        run.problems.append(f"metrics.csv cannot be read: {in_short(error)}")
    try:
        run.files = record.files(folder)
    except DataError:
        run.problems.append("no record: there are no trajectories")
    return run


def _metrics(file: Path) -> list[dict[str, float]]:
    with file.open(newline="", encoding="utf-8") as read:
        rows = [dict(_numbers(row)) for row in csv.DictReader(read)]
    return [row for row in rows if "iteration" in row]


def _numbers(row: Mapping[str | Any, Any]) -> Iterator[tuple[str, float]]:
    for name, text in row.items():
        try:
            value = float(text)
        except (TypeError, ValueError):  # an empty cell, or the last line of a file being written
            continue
        if math.isfinite(value) and isinstance(name, str):
            yield name, value


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, default=str)


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The settings in which runs differ, with the value of each run; a run without the setting has
    an empty one. Where a run writes to, and what it writes, is no difference."""
    known = [run.settings for run in runs if run.settings]
    names: Iterable[str] = dict.fromkeys(name for settings in known for name in settings)
    return {
        name: [str(run.settings.get(name, "")) for run in runs]
        for name in names
        if not _is_output(name) and len({settings.get(name) for settings in known}) > 1
    }


def _is_output(name: str) -> bool:
    """True for a setting of where or what a run writes, which changes no figure."""
    return name.startswith(_PLACES) or name in (*_WRITTEN, COMMAND)


def is_of_command(name: str) -> bool:
    """True for a setting that is none of the recipe's parts, such as `ckpt_path` or `samples`. Of
    an evaluation they say who answered what, and not what trained."""
    of_recipe = name != _CHECKPOINT and name.partition(".")[0] in SECTIONS
    return not of_recipe and not _is_output(name)


def experiments(runs: Sequence[Run]) -> list[list[int]]:
    """The numbers of the runs that differ in their seeds alone, together.

    A run that went on from a checkpoint of its own recipe is the same experiment, and one that
    began with a checkpoint of another is not. Of a checkpoint that was evaluated, the name of its
    file alone counts: `best.ckpt` of seeds 0 and 1 are one experiment, `last.ckpt` is another. If
    the seeds do not tell such runs apart, their checkpoints do. So two checkpoints of one run are
    never two seeds, nor is one checkpoint that was evaluated with two seeds.
    """
    alike: dict[object, list[int]] = {}
    for number, run in enumerate(runs):
        alike.setdefault(_identity(run) or number, []).append(number)
    return sorted(part for some in alike.values() for part in _apart(runs, some))


def _identity(run: Run) -> str:
    """The settings of a run without seeds, output and checkpoint; empty if none are known."""
    place = Path(_checkpoint(run)).absolute()  # runs/NAME/version_0/checkpoints/last.ckpt
    home = place.parents[2].name if len(place.parents) > 2 else ""
    own = not _checkpoint(run) or home == run.folder.resolve().parent.name
    checkpoint = Path(_checkpoint(run)).name if was_evaluated(run) else "" if own else home
    told = (*SEEDS, _CHECKPOINT)
    kept = {k: v for k, v in run.settings.items() if k not in told and not _is_output(k)}
    return json.dumps([kept, checkpoint, was_evaluated(run)], sort_keys=True) if kept else ""


def _apart(runs: Sequence[Run], alike: Sequence[int]) -> Iterable[list[int]]:
    """Numbers of runs that are alike but for seeds and checkpoints, apart where these are not one
    checkpoint for each seed."""
    known = {number: (_seed(runs[number]), _checkpoint(runs[number])) for number in alike}
    pairs, evaluated = {*known.values()}, was_evaluated(runs[alike[0]])
    trained = {pair for pair in pairs if evaluated and pair[1]}
    if len({seed for seed, _ in pairs}) == len(pairs) and (
        len({checkpoint for _, checkpoint in trained}) == len(trained)
    ):
        return [list(alike)]
    parts: dict[object, list[int]] = {}
    for number, (seed, checkpoint) in known.items():
        parts.setdefault((checkpoint, seed if evaluated else ()), []).append(number)
    return parts.values()


def was_evaluated(run: Run) -> bool:
    """True if it is of `turnrl eval`. Runs of before did not note their command, but those of
    `eval` have a split to score, and those of `fit` have none."""
    command = run.settings.get(COMMAND)
    return "split" in run.settings if command is None else command == "eval"


def _checkpoint(run: Run) -> str:
    path = str(run.settings.get(_CHECKPOINT, "null"))
    return "" if path == "null" else path


def _seed(run: Run) -> tuple[object, ...]:
    return tuple(run.settings.get(name) for name in SEEDS)
