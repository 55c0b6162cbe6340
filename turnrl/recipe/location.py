"""Where a run writes, and the logger that keeps its folder there."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from turnrl.recipe.merging import PARTS, Contents, Editable, as_list
from turnrl.runs.claim import next_version
from turnrl.runs.find import RUNS


@dataclass(frozen=True)
class RunLocation:
    """Where a run writes.

    Args:
        command: `fit`, for example. Each command keeps its runs in folders of its own.
        name: The run's name.
        logger: Settings of the CSVLogger that keeps a folder for the run; empty if nothing logs it.
        number: The number that the run has claimed; None before that.
        is_trial: True if the run is a trial, which leaves no files.
        destination: Where the command writes, if it keeps no folder of runs; else empty.
    """

    command: str
    name: str
    logger: Contents
    number: int | None
    is_trial: bool
    destination: str

    @property
    def home(self) -> Path | None:
        """The folder of the runs of this name; None without a logger."""
        return Path(self.logger["save_dir"], self.logger["name"]) if self.logger else None

    @property
    def trained(self) -> Path:
        """The folder of the runs of `fit`, in which `last` and `best` are looked up."""
        home = self.home or RUNS / self.name
        return Path(str(home).removesuffix(folder_suffix(self.command)))

    @cached_property
    def folder(self) -> Path | None:
        """The folder in which the run will leave its files; None if it leaves none. Another run may
        take the folder until this one has claimed its number."""
        if self.home is None or self.is_trial:
            return None
        version = self.number if self.logger.get("version") is None else self.logger["version"]
        number = str(next_version(self.home) if version is None else version)
        return self.home / (f"version_{number}" if number.isdigit() else number)

    @property
    def is_numbered(self) -> bool:
        """True if the run's folder gets the next number in `home`."""
        local = "://" not in str(self.logger.get("save_dir"))
        return self.folder is not None and self.logger.get("version") is None and local

    def __str__(self) -> str:
        """The words that follow `writing` in an announcement."""
        if self.destination:
            return f"to {self.destination}"
        if self.is_trial:
            return "no files: trainer.fast_dev_run is a trial"
        if self.folder is not None:
            return f"to {self.folder}"
        kept = "only checkpoints/" if self.command == "fit" else "no files"
        return f"{kept}: trainer.logger is false"


def folder_suffix(command: str) -> str:
    """The ending of the name of the folder that has a command's runs."""
    return "" if command == "fit" else f"-{command}"


def with_own_logger(value: object, name: str, root: str) -> tuple[Any, Editable]:
    """Find or add the logger that keeps a folder for the run. Because of it the run's files always
    lie where the command announces, and `last` and `best` find them.

    It is the recipe's first CSVLogger, or a new one before the recipe's loggers. A new one has the
    `save_dir` and `name` of the recipe's first logger. `root` and `name` replace missing ones.

    Returns:
        The recipe's loggers, beginning with this one if it is among them; and its settings.
    """
    items = as_list(value)
    loggers = [{"class_path": item} if isinstance(item, str) else item for item in items]
    if not loggers:
        return [], {}
    described: list[Editable] = [logger for logger in loggers if isinstance(logger, dict)]
    csv = next((logger for logger in described if _class(logger).endswith("CSVLogger")), {})
    first = csv or next(iter(described), {})
    settings = {key: item for key, item in first.items() if key not in PARTS}
    settings |= first.get("init_args") or {}
    own = settings if csv else {}
    # with an empty name, runs lie in `save_dir` itself
    own["name"] = "" if own.get("name") == "" else settings.get("name") or name
    own["save_dir"] = settings.get("save_dir") or root
    others = [logger for logger in loggers if logger is not csv and logger is not True]
    if csv or not others:
        others.insert(0, {"class_path": _class(csv), "init_args": own})
    return others if len(others) > 1 else others[0], own


def _class(logger: Mapping[str, object]) -> str:
    return str(logger.get("class_path", "CSVLogger"))
