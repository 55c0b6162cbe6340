"""Loads a policy to ask questions, from a run, a checkpoint or a recipe."""

from functools import partial
from os import PathLike
from pathlib import Path
from typing import cast

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser

from turnrl.checkpoints import take_exported
from turnrl.checks import Plan
from turnrl.errors import ArgumentTypeError, RecipeError, instance_of, kind_of
from turnrl.module import MTGRPO
from turnrl.recipe.agents import NamedAgent, find_agent
from turnrl.recipe.build import explained, faults, import_components, import_from, seed_of
from turnrl.recipe.invocation import read_invocation
from turnrl.recipe.merging import Contents, each_value, relocated
from turnrl.recipe.moved import up_to_date
from turnrl.types.examination import Start


def load(
    path: str | Path,
    device: str = "cpu",
    checkpoint: str | Path | None = None,
    module: MTGRPO | None = None,
) -> MTGRPO:
    """Load a policy to `ask`: a recipe's module, with its weights. On a GPU it samples with the
    settings that a memory plan would choose for a run of its recipe.

    Args:
        path: A run (see `turnrl.find_run`), a checkpoint, or a recipe, by its path or its name. The
            policy of a recipe is untrained.
        device: The device of the weights.
        checkpoint: `best` or `last` of the run; None for the best one, or else the last. If `path`
            is a recipe: the run or checkpoint that has its weights.
        module: Takes the weights, in place of the module that the recipe describes. Needed for a
            run made from Python, which has no recipe.
    Raises:
        CheckpointError: If there is no such run or checkpoint, if it belongs to another policy, or
            if it has no recipe and `module` is None.
        RecipeError: If there is no such recipe, or it does not describe an `MTGRPO`.
    """
    if not isinstance(path, str | PathLike):
        raise ArgumentTypeError(
            f"path is {kind_of(path)}. Give a run, a checkpoint or a recipe: "
            "turnrl.load('runs/NAME')."
        )
    if module is not None:
        instance_of(MTGRPO, "module", module)
    agent = find_agent(path, None if checkpoint is None else str(checkpoint))
    file = agent.weights()
    saved = None
    if file is not None and not file.is_dir():
        saved = torch.load(file, map_location="cpu", weights_only=True)
    if module is not None and file is None:
        raise RecipeError(
            f"{str(path)!r} is a recipe, and has no trained weights for the module to take. "
            "Give a run, or a checkpoint."
        )
    questions, plan = 0, Plan()
    if module is None:
        recipe = _contents_of_recipe(agent, saved)
        module, data = _made(recipe), recipe.get("data") or {}
        settings = data.get("init_args", data) or {}
        questions = settings.get("questions_per_iteration") or 0
        plan = Plan(**(recipe.get("plan") or {}))
    target = torch.device(device)
    Start(target, module, learns=False, questions=questions, profile=plan.profile).settle()
    module.policy.load(device)
    if saved is not None:
        module.on_load_checkpoint(saved)
    elif file is not None:
        take_exported(module.policy, file)
    module.load_state_dict({} if saved is None else saved["state_dict"])
    return module.to(device)


def _contents_of_recipe(agent: NamedAgent, saved: Contents | None) -> Contents:
    """The recipe of an agent: its own, its checkpoint's or its run's.

    Raises:
        CheckpointError: If the agent has no recipe.
    """
    file = agent.checkpoint
    if file is not None and not agent.is_recipe:
        if saved is not None and "recipe" in saved:
            recipe = up_to_date(yaml.safe_load(saved["recipe"]))
            return cast(Contents, each_value(recipe, partial(relocated, file)))
        if not agent.recipe.is_file() or agent.recipe == file:
            raise agent.without_recipe()
    invocation = read_invocation("fit", ["--config", str(agent.recipe)])
    invocation.check()
    # the user's own classes may lie beside a recipe; they never lie beside a checkpoint
    import_from(agent.recipe.parent)
    return invocation.contents


def _made(recipe: Contents) -> MTGRPO:
    """The module that a recipe describes."""
    import_components()
    import_from(Path.cwd())
    model = recipe.get("model", {})
    if "class_path" not in model:
        model = {"class_path": "turnrl.MTGRPO", "init_args": model}
    seed = seed_of(recipe.get("seed_everything", 0))
    model["init_args"] = {**model.get("init_args", {}), "seed": seed}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model", type=MTGRPO)
    try:
        made = parser.instantiate_classes(parser.parse_object({"model": model})).model
    except Exception as error:
        described = {"model": model}
        if isinstance(error, ArgumentError | ValueError | TypeError) or any(faults(described, {})):
            raise explained(error, described, {}) from error
        raise
    return cast(MTGRPO, made)
