"""Forward passes over pages, with the weights for sampling: one token of each row, and the tokens
that turns begin with."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from turnrl.engines import SampledPolicy
from turnrl_slots.attention import Feed, GatherPlan
from turnrl_slots.dense import Dense
from turnrl_slots.pages import Pool
from turnrl_slots.sampling import sample
from turnrl_slots.scheduler import Request
from turnrl_slots.stops import Stops
from turnrl_slots.transfer import pack

if TYPE_CHECKING:
    from turnrl_slots.decode import Decoder
    from turnrl_slots.kernel import KernelPass, Tables

Reason = Literal["end", "stop", "length"]


class Passes:
    """Computes passes.

    Args:
        policy: The policy, loaded.
        pool: Its pages.
        samples_dense: Sample with the adapter beside a dense base; see `Dense`.
        graphs: Record the passes that only sample, if a GPU's kernel computes attention.
        piece_tokens: The most tokens read in one pass.
        longest: Tokens of the longest history.

    Attributes:
        stops: Finds the stop strings.
        dense: The dense weights of base and adapter, while they are in memory.
        decoder: Computes the passes that only sample, if a GPU's kernel computes attention.
    """

    def __init__(
        self,
        policy: SampledPolicy,
        pool: Pool,
        samples_dense: bool,
        graphs: bool,
        piece_tokens: int,
        longest: int,
    ) -> None:
        self.policy, self.pool, self.samples_dense = policy, pool, samples_dense
        self._network, self._piece_tokens = policy.load(), piece_tokens
        self.stops = Stops(policy, self._network.config.get_text_config().vocab_size)
        self.dense: Dense | None = None
        self.decoder: Decoder | None = None
        self._plan_of: Callable[[Sequence[Sequence[int]], Pool], GatherPlan | Tables] = GatherPlan
        if pool.kernel:
            from turnrl_slots.decode import Decoder, Graphs
            from turnrl_slots.kernel import Tables

            self._plan_of = Tables
            recorded = Graphs(pool.device) if graphs and pool.device.type == "cuda" else None
            self.decoder = Decoder(pool, self._hidden, recorded, longest)
        self._planned: list[Request] = []
        self._plan: GatherPlan | Tables | None = None
        """Page plan of the rows of the last pass."""

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Let the network have the weights for sampling."""
        if not self.samples_dense:
            yield
            return
        if self.dense is None:
            self.dense = Dense(self._network)
        with self.dense.in_place():
            yield

    def forget(self) -> None:
        """Give back the memory of dense weights and graphs, and forget the adapter as it is now."""
        self.dense = None
        if self.decoder is not None:
            self.decoder.forget()
        self._planned, self._plan = [], None

    def step(self, active: list[Request], several: list[Request]) -> Tensor:
        """The hidden state after the last token of each active turn, (n, H), in their order.

        Args:
            active: The turns that are being sampled.
            several: The turns with more than one token to read: the last ones of `active`.
        """
        rows = active[: len(active) - len(several)]
        if self._plan is None or rows != self._planned:
            tables = [r.history.table for r in rows]
            self._planned, self._plan = rows, self._plan_of(tables, self.pool)
        lengths = np.array([len(r.ids) + len(r.token_ids) - 1 for r in rows], np.int64)
        tokens = [(r.token_ids or r.ids)[-1] for r in rows]
        *before, last = self._pieces(several)
        states = [self.compute([], np.zeros(0, np.int64), [], feeds) for feeds in before]
        hidden = self._forward(self._plan, lengths, tokens, last)
        return torch.cat([hidden[: len(rows)], *states, hidden[len(rows) :]])

    def compute(
        self,
        tables: Sequence[Sequence[int]],
        lengths: np.ndarray,
        tokens: list[int],
        feeds: list[Feed],
    ) -> Tensor:
        """The hidden state after each row's token, and after each feed that ends, (n, H).

        Args:
            tables: The pages of each row.
            lengths: Tokens of each row that are in its pages already.
            tokens: The next token of each row.
            feeds: Other tokens to read in the same pass.
        """
        return self._forward(self._plan_of(tables, self.pool), lengths, tokens, feeds)

    def draw(self, active: list[Request], hidden: Tensor) -> list[tuple[Request, Reason]]:
        """Draw the next token of each active turn from its hidden state, and return the turns that
        this token ends."""
        uniforms = [r.uniforms[len(r.token_ids)] for r in active]
        forced = [
            s.forced_ids[n] if (n := len(r.token_ids)) < len((s := r.sampling).forced_ids) else None
            for r in active
        ]
        samplings = [r.sampling for r in active]
        tokens, logprobs = sample(self.policy.logits, hidden, samplings, uniforms, forced)
        for request, token, logprob in zip(active, tokens, logprobs, strict=True):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
        reasons = ((request, self._ending(request)) for request in active)
        return [(request, reason) for request, reason in reasons if reason is not None]

    def _ending(self, request: Request) -> Reason | None:
        sampling, token = request.sampling, request.token_ids[-1]
        if token in sampling.end_ids:
            return "end"
        completes = request.closers is None or token in request.closers
        if sampling.stop and completes and self.stops.has_stop(request.token_ids, sampling.stop):
            return "stop"
        return "length" if len(request.token_ids) >= sampling.max_tokens else None

    def _hidden(self, tokens: Tensor, positions: Tensor, attend: KernelPass) -> Tensor:
        return self.policy.hidden(tokens[None], None, positions[None], attend=attend)[0]

    def _pieces(self, requests: list[Request]) -> list[list[Feed]]:
        """The tokens to read, divided into one portion per forward pass: at least one portion,
        which may be empty."""
        pieces: list[list[Feed]] = [[]]
        room = self._piece_tokens
        for request in requests:
            ids, start, table = request.ids, request.history.covered, request.history.table
            while start < len(ids):
                if pieces[-1] and len(ids) - start > room:
                    pieces.append([])
                    room = self._piece_tokens
                part = ids[start : start + room]
                start, room = start + len(part), room - len(part)
                pieces[-1].append(Feed(table, start - len(part), part, start == len(ids)))
        return pieces

    def _forward(
        self, plan: GatherPlan | Tables, lengths: np.ndarray, tokens: list[int], feeds: list[Feed]
    ) -> Tensor:
        if self.decoder is not None and not isinstance(plan, GatherPlan) and not feeds:
            return self.decoder(plan, lengths, tokens)
        attend = plan.attend_to(lengths, feeds)
        ids = [*tokens, *itertools.chain.from_iterable(feed.ids for feed in feeds)]
        last = np.cumsum([len(tokens), *(len(feed.ids) for feed in feeds)])[1:] - 1
        ends = [at for at, feed in zip(last.tolist(), feeds, strict=True) if feed.ends]
        wanted_rows = [*range(len(tokens)), *ends]
        arrays = [np.array(ids, np.int32), np.array(wanted_rows, np.int32)]
        read, wanted = (tensor.long() for tensor in pack(arrays, self.pool.device))
        hidden = self.policy.hidden(read[None], None, attend.positions[None], attend=attend)[0]
        return hidden[wanted] if feeds else hidden
