"""A policy that several processes share: each keeps a part of every weight (FSDP2).

A layer's weights are gathered before it computes, and dropped afterwards, both forward and
backward. Every process takes part in that, so all of them make equally many forward passes, however
much each has to read; see `UnevenPasses`. Weights that leave a process (checkpoints, exports,
weights for servers) are whole.

Source: Zhao et al., arXiv 2304.11277, as implemented by torch's `fully_shard`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from turnrl.plugin.errors import CheckpointError

_T = TypeVar("_T")


def shard(policy: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, *methods: str) -> None:
    """Divide the weights of a policy, layer by layer, among the processes of a mesh. Each layer
    moves to the device whole, and only this process's part of it stays there.

    Args:
        policy: The policy, on any device. Calling it gathers the weights that are in no layer.
        layers: Its network's layers, each of which gathers its own weights.
        mesh: The processes.
        methods: Names of further methods of the policy that compute, and so gather too.
    """
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # By default, weights in no layer stay gathered until a backward pass. After a pass without one,
    # the parameters would then differ from the optimiser's.
    fully_shard(policy, mesh=mesh, reshard_after_forward=True)
    for method in methods:
        register_fsdp_forward_method(policy, method)


def gather_full(value: _T) -> _T:
    """The value, with each divided tensor in it whole and on the CPU in the first of the processes
    that share it. All of them have to call this; the others keep their parts."""
    return cast(_T, tree_map(_gather, value))


def gather_full_state(network: nn.Module, trained_alone: bool) -> dict[str, Tensor]:
    """The weights of a network by name, as `gather_full` gives them.

    Args:
        network: The network.
        trained_alone: Leave out weights that are not trained.
    """
    named = dict(network.named_parameters(remove_duplicate=False))
    gathered: dict[int, Tensor] = {}  # weights that two layers share are gathered once
    state: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        parameter = named.get(name)
        if trained_alone and (parameter is None or not parameter.requires_grad):
            continue
        key = id(value if parameter is None else parameter)
        if key not in gathered:
            gathered[key] = gather_full(value)
        state[name] = gathered[key]
    return state


def _gather(value: object) -> object:
    if not isinstance(value, DTensor):
        return value
    every = value.full_tensor()
    return every.cpu() if value.device_mesh.get_local_rank() == 0 else value


def local_part(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that every process has whole, divided in the way of
    `like`."""
    if not isinstance(like, DTensor):
        return value
    there = value.to(like.device)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)


class UnevenPasses:
    """Makes processes that share a policy perform equally many forward passes.

    A process announces each of its forward passes. A process with nothing left to read makes idle
    forward passes until the last process is done.

    Args:
        mesh: The processes.
        idle: Makes a forward pass whose result is not needed.
    """

    def __init__(self, mesh: DeviceMesh, idle: Callable[[], object]) -> None:
        self._mesh, self._idle = mesh, idle
        self.within = False
        """True if this process may be making forward passes that the others do not know of."""

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A block in which this process may make any number of forward passes, each after
        `announce`. All processes enter it equally often. A nested block is part of the outer
        one."""
        if self.within:
            yield
            return
        self.within = True
        try:
            yield
        finally:
            self.within = False
        while self._any(passes=False):
            self._idle()

    @property
    def is_first(self) -> bool:
        """True if this process is the first of them."""
        return self._mesh.get_local_rank() == 0

    def announce(self) -> None:
        """Announce a forward pass."""
        self._any(passes=True)

    def _any(self, passes: bool) -> bool:
        flag = torch.tensor([float(passes)], device=self._mesh.device_type)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, self._mesh.get_group())
        return bool(flag)


class FSDP2(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` for `MTGRPO`: the policy is divided over all processes,
    layer by layer and in no other way. In a recipe it is `trainer.strategy: fsdp2`.

    Checkpoints look like those of a single process: whole, with only the trained weights. So a run
    can resume with another number of processes, or with another strategy.
    """

    def setup_environment(self) -> None:
        """One mesh of all processes."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        self._save_distributed_checkpoint = False
        super().setup_environment()

    @property
    def mesh(self) -> DeviceMesh:
        """The processes that share the policy."""
        return self.device_mesh["data_parallel"]

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning then passes the checkpoint to `load_optimizer_state_dict`, after the
        module has seen it."""
        return True

    def lightning_module_state_dict(self) -> dict[str, object]:
        """Nothing: the module puts the trained weights into its checkpoints."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        """Give the module whole weights, from which it takes its parts."""
        assert self.lightning_module is not None
        weights = cast(Mapping[str, object], checkpoint["state_dict"])
        self.lightning_module.load_state_dict(weights, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The whole state of an optimiser."""
        return gather_full(ParallelStrategy.optimizer_state(self, optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, object]) -> None:
        """Give each optimiser its parts of a whole state."""
        every = cast(list[dict[str, dict[int, dict[str, object]]]], checkpoint["optimizer_states"])
        for optimizer, saved in zip(self.optimizers, every, strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {
                number: {
                    name: _part_of_moment(value, parameters[number]) for name, value in own.items()
                }
                for number, own in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})

    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Read a checkpoint in each process; weights are loaded from it later."""
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)


def _part_of_moment(value: object, parameter: Tensor) -> object:
    """This process's part of a moment, which has a number per weight. A count of steps stays whole.

    Raises:
        CheckpointError: If the value has another shape, such as sums over rows, which cannot be
            divided.
    """
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:
        if value.numel() == 1:
            return value
        raise CheckpointError(
            f"the optimiser keeps a moment of shape {tuple(value.shape)} for a weight of shape "
            f"{tuple(parameter.shape)}, and with trainer.strategy fsdp2 only moments of the "
            "weight's own shape can be resumed. Take ddp, or an optimiser such as AdamW."
        )
    return local_part(value, parameter)


StrategyRegistry.register("fsdp2", FSDP2, "Divides the policy of MTGRPO over all processes")
