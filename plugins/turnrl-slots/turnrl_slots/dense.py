"""An adapter beside its base as dense weights, to sample with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from turnrl import adapted_layers


def dense_bytes(network: nn.Module) -> int:
    """Memory that `Dense` takes."""
    return sum(layer.dense_bytes for layer in adapted_layers(network))


class Dense:
    """The adapted linear layers with dense weights: the base's W, dequantised, and the adapter as
    it is now beside it. Nothing of the network is changed or kept.

    Args:
        network: With an adapter.
    """

    def __init__(self, network: nn.Module) -> None:
        self._layers = [(one.layer, one.dense()) for one in adapted_layers(network)]

    def refill(self) -> None:
        """Take over the adapter as it is now, at the same addresses."""
        for _, dense in self._layers:
            dense.refill()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the network computes with these weights. It is for one pass at a time: between
        passes the network has the learner's weights, however a pass ends."""
        # a `forward` of the object shadows its class's. Not set by way of nn.Module, which would
        # look among parameters and modules first: there are some hundred layers, in every pass
        own = [(vars(layer), vars(layer)["forward"]) for layer, _ in self._layers]
        try:
            for layer, dense in self._layers:
                vars(layer)["forward"] = dense
            yield
        finally:
            for attributes, before in own:
                attributes["forward"] = before
