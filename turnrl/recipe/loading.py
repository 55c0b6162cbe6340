"""Loads a policy to ask questions, from a run, a checkpoint or a recipe."""

from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from jsonargparse import ArgumentParser

from turnrl.plugin.errors import (
    ArgumentTypeError,
    CheckpointError,
    RecipeError,
    check_instance,
    describe_value,
    summarize_error,
)
from turnrl.recipe.agents import NamedAgent, find_agent
from turnrl.recipe.build import import_components, refusal_of, refuse_unknown_sections, seed_of
from turnrl.recipe.filling import fill_variables
from turnrl.recipe.invocation import read_invocation
from turnrl.recipe.merging import Contents, map_values, relocate
from turnrl.recipe.trust import TRUST, import_from, is_marked, require_consent
from turnrl.runs.config import load_yaml
from turnrl.training.checkpoints import load_exported, read_safely
from turnrl.training.module import MTGRPO
from turnrl.types.examination import Start


def load(
    path: str | Path,
    device: str = "cpu",
    checkpoint: str | Path | None = None,
    module: MTGRPO | None = None,
    trust: bool = False,
) -> MTGRPO:
    """Load a policy to `ask`: a recipe's module, with its weights. On a GPU it samples with the
    settings that a memory plan would choose for a run of its recipe.

    Args:
        path: A run (see `turnrl.runs.find_run`), a checkpoint, or a recipe, by its path or its
            name. The policy of a recipe is untrained.
        device: The device of the weights.
        checkpoint: `best` or `last` of the run; None for the best one, or else the last. If `path`
            is a recipe: the run or checkpoint that has its weights.
        module: Takes the weights, in place of the module that the recipe describes. Needed for a
            run made from Python, which has no recipe.
        trust: Run the code that a recipe names, whoever wrote it. A run or checkpoint that your own
            turnrl has written needs no trust, nor does one that names only installed plugins.
    Raises:
        CheckpointError: If there is no such run or checkpoint, if it belongs to another policy, or
            if it has no recipe and `module` is None.
        RecipeError: If there is no such recipe, or it does not describe an `MTGRPO`; or if a
            stranger wrote it, it names code of no installed plugin, and `trust` is False.
    """
    if not isinstance(path, str | PathLike):
        raise ArgumentTypeError(
            f"path is {describe_value(path)}. Give a run, a checkpoint or a recipe: "
            "turnrl.load('runs/NAME')."
        )
    if module is not None:
        check_instance(MTGRPO, "module", module)
    agent = find_agent(path, None if checkpoint is None else str(checkpoint))
    file = agent.weights()
    saved = None if file is None or file.is_dir() else _read_checkpoint(file)
    if module is not None and file is None:
        raise RecipeError(
            f"{str(path)!r} is a recipe, and has no trained weights for the module to take. "
            "Give a run, or a checkpoint."
        )
    questions = 0
    if module is None:
        recipe = _contents_of_recipe(agent, saved, trust)
        module, data = _build_module(recipe), recipe.get("data") or {}
        settings = data.get("init_args", data) or {}
        questions = settings.get("questions_per_iteration") or 0
    target = torch.device(device)
    memory = module.gpu_memory
    Start(target, module, learns=False, questions=questions, gpu_memory=memory).settle()
    module.policy.load(device)
    if saved is not None:
        module.on_load_checkpoint(saved)
        module.load_state_dict(saved["state_dict"])
    elif file is not None:
        load_exported(module.policy, file)
    module.collector.forget()
    return module.to(device)


def _read_checkpoint(file: Path) -> dict[str, Any]:
    """The contents of a checkpoint."""
    with read_safely(file):
        saved = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(saved, dict):
        raise CheckpointError(f"{str(file)!r} is no checkpoint. Give one of 'turnrl fit'.")
    return saved


def _contents_of_recipe(agent: NamedAgent, saved: Contents | None, trust: bool) -> Contents:
    """The recipe of an agent: its own, its checkpoint's or its run's.

    Raises:
        CheckpointError: If the agent has no recipe.
    """
    file = agent.checkpoint
    if file is not None and not agent.is_recipe:
        if saved is not None and "recipe" in saved:
            recipe = _saved_recipe(saved["recipe"], file)
            recipe = map_values(recipe, partial(relocate, file))
            if not is_marked(saved["recipe"]):
                require_consent(str(file), recipe, Path(), trust)
            # the user's own classes may lie here; they never lie beside a checkpoint
            import_from(recipe, Path.cwd())
            return cast(Contents, recipe)
        if not agent.recipe.is_file() or agent.recipe == file:
            raise agent.missing_recipe_error()
    trusts = [TRUST] if trust else []
    invocation = read_invocation("fit", ["--config", str(agent.recipe), *trusts])
    import_from(invocation.contents, Path.cwd(), agent.recipe.parent)
    return invocation.contents


def _saved_recipe(text: object, file: Path) -> Contents:
    """The recipe in a checkpoint, which anybody may have written."""
    try:
        recipe = load_yaml(str(text))
    except yaml.YAMLError as error:
        raise CheckpointError(
            f"the recipe in the checkpoint {str(file)!r} cannot be read: "
            f"{summarize_error(error)}. Give a "
            "recipe, and the checkpoint after it."
        ) from error
    if not isinstance(recipe, dict):
        raise CheckpointError(f"the recipe in the checkpoint {str(file)!r} is no mapping.")
    return recipe


def _build_module(recipe: Contents) -> MTGRPO:
    """The module that a recipe describes."""
    import_components(recipe)
    if not recipe.get("model"):
        refuse_unknown_sections(recipe, ())
    model = recipe.get("model", {})
    if "class_path" not in model:
        model = {"class_path": "turnrl.MTGRPO", "init_args": model}
    seed = seed_of(recipe.get("seed_everything", 0))
    model["init_args"] = {**model.get("init_args", {}), "seed": seed}
    described = {"model": model}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model", type=MTGRPO)
    try:
        made = parser.instantiate_classes(fill_variables(parser.parse_object(described))).model
    except Exception as error:
        if (refusal := refusal_of(error, described, {})) is None:
            raise
        raise refusal from error
    return cast(MTGRPO, made)
