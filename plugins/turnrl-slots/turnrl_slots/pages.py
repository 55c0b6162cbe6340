"""Keys and values in pages of one size: the holders of each page, and its known contents.

A session's history is a list of pages; the last page may be partly filled. Sessions share pages,
but a page that a session writes to belongs to that session alone. A page with the beginning of a
text can be found by its tokens, and is kept for histories with the same beginning until its room is
needed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from turnrl_slots.memory import empty_cache
from turnrl_slots.sizes import PAGE
from turnrl_slots.transfer import upload

_Key = tuple[int, tuple[int, ...]]


def rectangle(rows: Sequence[Sequence[int]], dtype: type = np.int64) -> np.ndarray:
    """Lists of numbers as rows of an array, filled up with zeros."""
    filled: np.ndarray = np.zeros((len(rows), max(map(len, rows), default=1)), dtype)
    for n, row in enumerate(rows):
        filled[n, : len(row)] = row
    return filled


@dataclass(eq=False)
class Shapes:
    """The shapes of one token's keys and values in each layer, found by reading two tokens.

    It is an `Attend` that notes the shapes and attends to nothing. `heads` is the number of
    key-value heads, `asking` the number of query heads.
    """

    layers: int = 0
    heads: int = 0
    size: int = 0
    asking: int = 0
    dtype: torch.dtype = torch.float32
    windows: set[int] = field(default_factory=set)

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        heads, size = key.shape[1], key.shape[3]
        alike = not self.layers or (self.heads, self.size) == (heads, size)
        if (
            layer != self.layers
            or not alike
            or not key.shape == value.shape == query[:, :heads].shape
        ):
            raise NotImplementedError("keys and values of its layers are not all of one shape")
        self.layers, self.heads, self.size, self.dtype = layer + 1, heads, size, key.dtype
        self.asking = query.shape[1]
        self.windows |= {window} if window is not None else set()
        return query.transpose(1, 2)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, over all layers."""
        return PAGE * 2 * self.layers * self.heads * self.size * self.dtype.itemsize


