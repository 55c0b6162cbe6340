"""Builds a module, data and a trainer from recipes and options, with LightningCLI.

jsonargparse checks and builds. This module chooses classes, and reports mistakes in a user's words.
"""

import json
import logging
import re
import signal
import threading
import warnings
from argparse import SUPPRESS
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from transformers.utils import logging as transformers_logging

from turnrl.plugin.errors import (
    ArgumentTypeError,
    RecipeError,
    TurnRLError,
)
from turnrl.plugin.hooks import import_classes
from turnrl.recipe.filling import fill_variables
from turnrl.recipe.invocation import Invocation, read_invocation
from turnrl.recipe.merging import Contents, as_list, map_values
from turnrl.recipe.trust import TRUST, import_from, mark_text
from turnrl.runs.config import COMMAND, SECTIONS
from turnrl.runs.files import whole_file
from turnrl.training.checks import check_division, make_start
from turnrl.training.lifecycle import PolicyModule
from turnrl.training.module import MTGRPO
from turnrl.training.questions import QuestionData
from turnrl.training.trainer_checks import check_trainer, claim_folder
from turnrl.types.examination import Start
from turnrl.watch.checkpoints import BestCheckpoint, LastCheckpoint
from turnrl.watch.console import IterationLines
from turnrl.watch.recorder import Recorder
from turnrl.watch.trainer import writing

CLASSES = {"model": MTGRPO, "data": QuestionData, "trainer": L.Trainer, "record": Recorder}
"""The classes of a recipe's sections, unless the recipe names others."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """The objects that a recipe describes. Nothing has run, and no weights are loaded.

    Args:
        module: The recipe's module.
        data: The recipe's data.
        trainer: The recipe's trainer, with the callbacks and loggers of the run.
        start: The run that the trainer would begin, for checks.
        settings: Values of the command's own keys.
        invocation: The recipes and options.
    """

    module: L.LightningModule
    data: L.LightningDataModule
    trainer: L.Trainer
    start: Start
    settings: Contents
    invocation: Invocation

    @property
    def checkpoint(self) -> str | None:
        """The file of `ckpt_path`; None if it is not set."""
        file: str | None = self.invocation.contents.get("ckpt_path")
        return file

    def agent(self, command: str) -> tuple[MTGRPO, QuestionData]:
        """The module and the data, for a command whose policy acts on a question set.

        Raises:
            RecipeError: If the recipe names other classes.
        """
        if not isinstance(self.module, MTGRPO) or not isinstance(self.data, QuestionData):
            has = f"{type(self.module).__name__} and {type(self.data).__name__}"
            raise RecipeError(f"{command!r} plays MTGRPO on QuestionData, not {has}.")
        return self.module, self.data


def build(arguments: Sequence[str]) -> Built:
    """Make what `turnrl fit` would run, and run nothing: no weights are loaded, no data is read.

    Args:
        arguments: Recipes, then options, as they follow the command.
    Returns:
        The recipe's module, data and trainer, and where they would run.
    Raises:
        RecipeError: If something is wrong with the arguments.
        CheckpointError: If the file of `ckpt_path` is missing, or is not a checkpoint; or if no
            run has a `last` or `best` one.
    """
    return instantiate(read_invocation("fit", arguments).with_checkpoint())


class _Parser(LightningArgumentParser):
    """Accepts no abbreviated keys, reads no file that a setting names, and fills in variables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "description": None, "allow_abbrev": False})

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> Any:
        return super().add_class_arguments(*args, **{**kwargs, "sub_configs": False})

    def instantiate_classes(self, cfg: Any, **kwargs: Any) -> Any:
        # only constructors get the values of variables: the config is saved and printed
        return super().instantiate_classes(fill_variables(cfg), **kwargs)


class _Recipe(SaveConfigCallback):
    """Saves the recipe with the run and in its checkpoints."""

    @cached_property
    def _text(self) -> str:  # cached, because dumping takes a fifth of a second
        return mark_text(str(self.parser.dump(self.config, skip_none=False)))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.logger is not None:  # without one, the folder is the user's own
            self._folder = Path(str(trainer.log_dir))  # broadcast, so every process has to ask
            super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        file = self._folder / "config.yaml"
        with writing(trainer, file), whole_file(file) as new:
            new.write_text(self._text, "utf-8")

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["recipe"] = self._text


