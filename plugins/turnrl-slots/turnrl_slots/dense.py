"""An adapter beside its base as dense weights, to sample with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from turnrl.policy.compute import find_adapted_layers


def dense_bytes(network: nn.Module) -> int:
    """Memory that `Dense` takes."""
    return sum(layer.dense_bytes for layer in find_adapted_layers(network))


class Dense:
    """The adapted linear layers with dense weights: the base's W, dequantised, and beside it the
    adapter as it is now. The network itself is not changed, and nothing in it is kept.

    Args:
        network: A network with an adapter.
    """

    def __init__(self, network: nn.Module) -> None:
        self._layers = [
            (adapted.layer, adapted.dense()) for adapted in find_adapted_layers(network)
        ]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the network compute with these weights. Use it for one pass at a time: between passes
        the network has the learner's weights, however a pass ends."""
        # an object's own `forward` shadows its class's. nn.Module's setattr would look among
        # parameters and modules first, for hundreds of layers in every pass
        forwards = [(vars(layer), vars(layer)["forward"]) for layer, _ in self._layers]
        try:
            for layer, dense in self._layers:
                vars(layer)["forward"] = dense
            yield
        finally:
            for attributes, before in forwards:
                attributes["forward"] = before
