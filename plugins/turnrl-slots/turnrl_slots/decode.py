"""The step that samples one token of each row, at fixed addresses, so that a GPU can replay it.

A step of a large model is thousands of short kernels, and launching them takes longer than running
them. A CUDA graph launches all of them at once, but only for the sizes and addresses that it was
recorded with. So rows are padded to the next of a few sizes (`padded_size`), and tables of pages to
the longest history, because the kernel reads pages in place, and not the rest. Padding rows read
and write a page that belongs to nobody. The inputs of a size are in two buffers, and the device
computes all else from them.

A size is computed plainly the first time, which warms it up, and recorded the second time, so a
size that occurs once costs nothing extra. Recording takes about as long as a plain step. Graphs
know the addresses of weights and pages, so they last for one collection.

On a CPU all sizes are padded in the same way and computed plainly.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from turnrl.plugin.errors import summarize_error
from turnrl.policy.device import is_device_error
from turnrl_slots.kernel import KernelPass, Sequences, Tables
from turnrl_slots.pages import Pool
from turnrl_slots.sizes import PAGE, count_pages
from turnrl_slots.transfer import fill

_logger = logging.getLogger(__name__)

Hidden = Callable[[Tensor, Tensor, KernelPass], Tensor]
"""Reads tokens (R,) at positions (R,); returns the hidden state after each, (R, H)."""

_GAP = 0.05
"""Largest relative difference of a first replay from the plain step; bfloat16 alone makes 0.01."""


def padded_size(rows: int) -> int:
    """The number of rows in a step that samples so many.

    Up to 8 rows, sizes are powers of two; up to 256 there are two sizes per doubling (12, 16, 24,
    32, ...): with so few rows, reading weights takes longer than computing, and padding is nearly
    free. Beyond 256, computing takes longer, so there are four sizes per doubling (320, 384, 448,
    512, 640, ...), and at most a fifth of a step is padding. Up to 512 these are 18 sizes.
    """
    power = 1 << (rows - 1).bit_length()
    if rows <= 8:
        return power
    step = power // 4 if rows <= 256 else power // 8
    return -(-rows // step) * step


class Graphs:
    """Records steps on a GPU.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        """Drop all graphs. Later graphs share one new block of memory, because they are replayed
        one at a time, and the result of a replay is used before the next."""
        self._memory = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Send work to the recording stream, after all earlier work and before all later work, so
        that libraries do their setup there, which a graph cannot record."""
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            yield
        main.wait_stream(self._stream)

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record a computation; return a function that replays it, and the tensor in which each
        replay leaves its result.

        Raises:
            RuntimeError: If the computation does something that cannot be recorded.
        """
        # not `torch.cuda.graph`, which empties the allocator's cache for each graph
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            # other threads, of tools for example, may use the GPU meanwhile
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                outputs = compute()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # a broken capture raises again
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay, outputs