class _Signals(L.Callback):
    """Keeps the handler of SIGTERM. Lightning's handler waits for the end of a step, which a
    collection can delay by minutes, and then ends the run as if it were complete."""

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)

    on_validation_start = on_train_start


class _CLI(LightningCLI):
    """LightningCLI with the settings and callbacks of turnrl's runs.

    Args:
        invocation: The recipes and options.
        settings: Arguments of LightningCLI.
    """

    def __init__(self, invocation: Invocation, **settings: Any) -> None:
        self.invocation = invocation
        super().__init__(
            **settings,
            parser_class=_Parser,
            parser_kwargs={"exit_on_error": False},
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Recorder, "record")
        # one seed for the whole run
        for section, cls in (("model", self.model_class), ("data", self.datamodule_class)):
            if cls is not None:
                parser.link_arguments("seed_everything", f"{section}.seed", compute_fn=seed_of)
        path = "Checkpoint to begin from: its path, a run's folder, or `last` or `best` of all runs"
        parser.add_argument("--ckpt_path", type=str | None, help=path)
        invocation = self.invocation
        # a note in the run's config.yaml; reading a recipe ignores it
        for_help = "--help" in invocation.help_options
        hidden = SUPPRESS if for_help else None
        parser.add_argument(f"--{COMMAND}", type=str, default=invocation.command, help=hidden)
        group = parser.add_argument_group(f"Settings of turnrl {invocation.command}")
        for key, (kind, default, *text) in invocation.settings.items():
            group.add_argument(f"--{key}", type=kind, default=default, help=" ".join(text))
        if for_help:  # it is no setting
            line = "Run the code that a stranger's recipe names"
            group.add_argument(TRUST, action="store_true", help=line)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        parser.usage = f"turnrl {self.invocation.command} RECIPE.yaml [--key value ...]"
        trainer_title = "training via flags"  # part of the title of the trainer's hundreds of lines
        groups: Any = parser._action_groups  # a list, which its type does not say
        groups.sort(key=lambda group: trainer_title in (group.title or ""))
        # Lightning's method warns if sys.argv has words, which DDP's other processes need
        self.config = parser.parse_args(args)

    def before_instantiate_classes(self) -> None:
        invocation = self.invocation

        def numbered(cls: type[Any], *args: Any, **settings: Any) -> Any:
            # the number is not saved with the recipe, because somebody may run that again
            home = Path(settings.get("save_dir") or "", settings.get("name") or "")
            if settings.get("version", 0) is None and home == invocation.location.home:
                settings["version"] = invocation.number
            return cls(*args, **settings)

        for logger in (CSVLogger, TensorBoardLogger):
            self.parser.add_instantiator(numbered, logger)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        invocation = self.invocation
        config = self.config_init.trainer
        callbacks = [_Signals(), *as_list(config.callbacks)]
        if any(isinstance(callback, Recorder) for callback in callbacks):
            raise RecipeError(
                "trainer.callbacks has a Recorder, but every run has one. Leave it out, and set "
                "its options under record."
            )
        checkpoint_classes: list[type[L.Callback]] = [LastCheckpoint]
        if self.datamodule_class is QuestionData:
            checkpoint_classes.append(BestCheckpoint)
        for cls in checkpoint_classes if config.get("enable_checkpointing") is not False else ():
            if not any(isinstance(callback, cls) for callback in callbacks):
                callbacks.append(cls())
        loggers = as_list(config.logger)
        for logger in loggers:
            _ = logger.version  # chosen now: a folder that is made later would count
        if invocation.location.logger and not any(
            isinstance(logger, CSVLogger) for logger in loggers
        ):
            loggers.insert(0, CSVLogger(**invocation.location.logger, version=invocation.number))
        # a list of its own, because Lightning adds a bar to it
        settings = {**kwargs, "callbacks": [*callbacks], "logger": loggers}
        try:
            trainer: Any = super().instantiate_trainer(**settings)
        except MisconfigurationException as error:
            raise RecipeError(
                f"Lightning refuses the settings under trainer: {str(error).rstrip('.!')}. Correct "
                "them; 'accelerator: auto' takes what this machine has."
            ) from error
        bar = trainer.progress_bar_callback
        if not isinstance(self.model, PolicyModule):  # nothing is collected that they could record
            trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Recorder)]
        elif bar is not None and bar not in callbacks:  # Lightning's own, which nobody asked for
            trainer.callbacks[trainer.callbacks.index(bar)] = IterationLines(announced=True)
        return cast(L.Trainer, trainer)