class Pool:
    """A bounded number of pages, and their contents.

    Not for several threads at once: the engine has a lock.

    Args:
        count: Number of pages.
        shapes: Shapes of keys and values.
        device: The device that holds the pages.
        kernel: True if a GPU's kernels read the pages (see `turnrl_slots.kernel`). A page then
            holds all heads of its first token, then all heads of the next, instead of all tokens of
            its first head. There is also one more page, `nobody`, for tokens that belong to no
            session.
    """

    def __init__(
        self, count: int, shapes: Shapes, device: torch.device, kernel: bool = False
    ) -> None:
        self.count, self.shapes, self.device, self.kernel = count, shapes, device, kernel
        self.nobody = count
        self._total = count + kernel
        self.bytes = self._total * shapes.page_bytes
        self._store: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all holders and contents, and give their memory back."""
        had, self._store = self.allocated, None
        self._scratch = [torch.empty(0), torch.empty(0)]
        self._untouched = 0  # the first page that was never taken, as all after it
        self._free: list[int] = []
        self._holders: dict[int, int] = {}
        self._kept: dict[int, None] = {}  # not held, but can be found by tokens; oldest first
        self._serials: dict[int, int] = {}
        self._serial = 0
        self._page_of: dict[_Key, int] = {}
        self._keys: dict[int, list[_Key]] = {}
        if had:
            # or learning would allocate out of this block, and the whole could not be had again
            empty_cache(self.device)

    @property
    def allocated(self) -> bool:
        """True while the pages have memory: from the first use to a `reset`."""
        return self._store is not None

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return self.count - len(self._holders)

    def take(self) -> int:
        """A page for a new holder to write to: the lowest free one, so that used memory stays
        compact."""
        if self._free:
            page = heapq.heappop(self._free)
        elif self._untouched < self.count:
            page, self._untouched = self._untouched, self._untouched + 1
        else:
            page = next(iter(self._kept))
            del self._kept[page]
            self._forget(page)
        self._serial += 1
        self._serials[page] = self._serial  # so its old successors are no longer found
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holder."""
        self._kept.pop(page, None)
        self._holders[page] = self._holders.get(page, 0) + 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page. A page that can be found by its tokens is kept; beginnings
        are kept longest."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page in self._keys:
                    self._kept[page] = None
                else:
                    heapq.heappush(self._free, page)

    def part(self, pages: Sequence[int]) -> float:
        """The share of these pages that one holder accounts for: a page with n holders counts
        1/n."""
        return sum(1 / self._holders[page] for page in pages)

    def count_freed(
        self, tables: Sequence[Sequence[int]], own: Sequence[int] = ()
    ) -> Iterator[int]:
        """Number of pages freed by releasing the first 1, 2, ... tables. Pages of `own` count as
        soon as nobody else holds them, because then they need no copy."""
        gone = Counter(own)
        free = 0
        for table in tables:
            gone.update(table)
            free += sum(gone[page] == self._holders[page] for page in table)
            yield free

    def is_shared(self, page: int) -> bool:
        """True if a page has several holders."""
        return self._holders[page] > 1

    def find(self, before: int | None, tokens: tuple[int, ...]) -> int | None:
        """The page with these tokens after the page `before` (None: as the first page)."""
        return self._page_of.get((self._name(before), tokens))

    def know(self, page: int, before: int | None, tokens: tuple[int, ...]) -> None:
        """Let a page be found by its tokens. They do not change, but more tokens may follow."""
        key = (self._name(before), tokens)
        if key not in self._page_of:
            self._page_of[key] = page
            self._keys.setdefault(page, []).append(key)

    def _name(self, page: int | None) -> int:
        return 0 if page is None else self._serials[page]

    def _forget(self, page: int) -> None:
        for key in self._keys.pop(page, ()):
            del self._page_of[key]

    @property
    def store(self) -> Tensor:
        """(layers, 2, pages, key-value heads, page, D), keys and values; for a kernel (layers,
        2, pages, page, key-value heads, D).

        All zeros at first: unwritten places are masked, but a weight of zero times a number that is
        not finite would not be zero. On a CPU, memory that is never touched takes no room.
        """
        if self._store is None:
            shapes = self.shapes
            page = (PAGE, shapes.heads) if self.kernel else (shapes.heads, PAGE)
            shape = (shapes.layers, 2, self._total, *page, shapes.size)
            if self.device.type == "cpu":
                empty_cache(self.device)  # of learning's leftovers, which would take room as well
                plain = torch.from_numpy(np.zeros(self.bytes, np.uint8))
                self._store = plain.view(shapes.dtype).view(shape)
            else:
                self._store = torch.zeros(shape, dtype=shapes.dtype, device=self.device)
        return self._store

    def tensor(self, array: np.ndarray) -> Tensor:
        """An array on the device of the pages."""
        return upload(array, self.device)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values, (heads, N, D), to `slots`: (heads x N), or for a kernel (N,)."""
        for side, new in enumerate((keys, values)):
            if self.kernel:
                places, new = self.store[layer, side].flatten(0, 1), new.transpose(0, 1)
            else:
                places, new = self.store[layer, side].flatten(0, 2), new.flatten(0, 1)
            places.index_copy_(0, slots, new)

    def gather(self, layer: int, units: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """(rows x heads, tokens, D), keys and values, if no kernel reads the pages. They last until
        the next call: allocating memory anew in each layer costs more than the work in it."""
        shapes, sides = self.shapes, []
        for side in range(2):
            size = len(units) * PAGE * shapes.size
            if self._scratch[side].numel() < size:
                self._scratch[side] = torch.empty(size, dtype=shapes.dtype, device=self.device)
            out = self._scratch[side][:size].view(-1, PAGE, shapes.size)
            torch.index_select(self.store[layer, side].flatten(0, 1), 0, units, out=out)
            sides.append(out.view(rows * shapes.heads, -1, shapes.size))
        return sides[0], sides[1]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages, as (from, to). All are read before any is written."""
        sources, targets = self.tensor(np.array(pairs)).unbind(1)
        self.store[:, :, targets] = self.store[:, :, sources]
