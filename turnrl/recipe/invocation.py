"""A command with its recipes and options, merged.

They are read before anything heavy is imported, so that a missing file or a broken line shows at
once. They are merged only here, so that checks, explanations and the build see the same contents.
"""

import json
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args, get_origin

from turnrl.plugin.errors import RecipeError, is_finite
from turnrl.plugin.signals import is_first_process
from turnrl.recipe.bundled import find_recipe, recipe_name
from turnrl.recipe.location import RunLocation, folder_suffix, with_own_logger
from turnrl.recipe.merging import (
    Contents,
    Editable,
    expand_variables,
    map_values,
    merge,
    relocate,
    variable_name,
)
from turnrl.recipe.reading import ASKS, MAPPINGS, parse_value, read_options, read_recipe
from turnrl.recipe.trust import TRUST, is_own, require_consent
from turnrl.runs.checkpoints import LATEST, checkpoint_to_resume, newest_checkpoint
from turnrl.runs.config import COMMAND
from turnrl.runs.find import RUNS, require_files

if TYPE_CHECKING:
    from turnrl.recipe.agents import NamedAgent

Settings = Mapping[str, tuple[Any, ...]]
"""The type and default of each of a command's own keys, and perhaps its line of help."""
DEFAULTS: Mapping[str, Editable] = {
    "optimizer": {
        "class_path": "torch.optim.AdamW",
        "init_args": {"lr": 1e-6, "betas": [0.9, 0.99], "weight_decay": 0.0},
    },
    "estimator": {"class_path": "turnrl.TurnLevel"},
    "objective": {"class_path": "turnrl.ClippedSurrogate"},
}
"""What `MTGRPO` takes if a recipe names no class. A recipe or an option may change a setting of it,
as in `--model.optimizer.lr 1e-5`."""
_WRITES = ("logger", "default_root_dir")
"""Settings of a trainer that say where a run writes."""
DECISIONS = "TURNRL_DECISIONS"
"""The variable by which the first process of a run gives the others what it has read and decided,
as JSON. Unlike a command line, other users of the machine cannot see it."""


@dataclass(frozen=True)
class Invocation:
    """A command with its recipes and options.

    Args:
        command: `fit`, for example.
        settings: The command's own keys at the top of a recipe.
        contents: The recipes and options merged; later ones override earlier ones.
        arguments: The words of the command, for the other processes of a run.
        files: The recipes.
        help_options: Options that ask for help or for the printed recipe, and not for a run.
        agent: The run that the first word means; its recipe is then the first. None if the word
            means a recipe.
        number: The number that the run has claimed; None before that.
        destination: Where the command writes, if it keeps no folder of runs; else empty.
    """

    command: str
    settings: Settings
    contents: Contents
    arguments: Sequence[str]
    files: Sequence[str]
    help_options: Sequence[str]
    agent: "NamedAgent | None" = None
    number: int | None = None
    destination: str = ""

    @property
    def kinds(self) -> dict[str, object]:
        """Types of the keys at the top that are not sections."""
        own = {key: kind for key, (kind, *_) in self.settings.items()}
        return {"seed_everything": int, "ckpt_path": str | None, **own}

    @property
    def name(self) -> str:
        """The name of the run: the name of the run that the user gave, or else the last recipe's
        file name without its ending."""
        if self.agent is not None and (run := self.agent.run) is not None:
            return (run.parent if run.name.startswith("version_") else run).name
        return Path(self.files[-1]).stem if self.files else ""

    @cached_property
    def location(self) -> RunLocation:
        """Where the run writes."""
        trial = self.contents["trainer"].get("fast_dev_run") not in (None, False, 0, "0")
        return RunLocation(
            command=self.command,
            name=self.name,
            logger=self._loggers[1],
            number=self.number,
            is_trial=trial,
            destination=self.destination,
        )

    @cached_property
    def _loggers(self) -> tuple[Any, Editable]:
        """The loggers, and the settings of the one that keeps the run's folder."""
        trainer = self.contents["trainer"]
        root = trainer.get("default_root_dir") or RUNS
        name = f"{self.name}{folder_suffix(self.command)}"
        loggers, own = with_own_logger(trainer.get("logger", True), name, str(root))
        return loggers, map_values(own, expand_variables, "trainer.logger")

    def with_logger(self) -> "Invocation":
        """A copy with the logger that keeps the run's folder."""
        trainer = {**self.contents["trainer"], "logger": self._loggers[0]}
        return replace(self, contents={**self.contents, "trainer": trainer})

    def with_checkpoint(self) -> "Invocation":
        """A copy whose `ckpt_path` is a file in place of `last` or `best`, which mean that of the
        newest run that has it.

        Raises:
            CheckpointError: If no run has such a checkpoint.
        """
        name = self.contents.get("ckpt_path")
        if name not in LATEST:
            return self
        file = str(newest_checkpoint(self.location.trained, name))
        return replace(self, contents={**self.contents, "ckpt_path": file})

    def words(self, without: Collection[str]) -> str:
        """The recipes and options as typed for another command, without the options of the keys in
        `without`."""
        kept = (word for word in self.arguments if word[2:].partition("=")[0] not in without)
        return shlex.join(recipe_name(word.removeprefix("--config=")) for word in kept)