def seed_of(value: int | None) -> int:
    if value is None or value is True or not 0 <= value < 2**32:
        raise RecipeError(
            f"seed_everything is {json.dumps(value)}; it must be a number from 0 to 4294967295, so "
            "that a run can be repeated."
        )
    return int(value)


def import_components(contents: Contents) -> None:
    """Import the classes that a recipe names, and silence warnings on which a user of turnrl cannot
    act."""
    names = set[str]()
    map_values(contents, lambda value, _: names.add(value) if isinstance(value, str) else None)
    import_classes(names)
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")  # Lightning on torch 2.13
    # the state of Lightning's own callback for checkpoints, which every trainer in Python has
    warnings.filterwarnings("ignore", r".*provided during.*: \[\"ModelCheckpoint\{[^\"]*\"\]")
    # remarks on which GPU there is, and on float32, in which few policies compute on a GPU
    remark = re.compile("litlogger|^.PU available: |has Tensor Cores")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: not remark.search(record.getMessage())
    )


def refuse_unknown_sections(contents: Contents, kinds: Collection[str]) -> None:
    """Refuse an unknown key at the top of a recipe. jsonargparse takes one that is empty.

    Args:
        contents: The recipe.
        kinds: The keys at the top that are not sections.
    Raises:
        RecipeError: Naming the key.
    """
    if not contents.keys() <= {*SECTIONS, *kinds}:
        from turnrl.recipe.explain import unknown_section_message

        raise RecipeError(unknown_section_message(contents, kinds, CLASSES))


def refusal_of(
    error: Exception, contents: Contents, kinds: Mapping[str, object]
) -> RecipeError | None:
    """The error in a user's words, if a recipe has caused it; else None."""
    if isinstance(error, TurnRLError) and not isinstance(error, ArgumentTypeError):
        return None
    from turnrl.recipe.explain import explain_refusal

    return explain_refusal(error, contents, kinds, CLASSES)


def instantiate(invocation: Invocation) -> Built:
    """Let LightningCLI make what a recipe describes; see `build`."""
    asked = [option.partition("=")[2] for option in invocation.help_options]
    import_components({**invocation.contents, "help": asked})
    # the user's own classes may lie here, or beside the recipe
    folders = (Path.cwd(), *(Path(file).parent for file in invocation.files))
    import_from(invocation.contents, *folders)
    contents, kinds = invocation.contents, invocation.kinds
    refuse_unknown_sections(contents, kinds)
    for key in ("model", "data", "trainer"):  # jsonargparse would accept it in spite of the link
        if "seed" in (section := contents[key]):
            raise RecipeError(f"{key}.seed is {section['seed']}; set seed_everything in its place.")
    defaults = {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "enable_model_summary": False}
    try:
        cli = _CLI(
            invocation,
            model_class=None if "class_path" in contents["model"] else MTGRPO,
            datamodule_class=None if "class_path" in contents["data"] else QuestionData,
            trainer_defaults=defaults,
            save_config_callback=_Recipe,
            save_config_kwargs={"save_to_log_dir": False},  # True would dump the recipe once more
            seed_everything_default=0,
            args=[f"--config={json.dumps(contents, default=str)}", *invocation.help_options],
        )
    except Exception as error:
        given = contents if invocation.files else {}  # else there is only a request for help
        if (refusal := refusal_of(error, given, kinds)) is None:
            raise
        raise refusal from error
    trainer = cli.trainer
    check_trainer(trainer)
    folder = invocation.location.folder and Path(str(trainer.log_dir))
    resumed = invocation.contents.get("ckpt_path") if invocation.command == "fit" else None
    claim_folder(trainer, folder, resumed)
    gpu_memory = cli.model.gpu_memory if isinstance(cli.model, MTGRPO) else None
    start = make_start(trainer, cli.model, cli.datamodule, folder, gpu_memory)
    if start.divided:
        check_division(cli.model.policy, cli.model.engine)
    return Built(
        module=cli.model,
        data=cli.datamodule,
        trainer=trainer,
        start=start,
        settings={key: cli.config_init[key] for key in invocation.settings},
        invocation=invocation,
    )
