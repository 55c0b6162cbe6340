"""Resumed runs: whether they are finished, and settings that changed when they were resumed."""

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.cli import SaveConfigCallback

from turnrl.plugin.text import say
from turnrl.runs.config import SECTIONS, flatten_settings, load_yaml

_LONGEST = 60
"""Characters of a value to show."""


class ResumeNotes(L.Callback):
    """Print the settings of a resumed run that differ from its checkpoint's, or that the run of the
    checkpoint is finished."""

    def __init__(self) -> None:
        self._finished = ""

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Print at the very end, below Lightning's own lines, that there was nothing to do."""
        if self._finished and trainer.is_global_zero:
            say(self._finished, sys.stderr)
        self._finished = ""

    def on_load_checkpoint(
        self, trainer: Any, pl_module: L.LightningModule, checkpoint: Mapping[str, Any]
    ) -> None:
        """Compare the recipe in the checkpoint, if there is one, with this run's. Note if the
        checkpoint belongs to a finished run."""
        if trainer.state.fn != "fit":
            return
        recipes = (c for c in trainer.callbacks if isinstance(c, SaveConfigCallback))
        own = next(recipes, None)
        done = checkpoint["epoch"] + 1 if checkpoint["global_step"] else 0
        if done >= (trainer.max_epochs or -1) > 0:
            self._finished = (
                f"turnrl: this run is finished: {done} iterations are done, and max_epochs is "
                f"{trainer.max_epochs}. To train on, raise trainer.max_epochs."
            )
            return
        if own is not None and "recipe" in checkpoint:
            with contextlib.suppress(yaml.YAMLError):  # of a checkpoint that a stranger has sent
                saved = load_yaml(str(checkpoint["recipe"]))
                now = load_yaml(own.parser.dump(own.config, skip_none=False))
                self._compare(trainer, saved, now)

    def _compare(self, trainer: L.Trainer, saved: object, now: object) -> None:
        changed = changed_settings(saved, now)
        if trainer.is_global_zero and changed:
            say("turnrl: resumes with changed settings:", sys.stderr)
            for key, (old, new) in sorted(changed.items()):
                say(f"  {key}: {_shorten(old)} -> {_shorten(new)}", sys.stderr, indent="    ")


def changed_settings(old: object, new: object) -> dict[str, tuple[str, str]]:
    """The settings in which two recipes differ, by dotted keys, with both values as text. Settings
    of the place where a run writes do not count."""
    sides = [
        dict(flatten_settings(recipe)) if isinstance(recipe, Mapping) else {}
        for recipe in (old, new)
    ]
    pairs = {
        key: (str(sides[0].get(key, "not set")), str(sides[1].get(key, "not set")))
        for key in {**sides[0], **sides[1]}
        if key.startswith(SECTIONS) and not key.startswith(("trainer.logger", "ckpt_path"))
    }
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _shorten(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."
