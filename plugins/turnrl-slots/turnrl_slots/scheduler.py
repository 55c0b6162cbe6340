"""Chooses the turns that are sampled and their pages: turns wait, begin, and give up room.

A turn is begun when there is a slot for it, room in the forward pass for what it has to read, and
pages for all that it may come to need; so no turn stops in the middle. Pages that others have read
of its history are shared. Where pages are held by sessions that are idle, these give them up, those
that will go on last first, and are read again when they go on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from turnrl import Completion, Sampling
from turnrl_slots.pages import Pool
from turnrl_slots.sizes import PAGE, pages_of

_LIKELY = 0.9
"""The share of the sessions that would fit by what others needed that `capacity` promises; if they
come to need more, some are read again."""


@dataclass(eq=False)
class History:
    """A session's tokens, and the pages of the first `covered` of them: after a turn that is all
    but the last; before the first, or when the pages had to be given up, none."""

    order: int
    ids: tuple[int, ...]
    table: list[int] = field(default_factory=list)
    covered: int = 0
    closed: bool = False


@dataclass(eq=False)
class Request:
    """A turn: asked for, and later sampled."""

    history: History
    ids: tuple[int, ...]
    """The history, with what is new in this turn."""
    sampling: Sampling
    future: asyncio.Future[Completion]
    uniforms: list[float]
    closers: frozenset[int] | None
    """Tokens that may complete a stop string; None if any may."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def reads(self) -> int:
        """Tokens that have no keys and values yet, the last of which is what sampling begins at."""
        return len(self.ids) - self.history.covered


