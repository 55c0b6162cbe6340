"""`Slots`, the in-process engine: any transformers decoder, turns batched as they come.

A session is its token ids, and pages that hold the keys and values of all but the last of them.
Forks share pages, and so do histories that begin with the same text; nothing is copied but a page
that two would write to. Every forward pass takes one token of each turn that is being sampled, and
what is to be read of those that are begun, in one packed row of tokens. The memory of pages has a
bound, so turns wait for room; which is begun next, and in which pages, `scheduler` says.

The model is the stock one, adapters and 4-bit layers included: its attention asks this engine's
(`Attend`), which writes the new keys and values into pages and reads them there: what rows share
once for all of them (`attention`), or by the kernel of a GPU, if it has one that can (`kernel`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NoReturn, final

import numpy as np
import torch
from torch import Tensor

from turnrl import Completion, Engine, RecipeError, SampledPolicy, Sampling, Session
from turnrl_slots.attention import Feed, Plan
from turnrl_slots.decode import Decoder, Graphs
from turnrl_slots.kernel import KernelPass, Tables, find_way
from turnrl_slots.merged import Merged, adapted, merged_bytes
from turnrl_slots.pages import PAGE, Pool, Shapes, pages_of, parse_memory
from turnrl_slots.sampling import draw
from turnrl_slots.scheduler import History, Request, Scheduler

_SHARE_OF_MACHINE = 0.25
"""Of the memory of a machine without a GPU, for `kv_memory: auto`. Not of what is free: batches,
and so last digits, may depend on it."""

_SHARE_OF_GPU = 0.7
"""Of a GPU's memory that is free once the weights are loaded."""

_CPU_TOKENS = 512
"""What a CPU reads at once: with more, activations leave its cache, and a token of a small model
takes half as long again."""

_SMALL = 20_000_000
"""Weights of a model whose passes are sampled on one thread of a CPU. The thread of the engine and
the main one have a team of workers each, which then sleep between the many short operations of a
pass: waking them takes longer than they save."""


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Within it, torch computes on one thread in whatever thread begins."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Session(Session):
    """One history, sampled by the engine."""

    def __init__(self, engine: Slots, history: History) -> None:
        self._engine = engine
        self._history = history
        self._version = engine._version
        self._busy = False

    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        self._check()
        if sampling.max_tokens < 1:
            raise ValueError(
                f"max_tokens is {sampling.max_tokens}, but a turn has at least one token"
            )
        self._busy = True
        try:
            ids = (*self._history.ids, *new_ids)
            return await self._engine._submit(self._history, ids, sampling)
        except BaseException:
            self.close()  # what was sampled of the turn is lost, so the history has a hole
            raise
        finally:
            self._busy = False

    def _check(self) -> None:
        if self._history.closed or self._busy:
            raise RuntimeError(
                "a session generates one turn at a time, and none after close() or a turn that "
                "was cancelled"
            )
        if self._version != self._engine._version:
            raise RuntimeError("a session ends when the engine's weights change: open a new one")

    def fork(self) -> _Session:
        self._check()
        return self._engine._fork(self._history)

    def close(self) -> None:
        self._engine._scheduler.let_go(self._history)


