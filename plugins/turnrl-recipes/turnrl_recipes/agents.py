"""An agent by a word: a run, a checkpoint or a recipe, as `turnrl eval`, `turnrl play` and
`turnrl.load` take it.

The name of a bundled recipe means the recipe, also if runs have that name: `runs/quickstart` means
the runs. Nothing here imports torch, so that a mistake is told at once.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from turnrl import CheckpointError, RecipeError
from turnrl_recipes.bundled import bundled_recipes, find_recipe
from turnrl_recipes.folders import (
    EXPORTED,
    LATEST,
    RUNS,
    checkpoint_to_ask,
    checkpoint_to_resume,
    checkpoints_in,
    run_at,
    run_in,
    run_like,
)

_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class Agent:
    """The recipe, the run and the checkpoint that a word means.

    Args:
        word: As it was given.
        recipe: A file of YAML. Of a run it is its `config.yaml`, which a run made from Python
            lacks. Of a checkpoint in no run it is the checkpoint itself, which holds its recipe.
        run: The folder of the run; None for a recipe, and for a checkpoint in no run.
        checkpoint: The weights. None for a recipe, whose policy is untrained, and for a run that
            has none yet.
    """

    word: str
    recipe: Path
    run: Path | None = None
    checkpoint: Path | None = None

    def weights(self, name: str | None = None) -> Path | None:
        """The checkpoint to load; None for a recipe.

        Args:
            name: Take this one of the run, `best` or `last`; None for `checkpoint`.
        Raises:
            CheckpointError: If the run has no such checkpoint, or it cannot be one.
            RecipeError: If a checkpoint of a recipe is asked for.
        """
        file = self.checkpoint if name is None else self._named(name)
        if file is not None:
            return Path(checkpoint_to_resume(str(file)))
        if self.run is None:
            return None
        step = "Wait for its first iteration."
        if self.recipe.is_file():
            step = f"{step[:-1]}, or give its recipe, which is untrained: {self.recipe}"
        names = (name,) if name else _choices(self.word, self.run)
        lacks = " and no ".join(f"{one}.ckpt" for one in names)
        what = f"the run {str(self.run)!r} has no {lacks} in checkpoints/"
        raise CheckpointError(f"{what}. {step}")

    def _named(self, name: str) -> Path | None:
        if self.run is None and self.checkpoint is None:
            what = f"{self.word!r} is a recipe, and has no {name}.ckpt"
            raise RecipeError(f"{what}. Give a run: {_runs_of_name(self.word) or RUNS / 'NAME'}.")
        if self.run is None or self.checkpoint == Path(self.word):
            raise CheckpointError(f"{self.word!r} is one checkpoint already. Leave {name!r} out.")
        return checkpoint_to_ask(self.run, (name,))

    def __str__(self) -> str:
        """A phrase: the checkpoint, or the recipe whose policy is untrained."""
        if self.checkpoint is not None:
            return f"checkpoint {self.checkpoint}"
        runs = _runs_of_name(self.word)
        trained = f"; for its newest run give {runs}" if runs else ""
        return f"the policy of {self.recipe} before any training{trained}"


def find_agent(word: str | Path, name: str | None = None) -> Agent:
    """The agent that a word means. It is the same one for every command.

    A file of YAML and the name of a bundled recipe are a recipe. A checkpoint is itself. Whatever
    else means a run (see `turnrl.find_run`) means its best checkpoint, or else its last, and
    `model` or `adapter` of a run its last one, from which it was exported. Any other file is read
    as a recipe.

    Args:
        word: A run, a checkpoint, or a recipe by its path or its name.
        name: Checkpoint of the run, `best` or `last`; None for the rule above.
    Raises:
        CheckpointError: If the word means nothing, or the run has no checkpoint of that name.
        RecipeError: If a checkpoint of a recipe is asked for.
    """
    agent = _agent_at(str(word))
    return agent if name is None else replace(agent, checkpoint=agent.weights(name))


def _agent_at(word: str) -> Agent:
    place = Path(word)
    if word.endswith(_YAML) or word in bundled_recipes():
        return Agent(word, Path(find_recipe(word)))
    is_file = place.is_file()
    run = run_in(place) if is_file else run_at(word)
    kept = place if is_file else place / "last.ckpt"
    if kept.is_file() and (run is None or is_file) and _is_checkpoint(kept):
        return Agent(word, run / "config.yaml" if run else kept, run, kept)
    if run is not None:
        return Agent(word, run / "config.yaml", run, checkpoint_to_ask(run, _choices(word, run)))
    if place.is_dir():
        raise CheckpointError(_no_run(place))
    if place.exists():
        return Agent(word, place)
    near = run_like(word, bundled_recipes())
    step = "Give the folder of a run, the name of its runs, or a recipe."
    raise CheckpointError(f"no run, no recipe and no checkpoint at {word!r}.{near} {step}")


def _is_checkpoint(file: Path) -> bool:
    return file.suffix == ".ckpt" or zipfile.is_zipfile(file)


def _choices(word: str, run: Path) -> tuple[str, ...]:
    """Names of the checkpoints that a word for a run means, in the order in which one is taken."""
    place = Path(word)
    folder = place.parent if place.is_file() else place
    return ("last",) if folder.name in EXPORTED and folder.parent == run else LATEST


def _no_run(folder: Path) -> str:
    """The message that a folder is no run, with the next step."""
    step = checkpoints_in(folder)
    if (folder / "config.json").is_file():
        step = f"It holds a model: 'turnrl eval RECIPE --model.policy.model {folder}' scores it."
    if (folder / "adapter_config.json").is_file():
        step = "It holds an adapter. Give the run that trained it, or merge it into its base."
    here = repr(str(folder))
    what = f"no run and no checkpoints/last.ckpt in {here}: the folder {here} has no config.yaml"
    return f"{what}. {step}"


def _runs_of_name(word: str) -> str | None:
    """The path that means the runs of a recipe's name; None if there are none."""
    home = RUNS / word
    return str(home) if not word.endswith(_YAML) and run_at(home) else None
