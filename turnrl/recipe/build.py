"""Recipes: from what a user gave to a module, data and a trainer, by LightningCLI.

jsonargparse checks and builds; what is here chooses classes, tells a mistake in a user's words, and
says what a resumed run changed.
"""

import json
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

import lightning as L
import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from transformers.utils import logging as transformers_logging

from turnrl.callbacks import BestCheckpoint, LastCheckpoint
from turnrl.data import QuestionData
from turnrl.errors import CheckpointError, RecipeError, TurnRLError, did_you_mean
from turnrl.module import MTGRPO
from turnrl.plugins import KINDS, installed
from turnrl.recipe.explain import explain, explain_class, explain_section, parameters
from turnrl.recipe.given import SECTIONS, Given, find_recipe, read_given
from turnrl.record import figures
from turnrl.run.folders import LATEST, checkpoint_at, newest, run_folder, writable_part
from turnrl.types import Start

_CLASSES = {"model": MTGRPO, "data": QuestionData, "trainer": L.Trainer}
"""Classes of a recipe that names none."""


def load(path: str | Path, device: str = "cpu") -> MTGRPO:
    """A policy to `ask`, and whatever else its recipe says: a module with its weights loaded.

    Args:
        path: A checkpoint, a run's folder (its `last.ckpt`), or a recipe, by its path or its name,
            whose policy it is as it was before any training.
        device: Where the weights go.
    Raises:
        CheckpointError: If there is no such checkpoint, or it holds no recipe.
        RecipeError: If there is no such recipe, or it describes no `MTGRPO`.
    """
    path = str(path) if Path(path).is_dir() else find_recipe(str(path))
    file, checkpoint = Path(path), None
    if file.suffix in (".yaml", ".yml"):
        recipe = read_given("fit", ["--config", path]).contents
        sys.path += [str(file.absolute().parent)]  # classes of one's own; none beside a checkpoint
    else:
        file = Path(checkpoint_at(str(path)))
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        if "recipe" not in checkpoint:
            raise CheckpointError(
                f"{str(file)!r} holds no recipe: it was made from Python. Give what it was made of "
                "to MTGRPO.load_from_checkpoint(path, policy=..., rollout=..., rewards=...)."
            )
        recipe = _relocated(yaml.safe_load(checkpoint["recipe"]), file)
    _prepare()
    _refuse_unknown(recipe, SECTIONS)
    sys.path += [str(Path.cwd())]
    model = recipe.get("model", {})
    if "class_path" not in model:
        model = {"class_path": "turnrl.MTGRPO", "init_args": model}
    seed = _seed(recipe.get("seed_everything", 0))
    model["init_args"] = {**model.get("init_args", {}), "seed": seed}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model", type=MTGRPO)
    try:
        module: MTGRPO = parser.instantiate_classes(parser.parse_object({"model": model})).model
    except (ArgumentError, ValueError, TypeError) as error:
        raise _told(error, {"model": model}) from error
    module.policy.load(device)
    if checkpoint is not None:
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
    return module.to(device)


