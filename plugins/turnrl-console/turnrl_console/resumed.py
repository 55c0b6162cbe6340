"""Runs that go on from a checkpoint: their first figures, and settings that changed since."""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.cli import SaveConfigCallback

_SCORING = (
    *("data.val", "data.answers", "data.fields", "data.config"),
    *("model.rewards", "model.rollout"),
)
"""Beginnings of the keys that decide what a figure of the validation is of."""


class FirstFigures(L.Callback):
    """Keep the first figures of a run, in its checkpoints too; and say what a run that goes on by
    another recipe than its checkpoint's changed."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        """By name, with `iteration`, the iterations behind the policy; empty at first."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._take(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._take(trainer, pl_module)

    def _take(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not self.figures:
            self.figures = {"iteration": pl_module.iteration_and_version[0]} | {
                name: float(value)
                for name, value in trainer.callback_metrics.items()
                if name.startswith("val/") == trainer.validating
            }

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: Any) -> None:
        checkpoint["first_figures"] = self.figures

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Compare the recipe in the checkpoint with that of this run, if it has one."""
        if trainer.state.fn != "fit":
            return
        self.figures = checkpoint.get("first_figures", {})
        recipes = (one for one in trainer.callbacks if isinstance(one, SaveConfigCallback))
        if (own := next(recipes, None)) is None or "recipe" not in checkpoint:
            return
        texts = checkpoint["recipe"], own.parser.dump(own.config, skip_none=False)
        saved, now = (dict(_flat(yaml.safe_load(text))) for text in texts)
        changed = {
            key: f"{saved.get(key)} -> {now.get(key)}"
            for key in sorted(saved | now)
            if saved.get(key) != now.get(key)
            and key.startswith(("seed_everything", "model", "data", "trainer"))
            and not key.startswith("trainer.logger")
        }
        if any(key.startswith(_SCORING) for key in changed):
            self.figures = {}  # they were scored in another way: not to be compared
        done, most = checkpoint["epoch"] + 1, trainer.max_epochs or -1
        if trainer.is_global_zero and changed:
            told = ", ".join(f"{key} {values}" for key, values in changed.items())
            print(f"turnrl: goes on with other settings: {told}", file=sys.stderr)
        if trainer.is_global_zero and done >= most > 0:
            told = f"{done} iterations are done, and trainer.max_epochs is {most}. Raise it."
            print(f"turnrl: nothing is left to train: {told}", file=sys.stderr)


def _flat(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, json.dumps(node)
