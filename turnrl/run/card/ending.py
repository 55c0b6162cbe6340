"""The export at the end of a run, into `model/` or `adapter/` of its folder."""

import hashlib
from pathlib import Path

import lightning as L

from turnrl.module import MTGRPO
from turnrl.run.card.card import export
from turnrl.run.folders import writing


class ExportsPolicy(L.Callback):
    """Export the trained policy into the run's folder, for others to load."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, MTGRPO)
        policy = pl_module.policy
        if (trainer.is_global_zero or policy.divided) and (run := pl_module.folder):
            kind = "model" if policy.lora is None else "adapter"
            facts = facts_of(run, trainer.current_epoch, trainer.global_step)
            with writing(trainer, run / kind):
                export(policy, run / kind, facts)


def facts_of(run: Path, iterations: int, steps: int) -> dict[str, str]:
    """Rows of a run's card, by name: the length of its training, and the digest of its recipe.

    Args:
        run: The run's folder.
        iterations: Number of finished iterations.
        steps: Number of finished optimiser steps.
    """
    recipe = run / "config.yaml"
    origin = "none: made from Python"
    if recipe.is_file():
        digest = hashlib.sha256(recipe.read_bytes()).hexdigest()
        origin = f"`config.yaml` of the run, SHA-256 `{digest}`"
    return {"iterations": f"{iterations}, in {steps} optimiser steps", "recipe": origin}
