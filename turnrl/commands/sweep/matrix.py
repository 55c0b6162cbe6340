"""The runs of a sweep: seeds times settings, read as `turnrl fit` reads a recipe.

    turnrl sweep quickstart --seeds 0..1 --set model.estimator=OutcomeOnly,TurnLevel

is `turnrl fit quickstart --model.estimator OutcomeOnly --seed_everything 0`, and three more.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnrl.plugin.errors import RecipeError
from turnrl.recipe.invocation import Invocation, read_invocation
from turnrl.recipe.merging import as_list
from turnrl.runs.find import RUNS

_SEEDS_LIMIT = 10_000
_PLACES = ("trainer.logger", "trainer.default_root_dir")
"""Settings of the place where a run writes, which the sweep decides."""
_NAME_LENGTH = 60


@dataclass(frozen=True)
class SweepRun:
    """One run: a recipe with settings and a seed.

    Args:
        settings: The values of `--set`, by key.
        seed: The seed of everything.
        digest: Digest of the recipe with the settings, without its seed and its place. Runs with
            the same digest differ only in their seeds.
        arguments: The recipes and options of `turnrl fit`.
        loggers: The loggers of the recipe, except for the one that keeps the folder of a run.
    """

    settings: Mapping[str, str]
    seed: int
    digest: str
    arguments: tuple[str, ...]
    loggers: tuple[Mapping[str, Any], ...]

    @property
    def key(self) -> tuple[str, int]:
        """Its digest and its seed, which identify it in a line of results."""
        return self.digest, self.seed

    @property
    def name(self) -> str:
        """The name of its folder."""
        parts = [f"{key.split('.')[-1]}_{value}" for key, value in self.settings.items()]
        values = re.sub(r"[^\w.+-]+", "-", "-".join(parts))[:_NAME_LENGTH].strip("-.")
        return "-".join(filter(None, [values, f"seed_{self.seed}", self.digest[:8]]))

    def __str__(self) -> str:
        parts = [f"{key.split('.')[-1]}={value}" for key, value in self.settings.items()]
        return ", ".join([*parts, f"seed {self.seed}"])

    def words(self, folder: Path) -> list[str]:
        """The words after `turnrl fit` for a run in the sweep's folder.

        Args:
            folder: The sweep's folder. The run is in `NAME/version_0` there.
        """
        place = {"save_dir": str(folder), "name": self.name, "version": 0}
        further = [dict(logger) for logger in self.loggers]
        for logger in further:  # they keep their files beside those of the run
            if "save_dir" in logger.get("init_args", {}):
                logger["init_args"] = {**logger["init_args"], "save_dir": str(folder / self.name)}
        loggers = [{"class_path": "CSVLogger", "init_args": place}, *further]
        option = f"--trainer.logger={json.dumps(loggers if further else loggers[0])}"
        return [*self.arguments, f"--seed_everything={self.seed}", option]


def format_settings(settings: Mapping[str, str]) -> str:
    """Settings as a user gave them, in one line."""
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def read_cells(
    words: Sequence[str], seeds: str | None, sets: Sequence[str]
) -> tuple[Invocation, list[SweepRun]]:
    """The runs of a sweep, the first seed of every setting first.

    Args:
        words: Recipes, then options for every run, as after `turnrl fit`.
        seeds: `0..4`, or `0,2,5`; None for the seed of the recipe.
        sets: Each a key with its values, `model.estimator=OutcomeOnly,Merged`.
    Returns:
        The recipes and options without any of the settings, and the runs.
    Raises:
        RecipeError: If a recipe cannot be read, or if the seeds or settings make no sweep. Values
            are only read here, and checked in `check`.
    """
    invocation = read_invocation("sweep", words)
    if invocation.help_options:
        raise RecipeError(
            f"{invocation.help_options[0]} is an option of 'turnrl fit'. 'turnrl sweep --help' "
            "describes a sweep."
        )
    own = invocation.contents.get("seed_everything", 0)
    numbers = read_seeds(str(own) if seeds is None else seeds)
    keys = [read_set(text) for text in sets]
    cells = []
    by_digest: dict[str, Mapping[str, str]] = {}
    for values in itertools.product(*(values for _, values in keys)):
        settings = {key: value for (key, _), value in zip(keys, values, strict=True)}
        words = [*invocation.arguments, *(f"--{key}={value}" for key, value in settings.items())]
        read = read_invocation("fit", words)
        _refuse(read.contents)
        digest = _digest(read.contents)
        if (first := by_digest.setdefault(digest, settings)) is not settings:
            raise RecipeError(
                f"{format_settings(first)} and {format_settings(settings)} are the same recipe. "
                "Leave one out."
            )
        trainer = read.contents["trainer"]
        # the loggers, except for the one that keeps the folder of a run
        loggers = (
            logger
            for logger in as_list(trainer["logger"])
            if isinstance(logger, dict) and logger.get("init_args") != read.location.logger
        )
        more = tuple(read.arguments), tuple(loggers)
        cells += [SweepRun(settings, seed, digest, *more) for seed in numbers]
    return invocation, sorted(cells, key=lambda cell: numbers.index(cell.seed))


def read_seeds(text: str) -> list[int]:
    """The seeds that a text names: `0..4`, `0,2,5`, or both, `0..4,7`.

    Raises:
        RecipeError: If it names no seeds, or a seed twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", part)
        new = range(int(ends[1]), int(ends[2] or ends[1]) + 1) if ends else range(0)
        if not new or len(new) > _SEEDS_LIMIT or {*new} & {*seeds}:
            raise RecipeError(
                f"--seeds is {text!r}, and {part!r} is no seed, no range of at most "
                f"{_SEEDS_LIMIT} seeds, or names a seed twice. Give 0..4, or 0,2,5."
            )
        seeds += new
    return seeds


