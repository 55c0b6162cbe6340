"""`Slots`, the in-process engine: any transformers decoder, sessions batched as they come.

Rows of a preallocated key-value store are *slots*. A turn that is being sampled occupies a slot;
rows in use are always the first n, so a step works on a view. When a turn ends, its keys and values
are kept with the session and the slot goes to the next turn waiting: nothing is ever read twice,
and a fork costs nothing until it generates.

The model is the stock one, adapters and 4-bit layers included: it sees a `Cache` whose rows have
lengths of their own, and a mask that says which entries each query may attend to.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, final

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from turnrl import Completion, Engine, RecipeError, SampledPolicy, Sampling, Session

_BLOCK = 64
"""Capacity of the store grows by this many tokens at a time."""


class _Store:
    """Keys and values of all slots: one tensor (layers, 2, slots, heads, capacity, head size)."""

    def __init__(self, layers: int, slots: int) -> None:
        self.layers = layers
        self.slots = slots
        self.store: Tensor | None = None
        self.rows = slice(0, 0)
        self.positions = torch.empty(0)
        self.length = 0

    def reserve(self, length: int, like: Tensor) -> Tensor:
        """Make room for `length` tokens per slot. `like` is (n, heads, t, head size)."""
        if self.store is None or self.store.shape[4] < length:
            capacity = -(-length // _BLOCK) * _BLOCK
            if self.store is not None:  # growth is geometric, so that copying stays linear overall
                capacity = max(capacity, self.store.shape[4] * 3 // 2 // _BLOCK * _BLOCK)
            heads, size = like.shape[1], like.shape[3]
            grown = like.new_zeros(self.layers, 2, self.slots, heads, capacity, size)
            if self.store is not None:
                grown[..., : self.store.shape[4], :] = self.store
            self.store = grown
        return self.store

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write (n, heads, t, size) at `positions` (n, t) of `rows`; give back all that they
        hold.
        """
        store = self.reserve(self.length, keys)[layer, :, self.rows]
        index = torch.arange(keys.shape[0], device=keys.device)[:, None]
        store[0][index, :, self.positions] = keys.transpose(1, 2)
        store[1][index, :, self.positions] = values.transpose(1, 2)
        return store[0, :, :, : self.length], store[1, :, :, : self.length]


