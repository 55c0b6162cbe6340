"""A run in a recipe's place after `turnrl eval`, and the checkpoint of it that is scored. Nothing
heavy is imported here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from turnrl_recipes.agents import agent_run, names_recipe
from turnrl_recipes.folders import LATEST, checkpoint_of, find_run, run_like
from turnrl_recipes.given import Given

from turnrl import RecipeError, bundled_recipes


def prepare(given: Given) -> Given:
    """Say which checkpoint of a run is scored, where nothing that was given says it: its best, or
    else its last. A server that acts in place of its policy needs none.

    Args:
        given: Recipes and options, put together.
    Raises:
        CheckpointError: If the run has no checkpoint.
    """
    if given.run is None:
        return given
    checkpoint = given.contents.get("ckpt_path", "")
    if checkpoint == "" and given.contents.get("endpoint"):
        checkpoint = None
    elif checkpoint in ("", *LATEST):
        checkpoint = checkpoint_of(given.word, checkpoint or None)
    return replace(given, contents={**given.contents, "ckpt_path": checkpoint})


def run_of(word: str) -> Path | None:
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
