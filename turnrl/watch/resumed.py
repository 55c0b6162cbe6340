"""Resumed runs: their first figures, and settings that changed when they were resumed."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.cli import SaveConfigCallback

from turnrl.runs.config import SECTIONS, load_yaml
from turnrl.text import say

_SCORING = (
    *("data.val", "data.answers", "data.fields", "data.config"),
    *("model.rewards", "model.rollout"),
)
"""Prefixes of the keys that decide how the validation is scored."""
_ABSENT = object()
_LONGEST, _AROUND = 60, 20
"""Characters of a value to show, and the number of these before its first difference."""


class FirstFigures(L.Callback):
    """Keep the first figures of a run and those that it has shown, also in its checkpoints. Print
    the settings of a resumed run that differ from its checkpoint's."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        """The first figures, by name; `iteration` counts the iterations behind the policy. Empty at
        first."""
        self.shown: dict[str, list[float]] = {}
        """The figures shown: by name, one value for each row on the console."""
        self._finished = ""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._take(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._take(trainer, pl_module)

    def _take(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not self.figures:
            self.figures = {"iteration": pl_module.position.iteration} | {
                name: float(value)
                for name, value in trainer.callback_metrics.items()
                if name.startswith("val/") == trainer.validating
            }

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Print at the very end, below Lightning's own lines, that there was nothing to do."""
        if self._finished and trainer.is_global_zero:
            say(self._finished, sys.stderr)
        self._finished = ""

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        checkpoint["first_figures"] = self.figures
        checkpoint["shown_figures"] = self.shown

    def on_load_checkpoint(
        self, trainer: Any, pl_module: L.LightningModule, checkpoint: Mapping[str, Any]
    ) -> None:
        """Compare the recipe in the checkpoint, if there is one, with this run's. Note if the
        checkpoint belongs to a finished run."""
        if trainer.state.fn != "fit":
            return
        self.figures = checkpoint.get("first_figures", {})
        self.shown = checkpoint.get("shown_figures", {})
        recipes = (c for c in trainer.callbacks if isinstance(c, SaveConfigCallback))
        own = next(recipes, None)
        steps = checkpoint["global_step"]
        iterations = checkpoint["epoch"] + 1 if steps else 0
        limits = (
            ("max_epochs", "iterations", iterations, trainer.max_epochs or -1),
            ("max_steps", "steps", steps, trainer.max_steps),
        )
        for name, unit, done, limit in limits:
            if done >= limit > 0:
                step = f"repeat the command with --trainer.{name} N" if own else f"set {name}=N"
                self._finished = (
                    f"turnrl: this run is finished: {done} {unit} are done, and {name} is "
                    f"{limit}.\nTo train on, {step}, N above {done}."
                )
                return
        if own is not None and "recipe" in checkpoint:
            with contextlib.suppress(yaml.YAMLError):  # of a checkpoint that a stranger has sent
                saved = load_yaml(str(checkpoint["recipe"]))
                now = load_yaml(own.parser.dump(own.config, skip_none=False))
                self._compare(trainer, saved, now)

    def _compare(self, trainer: L.Trainer, saved: object, now: object) -> None:
        changed = {
            key: values
            for key, *values in changes(saved, now)
            if key.startswith(SECTIONS) and not key.startswith(("trainer.logger", "ckpt_path"))
        }
        if any(key.startswith(_SCORING) for key in changed):
            self.figures, self.shown = {}, {}  # scored differently, so they cannot be compared
        if trainer.is_global_zero and changed:
            say("turnrl: resumes with changed settings:", sys.stderr)
            for key, (old, new) in sorted(changed.items()):
                say(change_line(key, old, new), sys.stderr, indent="    ")


def changes(old: object, new: object, key: str = "") -> Iterator[tuple[str, str, str]]:
    """The smallest differing parts of two recipes. Lists of different lengths are shown by the
    names of their components.

    Args:
        old: A recipe, or the part of one at `key`.
        new: The same of the other recipe.
        key: The dotted path of the part; empty for a whole recipe.
    Yields:
        Key, old value and new value; the values as JSON.
    """
    if old == new:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in {**old, **new}:
            inner = f"{key}.{name}" if key else str(name)
            yield from changes(old.get(name, _ABSENT), new.get(name, _ABSENT), inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from changes(*pair, f"{key}[{number}]")
    elif (had := _components(old)) and (has := _components(new)):
        yield key, ", ".join(had), ", ".join(has)
        for number, (name, component) in enumerate(has.items()):
            if name in had:
                yield from changes(had[name], component, f"{key}[{number}]")
    else:
        before, after = ("not set" if v is _ABSENT else json.dumps(v) for v in (old, new))
        yield key, before, after


def _components(value: object) -> dict[str, object]:
    """The components of a list by their classes' names; empty for any other value, and for a list
    with a class twice."""
    items = value if isinstance(value, list) else []
    components = [item for item in items if isinstance(item, Mapping) and "class_path" in item]
    by_name: dict[str, object] = {str(c["class_path"]).rpartition(".")[2]: c for c in components}
    return by_name if len(by_name) == len(items) else {}


def change_line(key: str, old: str, new: str) -> str:
    """One line with a setting's old and new value, around the place where they differ.

    Args:
        key: The dotted path of the setting.
        old: Its value before, as `changes` yields it.
        new: Its value now.
    """
    pairs = enumerate(zip(old, new, strict=False))
    same = next((n for n, (a, b) in pairs if a != b), 0)
    begin = max(0, same - _AROUND) if max(len(old), len(new)) > _LONGEST else 0
    old, new = (_cut(value, begin) for value in (old, new))
    return f"  {key}: {old} -> {new}"


def _cut(value: str, begin: int) -> str:
    """The part of a long value around the place where it differs from another."""
    value = f"...{value[begin:]}" if begin > len("...") else value
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."