class _SlotLayer(CacheLayerMixin):
    """One layer's window on `_Store`, in the form that transformers' attention expects."""

    is_sliding = False

    def __init__(self, store: _Store, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.store = store
        self.layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store makes room when it is written to."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.store.update(self.layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.length, 0

    def get_seq_length(self) -> int:
        return self.store.length

    def get_max_length(self) -> int:
        return -1


@contextlib.contextmanager
def _evaluating(network: torch.nn.Module) -> Iterator[None]:
    """Eval mode within, the mode it was in afterwards."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


@dataclass(eq=False)
class _Past:
    """Tokens whose keys and values are, or will be, known; immutable once read, so sessions share
    it.
    """

    ids: tuple[int, ...]
    """Ids to be read before anything else; empty once `state` covers them."""
    state: Tensor | None = None
    """(layers, 2, heads, length, size), or None if nothing has been read."""

    @property
    def length(self) -> int:
        return len(self.ids) + (0 if self.state is None else self.state.shape[3])


@dataclass(eq=False)
class _Request:
    """A turn being sampled."""

    order: int
    session: _Session
    feed: list[int]
    sampling: Sampling
    future: asyncio.Future[Completion]
    uniforms: np.ndarray
    length: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class _Session(Session):
    """Keys and values cover all tokens but `pending`, at least one."""

    def __init__(self, engine: Slots, past: _Past, pending: list[int]) -> None:
        self._engine = engine
        self._order = next(engine._orders)
        self._version = engine._version
        self._busy = False
        self._closed = False
        self.past = past
        self.pending = pending

    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        self._check()
        if sampling.max_tokens < 1:
            raise ValueError(
                f"max_tokens is {sampling.max_tokens}, but a turn has at least one token"
            )
        self._busy = True
        try:
            return await self._engine._submit(self, [*self.pending, *new_ids], sampling)
        except BaseException:
            self.close()  # what was sampled of the turn is lost, so the history has a hole
            raise
        finally:
            self._busy = False

    def _check(self) -> None:
        if self._closed or self._busy:
            raise RuntimeError(
                "a session generates one turn at a time, and none after close() or a turn that "
                "was cancelled"
            )
        if self._version != self._engine._version:
            raise RuntimeError("a session ends when the engine's weights change: open a new one")

    def fork(self) -> _Session:
        self._check()
        return _Session(self._engine, self.past, list(self.pending))

    def close(self) -> None:
        self._closed = True
        self.past = _Past(())


@final
class Slots(Engine):
    """Samples with the policy's own weights, in this process.

    Turns that are asked for in the same tick of the event loop are admitted in the order in which
    their sessions were opened, so equal requests give equal batches and equal results to the last
    digit.

    Args:
        slots: The most turns sampled at once.
        prefill_tokens: The most tokens (padding included) read in one forward pass.
    """

    def __init__(self, slots: int = 256, prefill_tokens: int = 16384) -> None:
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        if slots < 1 or prefill_tokens < 1:
            raise RecipeError(
                f"model.engine.slots is {slots} and model.engine.prefill_tokens {prefill_tokens}; "
                "both must be at least 1"
            )
        self._version = 0
        self._slots_in_use: list[_Request] = []
        self._inbox: list[_Request] = []
        self._waiting: list[_Request] = []
        self._orders = itertools.count()
        self._server: asyncio.Task[None] | None = None
        self._kv = _Store(0, slots)
        self._closing: dict[str, set[int]] = {}

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """See `Engine.start`. The policy is used in eval mode, whatever mode it is in."""
        self._policy = policy
        self._network = policy.load()
        layers = self._network.config.get_text_config().num_hidden_layers
        self._kv = _Store(layers, self.slots)
        self._closing = {}  # of another tokenizer, perhaps
        self._cache = Cache(layers=[_SlotLayer(self._kv, k) for k in range(layers)])
        self._probe(max_tokens)

    def sync(self, version: int) -> None:
        """See `Engine.sync`. The weights are the policy's own, so there is nothing to copy."""
        self._version = version

    def close(self) -> None:
        """See `Engine.close`."""
        self._kv.store = None
        self._version = -1

    @torch.inference_mode()
    def _probe(self, tokens: int) -> None:
        """Read a text as long as any that will come, once with slots and in two parts, and once as
        the model itself would. Sliding windows, chunked attention, recurrent layers and whatever
        else a slot does not hold show in the difference."""
        vocabulary = self._network.config.get_text_config().vocab_size
        ids = [(7919 * i + 104_729) % vocabulary for i in range(max(tokens, 2))]
        half = len(ids) // 2
        self._kv.slots = 1
        with _evaluating(self._network):
            try:
                self._forward([ids[:half]], [0], slice(0, 1))
                found = self._policy.logits(self._forward([ids[half:]], [half], slice(0, 1)))
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
                self._refuse(f"({type(error).__name__}: {error})", error)
            whole = torch.tensor([ids], device=self._device)
            positions = torch.arange(len(ids), device=self._device)[None]
            hidden = self._policy.hidden(whole, None, positions, use_cache=False)
        self._kv.slots, self._kv.store = self.slots, None
        gap = found.log_softmax(-1) - self._policy.logits(hidden[:, -1]).log_softmax(-1)
        # rounding alone makes 1e-5 in float32, and some hundredths in bfloat16
        limit = 1e-2 if hidden.dtype == torch.float32 else 0.25
        if not (gap.abs().mean() < limit):
            self._refuse(
                f"(log-probabilities {float(gap.abs().mean()):.2g} nats apart after {len(ids)} "
                "tokens)"
            )

    def _refuse(self, why: str, cause: Exception | None = None) -> NoReturn:
        window = getattr(self._network.config.get_text_config(), "sliding_window", None)
        at_most = f" ({window} or less)" if window else ""
        raise RecipeError(
            f"{type(self._network).__name__} cannot be sampled by the engine Slots, which keeps "
            f"keys and values of full attention {why}. Set rollout.max_tokens within the model's "
            f"attention window{at_most}, or choose another model."
        ) from cause

    @property
    def _device(self) -> torch.device:
        return next(self._network.parameters()).device

    def open(self, prompt_ids: Sequence[int]) -> _Session:
        """See `Engine.open`."""
        if not prompt_ids:
            raise ValueError("a prompt has at least one token")
        return _Session(self, _Past(tuple(prompt_ids[:-1])), [prompt_ids[-1]])

    async def _submit(self, session: _Session, feed: list[int], sampling: Sampling) -> Completion:
        loop = asyncio.get_running_loop()
        # in (0, 1]: a draw of 0 could pick a token of probability 0
        uniforms = 1 - np.random.Generator(np.random.Philox(sampling.seed)).random(
            sampling.max_tokens
        )
        request = _Request(session._order, session, feed, sampling, loop.create_future(), uniforms)
        self._inbox.append(request)
        if self._server is None or self._server.done():
            self._server = loop.create_task(self._serve())
        return await request.future

    async def drain(self) -> None:
        """See `Engine.drain`."""
        if self._server is not None:
            await asyncio.gather(self._server, return_exceptions=True)
            self._server = None
        self._kv.store = None

    async def _serve(self) -> None:
        """Step until nobody waits. The forward pass runs in a thread, so that tools go on
        meanwhile.
        """
        loop = asyncio.get_running_loop()
        pool = ThreadPoolExecutor(1, thread_name_prefix="turnrl-engine")
        # in train mode, checkpointing would drop the cache, and dropout would bite
        with _evaluating(self._network), pool as thread:
            await asyncio.sleep(0)  # whoever asks in this tick is in the first batch
            while self._inbox or self._waiting or self._slots_in_use:
                # the inbox belongs to the loop's thread, all else to the engine's
                arrived, self._inbox = self._inbox, []
                try:
                    finished = await loop.run_in_executor(thread, self._advance, arrived)
                except BaseException as error:
                    for request in [*arrived, *self._inbox, *self._waiting, *self._slots_in_use]:
                        if not request.future.done():
                            request.future.set_exception(
                                error
                                if isinstance(error, Exception)
                                else RuntimeError("sampling was interrupted")
                            )
                    self._inbox, self._waiting, self._slots_in_use = [], [], []
                    if not isinstance(error, Exception):
                        raise
                    return
                for request, completion in finished:
                    if not request.future.done():
                        request.future.set_result(completion)
                await asyncio.sleep(0)

    @torch.inference_mode()
    def _advance(self, arrived: list[_Request]) -> list[tuple[_Request, Completion]]:
        """Admit who fits, or sample one token in every slot. Returns the turns that ended."""
        for row in reversed(range(len(self._slots_in_use))):
            if self._slots_in_use[row].future.cancelled():
                self._vacate(row)
        self._waiting = sorted(
            (r for r in [*self._waiting, *arrived] if not r.future.cancelled()),
            key=lambda r: r.order,
        )
        return self._admit() or self._step()

    def _admit(self) -> list[tuple[_Request, Completion]]:
        free = self.slots - len(self._slots_in_use)
        admitted, self._waiting = self._waiting[:free], self._waiting[free:]
        if not admitted:
            return []
        first = len(self._slots_in_use)
        unread = list({r.session.past: None for r in admitted if r.session.past.ids})
        for some in self._batches([len(p.ids) for p in unread], free):
            batch = [unread[i] for i in some]
            rows = slice(first, first + len(batch))
            self._forward([list(p.ids) for p in batch], [0] * len(batch), rows)
            for row, past in enumerate(batch, first):
                past.state = self._copy(row, len(past.ids))
                past.ids = ()
        finished = []
        for some in self._batches([len(r.feed) for r in admitted], free):
            batch_requests = [admitted[i] for i in some]
            start = len(self._slots_in_use)
            for row, request in enumerate(batch_requests, start):
                self._load(row, request.session.past)
                request.length = request.session.past.length
                # the slot has it now; a fork may still hold on to it
                request.session.past = _Past(())
            rows = slice(start, start + len(batch_requests))
            feeds = [r.feed for r in batch_requests]
            hidden = self._forward(feeds, [r.length for r in batch_requests], rows)
            for request in batch_requests:
                request.length += len(request.feed)
            self._slots_in_use += batch_requests
            finished += self._sample(hidden, rows)
        return finished

    def _batches(self, lengths: list[int], rows: int) -> list[list[int]]:
        """Consecutive indices, such that each padded batch stays within the token budget."""
        batches: list[list[int]] = []
        longest = 0
        for i, length in enumerate(lengths):
            longest = max(longest, length)
            full = not batches or len(batches[-1]) >= rows
            if full or (len(batches[-1]) + 1) * longest > self.prefill_tokens:
                batches.append([])
                longest = length
            batches[-1].append(i)
        return batches

    def _step(self) -> list[tuple[_Request, Completion]]:
        if not self._slots_in_use:
            return []
        rows = slice(0, len(self._slots_in_use))
        feeds = [[r.token_ids[-1]] for r in self._slots_in_use]
        hidden = self._forward(feeds, [r.length for r in self._slots_in_use], rows)
        for request in self._slots_in_use:
            request.length += 1
        return self._sample(hidden, rows)

    def _forward(self, feeds: list[list[int]], lengths: list[int], rows: slice) -> Tensor:
        """Append `feeds` to the rows; give the hidden state after each row's last token, (n, H).

        A row shorter than the longest is padded on the right. What the padding writes lies beyond
        the row's length, is masked, and is overwritten by the row's next tokens.
        """
        device = self._device
        longest = max(map(len, feeds))
        ids = torch.tensor([feed + [0] * (longest - len(feed)) for feed in feeds], device=device)
        start = torch.tensor(lengths, device=device)
        positions = start[:, None] + torch.arange(longest, device=device)
        self._kv.rows, self._kv.positions = rows, positions
        self._kv.length = max(length + longest for length in lengths)
        mask = torch.arange(self._kv.length, device=device) <= positions[:, None, :, None]
        last = torch.tensor([len(feed) - 1 for feed in feeds], device=device)
        # padding may not stand at a position beyond the row's own: a model may have none there, and
        # some scale their rotary embeddings by the largest position that they see
        real = torch.minimum(positions, (start + last)[:, None])
        hidden = self._policy.hidden(ids, mask, real, past_key_values=self._cache, use_cache=True)
        return hidden[torch.arange(len(feeds), device=device), last]

    def _sample(self, hidden: Tensor, rows: slice) -> list[tuple[_Request, Completion]]:
        """Draw one token in each of the rows by inverting the cumulative distribution."""
        requests = self._slots_in_use[rows]
        logits = self._policy.logits(hidden)
        temperatures = torch.tensor(
            [r.sampling.temperature for r in requests], device=logits.device
        )
        greedy = temperatures == 0
        log_p = torch.log_softmax(logits / temperatures.masked_fill(greedy, 1.0)[:, None], dim=-1)
        cumulative = log_p.exp().cumsum(-1)
        draws = torch.tensor(
            [float(r.uniforms[len(r.token_ids)]) for r in requests], device=logits.device
        )
        drawn = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:])[:, 0]
        tokens = torch.where(greedy, logits.argmax(-1), drawn.clamp(max=logits.shape[-1] - 1))
        for row, request in enumerate(requests):
            if len(request.token_ids) < len(forced := request.sampling.forced_ids):
                tokens[row] = forced[len(request.token_ids)]
        chosen = log_p.gather(-1, tokens[:, None])[:, 0]
        finished = []
        for row, (request, token, logprob) in enumerate(
            zip(requests, tokens.tolist(), chosen.tolist(), strict=True), rows.start
        ):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            reason = self._ending(request)
            if reason is not None:
                request.session.past = _Past((), self._copy(row, request.length))
                request.session.pending = [token]
                completion = Completion(tuple(request.token_ids), tuple(request.logprobs), reason)
                finished.append((request, completion))
        for request, _ in finished:
            self._vacate(self._slots_in_use.index(request))
        return finished

    def _ending(self, request: _Request) -> Literal["end", "stop", "length"] | None:
        token, sampling = request.token_ids[-1], request.sampling
        if token in sampling.end_ids:
            return "end"
        if sampling.stop and any(self._may_close(s, token) for s in sampling.stop):
            # no stop string is longer in tokens than in bytes, so the tail is all that can hold one
            tail = request.token_ids[-max(len(s.encode()) for s in sampling.stop) :]
            text = self._policy.tokenizer.decode(tail)
            if any(s in text for s in sampling.stop):
                return "stop"
        return "length" if len(request.token_ids) >= sampling.max_tokens else None

    def _may_close(self, stop: str, token: int) -> bool:
        """Whether a token can be the one that completes a stop string, from its text alone."""
        if not "!" <= stop[-1] <= "~":  # vocabularies write anything else in codes of their own
            return True
        if stop[-1] not in self._closing:
            tokenizer = self._policy.tokenizer
            pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
            holders = {i for i, piece in enumerate(pieces) if stop[-1] in (piece or "")}
            self._closing[stop[-1]] = holders
        return token in self._closing[stop[-1]] or token >= len(self._policy.tokenizer)

    def _copy(self, row: int, length: int) -> Tensor | None:
        if length == 0 or self._kv.store is None:
            return None
        return self._kv.store[:, :, row, :, :length].clone()

    def _load(self, row: int, past: _Past) -> None:
        if past.state is not None:
            length = past.state.shape[3]
            store = self._kv.reserve(length, past.state[0])
            store[:, :, row, :, :length] = past.state

    def _vacate(self, row: int) -> None:
        """Give up a slot; the last one in use moves into it."""
        last = len(self._slots_in_use) - 1
        if row != last:
            moved = self._slots_in_use[last]
            assert self._kv.store is not None
            self._kv.store[:, :, row, :, : moved.length] = self._kv.store[
                :, :, last, :, : moved.length
            ]
            self._slots_in_use[row] = moved
        self._slots_in_use.pop()