class StepBuffers:
    """The buffers of a step of one size, and its replay once it is recorded.

    Args:
        pool: The pages of keys and values.
        hidden: The forward pass.
        rows: The most sequences that the step advances.
        width: Pages of a sequence's table.

    Attributes:
        output: The hidden states of the last step; None before the first.
        replay: Computes the step again from the buffers; None until it is recorded.
    """

    def __init__(self, pool: Pool, hidden: Hidden, rows: int, width: int) -> None:
        self._pool, self._hidden, self._size = pool, hidden, (rows, width)
        self._read = torch.zeros(2, rows, dtype=torch.long, device=pool.device)
        self._table = torch.zeros(rows, width, dtype=torch.int32, device=pool.device)
        self._begins = torch.arange(rows + 1, dtype=torch.int32, device=pool.device)
        self._tables: Tables | None = None
        self.output: Tensor | None = None
        self.replay: Callable[[], None] | None = None

    def fill(self, tables: Tables, lengths: np.ndarray, tokens: list[int]) -> None:
        """Fill the buffers for the next step. A table is written only if it has changed."""
        rows, width = self._size
        read = np.zeros((2, rows), np.int64)
        read[:, : len(tokens)] = tokens, lengths
        fill(self._read, read)
        if self._tables is not tables:
            pages = np.full((rows, width), self._pool.nobody, np.int32)
            used = tables.pages[:, :width]
            pages[: len(used), : used.shape[1]] = used
            fill(self._table, pages)
            self._tables = tables

    def compute(self) -> Tensor:
        """(rows, H), computed from the buffers alone and without the host."""
        tokens, positions = self._read
        page = self._table.gather(1, (positions // PAGE)[:, None])[:, 0].long()
        slots = page * PAGE + positions % PAGE
        used = (positions + 1).int()
        rows = Sequences(self._table, self._begins, used, len(tokens), 1)
        return self._hidden(tokens, positions, KernelPass(self._pool, positions, slots, [rows]))


class Decoder:
    """Computes steps, each in the smallest size that holds it.

    Args:
        pool: The pages of keys and values.
        hidden: The forward pass.
        graphs: Records steps; None to compute each step plainly.
        longest: Tokens of the longest history.

    Attributes:
        graphs: As passed in; None after a recording has failed.
        steps: The sizes met so far, (rows, pages of a table), each with its buffers, and with its
            `replay` once it is recorded.
    """

    def __init__(self, pool: Pool, hidden: Hidden, graphs: Graphs | None, longest: int) -> None:
        self._pool, self._hidden, self.graphs = pool, hidden, graphs
        self._widest = count_pages(longest)
        self.steps: dict[tuple[int, int], StepBuffers] = {}
        self._checked = False

    def forget(self) -> None:
        """Drop all graphs. Call it before weights or the pool's memory move, because graphs hold
        their addresses."""
        self.steps.clear()
        self._checked = False
        if self.graphs is not None:
            self.graphs.forget()

    def __call__(self, tables: Tables, lengths: np.ndarray, tokens: list[int]) -> Tensor:
        """The hidden state after each row's token, (R, H). It lasts until the next call.

        Args:
            tables: The tables of the rows.
            lengths: (R,), tokens of each row that are in its pages already.
            tokens: The next token of each row.
        """
        size = padded_size(len(tokens)), self._width(count_pages(int(lengths.max()) + 1))
        step = self.steps.get(size)
        if step is None:
            step = self.steps[size] = StepBuffers(self._pool, self._hidden, *size)
        step.fill(tables, lengths, tokens)
        if self.graphs is not None and step.output is not None and step.replay is None:
            self._record(step, self.graphs)
        if step.replay is not None:
            step.replay()
        elif self.graphs is None:
            step.output = step.compute()
        else:
            with self.graphs.aside():
                step.output = step.compute()
        assert step.output is not None
        return step.output[: len(tokens)]

    def _width(self, pages: int) -> int:
        return self._widest if pages <= self._widest else 1 << (pages - 1).bit_length()

    def _record(self, step: StepBuffers, graphs: Graphs) -> None:
        """Record a step. If that fails, no other step is recorded, and there is one warning. The
        first replay is compared with the plain step; repeating a step changes nothing."""
        try:
            replay, output = graphs.record(step.compute)
            if not self._checked:
                replay()
                wanted = step.compute().float()
                gap = float((output.float() - wanted).norm() / wanted.norm())
                if not gap < _GAP:
                    raise RuntimeError(f"a replayed step is off by {gap:.2g}")
                self._checked = True
        except RuntimeError as error:
            if is_device_error(error):
                raise
            _logger.warning(
                f"tokens are sampled without CUDA graphs ({summarize_error(error)}). Sampling "
                "then takes 1.7 to 2.3 times as long (measured with Qwen2.5-7B on an H100). Set "
                "model.engine.cuda_graphs to false to skip the attempt."
            )
            self.graphs = None
        else:
            step.replay, step.output = replay, output
