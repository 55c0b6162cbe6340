"""Bytes of a policy of any size, counted without its memory.

Tensors are on torch's device `meta`: they have shapes and types, and no contents. The policy's own
code runs on them, told that they are on a GPU, and a mode counts the bytes of the storages that
operations make and drop.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lightning.fabric.utilities import move_data_to_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turnrl import Policy
from turnrl.policy.trials import Way

META = torch.device("meta")


class Bytes(TorchDispatchMode):
    """Counts the bytes of storages on a device: `now`, and the `peak` so far."""

    def __init__(self, kind: str = "meta") -> None:
        super().__init__()
        self.kind, self.now, self.peak, self.at = kind, 0, 0, ""
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.kind:
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self._known:
                    self._known.add(key)
                    self.now += (size := storage.nbytes())
                    weakref.finalize(storage, self._drop, key, size)
                    if self.now > self.peak:
                        self.peak, self.at = self.now, str(func)
        return out

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    @contextlib.contextmanager
    def above(self) -> Iterator[list[int]]:
        """Within it counts; then gives the peak above what was there, and what is kept of it."""
        bytes_above: list[int] = []
        with self:
            before = self.peak = self.now
            yield bytes_above
            bytes_above += [self.peak - before, self.now - before]


def _four_bit(linear: torch.nn.Linear, dtype: torch.dtype) -> Any:
    """The 4-bit layer that bitsandbytes makes of one: double quantisation, blocks of 64."""
    # imported here: it brings a second optimiser called SGD, which recipes know by that name
    import bitsandbytes
    from bitsandbytes.functional import QuantState

    rows, columns = linear.out_features, linear.in_features
    layer: Any = bitsandbytes.nn.Linear4bit.__new__(bitsandbytes.nn.Linear4bit)
    torch.nn.Module.__init__(layer)
    layer.in_features, layer.out_features = columns, rows
    packed = torch.empty((rows * columns // 2, 1), dtype=torch.uint8, device=META)
    weight: Any = torch.nn.Parameter(packed, requires_grad=False)
    blocks = rows * columns // 64
    of_scales = QuantState(
        absmax=torch.empty(-(-blocks // 256), device=META),
        blocksize=256,
        code=torch.empty(256, device=META),
        dtype=torch.float32,
    )
    weight.quant_state = QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8, device=META),
        shape=torch.Size((rows, columns)),
        code=torch.empty(16, device=META),
        blocksize=64,
        quant_type="nf4",
        dtype=dtype,
        offset=torch.empty((), device=META),
        state2=of_scales,
    )
    weight.bnb_quantized, weight.compress_statistics, weight.quant_type = True, True, "nf4"
    layer.weight, layer.bias, layer.quant_state = weight, linear.bias, weight.quant_state
    layer.compute_dtype, layer.compute_type_is_set = dtype, True
    layer.quant_storage, layer.support_avx512bf16_for_cpu = torch.uint8, False
    return layer


def _wide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product in float32, as a GPU makes it: without copies of what is multiplied."""
    return torch.mm(left, right, out_dtype=torch.float32)


@dataclass
class Counted:
    """A policy on `meta`, and what counts.

    Args:
        policy: Loaded, its network in train mode.
        bytes: The count.
    """

    policy: Policy
    bytes: Bytes

    def layout(self, tokens: int, prompt: int, turn: int, total: int) -> Any:
        """The first minibatch of sequences that begin with one prompt and ask for two turns."""
        draw = np.random.default_rng(0)
        begin = draw.integers(0, 1000, prompt)
        result = total - prompt - 2 * turn
        asked = [False] * prompt + [True] * turn + [False] * result + [True] * turn
        members = 2 + tokens // (total - prompt)
        own = (draw.integers(0, 1000, total - prompt) for _ in range(members))
        rows = [(np.concatenate([begin, attempt]).tolist(), asked) for attempt in own]
        _, layout = next(self.policy.forward_passes(rows, tokens))
        return layout, move_data_to_device(layout, META)


def counted(
    patch: pytest.MonkeyPatch, config: transformers.PretrainedConfig, **settings: Any
) -> Counted:
    """Load a policy of random weights on `meta`.

    Args:
        patch: Replaces what needs files or numbers (finding weights, comparing log-probabilities),
            and says of `meta` that a GPU's kernels are there.
        config: The model's.
        settings: Of `Policy`.
    """
    count, policy = Bytes(), Policy(".", **settings).build()
    policy.files.__dict__["config"] = config

    def network(*named: str | None, **options: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(options["dtype"])
        try:
            with torch.device("meta"):
                made: Any = transformers.AutoModelForCausalLM.from_config(config)
        finally:
            torch.set_default_dtype(before)
        if policy.settings.quantization == "nf4":
            for parent in list(made.modules()):
                for name, child in list(parent.named_children()):
                    head = child is made.get_output_embeddings()
                    if type(child) is torch.nn.Linear and not head:
                        setattr(parent, name, _four_bit(child, options["dtype"]))
            made.is_loaded_in_4bit = True
        whole = dict.fromkeys(("missing_keys", "mismatched_keys", "unexpected_keys"), ())
        return made, whole

    patch.setattr("turnrl.policy.files.load_part", network)
    patch.setattr("turnrl.policy.loading.fingerprint", lambda *args: "")
    patch.setattr("turnrl.policy.model.check_head", lambda policy: None)
    patch.setattr(
        "turnrl.policy.model.choose_way",
        lambda policy: Way(
            policy.settings.share_prefixes, policy.compute_dtype == torch.bfloat16, "as on a GPU"
        ),
    )
    patch.setattr("turnrl.policy.compute.wide_mm", _wide)
    with count, META:  # where peft makes its weights
        policy.load(META)
    return Counted(policy, count)


class Traffic(TorchDispatchMode):
    """Counts what operations read and write, and the operations of matrix products.

    A view moves nothing, a gather moves its result twice. A product with a 4-bit weight reads it,
    writes it in half precision and reads that again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in ("detach", "alias", "empty", "_unsafe_view", "empty_strided"):
            return out
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        written = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        moved = sum(t.numel() * t.element_size() for t in (*read, *written))
        if name in ("index", "index_select", "embedding", "gather"):
            moved = 2 * sum(t.numel() * t.element_size() for t in written)
        elif name in ("mm", "addmm", "addmm_"):
            left, right = read[-2:]
            self.operations += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        elif name == "gemm_4bit":
            rows, width = read[0].numel() // read[0].shape[-1], read[0].shape[-1]
            columns = written[0].shape[-1]
            self.operations += 2 * rows * width * columns
            moved = 2 * rows * (width + columns) + width * columns * 9 // 2
        self.bytes[name] += moved
        return out