class Scheduler:
    """Turns and pages of one engine.

    `begin` and `end` belong to the thread that computes; `fork` and `let_go` may be called by
    another meanwhile.

    Args:
        pool: The pages.
        slots: The most turns sampled at once.
        prefill_tokens: The most tokens read in one forward pass.
        least: How many sessions fit whatever they come to need.
    """

    def __init__(self, pool: Pool, slots: int, prefill_tokens: int, least: int) -> None:
        self.pool, self._slots, self._prefill_tokens = pool, slots, prefill_tokens
        self._least = least
        self._lock = threading.Lock()
        """Guards pages, their holders and their tables."""
        self._holders: dict[History, None] = {}
        """Histories that have pages."""
        self.forget()

    def forget(self, keep: bool = False) -> None:
        """No turn, and no page is held or known; the pages' memory is given back, or kept."""
        self.active: list[Request] = []
        """Turns that are being sampled, in the order in which they were begun."""
        self.waiting: list[Request] = []
        with self._lock:
            for history in self._holders:
                history.table, history.covered = [], 0
            self._holders.clear()
            self._sampled: set[History] = set()
            """The holders whose turn is being sampled."""
            self.capacity = self._least
            """Number of sessions that are likely to fit."""
            self._ended = (0, 0.0)
            """Sessions that have ended, and pages that they held."""
            self.pool.reset(keep)

    def fork(self, history: History, order: int) -> History:
        """A history that begins with all of another's, and shares its pages."""
        copy = History(order, history.ids)
        with self._lock:
            if history in self._holders:
                copy.table, copy.covered = list(history.table), history.covered
                for page in copy.table:
                    self.pool.hold(page)
                self._holders[copy] = None
        return copy

    def let_go(self, history: History) -> None:
        """The session is closed. If a pass is writing to its pages, they are given back after."""
        history.closed = True
        with self._lock:
            if history not in self._sampled:
                if history.table:
                    self._estimate(history)
                self._give_up(history)

    def begin(self, arrived: Sequence[Request]) -> list[Request]:
        """Take up what was asked for, drop what was cancelled, and begin what fits.

        Returns:
            The turns of `active` that have several tokens to be read: its last ones.
        """
        copies: list[tuple[int, int]] = []
        with self._lock:
            asked = [r for r in (*self.waiting, *arrived) if not r.future.cancelled()]
            self.waiting = sorted(asked, key=lambda r: r.history.order)
            # asked once: the event loop may cancel one at any moment
            gone = {r for r in self.active if r.future.cancelled()}
            for request in gone:
                self._sampled.discard(request.history)
                self._give_up(request.history)
            self.active = [r for r in self.active if r not in gone]
            begun = self._admit(copies)
        if copies:
            self.pool.copy(copies)
        several = [r for r in begun if r.reads > 1]
        self.active += [*(r for r in begun if r.reads == 1), *several]
        assert self.active or not self.waiting, "turns wait, and nothing is being sampled"
        return several

    def end(self, ended: Sequence[Request]) -> None:
        """Turns are over. Sessions keep the pages of what was read, which is all but the last
        token."""
        over = set(ended)
        self.active = [r for r in self.active if r not in over]
        with self._lock:
            for request in ended:
                history = request.history
                self._sampled.discard(history)
                history.ids = (*request.ids, *request.token_ids)
                history.covered = len(history.ids) - 1
                kept = pages_of(history.covered)
                self.pool.release(history.table[kept:])
                del history.table[kept:]
                if history.closed:
                    self._give_up(history)

    def _estimate(self, ended: History) -> None:
        """Work out `capacity` anew from the pages that sessions needed until they ended: fewer than
        they might have, because they share beginnings and most end before `max_tokens`."""
        count, pages = self._ended
        self._ended = count + 1, pages + self.pool.part(ended.table)
        likely = _LIKELY * self.pool.count * self._ended[0] / self._ended[1]
        self.capacity = max(self._least, int(likely))

    def _give_up(self, history: History) -> None:
        """Take a session's pages from it; if it goes on, its history is read again."""
        if history in self._holders:
            del self._holders[history]
            self.pool.release(history.table)
        history.table, history.covered = [], 0

    def _admit(self, copies: list[tuple[int, int]]) -> list[Request]:
        """The turns that are begun, in order, and the pages to be copied for them."""
        begun: list[Request] = []
        unread: set[int] = (
            set()
        )  # pages that this pass fills: turns that want them wait for the next
        tokens = 0
        for request in self.waiting:
            if len(self.active) + len(begun) == self._slots:
                break
            if not self._look_up(request, unread):
                continue
            tokens += request.reads
            if begun and tokens > self._prefill_tokens:
                break
            if not self._make_room(request):
                break
            self._set_up(request, unread, copies)
            begun.append(request)
        taken = set(begun)
        self.waiting = [r for r in self.waiting if r not in taken]
        return begun

    def _look_up(self, request: Request, unread: set[int]) -> bool:
        """Take over pages that others have read, of a history whose pages are full or none.

        Returns:
            True if no page that the turn needs is still being read.
        """
        pool, history, ids = self.pool, request.history, request.ids
        table, last = history.table, len(ids) - 1  # sampling the next token reads the last one
        while history.covered == len(table) * PAGE:
            rest = ids[history.covered : min(history.covered + PAGE, last)]
            page = pool.find(table[-1] if table else None, rest) if rest else None
            if page in unread:
                return False
            if page is None or len(rest) < PAGE:
                break
            pool.hold(page)
            table.append(page)
            history.covered += PAGE
            self._holders[history] = None
        return True

    def _needed(self, request: Request) -> int:
        """Pages to be taken, so that the turn has all that it may come to need."""
        history = request.history
        most = pages_of(len(request.ids) + request.sampling.max_tokens - 1)
        partly = history.covered % PAGE and self.pool.shared(history.table[-1])
        return most - len(history.table) + bool(partly)

    def _make_room(self, request: Request) -> bool:
        """See that pages are there for a turn. Those that will go on last give up theirs first."""
        missing = self._needed(request) - self.pool.available
        if missing <= 0:
            return True
        waiting = {r.history: r.history.order for r in self.waiting}
        order = request.history.order
        idle = [
            h for h in self._holders if h not in self._sampled and waiting.get(h, order + 1) > order
        ]
        idle.sort(key=lambda h: (h not in waiting, h.order), reverse=True)
        history = request.history
        partly = history.table[-1:] if history.covered % PAGE else []
        freed = self.pool.freed([h.table for h in idle], partly)
        enough = next((n for n, pages in enumerate(freed, 1) if pages >= missing), None)
        if enough is None:
            return False  # and nobody has to read again in vain
        for victim in idle[:enough]:
            self._give_up(victim)
        return True

    def _set_up(self, request: Request, unread: set[int], copies: list[tuple[int, int]]) -> None:
        """Give a turn its pages, and say what will be in them."""
        pool, history, ids = self.pool, request.history, request.ids
        table, needed = history.table, self._needed(request)
        self._holders[history] = None
        self._sampled.add(history)
        begins, last = history.covered, len(ids) - 1
        if begins < len(table) * PAGE:  # its last page is partly filled
            if pool.shared(table[-1]):
                copies.append((table[-1], pool.take()))
                pool.release(table[-1:])
                table[-1] = copies[-1][1]
                needed -= 1
        else:
            source = pool.find(table[-1] if table else None, ids[begins:last])
            if begins < last and source is not None:  # the rest of what another has read
                copies.append((source, pool.take()))
                table.append(copies[-1][1])
                history.covered = last
                needed -= 1
        table += [pool.take() for _ in range(needed)]
        if history.covered == begins and begins % PAGE == 0:
            for at in range(begins, last, PAGE):
                n = at // PAGE
                unread.add(table[n])
                pool.know(table[n], table[n - 1] if n else None, ids[at : min(at + PAGE, last)])
