"""Checkpoints of a module: only the trained weights, with their policy's identity; and resuming."""

import contextlib
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from turnrl.plugin.errors import CheckpointError, RecipeError, blaming, summarize_error
from turnrl.policy.adapter import load_adapter_weights, read_adapter
from turnrl.policy.files import load_language_model
from turnrl.policy.model import LanguageModel


@contextlib.contextmanager
def read_safely(file: object) -> Iterator[None]:
    """Read a checkpoint within this block, with `weights_only=True`, so that no code in it runs.

    Raises:
        CheckpointError: If it holds anything but weights and plain values. torch's own error would
            tell the user to let the code run.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        names = re.findall(r"GLOBAL ([\w.]+)", str(error))
        holds = f"the object {names[0]!r}" if names else "objects that torch cannot read"
        raise CheckpointError(
            f"the checkpoint {str(file)!r} holds {holds} beside weights and plain values. turnrl "
            "does not read it, because code in it could run. Give one that turnrl has written."
        ) from None


def add_identity(
    checkpoint: dict[str, object], policy: LanguageModel, optimizers: list[Optimizer]
) -> None:
    """Put the trained weights, their policy's identity and the class of the optimiser into a
    checkpoint."""
    state = policy.trainable_state()
    checkpoint["state_dict"] = {f"policy.{name}": value for name, value in state.items()}
    checkpoint["policy_identity"] = policy.files.identity
    checkpoint["optimizer"] = [str(type(made)) for made in optimizers]


def check_policy(checkpoint: Mapping[str, Any], policy: LanguageModel, learns: bool) -> None:
    """Refuse a checkpoint of another policy.

    Args:
        checkpoint: The checkpoint.
        policy: The policy that will take its weights.
        learns: True if the policy will be trained. Otherwise it needs no critic.
    Raises:
        CheckpointError: Naming the difference.
    """
    if "policy_identity" not in checkpoint:
        raise CheckpointError("this checkpoint names no policy. Give one of 'turnrl fit'.")
    names = {name.removeprefix("policy.") for name in checkpoint["state_dict"]}
    if not learns and policy.critic is None:
        names -= {"value_head.weight", "value_head.bias"}
    saved = checkpoint["policy_identity"]
    for key, value in policy.files.identity.items():
        if saved.get(key) != value:
            raise CheckpointError(
                f"the checkpoint was made with another policy: its {key} is {saved.get(key)!r}, "
                f"and {value!r} in this recipe. Use the recipe that it was made with: config.yaml "
                "in its run's folder."
            )
    if odd := sorted(names ^ set(policy.trainable_state())):
        where = "the checkpoint" if odd[0] in names else "the recipe"
        critic = " (of the critic of model.estimator)" if "value_head" in odd[0] else ""
        raise CheckpointError(
            f"the checkpoint holds other weights than the recipe trains: {odd[0]!r}{critic} is "
            f"only in {where}. Use the recipe that it was made with."
        )


def override_optimizer(
    checkpoint: dict[str, Any], optimizer: Optimizer, scheduler: LRScheduler | None
) -> None:
    """Let a recipe's optimiser and schedule override those of a checkpoint that is about to be
    restored: their settings replace the saved ones, and the schedule is replayed to the run's step.

    Args:
        checkpoint: The checkpoint, with the states of optimisers.
        optimizer: The optimiser, as the recipe makes it.
        scheduler: The schedule, as the recipe makes it, at its beginning.
    """
    with warnings.catch_warnings(), blaming(RecipeError, "model.scheduler", "Fix it."):
        warnings.simplefilter("ignore")  # torch warns that the optimiser has made no step
        for _ in range(checkpoint["global_step"] if scheduler is not None else 0):
            scheduler.step()  # type: ignore[union-attr]
    checkpoint["lr_schedulers"] = [scheduler.state_dict()] if scheduler is not None else []
    (saved,) = checkpoint["optimizer_states"]
    if checkpoint.get("optimizer", [str(AdamW)]) != [str(type(optimizer))]:
        saved["state"] = {}  # moments of another optimiser
    for group, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        old |= {name: value for name, value in group.items() if name != "params"}


def load_exported(policy: LanguageModel, folder: str | Path) -> None:
    """Load the trained weights from a folder that `LanguageModel.export` has written.

    Args:
        policy: A loaded policy, which takes the weights.
        folder: A folder with an adapter, or with a whole model.
    Raises:
        CheckpointError: If the weights do not fit this policy.
    """
    assert policy.network is not None, "LanguageModel.load() comes first"
    exported, own = read_adapter(Path(folder)), policy.files.identity["lora"]
    saved = None if exported is None else exported.shape
    if saved != own:
        raise CheckpointError(
            f"{str(folder)!r} has the adapter {saved}, and the policy {own}. Set model.policy.lora "
            "as it was trained."
        )
    try:
        if saved is not None:
            load_adapter_weights(policy.network, Path(folder))
        else:
            whole = load_language_model(str(folder), None, dtype=torch.float32)
            policy.network.load_state_dict(whole.state_dict())
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights in {str(folder)!r} do not fit the policy {policy.settings.model!r}: "
            f"{summarize_error(error)}. Give the recipe that they were trained with."
        ) from error
