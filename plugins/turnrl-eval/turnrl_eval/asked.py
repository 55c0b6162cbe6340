"""The words after `turnrl eval`, with a run in a recipe's place, as a command with a recipe takes
them. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from turnrl_recipes.agents import agent_run, names_recipe
from turnrl_recipes.folders import LATEST, checkpoint_of, find_run, run_like
from turnrl_recipes.given import read_given

from turnrl import RecipeError, bundled_recipes


def read_words(words: Sequence[str]) -> list[str]:
    """The words with a run replaced by its recipe and its checkpoint, several questions by a list,
    and `--json` by its value.

    Args:
        words: As they follow the command.
    Raises:
        RecipeError: If a word means neither a run nor a recipe, or a run has no recipe.
        CheckpointError: If a run has no checkpoint.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--questions", nargs="+")
    parser.add_argument("--ckpt_path", nargs="?")
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(words)
    checkpoint, moved = own.ckpt_path, []
    if rest and (run := _run(rest[0])) is not None:
        word, rest[0] = rest[0], str(run / "config.yaml")
        if _asks_server(rest):
            # one that the run went on from, say, which nobody asked for
            checkpoint = checkpoint or "null"
        elif checkpoint in (None, *LATEST):
            checkpoint = checkpoint_of(word, checkpoint)
        if not _names(rest, "--trainer.logger"):  # which is that of training
            name = run.parent.name if run.name.startswith("version_") else run.name
            settings = {"save_dir": "runs", "name": f"{name}-eval"}
            logger = [{"class_path": "CSVLogger", "init_args": settings}]
            moved = [f"--trainer.logger={json.dumps(logger)}"]
    rest += moved
    rest += [f"--ckpt_path={checkpoint}"] if checkpoint else []
    rest += [f"--questions={_several(own.questions)}"] if own.questions else []
    return [*rest, "--json=true"] if own.json else rest


def _names(words: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0].startswith(option) for word in words)


def _asks_server(words: Sequence[str]) -> bool:
    """True if recipes and options together name an `endpoint`."""
    # standard input can be read once, and a checkpoint that the run went on from may be gone
    readable = [word for word in words if word != "-"]
    given = read_given("eval", [*readable, "--ckpt_path=null"])
    return bool(given.contents.get("endpoint"))


def _several(sources: Sequence[str]) -> str:
    """Sources as one value; a list or a mapping in YAML stays as it is."""
    first, *others = sources
    return first if not others and first.startswith(("[", "{")) else json.dumps(sources)


def _run(word: str) -> Path | None:
    """The folder of the run that a word means; None if it means a recipe.

    Raises:
        RecipeError: If it means neither, or the run has no recipe.
    """
    if word.startswith("-") or names_recipe(word):
        return None
    if agent_run(word) is not None:
        return find_run(word, "recipe")
    folder = Path(word)
    if folder.suffix == ".ckpt" and folder.is_file():
        step = f"Give a recipe for it: 'turnrl eval RECIPE --ckpt_path {word}'."
        raise RecipeError(f"the checkpoint {word!r} is in no run. {step}")
    if folder.is_dir():
        step = "Give the folder of a run, such as runs/quickstart/version_0."
        if (folder / "config.json").is_file():
            step = f"It holds a model: 'turnrl eval RECIPE --model.policy.model {word}' scores it."
        if (folder / "adapter_config.json").is_file():
            step = "It holds an adapter. Give the run that trained it, or merge it into its base."
        raise RecipeError(f"the folder {word!r} has no config.yaml, so it is no run. {step}")
    if not folder.exists() and "://" not in word:
        near = run_like(word, bundled_recipes())
        step = "Give the folder of a run, the name of its runs, or a recipe."
        raise RecipeError(f"no run and no recipe at {word!r}.{near} {step}")
    return None
