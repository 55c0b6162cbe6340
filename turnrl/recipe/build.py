"""From what a user gave to a module, data and a trainer, by LightningCLI.

jsonargparse checks and builds. What is here chooses classes, and tells a mistake in a user's words.
"""

import json
import logging
import re
import signal
import sys
import threading
import warnings
from argparse import SUPPRESS
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, cast

import lightning as L
import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from transformers.utils import logging as transformers_logging

from turnrl.data.questions import QuestionData
from turnrl.errors import (
    ArgumentTypeError,
    RecipeError,
    TurnRLError,
    instance_of,
    kind_of,
)
from turnrl.module import MTGRPO
from turnrl.plugins import KINDS, installed
from turnrl.recipe.agents import Agent, find_agent
from turnrl.recipe.by_recipe import ByRecipe
from turnrl.recipe.explain import explain, explain_class, explain_section, parameters
from turnrl.recipe.given import (
    COMMAND,
    Given,
    Settings,
    each_text,
    listed,
    read_given,
    refuse_unknown,
    relocated,
)
from turnrl.recipe.moved import renamed
from turnrl.run.kept import BestCheckpoint, LastCheckpoint
from turnrl.types.examination import Start

_CLASSES = {"model": MTGRPO, "data": QuestionData, "trainer": L.Trainer}
"""Classes of a recipe that names none."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A recipe's parts, made: nothing has run, and no weights are loaded.

    Args:
        module: The recipe's module.
        data: The recipe's data.
        trainer: The recipe's trainer, with the callbacks and loggers of the run.
        start: The run that the trainer would begin, for checks.
        settings: Values of the keys that the command knows besides those of `fit`.
        given: The recipes and options.
    """

    module: L.LightningModule
    data: L.LightningDataModule
    trainer: L.Trainer
    start: Start
    settings: Mapping[str, Any]
    given: Given

    @property
    def checkpoint(self) -> str | None:
        """The file that `ckpt_path` means, None if it is not set. `last` and `best` are looked up
        when you ask.

        Raises:
            CheckpointError: If no run has it.
        """
        return self.given.checkpoint()


def build(arguments: Sequence[str]) -> Built:
    """Make what `turnrl fit` would run, and run nothing: no weights are loaded, no data is read.

    Args:
        arguments: Recipes, then options, as they follow the command.
    Returns:
        The recipe's module, data and trainer, and where they would run.
    Raises:
        RecipeError: If something is wrong with the arguments.
        CheckpointError: If the file of `ckpt_path` is not there, or is no checkpoint.
    """
    return make(read_given("fit", arguments))


def load(
    path: str | Path,
    device: str = "cpu",
    checkpoint: str | Path | None = None,
    module: MTGRPO | None = None,
) -> MTGRPO:
    """A policy to `ask`, and whatever else its recipe says: a module with its weights loaded. On a
    GPU it samples with the settings that a memory plan would choose for a run of its recipe.

    Args:
        path: A run (see `turnrl.find_run`), a checkpoint, or a recipe, by its path or its name,
            whose policy it is as it was before any training.
        device: Where the weights go.
        checkpoint: Which one of the run, `best` or `last`; None for the best one, or else the last.
            After a recipe: a run or a checkpoint whose weights it takes.
        module: Takes the weights, in place of a module that the recipe describes: for a run that
            was made from Python, which has none.
    Raises:
        CheckpointError: If there is no such run or checkpoint, it is of another policy, or it holds
            no recipe and there is no module to take it.
        RecipeError: If there is no such recipe, or it describes no `MTGRPO`.
    """
    if not isinstance(path, str | PathLike):
        step = "Give a run, a checkpoint or a recipe: turnrl.load('runs/NAME')."
        raise ArgumentTypeError(f"path is {kind_of(path)}. {step}")
    if module is not None:
        instance_of(MTGRPO, "module", module)
    agent = find_agent(path, None if checkpoint is None else str(checkpoint))
    file = agent.weights()
    saved = None
    if file is not None and not file.is_dir():
        saved = torch.load(file, map_location="cpu", weights_only=True)
    if module is not None and file is None:
        what = f"{str(path)!r} is a recipe, and has no trained weights for the module to take"
        raise RecipeError(f"{what}. Give a run, or a checkpoint.")
    questions = 0
    if module is None:
        recipe = _recipe_of(agent, saved)
        module, data = _made(recipe), recipe.get("data") or {}
        settings = data.get("init_args", data) or {}
        questions = settings.get("questions_per_iteration") or 0
    Start(torch.device(device), module, learns=False, questions=questions).settle()
    module.policy.load(device)
    if saved is not None:
        module.on_load_checkpoint(saved)
    elif file is not None:
        module.policy.take(file)
    module.load_state_dict({} if saved is None else saved["state_dict"])
    return module.to(device)


