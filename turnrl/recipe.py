"""Recipes: from a YAML file and options to a module, data and a trainer, by LightningCLI.

jsonargparse reads, checks and builds; what is here chooses classes, puts its complaints in a user's
words, and says what a resumed run changed.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from transformers.utils import logging as transformers_logging

from turnrl.callbacks import IterationLines, LastCheckpoint
from turnrl.data import QuestionData
from turnrl.errors import CheckpointError, RecipeError, TurnRLError, did_you_mean
from turnrl.module import MTGRPO
from turnrl.plugins import installed
from turnrl.scoring import CURVES, interval

_SECTIONS = ("seed_everything", "model", "data", "trainer", "ckpt_path", "split")
"""The top of a recipe."""
_HOOKS = {
    "segmenter": "turnrl_segmenters",
    "tools": "turnrl_tools",
    "rewards": "turnrl_rewards",
    "estimator": "turnrl_estimators",
    "engine": "turnrl_engines",
}
"""Where a recipe names components, and the hook that brings them."""


def train(command: str, arguments: Sequence[str]) -> int:
    """Run `fit` or `eval`.

    Args:
        command: Which.
        arguments: What follows it: a recipe, then options.
    Returns:
        The exit code.
    Raises:
        RecipeError: If there is no recipe, or something is wrong with it.
    """
    rest = list(arguments)
    for hook in _HOOKS.values():
        installed(hook)  # a short name is known once its class is imported
    if rest and not rest[0].startswith("-"):
        rest = ["--config", *rest]
    files = list(_given(rest, "--config", "-c"))
    asks = any(a in ("-h", "--help") or ".help" in a or "--print_config" in a for a in rest)
    if not files and not asks:
        usage = f"turnrl {command} RECIPE.yaml [--key value ...]"
        raise RecipeError(f"'turnrl {command}' needs a recipe: {usage}")
    recipe: dict[str, Any] = {k: v for file in files for k, v in read_recipe(file).items()}
    run = Path(files[0]).stem if files else command
    # DDP starts its other processes from sys.argv, so this is where the arguments have to be
    argv, sys.argv = sys.argv, [sys.argv[0], command, *rest]
    try:
        return _run(recipe, run if command == "fit" else f"{run}-{command}")
    finally:
        sys.argv = argv


def _given(arguments: Sequence[str], *options: str) -> Iterator[str]:
    """The values given for an option, as `--option value` or `--option=value`."""
    for i, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option in options and (equals or i + 1 < len(arguments)):
            yield value if equals else arguments[i + 1]


def read_recipe(path: str) -> dict[str, Any]:
    """A recipe's contents.

    Raises:
        RecipeError: If there is no such file, or it is not a YAML mapping.
    """
    file = Path(path)
    if not file.is_file():
        folder = file.parent
        here = sorted(str(p) for p in folder.glob("*.y*ml")) if folder.is_dir() else []
        hint = did_you_mean(str(file), here) or f" Recipes there: {', '.join(here) or 'none'}."
        raise RecipeError(f"no recipe at {path!r}.{hint} Give the path of a YAML file.")
    try:
        contents = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"recipe {path!r} is not YAML{where}: {what}. Mend that line.") from error
    has = f"A recipe has the keys {', '.join(_SECTIONS)}."
    if not isinstance(contents, dict):
        raise RecipeError(f"recipe {path!r} holds {type(contents).__name__}, not a mapping. {has}")
    for key in contents:  # jsonargparse would pass over an unknown section that is empty
        if key not in _SECTIONS:
            hint = did_you_mean(str(key), _SECTIONS)
            raise RecipeError(f"unknown key {str(key)!r} in recipe {path!r}.{hint} {has}")
    return contents


def _check_checkpoint(path: str) -> None:
    if "://" in path or zipfile.is_zipfile(path):
        return
    if Path(path).is_file():
        raise CheckpointError(f"{path!r} is not a checkpoint. Give a last.ckpt of a run.")
    raise CheckpointError(f"no checkpoint at {path!r}. Runs keep theirs in their checkpoints/.")


_NEXT_STEP = ". Mend it in the recipe or on the command line."
_UNKNOWN = (
    r"[Kk]ey [\"']([^\"']+)[\"'] is not expected",
    r"No action for key \"([^\"]+)\"",
    r"[Oo]ption '([^']+)' is not accepted",
    r"does not accept option '([^']+)'",
    r"[Uu]nrecognized arguments?: (\S+)",
)
"""How jsonargparse says that it does not know a key."""
_NOISE = (
    r"Does not validate|Subtypes:|Errors:|Given value|Expected a (path|<class 'NoneType'>)|"
    r"[Pp]arser key|Problem with given class_path"
)
"""What it says beside the point."""


def readable(message: str, keys: Sequence[str]) -> str:
    """jsonargparse's account of a mistake, in one or two lines.

    Args:
        message: What it says.
        keys: All settings there are, to offer the nearest.
    """
    message = message.replace(_NEXT_STEP, "")  # of parsers inside the parser
    context = re.search(r"[Pp]arser key \"([^\"]+)\"", message)
    key = context.group(1) if context else "the recipe"
    if found := re.search(r"Expected a dot import path string: (\S+)", message):
        names = sorted(installed(hook)) if (hook := _HOOKS.get(key.split(".")[-1])) else []
        return (
            f"{key} names {found.group(1)!r}, which is not installed."
            f"{did_you_mean(found.group(1), names, 0.5)} Installed: {', '.join(names) or 'none'}. "
            "Or give the full path of a class, such as my_package.MyClass."
        )
    if found := re.search(r"Problem with given class_path '([^']+)':\s+(.+)", message):
        return f"{key} names {found.group(1)!r}, but {found.group(2)}{_NEXT_STEP}"
    unknown = next((m for pattern in _UNKNOWN if (m := re.search(pattern, message))), None)
    if unknown:
        name = unknown.group(1).lstrip("-").partition("=")[0]
        hint = did_you_mean(name, keys, 0.8)
        hint = hint or did_you_mean(name.split(".")[-1], [k.split(".")[-1] for k in keys], 0.7)
        where = "" if not context or name.startswith(key) else f"{key}: "
        return f"{where}unknown key {name!r}.{hint} 'turnrl fit --help' lists all keys."
    lines = [line.strip(" -") for line in message.splitlines()]
    told = [line for line in lines if line and not re.match(_NOISE, line)] or [message]
    cause = re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.", r"\1", told[-1])
    where = f"{key}: " if context and key not in cause else ""
    return f"{where}{cause.rstrip('.')}{_NEXT_STEP}"


class _Parser(LightningArgumentParser):
    """Reports a bad recipe as a `RecipeError`, and takes no key by its first letters."""

    keys: ClassVar[set[str]] = set()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allow_abbrev = False

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise RecipeError(readable(str(ex or message), sorted({*self.keys, *_keys(self)}))) from ex


def _keys(parser: Any) -> Iterator[str]:
    for action in parser._actions:
        if action.dest and action.dest not in ("help", "config", "print_config"):
            yield action.dest


class _Recipe(SaveConfigCallback):
    """Saves the recipe with the run and in its checkpoints; says what a resumed run changed."""

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

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit" or "recipe" not in checkpoint:  # made from Python, say
            return
        saved, now = (dict(_flat(yaml.safe_load(t))) for t in (checkpoint["recipe"], self._text))
        changed = [
            f"{key} {saved.get(key)} -> {now.get(key)}"
            for key in sorted(saved | now)
            if saved.get(key) != now.get(key)
            and key.startswith(("seed_everything", "model", "data", "trainer"))
            and not key.startswith("trainer.logger")
        ]
        if changed and trainer.is_global_zero:
            print(f"turnrl: goes on with other settings: {', '.join(changed)}", file=sys.stderr)


def _flat(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, json.dumps(node)


class _Trainer(L.Trainer):
    """Lightning's trainer, which can also score a split."""

    def eval(
        self,
        model: Any = None,
        datamodule: Any = None,
        ckpt_path: str | None = None,
        split: Literal["train", "val", "test"] = "val",
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
        rows, log_dir = _gathered(model.evaluated), self.log_dir  # collective calls
        if not rows:
            raise RecipeError("nothing to score. Set data.val; leave out limit_val_batches 0.")
        if self.is_global_zero:
            print(f"\n{len(rows)} questions, greedy; mean and 95 % interval")
            for name in CURVES:
                values = [row[name] for row in rows]
                mean, (low, high) = sum(values) / len(values), interval(values)
                print(f"    {f'{split}/{name}':24} {mean:.4f}  [{low:.4f}, {high:.4f}]")
            if log_dir:
                print(f"written to {Path(log_dir) / 'metrics.csv'}; every trajectory in record/")


def _gathered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all processes."""
    if not torch.distributed.is_initialized():
        return rows
    parts: list[list[dict[str, Any]]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(parts, rows)
    return [row for part in parts for row in part]


class _CLI(LightningCLI):
    """LightningCLI with the commands of turnrl."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # one seed for the whole run
        if self.model_class is not None:
            parser.link_arguments("seed_everything", "model.seed", compute_fn=_seed)
        if self.datamodule_class is not None:
            parser.link_arguments("seed_everything", "data.seed", compute_fn=_seed)
        _Parser.keys |= set(_keys(parser))

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        skipped = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {"fit": skipped | {"weights_only"}, "eval": {"model", "datamodule"}}

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        config = self._get(self.config_init, "trainer")
        given = config.get("callbacks") or []
        callbacks = list(given) if isinstance(given, list) else [given]
        if config.get("enable_checkpointing") is not False:
            callbacks.append(LastCheckpoint())
        shown = config.get("enable_progress_bar") is not False
        if shown and not any(isinstance(c, ProgressBar) for c in callbacks):
            # a line stays for every iteration; rich would wrap the metrics in a narrow terminal
            terminal = sys.stdout.isatty() and sys.stderr.isatty()
            callbacks.append(TQDMProgressBar(leave=True) if terminal else IterationLines())
        return super().instantiate_trainer(**kwargs, callbacks=callbacks)

    def _parse_ckpt_path(self) -> None:
        """The recipe says what to build; a checkpoint gives its weights alone."""

    def before_instantiate_classes(self) -> None:
        path = self._get(self.config, "ckpt_path")
        if path is not None:
            _check_checkpoint(str(path))

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        # a checkpoint is data from somewhere: no code in it is run
        extra = {"weights_only": True} if subcommand == "fit" else {}
        return {**super()._prepare_subcommand_kwargs(subcommand), **extra}


def _seed(value: bool | int) -> int:
    if value is True:
        raise RecipeError("seed_everything is true, which picks a seed at random. Give a number.")
    return int(value)


def _quieten() -> None:
    """Silence what a user of turnrl can do nothing about."""
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")  # Lightning on torch 2.13
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "litlogger" not in record.getMessage()
    )


def _run(recipe: dict[str, Any], name: str) -> int:
    """Build and run the LightningCLI."""

    def chosen(section: str, default: type) -> type | None:
        return None if "class_path" in (recipe.get(section) or {}) else default

    _quieten()
    logger = {
        "class_path": "CSVLogger",
        "init_args": {"save_dir": "runs", "name": name, "flush_logs_every_n_steps": 1},
    }
    try:
        _CLI(
            chosen("model", MTGRPO),
            chosen("data", QuestionData),
            trainer_class=_Trainer,
            trainer_defaults={"logger": logger, "log_every_n_steps": 1, "num_sanity_val_steps": 0},
            save_config_callback=_Recipe,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            parser_class=_Parser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )
    except ValueError as error:  # of a component's constructor, wrapped by jsonargparse
        if isinstance(error, TurnRLError) or "Union subtypes" not in str(error):
            raise
        raise RecipeError(readable(str(error), [])) from error
    except SystemExit as stop:
        # Lightning turns Ctrl-C into exit code 1
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        return int(stop.code or 0) if not isinstance(stop.code, str) else 1
    return 0
