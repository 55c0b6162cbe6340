"""A second device, `far`: its tensors hold real values and compute on the CPU, and nothing of the
CPU's can be mixed with them.

    far tensor --- storage at a real address, device `far:0`
        |               |
    an operation     read as a CPU tensor, computed there, and the result is made far

It is torch's third-party device (`PrivateUse1`), written in Python, so dispatch, autograd and
default devices are torch's own. As on a GPU, an operation on tensors of two devices is an error,
`numpy()` is refused, and a value reaches the host by a copy, which `LEDGER` counts. It also counts
the bytes that live on the device.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import Tensor
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "far"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_aten = torch.ops.aten
# operations that a GPU allows beside tensors of the CPU: copies, and places to look at
_MIXED = {"aten::copy_", "aten::_copy_from", "aten::index", "aten::index_put_"}
_MIXED |= {"aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index"}
# operations whose result the host has to know before it goes on
_WAITS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"}


class Ledger:
    """Counts of the device: bytes that live there, their peak, and copies to the host; and the
    most bytes that it holds, if it has an end."""

    def __init__(self) -> None:
        self.now = self.peak = self.to_host = self.operations = 0
        self.limit: int | None = None

    def take(self, size: int) -> None:
        """So many bytes more, if there is room."""
        if self.limit is not None and self.now + size > self.limit:
            raise torch.OutOfMemoryError(
                f"{NAME} out of memory. Tried to allocate {size} bytes. GPU 0 has {self.limit}."
            )
        self.now += size
        self.peak = max(self.peak, self.now)

    def begin(self) -> None:
        """Count peak, copies and operations anew."""
        self.peak, self.to_host, self.operations = self.now, 0, 0


LEDGER = Ledger()
_memory: dict[int, torch.UntypedStorage] = {}
"""By the address of a far storage's object, the host memory behind it."""


def _drop(key: int, size: int) -> None:
    _memory.pop(key, None)
    LEDGER.now -= size


def _far(value: Tensor, made: Tensor | None = None) -> Tensor:
    """A CPU tensor, whose memory must be nobody else's, as one of the device, `made` if given."""
    memory = value.untyped_storage()
    size = memory.nbytes()
    LEDGER.take(size)
    storage = torch._C._construct_storage_from_data_pointer(  # type: ignore[attr-defined]
        memory.data_ptr(), torch.device(NAME, 0), size
    )
    if made is None:
        made = torch._C._acc.create_empty_tensor((0,), value.dtype)
    _aten.set_.source_Storage_storage_offset.redispatch(
        _CPU, made, storage, value.storage_offset(), value.size(), value.stride()
    )
    key = made.untyped_storage()._cdata
    _memory[key] = memory
    weakref.finalize(made.untyped_storage(), _drop, key, size)
    return made


def _near(value: Tensor) -> Tensor:
    """The same memory as a CPU tensor."""
    memory = _memory[value.untyped_storage()._cdata]
    plain = torch.empty(0, dtype=value.dtype).set_(
        memory, value.storage_offset(), value.size(), value.stride()
    )
    plain = torch.conj(plain) if value.is_conj() else plain
    return torch._neg_view(plain) if value.is_neg() else plain


def _here(value: Any, pairs: list[tuple[Tensor, Tensor]], beside: list[Tensor]) -> Any:
    """An argument as the CPU computes it; pairs of near and far tensors, and tensors of the CPU,
    are noted."""
    if isinstance(value, Tensor):
        if value.device.type != NAME:
            beside.append(value)
            return value
        pairs.append((_near(value), value))
        return pairs[-1][0]
    if isinstance(value, list | tuple):
        return [_here(item, pairs, beside) for item in value]
    far = isinstance(value, torch.device) and value.type == NAME
    return torch.device("cpu") if far else value