def _recipe_of(agent: Agent, saved: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The recipe of an agent: the one that was given, or that of its checkpoint, or of its run.

    Raises:
        CheckpointError: If it has none.
    """
    file = agent.checkpoint
    if file is not None and not agent.is_recipe:
        if saved is not None and "recipe" in saved:
            relocate = partial(relocated, file)
            recipe = renamed(yaml.safe_load(saved["recipe"]))
            return cast(Mapping[str, Any], each_text(recipe, relocate))
        if not agent.recipe.is_file() or agent.recipe == file:
            raise agent.without_recipe()
    given = read_given("fit", ["--config", str(agent.recipe)])
    refuse_unknown(given, _homes)
    # classes of one's own; none beside a checkpoint
    sys.path += [str(agent.recipe.absolute().parent)]
    return given.contents


def _made(recipe: Mapping[str, Any]) -> MTGRPO:
    """The module that a recipe describes."""
    _prepare()
    sys.path += [str(Path.cwd())]
    model = recipe.get("model", {})
    if "class_path" not in model:
        model = {"class_path": "turnrl.MTGRPO", "init_args": model}
    seed = _seed(recipe.get("seed_everything", 0))
    model["init_args"] = {**model.get("init_args", {}), "seed": seed}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model", type=MTGRPO)
    try:
        made = parser.instantiate_classes(parser.parse_object({"model": model})).model
    except Exception as error:
        described = {"model": model}
        if isinstance(error, ArgumentError | ValueError | TypeError) or any(_faults(described, {})):
            raise _told(error, described, {}) from error
        raise
    return cast(MTGRPO, made)


def _refuse(given: Given) -> None:
    """Check what jsonargparse lets pass: unknown keys that are empty, and a second seed.

    Raises:
        RecipeError: If there is one.
    """
    refuse_unknown(given, _homes)
    for key in _CLASSES:
        if "seed" in (section := given.contents[key]):
            raise RecipeError(f"{key}.seed is {section['seed']}; set seed_everything in its place.")


def _homes(key: str) -> list[str]:
    """The settings of this name in the sections of a recipe."""
    return [f"{name}.{key}" for name, cls in _CLASSES.items() if key in parameters(cls)]


def _told(error: BaseException, contents: Mapping[str, Any], settings: Settings) -> RecipeError:
    """Explain the fault in a recipe that jsonargparse refuses, in a user's words."""
    for fault in filter(None, _faults(contents, settings)):
        return RecipeError(fault)
    # what a component says of its own settings, below what jsonargparse makes of it
    cause = error
    while not isinstance(cause, TurnRLError) and (cause.__cause__ or cause.__context__):
        cause = cause.__cause__ or cause.__context__ or cause
    return RecipeError(" ".join(str(cause).split()))


def _faults(contents: Mapping[str, Any], settings: Settings) -> Iterator[str | None]:
    """Fault of each part of a recipe, None if nothing is found."""
    kinds: dict[str, Any] = {"seed_everything": int, "ckpt_path": str | None}
    kinds |= {key: kind for key, (kind, *_) in settings.items()}
    for key, value in contents.items():
        cls = _CLASSES.get(key)
        if cls is None:
            yield explain(value, kinds[key], key)
        elif key != "trainer" and "class_path" in value:
            yield explain_class(value, cls.__mro__[1], key)
        else:
            yield explain_section(value, cls, key)


class _Parser(LightningArgumentParser):
    """Reports a bad recipe as it was given, and takes no key by its first letters."""

    given: Given

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "description": None, "allow_abbrev": False})

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> Any:
        # a setting that names a file means the file, and not what is in it
        return super().add_class_arguments(*args, **{**kwargs, "sub_configs": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        contents = self.given.contents if self.given.files else {}  # and not of help alone
        raise _told(ex or ValueError(message), contents, self.given.settings) from ex

    def format_help(self, *args: Any) -> str:
        """turnrl's own settings first: the trainer's are hundreds of lines."""
        self.usage = f"turnrl {self.given.command} RECIPE.yaml [--key value ...]"
        # as the title of the trainer's group says
        last = "training via flags"
        groups = sorted(self._action_groups, key=lambda group: last in (group.title or ""))
        self._action_groups = groups
        return str(super().format_help(*args))


class _Recipe(SaveConfigCallback):
    """Saves the recipe with the run and in its checkpoints."""

    @cached_property
    def _text(self) -> str:  # which takes a fifth of a second to write
        return str(self.parser.dump(self.config, skip_none=False))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.logger is not None:  # else the folder is the user's own
            super().setup(trainer, pl_module, stage)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["recipe"] = self._text


class _Signals(L.Callback):
    """Keeps the handler of SIGTERM. Lightning's waits for the end of a step, which a collection can
    put off by minutes, and then ends as if all were done."""

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)

    on_validation_start = on_train_start


class _CLI(LightningCLI):
    """LightningCLI with the ways of turnrl's runs."""

    parser_class: type[_Parser]

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # one seed for the whole run
        if self.model_class is not None:
            parser.link_arguments("seed_everything", "model.seed", compute_fn=_seed)
        if self.datamodule_class is not None:
            parser.link_arguments("seed_everything", "data.seed", compute_fn=_seed)
        path = "Checkpoint to begin from: its path, a run's folder, or `last` or `best` of them all"
        parser.add_argument("--ckpt_path", type=str | None, help=path)
        given = self.parser_class.given
        # a fact in the run's config.yaml, which reading a recipe passes over; it cannot be set
        for_help = "--help" in given.asks_for_help
        hidden = SUPPRESS if for_help else None
        parser.add_argument(f"--{COMMAND}", type=str, default=given.command, help=hidden)
        group = parser.add_argument_group(f"Settings of turnrl {given.command}")
        for key, (kind, default, *told) in given.settings.items():
            group.add_argument(f"--{key}", type=kind, default=default, help=" ".join(told))
        for flag, text in given.flags.items() if for_help else ():  # they are no settings
            group.add_argument(f"--{flag}", action="store_true", help=text)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # without the warning that there is a sys.argv, which DDP's other processes need
        self.config = parser.parse_args(args)

    def before_instantiate_classes(self) -> None:
        given = self.parser_class.given

        def numbered(cls: type[Any], *args: Any, **settings: Any) -> Any:
            # the recipe that is saved has no number, for it may be run again
            if settings.get("version", 0) is None and given.number is not None:
                place = Path(settings.get("save_dir") or "", settings.get("name") or "")
                settings["version"] = given.number if place == given.home else None
            return cls(*args, **settings)

        for logger in (CSVLogger, TensorBoardLogger):
            self.parser.add_instantiator(numbered, logger)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        given = self.parser_class.given
        config = self.config_init.trainer
        note = ByRecipe(given.folder)
        callbacks = [_Signals(), note, *listed(config.callbacks)]
        ours: list[type[L.Callback]] = [LastCheckpoint]
        if self.datamodule_class is QuestionData:
            ours.append(BestCheckpoint)
        for cls in ours if config.get("enable_checkpointing") is not False else ():
            if not any(isinstance(one, cls) for one in callbacks):
                callbacks.append(cls())
        loggers = listed(config.logger)
        for logger in loggers:
            _ = logger.version  # before a folder is made, which would count
        if given.own and not any(isinstance(logger, CSVLogger) for logger in loggers):
            loggers.insert(0, CSVLogger(**given.own, version=given.number))
        trainer: Any = super().instantiate_trainer(**kwargs, callbacks=[*callbacks], logger=loggers)
        bar = trainer.progress_bar_callback  # Lightning adds one if the recipe names none
        note.default_bar = None if bar in callbacks else bar
        return trainer


def _seed(value: int | None) -> int:
    if value is None or value is True or not 0 <= value < 2**32:
        what = "a number from 0 to 4294967295, so that a run can be repeated"
        raise RecipeError(f"seed_everything is {json.dumps(value)}; it must be {what}.")
    return int(value)


def _prepare() -> None:
    """Import what a recipe may name, and silence what a user of turnrl can do nothing about."""
    for hook in KINDS:
        installed(hook)  # a short name is known once its class is imported
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")  # Lightning on torch 2.13
    # what Lightning's own callback for checkpoints, which every trainer in Python has, remembers
    warnings.filterwarnings("ignore", r".*provided during.*: \[\"ModelCheckpoint\{[^\"]*\"\]")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: not re.search("litlogger|^.PU available: ", record.getMessage())
    )