def read_invocation(
    command: str,
    arguments: Sequence[str],
    settings: Settings | None = None,
    *,
    takes_run: bool = False,
    prepare: Callable[[Invocation], Invocation] | None = None,
) -> Invocation:
    """Read the words after a command: recipes, then options.

    Args:
        command: `fit`, for example.
        arguments: The words.
        settings: The command's own keys at the top of a recipe.
        takes_run: Accept a run in the place of the first recipe; see `find_agent`.
        prepare: Returns the merged recipes and options with the command's own changes.
    Raises:
        RecipeError: If there is no recipe, a recipe cannot be read, or an option is malformed; or
            if a stranger's recipe names code, and the words have no `--trust`.
        CheckpointError: If the file of `ckpt_path` is missing, or is not a checkpoint; or if the
            first word is not a run, a checkpoint or a recipe.
    """
    settings, agent = settings or {}, None
    words = [word for word in arguments if word != TRUST]
    if not is_first_process() and (decisions := os.environ.pop(DECISIONS, None)):
        return Invocation(command, settings, **json.loads(decisions))
    if takes_run and words and not words[0].startswith("-"):
        from turnrl.recipe.agents import find_agent

        named = find_agent(words[0])
        if not named.is_recipe:
            agent, words[0] = named, _path_of_recipe(named, command)
    merge = _Merge(agent is not None, TRUST in arguments)
    help_options = list[str]()
    lists = [f"--{key}" for key, (kind, *_) in settings.items() if _takes_list(kind)]
    switches = [f"--{key}" for key, (kind, *_) in settings.items() if kind is bool]
    for option, value in read_options(command, words, lists, switches):
        if option in ASKS or option.endswith(".help"):
            help_options.append(f"{option}={value}" if value else option)
        elif option == "--config":
            merge.add_recipe(find_recipe(value))
        else:
            merge.add_option(option, value)
    if not merge.files and not help_options:
        raise _missing_recipe(command, takes_run)
    invocation = Invocation(
        command=command,
        settings=settings,
        contents=merge.check_contents(),
        arguments=merge.arguments,
        files=merge.files,
        help_options=help_options,
        agent=agent,
    )
    return _complete(prepare(invocation) if prepare else invocation)


