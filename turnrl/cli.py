"""The command line: `turnrl fit | eval | plugins`, and whatever commands plugins add.

`fit` and `eval` are LightningCLI with a positional recipe. A mistake of the user's is one message
and an exit code, never a traceback; `TURNRL_DEBUG=1` shows the traceback all the same.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import signal
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import yaml

from turnrl.errors import CheckpointError, RecipeError, TurnRLError
from turnrl.plugins import installed, load_plugins

_TRAINING = ("fit", "eval")
_DEBUG = "TURNRL_DEBUG"
_COMPONENTS = {
    "model.rollout.segmenter": "turnrl_segmenters",
    "model.rollout.tools": "turnrl_tools",
    "model.rewards": "turnrl_rewards",
    "model.estimator": None,
}
"""Where a recipe names components, and the hook that brings them; None for the core's own."""


_SECTIONS = ("seed_everything", "model", "data", "trainer", "ckpt_path", "split")
"""The top of a recipe."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; `sys.argv` if None.
    Returns:
        The exit code: 0 if all went well, 130 after Ctrl-C, otherwise that of the error.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(arguments)
    except TurnRLError as error:
        return _report(error, error.exit_code)
    except KeyboardInterrupt:
        print("\nturnrl: stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # of Lightning, torch or the system: in their words
        return _report(error, 1)


def _report(error: BaseException, code: int) -> int:
    if os.environ.get(_DEBUG):
        raise error
    message = str(error).strip()
    if not isinstance(error, TurnRLError):
        message = " ".join(message.split())[:600] + f" ({_DEBUG}=1 shows where.)"
    if type(error).__name__ == "OutOfMemoryError":
        message += " Lower model.minibatch_size, model.rollout.slots or model.rollout.max_tokens."
    print(f"turnrl: {type(error).__name__}: {message}", file=sys.stderr)
    return code


def _dispatch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="turnrl",
        description=(
            "Train language-model agents that use tools over several turns, with credit given "
            "turn by turn."
        ),
        epilog="'turnrl fit --help' lists every setting of a recipe.",
    )
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    subparsers.add_parser(
        "fit", help="train a recipe: turnrl fit RECIPE.yaml [--key value ...]", add_help=False
    )
    subparsers.add_parser(
        "eval",
        help="score a split: turnrl eval RECIPE.yaml --ckpt_path FILE [--split NAME]",
        add_help=False,
    )
    listing = subparsers.add_parser("plugins", help="list installed plugins and what they bring")
    listing.set_defaults(run=_plugins)
    if arguments[:1] and arguments[0] in _TRAINING:
        return _train(arguments)
    for plugin in load_plugins():
        for add in plugin.commands:
            add(subparsers)
    if not arguments:
        parser.print_help()
        return 2
    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed) or 0)


def _version() -> str:
    import turnrl

    return f"turnrl {turnrl.__version__}"


def _plugins(_: argparse.Namespace) -> int:
    """Print each plugin with its distribution, version, hooks and components."""
    plugins = load_plugins()
    for plugin in plugins:
        print(f"{plugin.name}  ({plugin.distribution} {plugin.version})")
        for hook, classes in plugin.components.items():
            print(f"    {hook:18} {', '.join(cls.__name__ for cls in classes)}")
        subparsers = argparse.ArgumentParser().add_subparsers()
        for add in plugin.commands:
            add(subparsers)
        if subparsers.choices:
            print(f"    {'turnrl_commands':18} {', '.join(subparsers.choices)}")
    if not plugins:
        print("no plugins are installed, or TURNRL_LOAD_PLUGINS excludes them all")
    return 0


# ------------------------------------------------------------------ fit and eval


def _train(arguments: list[str]) -> int:
    command, rest = arguments[0], arguments[1:]
    load_plugins()
    if rest and not rest[0].startswith("-"):
        rest = ["--config", *rest]
    files = list(_given(rest, "--config", "-c"))
    asks = any(a in ("-h", "--help") or ".help" in a or "--print_config" in a for a in rest)
    if not files and not asks:
        raise RecipeError(
            f"'turnrl {command}' needs a recipe: turnrl {command} RECIPE.yaml [--key value ...]"
        )
    recipe: dict[str, Any] = {}
    for file in files:
        contents = read_recipe(file)
        check_components(contents)
        recipe |= contents
    check_components(_overrides(rest))
    for path in [recipe.get("ckpt_path"), *_given(rest, "--ckpt_path")]:
        if path not in (None, "null"):
            _check_checkpoint(str(path))
    run = Path(files[0]).stem if files else command
    # DDP starts its other processes from sys.argv, so this is where the arguments have to be
    argv, sys.argv = sys.argv, [sys.argv[0], command, *rest]
    try:
        return _run_lightning(recipe, run if command == "fit" else f"{run}-{command}")
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
        here = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
        near = difflib.get_close_matches(file.name, here, 3)
        hint = f" Did you mean {', '.join(str(folder / n) for n in near)}?" if near else ""
        found = f" (recipes there: {', '.join(here)})" if here and not near else ""
        raise RecipeError(f"no recipe at {path!r}{found}.{hint} Give the path of a YAML file.")
    try:
        contents = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"recipe {path!r} is not YAML{where}: {what}. Mend that line.") from error
    if not isinstance(contents, dict):
        raise RecipeError(
            f"recipe {path!r} holds {type(contents).__name__}, not a mapping with the keys model, "
            "data and trainer"
        )
    unknown = next((str(key) for key in contents if key not in _SECTIONS), None)
    if unknown is not None:  # jsonargparse would pass over an unknown section that is empty
        near = difflib.get_close_matches(unknown, _SECTIONS, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise RecipeError(
            f"unknown key {unknown!r} in recipe {path!r}.{hint} A recipe has the keys "
            f"{', '.join(_SECTIONS)}."
        )
    return contents


def _overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Components named on the command line, as the recipe that they amount to."""
    found: dict[str, Any] = {}
    for key in _COMPONENTS:
        for text in _given(arguments, f"--{key}", f"--{key}.class_path", f"--{key}+"):
            node = found
            *parents, leaf = key.split(".")
            for parent in parents:
                node = node.setdefault(parent, {})
            try:
                node[leaf] = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise RecipeError(
                    f"--{key} is {text!r}, which is not YAML. Close its brackets and quotes."
                ) from error
    return found


