"""Writes what was trained, for use without turnrl."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn


def exchange_trained(
    network: nn.Module,
    trained: Mapping[str, nn.Parameter],
    weights: Mapping[str, Tensor],
    state: dict[str, Tensor] | None,
) -> dict[str, Tensor]:
    """The weights of a network by name, with others in the place of the trained ones.

    Args:
        network: The network.
        trained: Its trained parameters, by the names of `weights`.
        weights: The others.
        state: The weights of the network if they are divided over processes; None if not.
    """
    own = network.state_dict(keep_vars=True)  # tied weights have two names there
    others = {id(parameter): weights[name] for name, parameter in trained.items()}
    state = {**own} if state is None else state
    exchanged = {n: others[id(p)] for n, p in own.items() if id(p) in others and n in state}
    return state | exchanged


def write_network(
    network: Any, folder: Path, state: Mapping[str, Tensor] | None, adapter: bool
) -> None:
    """Write a network, or only its adapter, as transformers and peft read it."""
    folder.mkdir(parents=True, exist_ok=True)
    # peft would also save a base's embeddings and head that have an adapter
    alone: dict[str, Any] = {"save_embedding_layers": False} if adapter else {}
    network.save_pretrained(folder, state_dict=state, **alone)