class _Operator:
    """What an operator's schema says, and how it is computed here."""

    def __init__(self, op: Any) -> None:
        self.op, self.name = op, op._schema.name
        self.kinds = [returned.alias_info for returned in op._schema.returns]
        view = self.kinds and all(k is not None and not k.is_write for k in self.kinds)
        self.moves_nothing = bool(view) or self.name == "aten::set_"
        self.tensors = [
            str(to.type) in ("Tensor", "Optional[Tensor]") for to in op._schema.arguments
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        LEDGER.operations += 1
        if self.moves_nothing:
            return self.op.redispatch(_CPU, *args, **kwargs)
        pairs: list[tuple[Tensor, Tensor]] = []
        beside: list[Tensor] = []
        here = [
            # a number in a tensor's place comes as a number
            torch.tensor(value)
            if tensor and isinstance(value, int | float)
            else _here(value, pairs, beside)
            for value, tensor in zip(args, self.tensors, strict=False)
        ]
        named = {key: _here(value, pairs, beside) for key, value in kwargs.items()}
        if pairs and self.name not in _MIXED and any(t.dim() for t in beside):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{NAME}:0 and cpu! ({self.name})"
            )
        LEDGER.to_host += self.name in _WAITS
        if self.name == "aten::_copy_from":
            LEDGER.to_host += args[1].device.type != NAME
            here[1].copy_(here[0])
            return args[1]
        result = self.op(*here, **named)
        values = result if isinstance(result, tuple) else (result,)
        made = [self._far(v, kind, pairs) for v, kind in zip(values, self.kinds, strict=True)]
        return tuple(made) if isinstance(result, tuple) else made[0] if made else None

    @staticmethod
    def _far(value: Any, kind: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, list):
            return [_far(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        if kind is None:
            return _far(value)
        target = next(far for near, far in pairs if near is value)  # written in place
        return target if target.shape == value.shape else _far(value, target)  # or made to fit


_clone_near = torch.UntypedStorage.clone


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy of a storage, which torch makes by an allocator that only C++ could register."""
    if storage.device.type != NAME:
        return _clone_near(storage)
    plain = torch.empty(0, dtype=torch.uint8).set_(_memory[storage._cdata])
    return _far(plain.clone()).untyped_storage()


torch.UntypedStorage.clone = _clone  # type: ignore[method-assign]
_operators: dict[Any, _Operator] = {}


def _compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    known = _operators.get(op)
    if known is None:
        known = _operators[op] = _Operator(op)
    return known(*args, **kwargs)


class _Backend(_DummyBackendModule):
    """`torch.far`, as far as torch asks for it: recomputing activations looks for autocast, and for
    random states to keep."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Types of mixed precision."""
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        """The device has no random numbers of its own."""
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """Nothing to set."""


_setup_privateuseone_for_python_backend(NAME, _Backend())
_libraries = [torch.library.Library("_", "IMPL")]
_libraries[0].fallback(_compute, "PrivateUse1")


def take_kernels(package: str) -> None:
    """Let a package's own operators, `torch.ops.PACKAGE`, compute with its kernels for CPUs."""
    library = torch.library.Library(package, "IMPL")
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith(f"{package}::"):
            named = schema.name + ("." + schema.overload_name if schema.overload_name else "")
            packet = getattr(getattr(torch.ops, package), schema.name.partition("::")[2])
            op = getattr(packet, schema.overload_name or "default")
            library.impl(named, functools.partial(_compute, op), "PrivateUse1")
    _libraries.append(library)


class Far(Accelerator):
    """Lightning's way to the device, beside the strategy: `trainer: {accelerator: far, strategy:
    far}`."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to set up."""

    def teardown(self) -> None:
        """Nothing to clean up."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """One device."""
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The device."""
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        """One."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Always."""
        return True

    @staticmethod
    def name() -> str:
        """As a recipe names it."""
        return NAME


class FarStrategy(SingleDeviceStrategy):
    """One device. At the end weights stay on it: a 4-bit weight is moved to the CPU by exchanging
    its data in place, which torch allows between its own devices alone."""

    def teardown(self) -> None:
        """As Lightning's, but for the way back."""
        module, self._lightning_module = self._lightning_module, None
        super().teardown()
        self._lightning_module = module


AcceleratorRegistry.register(NAME, Far)
StrategyRegistry.register(NAME, FarStrategy, device=torch.device(NAME, 0))


@contextlib.contextmanager
def counting() -> Iterator[Ledger]:
    """Within it the ledger counts anew."""
    LEDGER.begin()
    yield LEDGER
