"""The export at the end of a run, into `model/` or `adapter/` of its folder."""

import hashlib
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO

from turnrl.checkpoints import Position, position
from turnrl.module import MTGRPO
from turnrl.recipe.folders import kept_in
from turnrl.run.card.card import export
from turnrl.run.folders import writing


class ExportsPolicy(L.Callback):
    """Export the trained policy into the run's folder, for others to load. It is the one that
    `turnrl.load` takes: that of the best checkpoint, or else of the last.

    Attributes:
        exported: The name of its checkpoint, and its position in training. None before the end of
            training, and the name is empty if the run keeps no checkpoint.
    """

    def __init__(self) -> None:
        self.exported: tuple[str, Position] | None = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, MTGRPO)
        policy = pl_module.policy
        if not (trainer.is_global_zero or policy.divided) or (run := pl_module.folder) is None:
            return
        if isinstance(io := trainer.strategy.checkpoint_io, AsyncCheckpointIO):
            io.teardown()  # waits until the last checkpoint is written
        weights, name, place = None, "", pl_module.position
        if (file := kept_in(run)) is not None:
            saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            state = saved["state_dict"].items()
            weights = {key.removeprefix("policy."): value for key, value in state}
            name, place = file.name, position(saved)
        kind = "model" if policy.lora is None else "adapter"
        with writing(trainer, run / kind):
            export(policy, run / kind, facts_of(run, name, place), weights)
        self.exported = name, place


def facts_of(run: Path, checkpoint: str, place: Position) -> dict[str, str]:
    """Rows of a run's card, by name: which policy it is, and the digest of its recipe.

    Args:
        run: The run's folder.
        checkpoint: The name of the policy's checkpoint; empty if there is none.
        place: Its position in training.
    """
    recipe = run / "config.yaml"
    origin = "none: made from Python"
    if recipe.is_file():
        digest = hashlib.sha256(recipe.read_bytes()).hexdigest()
        origin = f"`config.yaml` of the run, SHA-256 `{digest}`"
    kept = {"checkpoint": f"`{checkpoint}` of the run"} if checkpoint else {}
    length = f"{place.iteration}, in {place.step} optimiser steps"
    return {**kept, "iterations": length, "recipe": origin}