def make(given: Given) -> Built:
    """Let LightningCLI make what a recipe describes; see `build`."""
    contents = given.contents
    _prepare()
    # classes of one's own, beside the recipe
    sys.path += [str(Path(one).absolute().parent) for one in ("here", *given.files)]
    _refuse(given)
    defaults = {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "enable_model_summary": False}
    try:
        cli = _CLI(
            None if "class_path" in contents["model"] else MTGRPO,
            None if "class_path" in contents["data"] else QuestionData,
            trainer_defaults=defaults,
            save_config_callback=_Recipe,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            parser_class=type("Parser", (_Parser,), {"given": given}),
            args=[f"--config={json.dumps(contents, default=str)}", *given.asks_for_help],
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )
    except Exception as error:
        # of a component's constructor, wrapped by jsonargparse; of a null in a number's place; or
        # of a module that cannot be imported
        wrapped = "Union subtypes" in str(error) or any(_faults(contents, given.settings))
        null = isinstance(error, ArgumentTypeError)
        if not wrapped or (isinstance(error, TurnRLError) and not null):
            raise
        raise _told(error, contents, given.settings) from error
    trainer = cli.trainer
    folder = given.folder and Path(str(trainer.log_dir))
    device, processes = trainer.strategy.root_device, trainer.world_size
    return Built(
        module=cli.model,
        data=cli.datamodule,
        trainer=trainer,
        start=Start(device, cli.model, cli.datamodule, folder, processes, trainer.max_epochs),
        settings={key: cli.config_init[key] for key in given.settings},
        given=given,
    )
