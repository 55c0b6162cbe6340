"""Chooses the turns that are sampled and their pages: turns wait, begin, and give up room.

A turn begins when there is a slot for it, room in the forward pass for the tokens that it has to
read, and pages for all tokens that it may come to need, so no turn stops in the middle. It shares
pages of its history that other sessions have read. If pages are short, idle sessions give up
theirs; the session that will go on last comes first. Its history is read again when it goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from turnrl import Sampling
from turnrl.engines import Completion
from turnrl_slots.pages import Pool
from turnrl_slots.sizes import PAGE, count_pages

_LIKELY = 0.9
"""`capacity` promises this share of the sessions that would fit if they need as much as earlier
sessions did. If they come to need more, the histories of some are read again."""


@dataclass(eq=False)
class History:
    """A session's tokens, and the pages of the first `covered` tokens. After a turn, `covered` is
    all but the last; before the first turn, or after the pages were given up, it is 0."""

    order: int
    ids: tuple[int, ...]
    table: list[int] = field(default_factory=list)
    covered: int = 0
    closed: bool = False


@dataclass(eq=False)
class Request:
    """A turn: requested, and later sampled."""

    history: History
    ids: tuple[int, ...]
    """The history, with the new tokens of this turn."""
    sampling: Sampling
    future: asyncio.Future[Completion]
    uniforms: list[float]
    closers: frozenset[int] | None
    """Tokens that may complete a stop string; None if any may."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def reads(self) -> int:
        """The number of tokens without keys and values. Sampling begins at the last of them."""
        return len(self.ids) - self.history.covered


class Scheduler:
    """Turns and pages of one engine.

    `begin` and `end` belong to the computing thread; another thread may call `fork` and `close`
    meanwhile.

    Args:
        pool: The pages.
        slots: The most turns sampled at once.
        prefill_tokens: The most tokens read in one forward pass.
        least: The number of sessions that fit even if all need the most.
    """

    def __init__(self, pool: Pool, slots: int, prefill_tokens: int, least: int) -> None:
        self.pool, self._slots, self._prefill_tokens = pool, slots, prefill_tokens
        self._least = least
        self._lock = threading.Lock()
        """Guards pages, their holders and their tables."""
        self._holders: dict[History, None] = {}
        """Histories that have pages."""
        self.forget()

    def forget(self) -> None:
        """Drop all turns and pages, and give the pages' memory back."""
        self.active: list[Request] = []
        """Turns that are being sampled, in the order in which they began."""
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
            self.pool.reset()

    def fork(self, history: History, order: int) -> History:
        """A copy of a history that shares its pages."""
        copy = History(order, history.ids)
        with self._lock:
            if history in self._holders:
                copy.table, copy.covered = list(history.table), history.covered
                for page in copy.table:
                    self.pool.hold(page)
                self._holders[copy] = None
        return copy

    def close(self, history: History) -> None:
        """Close a session. If a pass is writing to its pages, they are given back afterwards."""
        history.closed = True
        with self._lock:
            if history not in self._sampled:
                if history.table:
                    self._estimate(history)
                self._give_up(history)

    def begin(self, arrived: Sequence[Request]) -> list[Request]:
        """Take up requested turns, drop cancelled turns, and begin the turns that fit.

        Returns:
            The turns of `active` with more than one token to read: its last ones.
        """
        copies: list[tuple[int, int]] = []
        with self._lock:
            wanted = [r for r in (*self.waiting, *arrived) if not r.future.cancelled()]
            self.waiting = sorted(wanted, key=lambda r: r.history.order)
            # looked up once, because the event loop may cancel a turn at any moment
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
        """End turns. Sessions keep the pages of the tokens that were read: all but the last."""
        gone = set(ended)
        self.active = [r for r in self.active if r not in gone]
        with self._lock:
            for request in ended:
                history = request.history
                self._sampled.discard(history)
                history.ids = (*request.ids, *request.token_ids)
                history.covered = len(history.ids) - 1
                used = count_pages(history.covered)
                self.pool.release(history.table[used:])
                del history.table[used:]
                if history.closed:
                    self._give_up(history)

    def _estimate(self, ended: History) -> None:
        """Update `capacity` from the pages that sessions held when they ended. They need fewer than
        the most, because they share beginnings and usually end before `max_tokens`."""
        count, pages = self._ended
        self._ended = count + 1, pages + self.pool.part(ended.table)
        likely = _LIKELY * self.pool.count * self._ended[0] / self._ended[1]
        self.capacity = max(self._least, int(likely))

    def _give_up(self, history: History) -> None:
        """Take all pages from a session; if it goes on, its history is read again."""
        if history in self._holders:
            del self._holders[history]
            self.pool.release(history.table)
        history.table, history.covered = [], 0

    def _admit(self, copies: list[tuple[int, int]]) -> list[Request]:
        """Begin the turns that fit, in order, and add the pages to copy for them to `copies`."""
        begun: list[Request] = []
        # pages that this pass fills: turns that want them wait for the next pass
        unread: set[int] = set()
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
        """Share the next pages of a history that others have read, as long as its own are full.

        Returns:
            True if no page that the turn needs is still being read.
        """
        pool, history, ids = self.pool, request.history, request.ids
        table, last = history.table, len(ids) - 1  # sampling the next token reads the last one
        while history.covered == len(table) * PAGE:
            unshared = ids[history.covered : min(history.covered + PAGE, last)]
            page = pool.find(table[-1] if table else None, unshared) if unshared else None
            if page in unread:
                return False
            if page is None or len(unshared) < PAGE:
                break
            pool.hold(page)
            table.append(page)
            history.covered += PAGE
            self._holders[history] = None
        return True

    def _needed(self, request: Request) -> int:
        """The number of pages to take so that the turn has all that it may come to need."""
        history = request.history
        total = count_pages(len(request.ids) + request.sampling.max_tokens - 1)
        copied = history.covered % PAGE and self.pool.is_shared(history.table[-1])
        return total - len(history.table) + bool(copied)

    def _make_room(self, request: Request) -> bool:
        """Make pages available for a turn. Idle sessions that will go on last give up theirs
        first."""
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
        freed = self.pool.count_freed([h.table for h in idle], partly)
        enough = next((n for n, pages in enumerate(freed, 1) if pages >= missing), None)
        if enough is None:
            return False  # so no session has to read again in vain
        for victim in idle[:enough]:
            self._give_up(victim)
        return True

    def _set_up(self, request: Request, unread: set[int], copies: list[tuple[int, int]]) -> None:
        """Give a turn its pages, and note their future contents."""
        pool, history, ids = self.pool, request.history, request.ids
        table, needed = history.table, self._needed(request)
        self._holders[history] = None
        self._sampled.add(history)
        begins, last = history.covered, len(ids) - 1
        if begins < len(table) * PAGE:  # its last page is partly filled
            if pool.is_shared(table[-1]):
                copies.append((table[-1], pool.take()))
                pool.release(table[-1:])
                table[-1] = copies[-1][1]
                needed -= 1
        else:
            source = pool.find(table[-1] if table else None, ids[begins:last])
            if begins < last and source is not None:  # another session has read the rest
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