@final
class Slots(Engine):
    """Samples with the policy's own weights, in this process.

    Turns that are asked for in the same tick of the event loop are admitted in the order in which
    their sessions were opened, so equal requests give equal batches and equal results to the last
    digit.

    Args:
        slots: The most turns sampled at once.
        prefill_tokens: The most tokens read in one forward pass, those being sampled left out; on a
            CPU never more than 512.
        kv_memory: The most memory for keys and values: a size such as `4GB`; `auto` is a quarter of
            the machine's memory (or a container's, and each process has its part), or most of what
            is free on a GPU once the weights are loaded. It is given back between collections.
        decode_weights: What a policy with an adapter is sampled with: `adapter`, base and adapter
            one after the other, as in learning; `merged`, their sum as dense weights, in bfloat16
            on a GPU and float32 on a CPU. A step then reads more memory and computes far less
            around it. The sums are made anew for every collection and given back after it; with
            7 billion weights they take 15 GB, beside what is learnt, which they leave alone. In
            bfloat16 they round what an adapter adds: `train/logprob_gap` shows by how much.
        cuda_graphs: Record the passes that sample a token of each turn, and replay them, where the
            attention is a GPU's own kernel (half precision on CUDA). Elsewhere, on a CPU for one,
            it changes nothing.
    """

    def __init__(
        self,
        slots: int = 256,
        prefill_tokens: int = 16384,
        kv_memory: str = "auto",
        decode_weights: Literal["adapter", "merged"] = "adapter",
        cuda_graphs: bool = True,
    ) -> None:
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        self.kv_memory = kv_memory
        self.decode_weights = decode_weights
        self.cuda_graphs = cuda_graphs
        self._budget = parse_memory(kv_memory)
        if slots < 1 or prefill_tokens < 1:
            raise RecipeError(
                f"model.engine.slots is {slots} and model.engine.prefill_tokens {prefill_tokens}; "
                "both must be at least 1"
            )
        self._version = 0
        self._inbox: list[Request] = []
        self._orders = itertools.count()
        self._server: asyncio.Task[None] | None = None
        self._closers: dict[str, frozenset[int]] = {}
        self._was_training: bool | None = None
        self._stopping = False
        self._closed = False
        self._planned: list[Request] = []
        self._plan: Plan | Tables | None = None
        """Of the rows of the last pass: how they are read."""
        self._merged: Merged | None = None
        self._decoder: Decoder | None = None

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """See `Engine.start`. The policy is used in eval mode, whatever mode it is in."""
        self._forget()  # sessions of before know pages of a pool that is given up
        self._policy = policy
        self._closed = False
        self._network = policy.load()
        self._device = next(self._network.parameters()).device
        if self.decode_weights == "merged" and not adapted(self._network):
            raise RecipeError(
                "model.engine.decode_weights is 'merged', and no linear layer of this policy has "
                "an adapter to be merged: its weights are dense already. Set it to 'adapter', or "
                "add policy.lora."
            )
        self._closers = {}  # of another tokenizer, perhaps
        most = _CPU_TOKENS if self._device.type == "cpu" else self.prefill_tokens
        self._piece_tokens = min(most, self.prefill_tokens)
        weights = sum(p.numel() for p in self._network.parameters())
        self._policy_is_small = self._device.type == "cpu" and weights < _SMALL
        self._evaluate()
        try:
            self._pool, least = self._sized_pool(max_tokens)
            self._scheduler = Scheduler(self._pool, self.slots, self.prefill_tokens, least)
            self._decoder = self._made_decoder() if self._pool.kernel else None
            with self._weights():  # room for merged ones is missing now or never
                self._compare(max_tokens)
        finally:
            self._forget()
            self._leave_mode()

    @property
    def capacity(self) -> int | None:  # type: ignore[override]
        """See `Engine.capacity`. It grows with what sessions turn out to need."""
        return self._scheduler.capacity if hasattr(self, "_scheduler") else None

    def _sized_pool(self, tokens: int) -> tuple[Pool, int]:
        """The pool that the budget allows, and how many sessions of so many tokens it holds."""
        shapes = Shapes()
        with torch.inference_mode():
            ids = torch.zeros(1, 2, dtype=torch.long, device=self._device)
            try:
                at = torch.arange(2, device=self._device)[None]
                self._policy.hidden(ids, None, at, attend=shapes)
            except (NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
                self._refuse(f"({type(error).__name__}: {error})", error)
        if not shapes.layers:
            self._refuse("(it has no attention that asks for an implementation)")
        if shapes.windows and (window := min(shapes.windows)) < tokens:
            self._refuse(f"(a layer sees {window} tokens, and a trajectory has {tokens})")
        budget = self._budget
        if budget is None:
            beside = self.decode_weights == "merged"
            budget = _auto(self._device, beside * merged_bytes(self._network, self._device))
        way = find_way(shapes, self._device)
        count, needed = budget // shapes.page_bytes - (way is not None), pages_of(tokens)
        if count < needed:
            raise RecipeError(
                f"model.engine.kv_memory is {self.kv_memory!r}: room for {count * PAGE} tokens of "
                f"{shapes.page_bytes // PAGE} bytes each, and one trajectory of rollout.max_tokens "
                f"= {tokens} takes {needed * shapes.page_bytes / 1e6:.1f} MB. Raise the one, or "
                "lower the other."
            )
        return Pool(count, shapes, self._device, way), count // needed

    def _made_decoder(self) -> Decoder:
        """What computes passes of rows alone, where a kernel attends."""

        def hidden(tokens: Tensor, positions: Tensor, attend: KernelPass) -> Tensor:
            return self._policy.hidden(tokens[None], None, positions[None], attend=attend)[0]

        graphs = self.cuda_graphs and self._device.type == "cuda"
        return Decoder(self._pool, hidden, Graphs(self._device) if graphs else None)

    def _plan_of(self, tables: Sequence[Sequence[int]]) -> Plan | Tables:
        """How rows with these pages are read."""
        return (Tables if self._pool.kernel else Plan)(tables, self._pool)

    @torch.inference_mode()
    def _compare(self, tokens: int) -> None:
        """Read a text as long as any that will come, once over pages and in two parts, and once as
        the model itself would. Chunked attention, recurrent layers and whatever else pages do not
        hold show in the difference."""
        vocabulary = self._network.config.get_text_config().vocab_size
        ids = tuple((7919 * i + 104_729) % vocabulary for i in range(max(tokens, 2)))
        half = len(ids) // 2
        table = [self._pool.take() for _ in range(pages_of(len(ids)))]
        try:
            for feed in (Feed(table, 0, ids[:half]), Feed(table, half, ids[half:])):
                found = self._policy.logits(self._read([feed]))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
            self._refuse(f"({type(error).__name__}: {error})", error)
        whole = torch.tensor([ids], device=self._device)
        positions = torch.arange(len(ids), device=self._device)[None]
        hidden = self._policy.hidden(whole, None, positions)
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

    def sync(self, version: int) -> None:
        """See `Engine.sync`. The weights are the policy's own, so there is nothing to copy; what
        was read with older ones is forgotten."""
        if self._inbox or self._scheduler.active or self._scheduler.waiting:
            raise RuntimeError("turns are being sampled: drain() comes before sync()")
        self._version = version
        self._forget()

    def close(self) -> None:
        """See `Engine.close`. If a pass is under way, the rest waits until it is over."""
        self._version = -1
        if self._server is not None and not self._server.done():
            self._closed = True
            return
        self._leave_mode()
        self._forget()

    def open(self, prompt_ids: Sequence[int]) -> _Session:
        """See `Engine.open`."""
        if not prompt_ids:
            raise ValueError("a prompt has at least one token")
        return _Session(self, History(next(self._orders), tuple(prompt_ids)))

    def _fork(self, history: History) -> _Session:
        return _Session(self, self._scheduler.fork(history, next(self._orders)))

    @contextlib.contextmanager
    def _weights(self) -> Iterator[None]:
        """Within it the network has the weights that are sampled with."""
        if self.decode_weights == "adapter":
            yield
        else:
            if self._merged is None:
                self._merged = Merged(self._network, self._device)
            with self._merged.in_place():
                yield

    def _forget(self) -> None:
        """Take all pages from all sessions, and give the memory back, of merged weights too."""
        if self._decoder is not None:
            self._decoder.forget()
        self._merged = None
        self._planned, self._plan = [], None
        if hasattr(self, "_scheduler"):
            self._scheduler.forget()

    def _evaluate(self) -> None:
        """Eval mode, until sampling is over: in train mode dropout would bite. It is switched once
        a collection, because a walk through all modules takes as long as a token."""
        if self._was_training is None:
            self._was_training = self._network.training
            self._network.eval()

    def _leave_mode(self) -> None:
        if self._was_training is not None:
            self._network.train(self._was_training)
            self._was_training = None

    async def _submit(
        self, history: History, ids: tuple[int, ...], sampling: Sampling
    ) -> Completion:
        loop = asyncio.get_running_loop()
        if pages_of(len(ids) + sampling.max_tokens - 1) > self._pool.count:
            raise ValueError(
                f"a history of {len(ids)} tokens and a turn of {sampling.max_tokens} do not fit "
                f"into model.engine.kv_memory = {self.kv_memory!r} ({self._pool.count * PAGE} "
                "tokens)"
            )
        # in (0, 1]: a draw of 0 could pick a token of probability 0
        uniforms = 1 - np.random.Generator(np.random.Philox(sampling.seed)).random(
            sampling.max_tokens
        )
        request = Request(
            history,
            ids,
            sampling,
            loop.create_future(),
            uniforms.tolist(),
            self._closers_of(sampling.stop),
        )
        self._inbox.append(request)
        if self._server is None or self._server.done():
            self._server = loop.create_task(self._serve())
        return await request.future

    async def drain(self) -> None:
        """See `Engine.drain`."""
        if self._server is not None and not self._server.done():
            await asyncio.wait([self._server])  # who gives up waiting does not cancel it
        self._server = None
        self._leave_mode()
        self._forget()

    async def _serve(self) -> None:
        """Step until nobody waits. Passes run in a thread, so that tools go on meanwhile."""
        loop = asyncio.get_running_loop()
        self._stopping = False
        self._evaluate()
        with (
            _one_thread() if self._policy_is_small else contextlib.nullcontext(),
            ThreadPoolExecutor(
                1, "turnrl-engine", initializer=_compute_on, initargs=(self._device,)
            ) as thread,
        ):
            arrived: list[Request] = []
            try:
                await asyncio.sleep(0)  # whoever asks in this tick is in the first batch
                while self._inbox or self._scheduler.waiting or self._scheduler.active:
                    # the inbox belongs to the loop's thread, all else to the engine's
                    arrived, self._inbox = self._inbox, []
                    finished = await loop.run_in_executor(thread, self._advance, arrived)
                    for request, completion in finished:
                        if not request.future.done():
                            request.future.set_result(completion)
                    await asyncio.sleep(0)
            except BaseException as error:
                self._stopping = True
                thread.shutdown()
                self._fail(error, arrived)
                if not isinstance(error, Exception):
                    raise
            finally:
                if self._closed:  # and had to wait until the pass was over
                    self._leave_mode()
                    self._forget()

    def _fail(self, error: BaseException, arrived: list[Request]) -> None:
        """Tell whoever waits. What pages hold is anybody's guess, so all are given up."""
        told = error if isinstance(error, Exception) else RuntimeError("sampling was interrupted")
        begun = [*self._scheduler.waiting, *self._scheduler.active]
        for request in [*arrived, *self._inbox, *begun]:
            if not request.future.done():
                request.future.set_exception(told)
        self._inbox = []
        self._forget()

    @torch.inference_mode()
    def _advance(self, arrived: list[Request]) -> list[tuple[Request, Completion]]:
        """Sample a token of every turn that is begun, until some have ended or others have been
        asked for. Returns the turns that ended."""
        while True:
            if self._closed:
                raise RuntimeError("the engine was closed while turns were being sampled")
            several = self._scheduler.begin(arrived)
            arrived = []
            if not self._scheduler.active:
                return []
            with self._weights():
                finished = self._pass(several)
            if finished or self._inbox or self._stopping:
                return finished

    def _pass(self, several: list[Request]) -> list[tuple[Request, Completion]]:
        """One forward pass: a token of each turn. Those that have several to be read come last."""
        active = self._scheduler.active
        rows = active[: len(active) - len(several)]
        if self._plan is None or rows != self._planned:
            self._planned, self._plan = rows, self._plan_of([r.history.table for r in rows])
        lengths = np.array([len(r.ids) + len(r.token_ids) - 1 for r in rows], np.int64)
        tokens = [(r.token_ids or r.ids)[-1] for r in rows]
        *before, last = self._pieces(several)
        states = [self._read(feeds) for feeds in before]
        found = self._forward(self._plan, lengths, tokens, last)
        # in the order of turns: rows, then those that were fed
        return self._sample(torch.cat([found[: len(rows)], *states, found[len(rows) :]]))

    def _pieces(self, requests: list[Request]) -> list[list[Feed]]:
        """What is to be read, in portions of one forward pass each; one at least, perhaps empty."""
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

    def _read(self, feeds: list[Feed]) -> Tensor:
        """The hidden state after each feed that ends, of a pass without rows."""
        return self._forward(self._plan_of([]), np.zeros(0, np.int64), [], feeds)

    def _forward(
        self, plan: Plan | Tables, lengths: np.ndarray, tokens: list[int], feeds: list[Feed]
    ) -> Tensor:
        """The hidden state after each row's token, and after each feed that ends, (n, H)."""
        if self._decoder is not None and isinstance(plan, Tables) and not feeds:
            return self._decoder(plan, lengths, tokens)
        attend = plan.attend_to(lengths, feeds)
        read = torch.tensor(
            [[*tokens, *itertools.chain.from_iterable(feed.ids for feed in feeds)]],
            device=self._device,
        )
        hidden = self._policy.hidden(read, None, attend.positions[None], attend=attend)[0]
        if not feeds:
            return hidden
        last = np.cumsum([len(tokens), *(len(feed.ids) for feed in feeds)])[1:] - 1
        ends = [at for at, feed in zip(last.tolist(), feeds, strict=True) if feed.ends]
        wanted = torch.tensor([*range(len(tokens)), *ends], dtype=torch.long, device=self._device)
        return hidden[wanted]

    def _sample(self, hidden: Tensor) -> list[tuple[Request, Completion]]:
        """Draw one token in each turn; give those that end with it."""
        requests = self._scheduler.active
        uniforms = [r.uniforms[len(r.token_ids)] for r in requests]
        logits = self._policy.logits(hidden)
        forced = [
            s.forced_ids[n] if (n := len(r.token_ids)) < len((s := r.sampling).forced_ids) else None
            for r in requests
        ]
        tokens, logprobs = draw(logits, [r.sampling for r in requests], uniforms, forced)
        finished = []
        for request, token, logprob in zip(
            requests, tokens.tolist(), logprobs.tolist(), strict=True
        ):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            if reason := self._ending(request, token):
                completion = Completion(tuple(request.token_ids), tuple(request.logprobs), reason)
                finished.append((request, completion))
        if finished:
            self._scheduler.end([request for request, _ in finished])
        return finished

    def _ending(self, request: Request, token: int) -> Literal["end", "stop", "length"] | None:
        sampling = request.sampling
        if token in sampling.end_ids:
            return "end"
        if sampling.stop and (request.closers is None or token in request.closers):
            # no stop string is longer in tokens than in bytes, so the tail is all that can hold one
            tail = request.token_ids[-max(len(s.encode()) for s in sampling.stop) :]
            text = self._policy.tokenizer.decode(tail)
            if any(s in text for s in sampling.stop):
                return "stop"
        return "length" if len(request.token_ids) >= sampling.max_tokens else None

    def _closers_of(self, stop: tuple[str, ...]) -> frozenset[int] | None:
        """Tokens that may complete one of the stop strings, from their texts alone."""
        ends = {s[-1] for s in stop}
        if not all("!" <= end <= "~" for end in ends):
            return None  # vocabularies write anything else in codes of their own
        tokenizer = self._policy.tokenizer
        for end in ends - self._closers.keys():
            pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
            beyond = range(len(tokenizer), self._network.config.get_text_config().vocab_size)
            holders = (i for i, piece in enumerate(pieces) if end in (piece or ""))
            self._closers[end] = frozenset([*holders, *beyond])
        return frozenset().union(*(self._closers[end] for end in ends))


def _compute_on(device: torch.device) -> None:
    """Make a GPU this thread's own: kernels that others wrote launch on the thread's GPU, which is
    the first until it is told."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _auto(device: torch.device, beside: int) -> int:
    """Bytes for keys and values where the recipe does not say, with so many for something else."""
    if device.type == "cuda":
        return int(_SHARE_OF_GPU * max(torch.cuda.mem_get_info(device)[0] - beside, 0))
    if device.type != "cpu":
        raise RecipeError(f"model.engine.kv_memory is 'auto' on {device}; give a size, as '4GB'")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # a container's
        with contextlib.suppress(OSError, ValueError):
            memory = min(memory, int(Path("/sys/fs/cgroup", limit).read_text()))
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return int(_SHARE_OF_MACHINE * memory / processes)