class _Merge:
    """Merges recipes and options in their order.

    Args:
        of_run: True if the first recipe is a run's own.
        trusts: True if the user agrees to run the code that a stranger's recipe names.
    Attributes:
        contents: The recipes and options, merged.
        arguments: The words for the other processes of a run.
        files: The recipes.
    """

    def __init__(self, of_run: bool, trusts: bool) -> None:
        self._of_run, self._trusts = of_run, trusts
        self.contents: Editable = {key: {} for key in MAPPINGS}
        self.arguments: list[str] = []
        self.files: list[str] = []

    def add_recipe(self, file: str) -> None:
        """Add the settings of a recipe. The command that a run notes beside them is left out, and
        so are the `ckpt_path` of a first recipe that is a run's own, and where it wrote.
        """
        path = Path(file)
        new = {key: value for key, value in read_recipe(file).items() if key != COMMAND}
        if path.with_name("checkpoints").is_dir():
            with_paths = {key: new[key] for key in ("model", "data") if key in new}
            new |= map_values(with_paths, partial(relocate, path))
        if path.is_file() and not is_own(path, path.read_text("utf-8")):  # a pipe is read once
            require_consent(str(path), new, path.parent, self._trusts)
        if self._of_run and not self.files:
            new.pop("ckpt_path", None)
            if isinstance(trainer := new.get("trainer"), dict):
                settings = trainer.items()
                new["trainer"] = {key: value for key, value in settings if key not in _WRITES}
        self.contents.update(merge(self.contents, new))
        # settings of a recipe belong to the class that it means, not to one that an option names
        name_default_classes(self.contents["model"])
        self.files.append(file)
        self.arguments.append(f"--config={file}")

    def add_option(self, option: str, value: str) -> None:
        self.contents.update(merge(self.contents, _nest_option(option, value)))
        self.arguments.append(f"{option}={value}")

    def check_contents(self) -> Editable:
        """The contents, with the variables in them as they are written.

        Raises:
            RecipeError: If a variable is not set, or a number is not finite.
        """
        return _check_sections(self.contents)


def _missing_recipe(command: str, takes_run: bool) -> RecipeError:
    kinds, name = ("a run or a recipe", "RUN") if takes_run else ("a recipe", "RECIPE.yaml")
    return RecipeError(
        f"'turnrl {command}' needs {kinds}: turnrl {command} {name} [--key value ...]"
    )


def _takes_list(kind: object) -> bool:
    return any(get_origin(member) is list for member in get_args(kind))


def _nest_option(option: str, value: str) -> Editable:
    """An option and its value as a part of a recipe."""
    nested = parse_value(value)
    for name in reversed(option.removeprefix("--").split(".")):
        nested = {name: nested}
    return cast(Editable, nested)


def _check_sections(contents: Contents) -> Editable:
    """The contents with each value checked, and each section as a mapping."""
    checked = {key: map_values(value, _check_value, key) for key, value in contents.items()}
    for key in MAPPINGS:
        section = checked[key] or {}
        checked[key] = section if isinstance(section, dict) else {"class_path": section}
    name_default_classes(checked["model"])
    return checked


def name_default_classes(model: object) -> None:
    """Write the default class of a component of `MTGRPO` above settings that name none."""
    if not isinstance(model, dict):
        return
    if str(model.get("class_path", "MTGRPO")).rpartition(".")[2] == "MTGRPO":
        settings = model.get("init_args") or model
        for name, default in DEFAULTS.items():
            given = settings.get(name)
            if given and isinstance(given, dict) and "class_path" not in given:
                settings[name] = merge(default, given)


def _check_value(value: object, key: str) -> object:
    """A value of a recipe.

    Raises:
        RecipeError: If it is a number that is not finite, such as `.inf` in YAML, or larger than
            any float; or if it names a variable that is not set.
    """
    if isinstance(value, int | float) and not is_finite(value):
        raise RecipeError(f"{key} is {value!r:.80}; it must be finite. Give another number.")
    if key.endswith("_env") and isinstance(value, str) and (name := variable_name(value)):
        return name  # such a setting takes a variable's name
    filled = expand_variables(value, key)
    return filled if key.endswith(".class_path") else value


def _path_of_recipe(agent: "NamedAgent", command: str) -> str:
    """The recipe of the run that a user gave in a recipe's place.

    Raises:
        RecipeError: If the agent is a checkpoint outside any run, or the run has no recipe.
    """
    if agent.run is None:
        raise RecipeError(
            f"the checkpoint {str(agent.checkpoint)!r} is in no run. Give a recipe for it: "
            f"'turnrl {command} RECIPE --ckpt_path {agent.checkpoint}'."
        )
    return str(require_files(agent.run, "recipe") / agent.recipe.name)


def _complete(invocation: Invocation) -> Invocation:
    """Add the logger that keeps the run's folder, and look up the file of `ckpt_path`, unless it is
    `last` or `best`."""
    logged = invocation.with_logger()
    checkpoint = logged.contents.get("ckpt_path")
    if isinstance(checkpoint, str) and checkpoint not in LATEST and not logged.help_options:
        file = checkpoint_to_resume(str(expand_variables(checkpoint, "ckpt_path")))
        return replace(logged, contents={**logged.contents, "ckpt_path": file})
    return logged