def read_set(text: str) -> tuple[str, list[str]]:
    """The key and the values of one `--set`. Commas inside brackets do not separate values.

    Raises:
        RecipeError: If it has no key or no value, a value twice, or a key that the sweep decides.
    """
    key, _, rest = text.partition("=")
    values = [value.strip() for value in _split_values(rest)]
    if not re.fullmatch(r"\w[\w.-]*\+?", key) or "" in values:
        raise RecipeError(
            f"--set is {text!r}, which is not a key with its values. Give --set "
            "model.estimator=OutcomeOnly,Merged."
        )
    if key.removesuffix("+").startswith(("seed_everything", *_PLACES)):
        raise RecipeError(f"--set {key}: the sweep sets it. Give --seeds 0..4, or -o FOLDER.")
    return key, values


def _split_values(text: str) -> list[str]:
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _refuse(contents: Mapping[str, Any]) -> None:
    """Refuse settings that a run of a sweep cannot have."""
    if contents.get("ckpt_path") is not None:
        raise RecipeError(
            f"ckpt_path is {contents['ckpt_path']!r}, and a sweep looks for checkpoints itself: it "
            "resumes unfinished runs from their last. Leave it out."
        )
    if contents["trainer"].get("fast_dev_run") not in (None, False, 0, "0"):
        raise RecipeError(
            "trainer.fast_dev_run is a trial, which leaves no figures. Leave it out, or try the "
            "recipe with 'turnrl fit'."
        )


def _digest(contents: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in contents.items() if value != {}}
    for seed_or_place in ("seed_everything", "ckpt_path"):
        kept.pop(seed_or_place, None)
    where = [place.split(".")[-1] for place in _PLACES]
    kept["trainer"] = {k: v for k, v in contents["trainer"].items() if k not in where}
    text = json.dumps(_normalise_value(kept), sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _normalise_value(value: object) -> object:
    """A value in a uniform spelling, so that 2e-4 equals 0.0002, and a class equals its name."""
    if isinstance(value, Mapping):
        if "class_path" in value and not any(v for k, v in value.items() if k != "class_path"):
            return value["class_path"]
        return {str(key): _normalise_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalise_value(item) for item in value]
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def check(cells: Iterable[SweepRun], folder: Path) -> str:
    """Build the recipes of runs, as `turnrl fit` does before it begins, without running them.

    Args:
        cells: At least one run. Runs that differ only in their seeds are built once.
        folder: The sweep's folder.
    Returns:
        The kind of device on which the last of them runs: `cpu`, `cuda` or another.
    Raises:
        RecipeError: If one of them cannot be built.
    """
    from turnrl.recipe.build import build

    kind, level = "", logging.root.manager.disable
    logging.disable(logging.WARNING)  # Lightning prints the seed of each
    try:
        with warnings.catch_warnings(action="ignore"):
            for cell in {cell.digest: cell for cell in cells}.values():
                kind = build(cell.words(folder)).start.device.type
    finally:
        logging.disable(level)
    return kind


def default_folder(invocation: Invocation) -> Path:
    """`runs/NAME-sweep`, or beside the other runs of the recipe."""
    return invocation.location.home or RUNS / f"{invocation.name}-sweep"
