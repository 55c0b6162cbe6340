"""Finds the agent that a word means: a run, a checkpoint or a recipe, as `turnrl eval`,
`turnrl play` and `turnrl.load` take it.

The name of a bundled recipe means the recipe, even if runs have that name: `runs/quickstart` means
the runs. Nothing here imports torch, so a mistake shows at once.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from turnrl.plugin.errors import CheckpointError, RecipeError, suggest_name
from turnrl.recipe.bundled import bundled_recipes, find_recipe
from turnrl.runs.checkpoints import (
    LATEST,
    checkpoint_to_resume,
    find_checkpoint,
    find_exported,
    find_named_checkpoint,
    runs_with_checkpoints,
)
from turnrl.runs.find import RUNS, find_run_in, resolve_run, suggest_run

_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class NamedAgent:
    """The recipe, the run and the checkpoint that a word means.

    Args:
        word: The word as the user wrote it.
        kind: The kind of thing that it means. A `checkpoint` may lie inside a run or outside.
        recipe: A YAML file. For a run its `config.yaml`, which a run made from Python lacks. For a
            checkpoint outside any run the checkpoint itself, which holds its recipe.
        run: The folder of the run; None for a recipe, and for a checkpoint outside any run.
        checkpoint: The weights: a file, or the folder of an exported policy. None for a run that
            has none yet, and for a recipe without a checkpoint: its policy is untrained.
    """

    word: str
    kind: Literal["recipe", "run", "checkpoint"]
    recipe: Path
    run: Path | None = None
    checkpoint: Path | None = None

    @property
    def is_recipe(self) -> bool:
        """True if the word means a recipe, not a run or a checkpoint."""
        return self.kind == "recipe"

    def weights(self, name: str | None = None) -> Path | None:
        """The checkpoint to load, or the folder of an exported policy; None for a recipe.

        Args:
            name: `best` or `last`, for that checkpoint of the run; None for `checkpoint`.
        Raises:
            CheckpointError: If the run has no such checkpoint, or the file is not a checkpoint.
            RecipeError: If `name` is given for a recipe.
        """
        file = self.checkpoint if name is None else self._find_named(name)
        if file is not None:
            return file if file.is_dir() else Path(checkpoint_to_resume(str(file)))
        if self.run is None:
            return None
        lacks = f"{name}.ckpt in checkpoints/" if name else "checkpoint, no model/ and no adapter/"
        step = "Wait for its first iteration. If it has ended, it kept no policy."
        if name and (other := find_checkpoint(self.run)):
            step = f"It has {other}."
        elif self.recipe.is_file():
            step = (
                "Wait for its first iteration, or give its recipe, for the policy before training: "
                f"{self.recipe}"
            )
        raise CheckpointError(f"the run {str(self.run)!r} has no {lacks}. {step}")

    def missing_recipe_error(self) -> CheckpointError:
        """The error for a checkpoint, or an exported policy, without a recipe."""
        kept = str(self.checkpoint)
        return CheckpointError(
            f"{kept!r} has no recipe: it was made from Python, and nothing here says how its "
            f"agent acts. Give a recipe: 'turnrl play RECIPE --checkpoint {kept}'. Or make its "
            f"module in Python: turnrl.load({kept!r}, module=module).ask('a question')."
        )

    def _find_named(self, name: str) -> Path | None:
        if self.is_recipe:
            runs = _runs_of_name(self.word) or RUNS / "NAME"
            raise RecipeError(
                f"{self.word!r} is a recipe, and has no {name}.ckpt. Give a run: {runs}."
            )
        if self.run is None or self.kind == "checkpoint":
            raise CheckpointError(f"{self.word!r} is one checkpoint already. Leave {name!r} out.")
        if name not in LATEST:
            near = suggest_name(name, LATEST) or " Give best or last."
            raise CheckpointError(f"no checkpoint {name!r} of the run {str(self.run)!r}.{near}")
        return find_named_checkpoint(self.run, (name,))

    def __str__(self) -> str:
        """A phrase for the policy: the checkpoint, or the recipe if the policy is untrained."""
        if self.checkpoint is not None:
            acts = f", rolled out with {self.recipe}" if self.is_recipe else ""
            kind = "the policy in" if self.checkpoint.is_dir() else "checkpoint"
            return f"{kind} {self.checkpoint}{acts}"
        runs = _runs_of_name(self.word)
        trained = f"; for its newest run give {runs}" if runs else ""
        return f"the policy of {self.recipe} before any training{trained}"


def find_agent(word: str | Path, name: str | None = None) -> NamedAgent:
    """Find the agent that a word means, the same for every command.

    A YAML file or the name of a bundled recipe means the recipe. A checkpoint means itself. A word
    for a run (see `turnrl.runs.find_run`) means its best checkpoint, or else its last, or else its
    newest, or else its exported policy. The folder `model` or `adapter` of a run means the same
    checkpoint, from which it was exported, or else itself. Any other file is read as a recipe.

    Args:
        word: A run, a checkpoint, or a recipe by its path or its name.
        name: `best` or `last`, for that checkpoint of the run; None for the rule above. If `word`
            is a recipe: the run, checkpoint or folder of an exported policy that has its weights.
    Raises:
        CheckpointError: If a word means nothing, or the run has no checkpoint of that name.
        RecipeError: If `word` is a recipe, and `name` is `best`, `last` or another recipe.
    """
    agent = _agent_at(str(word))
    if name is None:
        return agent
    if not agent.is_recipe or name in LATEST:
        return replace(agent, checkpoint=agent.weights(name))
    if find_run_in(Path(name)) is None and (exported := find_exported(Path(name))) is not None:
        return replace(agent, checkpoint=exported)
    other = _agent_at(name)
    if other.is_recipe:
        raise RecipeError(
            f"{name!r} is a recipe, and has no trained weights. Give a run, or a checkpoint."
        )
    return replace(agent, checkpoint=other.weights())


def _agent_at(word: str) -> NamedAgent:
    path = Path(word)
    if word.endswith(_YAML) or word in bundled_recipes():
        return NamedAgent(word, "recipe", Path(find_recipe(word)))
    run = find_run_in(path) if path.is_file() else resolve_run(word)
    if path.is_file() and _is_checkpoint(path):
        return NamedAgent(word, "checkpoint", run / "config.yaml" if run else path, run, path)
    if run is not None:
        return NamedAgent(
            word, "run", run / "config.yaml", run, find_checkpoint(run) or find_exported(run)
        )
    if path.is_dir():
        if (kept := find_checkpoint(path, ("last",))) is not None:
            return NamedAgent(word, "checkpoint", kept, None, kept)
        raise CheckpointError(_not_a_run_message(path))
    if path.exists():
        return NamedAgent(word, "recipe", path)
    raise CheckpointError(
        f"no run, no recipe and no checkpoint at {word!r}.{suggest_run(word, bundled_recipes())} "
        "Give the folder of a run, the name of its runs, or a recipe."
    )


def _is_checkpoint(file: Path) -> bool:
    return file.suffix == ".ckpt" or zipfile.is_zipfile(file)


def _not_a_run_message(folder: Path) -> str:
    """The message for a folder that is not a run, with the next step."""
    here = repr(str(folder))
    return (
        f"no run and no checkpoint in {here}: the folder {here} has no config.yaml. "
        f"{runs_with_checkpoints(folder)} If it holds a model, 'turnrl eval RECIPE "
        f"--model.policy.model {folder}' scores it."
    )


def _runs_of_name(word: str) -> str | None:
    """The path of the runs named after a recipe; None if there are none."""
    home = RUNS / word
    return str(home) if not word.endswith(_YAML) and resolve_run(home) else None
