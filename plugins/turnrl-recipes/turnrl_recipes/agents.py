"""An agent by a word: a run or a recipe, as `turnrl eval`, `turnrl play` and `turnrl.load` take it.

The name of a bundled recipe means the recipe, also if runs have that name: `runs/quickstart` means
the runs. Nothing here imports torch, so that a mistake is told at once.
"""

from __future__ import annotations

from pathlib import Path

from turnrl import CheckpointError, RecipeError
from turnrl_recipes.folders import checkpoint_at, checkpoint_of, run_at, run_like
from turnrl_recipes.given import bundled_recipes, find_recipe, read_recipe


def names_recipe(word: str) -> bool:
    """True if a word can only be a recipe: a file of YAML, or the name of a bundled one."""
    return word.endswith((".yaml", ".yml")) or word in bundled_recipes()


def agent_run(word: str) -> Path | None:
    """The folder of the run that a word means; None if it means a recipe, or nothing."""
    other_file = Path(word).is_file() and not word.endswith(".ckpt")
    return None if other_file or names_recipe(word) else run_at(word)


def find_agent(word: str | Path, name: str | None = None) -> str:
    """The file that an agent is loaded from: a checkpoint, or a recipe for its policy before any
    training.

    Args:
        word: A run (see `turnrl.find_run`), a checkpoint, or a recipe by its path or its name.
        name: Checkpoint of the run, `best` or `last`; None for the best one, or else the last.
    Raises:
        CheckpointError: If there is no such run or checkpoint.
        RecipeError: If there is no such recipe, or a checkpoint of a recipe is asked for.
    """
    text = str(word)
    if names_recipe(text):
        if name is not None:
            what = f"{text!r} is a recipe, and has no {name}.ckpt"
            raise RecipeError(f"{what}. Give a run: {_run_of_name(text) or 'runs/NAME'}.")
        file = find_recipe(text)
        read_recipe(file)
        return file
    if Path(text).is_file() or agent_run(text) is not None:
        return checkpoint_of(text, name)
    if "://" in text or Path(text).exists():
        return checkpoint_at(text)
    near = run_like(text, bundled_recipes())
    step = "Give the folder of a run, the name of its runs, or a recipe."
    raise CheckpointError(f"no run and no checkpoint at {text!r}.{near} {step}")


def about_agent(word: str, file: str) -> str:
    """A phrase about what is loaded: the checkpoint, or the recipe whose policy is untrained.

    Args:
        word: As it was given.
        file: What `find_agent` made of it.
    """
    if not names_recipe(file):
        return f"checkpoint {file}"
    runs = _run_of_name(word)
    trained = f"; for its newest run give {runs}" if runs else ""
    return f"the policy of {file} before any training{trained}"


def _run_of_name(word: str) -> str | None:
    """The path that means the runs of a recipe's name; None if there are none."""
    home = Path("runs", word)
    return str(home) if not word.endswith((".yaml", ".yml")) and run_at(home) else None