def _component_names(hook: str | None) -> dict[str, type]:
    if hook is not None:
        return installed(hook)
    from turnrl.credit import Merged, OutcomeOnly, TurnLevel

    return {cls.__name__: cls for cls in (TurnLevel, OutcomeOnly, Merged)}


def check_components(recipe: dict[str, Any]) -> None:
    """Refuse a component that is neither installed nor importable.

    Raises:
        RecipeError: Naming the key, the value, the nearest names and all there are.
    """
    for key, hook in _COMPONENTS.items():
        node: Any = recipe
        for part in key.split("."):
            if isinstance(node, dict) and isinstance(node.get("init_args"), dict):
                node = node["init_args"]
            node = node.get(part) if isinstance(node, dict) else None
        for entry in node if isinstance(node, list) else [node]:
            name = entry.get("class_path") if isinstance(entry, dict) else entry
            if not isinstance(name, str):
                continue
            if "." in name:
                _check_dotted(key, name)
                continue
            names = _component_names(hook)
            if name not in names:
                near = difflib.get_close_matches(name, names, 3, 0.5)
                hint = f" Did you mean {' or '.join(near)}?" if near else ""
                raise RecipeError(
                    f"{key} names {name!r}, which is not installed.{hint} Installed: "
                    f"{', '.join(sorted(names)) or 'none'}. Or give the full path of a class, "
                    "such as my_package.MyClass."
                )


def _check_dotted(key: str, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:
        raise RecipeError(
            f"{key} names {name!r}, but {module!r} cannot be imported: {error}"
        ) from error
    if found is None:
        raise RecipeError(f"{key} names {name!r}, but module {module!r} has no {attribute!r}")


def _check_checkpoint(path: str) -> None:
    if "://" in path:
        return
    if Path(path).is_file():
        if not zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path!r} is not a checkpoint: it is no archive that torch wrote. "
                "Give a last.ckpt of a run."
            )
        return
    folder = Path(path).parent
    here = sorted(str(p) for p in folder.glob("*.ckpt")) if folder.is_dir() else []
    found = f" (checkpoints there: {', '.join(here)})" if here else ""
    raise CheckpointError(
        f"no checkpoint at {path!r}{found}. "
        "A run keeps its own in runs/NAME/version_N/checkpoints/."
    )


def readable(message: str, keys: Sequence[str]) -> str:
    """jsonargparse's account of a bad value, in one or two lines.

    Args:
        message: What it says.
        keys: All settings there are, to offer the nearest.
    """
    if message.endswith(_NEXT_STEP):  # of a parser inside the parser
        message = message.removesuffix(_NEXT_STEP)
    context = re.search(r"[Pp]arser key \"([^\"]+)\"", message)
    unknown = None
    for pattern in _UNKNOWN:
        unknown = unknown or re.search(pattern, message)
    if unknown:
        name = unknown.group(1).lstrip("-").partition("=")[0]
        if context and not name.startswith(context.group(1)):
            name = f"{context.group(1)}...{name}"
        leaves = {k.rpartition(".")[2]: k for k in keys}
        near = difflib.get_close_matches(name, keys, 2, 0.8)
        near += [
            leaves[k] for k in difflib.get_close_matches(name.rpartition(".")[2], leaves, 2, 0.7)
        ]
        hint = f" Did you mean {' or '.join(dict.fromkeys(near[:2]))}?" if near else ""
        return f"unknown key {name!r}.{hint} 'turnrl fit --help' lists all keys."
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    told = [
        line
        for line in lines
        if re.search(r"[Ee]xpected|not a valid|[Ii]nvalid|required|missing", line)
    ]
    cause = (told or lines or [message])[-1]
    cause = re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.", r"\1", cause)
    where = f"{context.group(1)}: " if context and context.group(1) not in cause else ""
    return f"{where}{cause.rstrip('.')}{_NEXT_STEP}"


