"""The model card of an exported policy, and the name of the model that it was trained from.

Both avoid absolute paths where they can: people move runs, and put them on the hub.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
import yaml
from lightning.pytorch.plugins import AsyncCheckpointIO

from turnrl.runs.checkpoints import Position, find_checkpoint, read_position
from turnrl.watch.trainer import writing

if TYPE_CHECKING:
    from torch import Tensor

    from turnrl.policy.model import LanguageModel

_LOADED = """```python
from pathlib import Path

{imports}

here = Path(".")  # this folder
tokenizer = AutoTokenizer.from_pretrained(here)
{load}
```
"""
_NF4 = """nf4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
)
"""


def export(
    policy: LanguageModel,
    folder: str | Path,
    facts: Mapping[str, str] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a policy for use without turnrl, with its tokenizer and a model card.

    Args:
        policy: The policy, whose weights are loaded.
        folder: Where to write.
        facts: Rows for the card's table, by name.
        weights: Other trained weights than the present ones; see `LanguageModel.export`.
    Returns:
        The folder.
    Raises:
        RecipeError: If the folder holds the model that the policy was trained from.
    """
    written = policy.export(folder, weights)
    if policy.writes:
        base = base_name(policy.files.origin.model, policy.folder, written)
        adapter, method = policy.lora is not None, policy.files.base_quantization
        write_card(written, base, policy.files.origin.revision, adapter, facts or {}, method)
    return written


def base_name(model: str, loaded_from: str, folder: Path) -> str:
    """The name under which an export refers to the model that it was trained from.

    Args:
        model: Its name in the recipe.
        loaded_from: The folder or the hub name that this stands for.
        folder: Folder of the export.
    Returns:
        A hub name, or `package://...`, unchanged; a path relative to the export, if the two share a
        parent folder; otherwise the absolute path.
    """
    if not Path(loaded_from).is_dir() or "://" in model:
        return model
    base, here = Path(loaded_from).resolve(), folder.resolve()
    apart = os.path.commonpath([base, here]) == here.anchor
    return str(base) if apart else Path(os.path.relpath(base, here)).as_posix()


def write_card(
    folder: Path,
    base: str,
    revision: str | None,
    adapter: bool,
    facts: Mapping[str, str],
    quantization: str | None = None,
) -> None:
    """Write `README.md` with the metadata that peft and the hub read, and name the base in the
    adapter's configuration.

    Args:
        folder: Where the export lies.
        base: See `base_name`.
        revision: Revision of the base on the hub.
        adapter: True for an adapter, False for a whole model.
        facts: More rows about the training, by name.
        quantization: How the base's weights were quantised while the adapter was trained; None if
            they were not.
    """
    on_hub = not base.startswith(("/", ".")) and "://" not in base
    library, relation = ("peft", "adapter") if adapter else ("transformers", "finetune")
    tags = ["lora", "transformers", "turnrl"] if adapter else ["turnrl"]
    data = {"library_name": library, "pipeline_tag": "text-generation", "tags": tags}
    if on_hub:  # the hub refuses a card whose base is a path
        data = {"base_model": base, **data, "tags": [f"base_model:{relation}:{base}", *tags]}
    if adapter:
        file = folder / "adapter_config.json"
        named = {"base_model_name_or_path": base, "revision": revision}
        config = json.loads(file.read_text("utf-8")) | named
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    rows = {"base model": f"`{base}`" + (f", revision `{revision}`" if revision else "")}
    if quantization is not None:
        rows["base while training"] = f"quantised ({quantization}); on another the policy differs"
    rows["prompts while training"] = (
        "each message tokenised on its own, any date read as 1 January 2026; a server that renders "
        "the chat template itself sends slightly other tokens"
    )
    rows |= {"trained with": f"turnrl {importlib.metadata.version('turnrl')}", **facts}
    title = f"# A {'LoRA adapter' if adapter else 'model'} trained with turnrl"
    table = ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())]
    head = f"---\n{yaml.safe_dump(data, sort_keys=False)}---"
    parts = [head, title, "\n".join(table), _how(base, revision, adapter, quantization)]
    (folder / "README.md").write_text("\n\n".join(parts), "utf-8")


def _how(base: str, revision: str | None, adapter: bool, quantization: str | None) -> str:
    """Python code that loads the export, on a base as it was while training."""
    imports = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    if not adapter:
        load = "model = AutoModelForCausalLM.from_pretrained(here)"
    else:
        imports = f"from peft import PeftModel\n{imports}"
        path = f"here / {base!r}" if base.startswith(".") else repr(base)
        if "://" in base:
            imports += "\nfrom turnrl import Policy"
            path = f"Policy({base!r}).build().folder"
        options = f", revision={revision!r}" if revision else ""
        load = ""
        if quantization == "nf4":
            imports = imports.replace("AutoTokenizer", "AutoTokenizer, BitsAndBytesConfig")
            options += ", quantization_config=nf4"
            load = _NF4
        load += (
            f"base = AutoModelForCausalLM.from_pretrained({path}{options})\n"
            "model = PeftModel.from_pretrained(base, here)"
        )
    return _LOADED.format(imports=imports, load=load)


class ExportsPolicy(L.Callback):
    """Export the trained policy into the run's folder, for others to load. It is the one that
    `turnrl.load` takes: that of the best checkpoint, or else of the last.

    Attributes:
        exported: The name of its checkpoint, and its position in training. None before the end of
            training, and the name is empty if the run keeps no checkpoint.
    """

    def __init__(self) -> None:
        self.exported: tuple[str, Position] | None = None

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        policy = pl_module.policy
        if not (trainer.is_global_zero or policy.is_sharded) or (run := pl_module.folder) is None:
            return
        if isinstance(io := trainer.strategy.checkpoint_io, AsyncCheckpointIO):
            io.teardown()  # waits until the last checkpoint is written
        weights, name, place = None, "", pl_module.position
        if (file := find_checkpoint(run)) is not None:
            saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            state = saved["state_dict"].items()
            weights = {key.removeprefix("policy."): value for key, value in state}
            name, place = file.name, read_position(saved)
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