def _relocated(value: Any, file: Path, key: str = "") -> Any:
    """A value of a saved recipe, whose paths started from the folder that the run was begun in.
    Those that lead nowhere from here are tried from the folders above the checkpoint. A model,
    which the checkpoint knows again, is also found by the end of its path, after a move."""
    if isinstance(value, dict):
        return {name: _relocated(item, file, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_relocated(item, file) for item in value]
    exists = os.path.exists  # unlike Path's, at home with texts of any length
    model = key == "model" and "://" not in str(value)
    if not isinstance(value, str) or not (model or "/" in value) or exists(value):
        return value
    above = file.resolve().parents
    there = [folder / value for folder in above]
    if model:  # the hub's names end as folders may: one with a model in it is meant
        parts = Path(value).parts
        ends = [Path(*parts[n:]) for n in range(1, len(parts))]
        moved = (folder / end for end in ends for folder in above)
        there += [path for path in moved if exists(path / "config.json")]
    return next((str(path) for path in there if exists(path)), value)


Split = Literal["train", "val", "test"]
_SETTINGS: dict[str, Any] = {"seed_everything": int, "split": Split}


def _refuse_unknown(contents: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check what jsonargparse lets pass: unknown keys that are empty, and a second seed.

    Raises:
        RecipeError: If there is one.
    """
    for key, value in contents.items():
        if key not in known:
            homes = [f"{name}.{key}" for name, cls in _CLASSES.items() if key in parameters(cls)]
            near = did_you_mean(str(key), [*known, *homes])
            raise RecipeError(f"unknown key {str(key)!r}.{near} There are {', '.join(known)}.")
        if key in _CLASSES and "seed" in value:
            raise RecipeError(f"{key}.seed is {value['seed']}; set seed_everything in its place.")


def _faults(contents: Mapping[str, Any]) -> Iterator[str | None]:
    """Fault of each part of a recipe, None if nothing is found."""
    for key, value in contents.items():
        cls = _CLASSES.get(key)
        if cls is None:
            yield explain(value, _SETTINGS.get(key, str | None), key)
        elif key != "trainer" and "class_path" in value:
            yield explain_class(value, cls.__mro__[1], key)
        else:
            yield explain_section(value, cls, key)


def _told(error: BaseException, contents: Mapping[str, Any]) -> RecipeError:
    """Explain the fault in a recipe that jsonargparse refuses, in a user's words."""
    for found in filter(None, _faults(contents)):
        return RecipeError(found)
    # what a component says of its own settings, below what jsonargparse makes of it
    cause = error
    while not isinstance(cause, TurnRLError) and (cause.__cause__ or cause.__context__):
        cause = cause.__cause__ or cause.__context__ or cause
    return RecipeError(" ".join(str(cause).split()))


class _Parser(LightningArgumentParser):
    """Reports a bad recipe as it was given, and takes no key by its first letters."""

    given: Given

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> Any:
        # a setting that names a file means the file, and not what is in it
        return super().add_class_arguments(*args, **{**kwargs, "sub_configs": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        contents = self.given.contents if self.given.files else {}  # and not of help alone
        raise _told(ex or ValueError(message), contents) from ex

    def format_help(self, *args: Any) -> str:
        """turnrl's own settings first: Lightning's are hundreds of lines."""
        self.usage = f"turnrl {self.given.command} RECIPE.yaml [--key value ...]"
        groups: list[Any] = list(self._action_groups)
        self._action_groups = sorted(groups, key=lambda group: "Lightning" in (group.title or ""))
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


class _Trainer(L.Trainer):
    """Lightning's trainer, which can also score a split."""

    announced: Path | None
    """The folder that the command has named."""
    by_default: list[L.Callback]
    """What shows the run because the recipe asks for nothing else."""

    def eval(
        self, model: Any, datamodule: Any = None, ckpt_path: str | None = None, split: Split = "val"
    ) -> None:
        """Score a split with greedy trajectories.

        Args:
            model: The module.
            datamodule: The data.
            ckpt_path: Checkpoint to score; without one, the policy as the recipe names it.
            split: Which of the recipe's splits to score.
        """
        if not isinstance(model, MTGRPO) or not isinstance(datamodule, QuestionData):
            has = f"{type(model).__name__} and {type(datamodule).__name__}"
            raise RecipeError(f"'turnrl eval' scores MTGRPO on QuestionData, not {has}.")
        datamodule.split = split
        self.validate(
            model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False, weights_only=True
        )
        parts, log_dir = [model.evaluated] * self.world_size, self.log_dir  # a collective call
        if self.world_size > 1:
            torch.distributed.all_gather_object(parts, model.evaluated)
        rows = [row for part in parts for row in part]
        if not rows:
            raise RecipeError("nothing to score. Set data.val; leave out limit_val_batches 0.")
        if self.is_global_zero:
            print(f"\n{len(rows)} questions, greedy; mean and 95 % interval")
            for name, figure in figures(rows).items():
                value, few = "-", ""
                if figure.mean is not None:
                    value = f"{figure.mean:.4f}  [{figure.low:.4f}, {figure.high:.4f}]"
                if figure.questions < len(rows):
                    few = f"  of {figure.questions} questions, whose answer can be found"
                print(f"    {f'{split}/{name}':36} {value}{few}")
            if log_dir:
                print(f"written to {Path(log_dir) / 'metrics.csv'}; every trajectory in record/")


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
    """LightningCLI with one command of turnrl."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # one seed for the whole run
        if self.model_class is not None:
            parser.link_arguments("seed_everything", "model.seed", compute_fn=_seed)
        if self.datamodule_class is not None:
            parser.link_arguments("seed_everything", "data.seed", compute_fn=_seed)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # without the warning that there is a sys.argv, which DDP's other processes need
        self.config = parser.parse_args(args)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        skipped = {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"}
        return {_Parser.given.command: skipped}

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        config = self._get(self.config_init, "trainer")
        given = config.get("callbacks") or []
        callbacks = [_Signals(), *(given if isinstance(given, list) else [given])]
        ours: list[type[L.Callback]] = [LastCheckpoint]
        if self.datamodule_class is QuestionData:
            ours.append(BestCheckpoint)
        for cls in ours if config.get("enable_checkpointing") is not False else ():
            if not any(isinstance(one, cls) for one in callbacks):
                callbacks.append(cls())
        trainer: Any = super().instantiate_trainer(
            **kwargs, callbacks=[*callbacks], logger=self._loggers(config.get("logger"))
        )
        # Lightning adds to its list what is shown by default
        trainer.announced, bar = _Parser.given.folder, trainer.progress_bar_callback
        trainer.by_default = [] if bar is None or bar in callbacks else [bar]
        return trainer

    def _loggers(self, given: Any) -> list[Any]:
        """The recipe's loggers, after one that keeps a folder for the run: whatever else logs it,
        its files lie where the command said, and `last` and `best` find them."""
        several = given if isinstance(given, list) else [given] if given else []
        home = _Parser.given.home
        if home is None or not several:
            return []
        others = [logger for logger in several if logger is not True]
        own = next((logger for logger in others if isinstance(logger, CSVLogger)), None)
        for logger in others:
            _ = logger.version  # before a folder is made, which would count
        if own is None:
            own = CSVLogger(str(home.parent), home.name, flush_logs_every_n_steps=1)
        return [own, *(logger for logger in others if logger is not own)]

    def _parse_ckpt_path(self) -> None:
        """The recipe says what to build; a checkpoint gives its weights alone."""

    def before_instantiate_classes(self) -> None:
        path = self._get(self.config, "ckpt_path")
        if path in LATEST:
            home = _Parser.given.home_of("fit") or Path("runs", _Parser.given.name)
            path = str(newest(home, path))
            self.config[self.subcommand]["ckpt_path"] = path
            print(f"checkpoint {path}")

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        # a checkpoint is data from somewhere: no code in it is run
        extra = {"weights_only": True} if subcommand == "fit" else {}
        return {**super()._prepare_subcommand_kwargs(subcommand), **extra}


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
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: not re.search("litlogger|^.PU available: ", record.getMessage())
    )


def run_recipe(given: Given) -> int:
    """Run `fit` or `eval`.

    Args:
        given: Which, and its recipes and options.
    Returns:
        The exit code.
    Raises:
        RecipeError: If something is wrong with them.
    """
    if given.folder is not None and not given.asks:
        writable_part(given.folder)  # before a logger tries to
    # DDP starts its other processes from sys.argv, so this is where the arguments have to be
    argv, sys.argv = sys.argv, [sys.argv[0], given.command, *given.arguments]
    try:
        _cli(given)
    except SystemExit as stop:
        # Lightning turns Ctrl-C into exit code 1
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise stop.__context__ from None
        return int(stop.code or 0) if not isinstance(stop.code, str) else 1
    finally:
        sys.argv = argv
    return 0


def build(arguments: Sequence[str], command: str = "fit") -> Start:
    """Make what a command would run, and run nothing: no weights are loaded, no data is read.

    Args:
        arguments: Recipes, then options, as they follow the command.
        command: Its name, for messages.
    Returns:
        The recipe's module and data, and where they would run.
    Raises:
        RecipeError: If something is wrong with the arguments.
    """
    given = read_given(command, arguments)
    given.contents.pop("ckpt_path", None)  # only a run takes one
    made = _cli(given, run=False)
    trainer: L.Trainer = made.trainer
    place = trainer.strategy.root_device, made.model, made.datamodule
    return Start(*place, run_folder(trainer), trainer.world_size)


def _cli(given: Given, run: bool = True) -> _CLI:
    """Let LightningCLI make what a recipe describes, and run it."""
    _Parser.given, command = given, given.command
    _prepare()
    # classes of one's own, beside the recipe
    sys.path += [str(Path(one).absolute().parent) for one in ("here", *given.files)]
    _refuse_unknown(given.contents, SECTIONS if command == "eval" else SECTIONS[:-1])
    contents = json.dumps(given.contents, default=str)
    name = f"{given.name}-{command}" if command == "eval" else given.name
    init_args = {"save_dir": "runs", "name": name, "flush_logs_every_n_steps": 1}
    defaults = {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "enable_model_summary": False}
    logger = {"class_path": "CSVLogger", "init_args": init_args}
    asked = [f"--config={contents}", *given.asks]
    try:
        return _CLI(
            None if "class_path" in given.contents["model"] else MTGRPO,
            None if "class_path" in given.contents["data"] else QuestionData,
            trainer_class=_Trainer,
            trainer_defaults={"logger": logger, **defaults},
            save_config_callback=_Recipe,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            parser_class=_Parser,
            args=[command, *asked] if run else asked,
            run=run,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )
    except (ValueError, TypeError) as error:
        # of a component's constructor, wrapped by jsonargparse, or of a null in a number's place
        wrapped = "Union subtypes" in str(error)
        if isinstance(error, TurnRLError) or not (wrapped or any(_faults(given.contents))):
            raise
        raise _told(error, given.contents) from error