_NEXT_STEP = ". Mend it in the recipe or on the command line."
_UNKNOWN = (
    r"[Kk]ey [\"']([^\"']+)[\"'] is not expected",
    r"No action for key \"([^\"]+)\"",
    r"[Oo]ption '([^']+)' is not accepted",
    r"does not accept option '([^']+)'",
    r"[Uu]nrecognized arguments?: (\S+)",
)
"""How jsonargparse says that it does not know a key."""


def _run_lightning(recipe: dict[str, Any], name: str) -> int:
    """Build and run the LightningCLI. Imports torch, so it is the last thing to be reached."""
    import lightning as L
    from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

    from turnrl.callbacks import IterationLines, LastCheckpoint
    from turnrl.data import QuestionData
    from turnrl.module import MTGRPO

    class RecipeParser(LightningArgumentParser):
        """Reports a bad recipe as a `RecipeError`, and takes no key by its first letters."""

        keys: ClassVar[set[str]] = set()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.allow_abbrev = False

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise RecipeError(
                readable(str(ex or message), sorted(self.keys | set(_keys(self))))
            ) from ex

    class Trainer(L.Trainer):
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
                raise RecipeError(
                    f"'turnrl eval' scores MTGRPO on QuestionData, and this recipe has "
                    f"{type(model).__name__} and {type(datamodule).__name__}. Give another recipe."
                )
            datamodule.split = split
            results = self.validate(
                model,
                datamodule=datamodule,
                ckpt_path=ckpt_path,
                verbose=False,
                weights_only=True,
            )
            log_dir = self.log_dir  # a collective call: every process has to make it
            if not results or not results[0]:
                raise RecipeError(
                    "there was nothing to score. Set data.val, and leave out "
                    "trainer.limit_val_batches 0."
                )
            if self.is_global_zero:
                _print_scores(results[0])
                if log_dir:
                    print(f"written to {Path(log_dir) / 'metrics.csv'}")

    class TurnRLCLI(LightningCLI):
        """LightningCLI with the commands of turnrl."""

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            # one seed for the whole run
            if self.model_class is not None:
                parser.link_arguments("seed_everything", "model.seed", compute_fn=_seed)
            if self.datamodule_class is not None:
                parser.link_arguments("seed_everything", "data.seed", compute_fn=_seed)
            RecipeParser.keys |= set(_keys(parser))

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

        def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
            # a checkpoint is data from somewhere: no code in it is run
            extra = {"weights_only": True} if subcommand == "fit" else {}
            return {**super()._prepare_subcommand_kwargs(subcommand), **extra}

    def chosen(section: str, default: type) -> type | None:
        node = recipe.get(section)
        return None if isinstance(node, dict) and "class_path" in node else default

    _quieten()
    logger = {
        "class_path": "CSVLogger",
        "init_args": {"save_dir": "runs", "name": name, "flush_logs_every_n_steps": 1},
    }
    defaults: dict[str, Any] = {
        "logger": logger,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    try:
        TurnRLCLI(
            chosen("model", MTGRPO),
            chosen("data", QuestionData),
            trainer_class=Trainer,
            trainer_defaults=defaults,
            save_config_callback=SaveConfigCallback,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            parser_class=RecipeParser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )
    except SystemExit as stop:
        # Lightning turns Ctrl-C into exit code 1
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        return int(stop.code or 0) if not isinstance(stop.code, str) else 1
    return 0


def _seed(value: bool | int) -> int:
    if value is True:
        raise RecipeError(
            "seed_everything is true, which picks a seed at random. Give a number, to repeat the "
            "run."
        )
    return int(value)


def _quieten() -> None:
    """Silence what a user of turnrl can do nothing about."""
    import logging
    import warnings

    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")  # Lightning on torch 2.13
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "litlogger" not in record.getMessage()
    )


def _keys(parser: Any) -> Iterator[str]:
    for action in parser._actions:
        if action.dest and action.dest not in ("help", "config", "print_config"):
            yield action.dest


def _print_scores(results: Any) -> None:
    """Mean and 95 % interval of each metric, which is that of a share of the questions (normal)."""
    questions = next(int(value) for name, value in results.items() if name.endswith("/questions"))
    print(f"\n{questions} questions, greedy; mean and 95 % interval")
    for name, value in results.items():
        if not name.endswith("/questions"):
            half = 1.96 * (max(value * (1 - value), 0.0) / questions) ** 0.5
            print(f"    {name:24} {value:.4f}  ± {half:.4f}")


if __name__ == "__main__":
    sys.exit(main())
