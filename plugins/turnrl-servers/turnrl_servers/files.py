"""The files of one version of the weights, which the servers read."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from turnrl.engines import SampledPolicy
from turnrl.plugin.errors import EngineError
from turnrl.policy.model import LanguageModel

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_TOGETHER_S = 1800.0
"""Seconds that a process waits for another one, as torch does in its own calls."""
_PUBLISHED = "published"
"""A file beside weights that the servers have, for other processes of the run."""


def is_sharded(policy: SampledPolicy) -> TypeGuard[LanguageModel]:
    """True if several processes share a policy, so that all of them publish it together."""
    return isinstance(policy, LanguageModel) and policy.is_sharded


def has_adapter(policy: SampledPolicy) -> TypeGuard[LanguageModel]:
    """True if an adapter is trained, and not all weights."""
    return isinstance(policy, LanguageModel) and policy.lora is not None


def write(policy: SampledPolicy, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Write the trained weights, without the tokenizer, which does not change.

    Args:
        policy: The policy.
        folder: The folder to write.
        state: The weights by name, for a policy that is divided over processes.
    Raises:
        EngineError: If the folder cannot be written.
    """
    network = policy.load()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if has_adapter(policy):
            network.save_pretrained(folder, state_dict=state)
        else:
            _write_whole(network, folder, network.state_dict() if state is None else state)
    except OSError as error:
        raise EngineError(
            f"the weights for the servers cannot be written to {str(folder)!r} ({error}). Free "
            "space, or set model.engine.folder to a folder that this process writes and the "
            "servers read."
        ) from error


def _write_whole(network: PreTrainedModel, folder: Path, state: dict[str, Tensor]) -> None:
    """Write a model with a separate output head. vLLM 0.32 on a CPU keeps a packed copy of a head
    that is tied to the embedding, and does not update it when it reloads weights."""
    from safetensors.torch import save_file

    head = network.get_output_embeddings()
    (name,) = (name for name, module in network.named_modules() if module is head)
    tensors = {key: value.detach().contiguous() for key, value in state.items()}
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    network.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [type(network).__name__], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))


def mark_published(folder: Path) -> None:
    """Tell the other processes of the run that the servers have the weights in a folder."""
    (folder / _PUBLISHED).touch()


def wait_until_published(folder: Path) -> None:
    """Wait until the first process of the run has published the weights in a folder. It may have to
    wait for servers that are away, and writes its checkpoint first.

    Raises:
        EngineError: If that takes longer than torch's processes wait for each other.
    """
    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            # a list asks a file server, which may remember that a path was not there
            if any(file.name == _PUBLISHED for file in folder.iterdir()):
                return
        if time.monotonic() - began > _TOGETHER_S:
            raise EngineError(
                f"the first process of the run has not given the servers its weights within "
                f"{_TOGETHER_S:g} s: {str(folder)!r} does not say so. See what it printed."
            )
        time.sleep(0.05)
