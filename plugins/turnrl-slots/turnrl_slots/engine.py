"""The in-process engine: any transformers decoder, turns batched as they come.

A session is its token ids, and pages with the keys and values of all tokens but the last. Forks
share pages, and so do histories that begin with the same text. Every forward pass (`passes`) takes
one token of each turn that is being sampled, and the unread tokens of turns that begin, in one
packed row. The memory of pages is bounded, so turns wait for room (`scheduler`).

The model is the stock one, adapters and 4-bit layers included. Its attention calls the engine's
attention (`Attend`), which writes the new keys and values into pages and reads them there
(`attention`, `kernel`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

import numpy as np
import torch

from turnrl import Sampling
from turnrl.engines import Completion, Engine, RunContext, SampledPolicy, Session
from turnrl.policy.compute import find_adapted_layers
from turnrl_slots.dense import dense_bytes
from turnrl_slots.kernel_trial import KERNEL, PLAIN, has_kernel
from turnrl_slots.limits import check_layers, check_room
from turnrl_slots.memory import auto_memory
from turnrl_slots.pages import Pool
from turnrl_slots.passes import Passes
from turnrl_slots.scheduler import History, Request, Scheduler
from turnrl_slots.settings import Slots
from turnrl_slots.sizes import PAGE, PREFILL_TOKENS, count_pages
from turnrl_slots.trial import compare_paths, fill_memory, measure_shapes

_SLOTS_OF_CPU = 256
"""With this many rows, a CPU gains nothing from more, and last digits depend on the number."""

_CPU_TOKENS = 512
"""Tokens that a CPU reads at once. With more, activations leave its cache, and a token of a small
model takes half as long again."""

_SMALL = 20_000_000
"""A CPU samples a model with fewer weights than this on one thread. The engine's thread and the
main thread each have a team of workers, which sleep between the many short operations of a pass:
waking them takes longer than they save."""


@contextlib.contextmanager
def _on_one_thread() -> Iterator[None]:
    """Let torch compute on one thread, in every thread that starts meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Session(Session):
    """One history, sampled by the engine."""

    def __init__(self, engine: SlotsEngine, history: History) -> None:
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
            self.close()  # the tokens sampled so far are lost, so the history has a hole
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
        history = self._engine._scheduler.fork(self._history, next(self._engine._orders))
        return _Session(self._engine, history)

    def close(self) -> None:
        self._engine._scheduler.close(self._history)


@final
class SlotsEngine(Engine):
    """The engine that `Slots` describes.

    Args:
        settings: Its settings.

    Attributes:
        pool: The pages of keys and values, from the first start on.
        passes: Computes the forward passes; None before the first start.
    """

    memory_setting = "model.engine.kv_memory"
    pool: Pool

    def __init__(self, settings: Slots) -> None:
        self.settings = settings
        self._version = 0
        self._inbox: list[Request] = []
        self._orders = itertools.count()
        self._server: asyncio.Task[None] | None = None
        self._was_training: bool | None = None
        self._stopping = False
        self._closed = False
        self.passes: Passes | None = None

    @property
    def name(self) -> str:
        """See `Engine.name`."""
        return "Slots"

    def check(
        self, policy: SampledPolicy, max_tokens: int, where: RunContext = RunContext()
    ) -> None:
        """See `Engine.check`. Refuses layers that pages do not hold."""
        check_layers(policy.config, max_tokens)

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """See `Engine.start`. The policy is used in eval mode, whatever mode it is in."""
        self._forget()  # earlier sessions hold pages of a pool that is about to go
        settings = self.settings
        self._policy = policy
        self._closed = False
        self._network = policy.load()
        self._device = next(self._network.parameters()).device
        samples_dense = settings.decode_weights == "dense" and bool(
            find_adapted_layers(self._network)
        )
        on_cpu = self._device.type == "cpu"
        prefill_tokens = settings.prefill_tokens or PREFILL_TOKENS
        piece_tokens = min(_CPU_TOKENS, prefill_tokens) if on_cpu else prefill_tokens
        small = sum(p.numel() for p in self._network.parameters()) < _SMALL
        self._one_thread = on_cpu and small
        self._evaluate()
        try:
            self.pool = pool = self._make_pool(max_tokens, samples_dense)
            self._slots = self._rows(on_cpu, pool.count)
            self._least = pool.count // count_pages(max_tokens)
            self._scheduler = Scheduler(pool, self._slots, prefill_tokens, self._least)
            passes = self.passes = Passes(
                policy, pool, samples_dense, settings.cuda_graphs, piece_tokens, max_tokens
            )
            with passes.weights():  # memory for dense weights runs out now or never
                tried = policy, pool, passes.compute, max_tokens
                compare_paths(*tried)
                if not on_cpu:
                    fill_memory(*tried, prefill_tokens, self._slots)
        finally:
            self._forget()
            self._leave_mode()

    @property
    def active_choices(self) -> Mapping[str, str]:
        """See `Engine.active_choices`."""
        if self.passes is None:
            return {}
        pool, decoder, dense = self.pool, self.passes.decoder, self.passes.samples_dense
        graphs = decoder is not None and decoder.graphs is not None
        weights = "base and adapter" if find_adapted_layers(self._network) else "the policy's own"
        tokens = f"{pool.count * PAGE} tokens, at least {self._least} sessions"
        return {
            "attention while sampling": KERNEL if pool.kernel else PLAIN,
            "CUDA graphs": "on" if graphs else "off",
            "weights while sampling": "base, dense, and adapter" if dense else weights,
            "keys and values": f"{pool.bytes / 1e9:.2f} GB, {tokens}",
            "turns at once": str(min(self._slots, pool.count)),
        }

    @property
    def capacity(self) -> int | None:  # type: ignore[override]
        """See `Engine.capacity`. It grows with what sessions turn out to need."""
        return None if self.passes is None else self._scheduler.capacity

    def _rows(self, on_cpu: bool, pages: int) -> int:
        return self.settings.slots or (_SLOTS_OF_CPU if on_cpu else pages)

    def _make_pool(self, tokens: int, samples_dense: bool) -> Pool:
        """The pool that the settings allow, with room for at least one session of `tokens`."""
        settings, shapes = self.settings, measure_shapes(self._policy, self._device, tokens)
        budget = settings.kv_bytes
        if budget is None:
            beside = dense_bytes(self._network) if samples_dense else 0
            budget = auto_memory(self._device, beside)
        kernel = settings.attention == "auto" and has_kernel(shapes, self._device)
        count = check_room(settings.kv_memory, budget, shapes.page_bytes, int(kernel), tokens)
        return Pool(count, shapes, self._device, kernel)

    def sync(self, version: int) -> None:
        """See `Engine.sync`. The weights are the policy's own, so there is nothing to copy; keys
        and values from older weights are forgotten."""
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

    def _forget(self) -> None:
        """Take all pages from all sessions, and give back memory."""
        if self.passes is not None:
            self.passes.forget()
            self._scheduler.forget()

    def _evaluate(self) -> None:
        """Switch to eval mode until sampling is over, because train mode has dropout. This happens
        once a collection, because a walk through all modules takes as long as a token."""
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
        assert self.passes is not None, "Engine.start() comes first"
        loop = asyncio.get_running_loop()
        if count_pages(len(ids) + sampling.max_tokens - 1) > self.pool.count:
            room = f"{self.settings.kv_memory!r} ({self.pool.count * PAGE} tokens)"
            raise ValueError(
                f"a history of {len(ids)} tokens and a turn of {sampling.max_tokens} do not fit "
                f"into model.engine.kv_memory = {room}"
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
            self.passes.stops.closers(sampling.stop),
        )
        self._inbox.append(request)
        if self._server is None or self._server.done():
            self._server = loop.create_task(self._serve())
        return await request.future

    async def drain(self) -> None:
        """See `Engine.drain`."""
        if self._server is not None and not self._server.done():
            await asyncio.wait([self._server])  # cancelling this wait does not cancel it
        self._server = None
        self._leave_mode()
        self._forget()

    async def _serve(self) -> None:
        """Compute passes until no turn waits. They run in a thread, so that tools can run
        meanwhile."""
        loop = asyncio.get_running_loop()
        self._stopping = False
        self._evaluate()
        with (
            _on_one_thread() if self._one_thread else contextlib.nullcontext(),
            ThreadPoolExecutor(
                1, "turnrl-engine", initializer=_compute_on, initargs=(self._device,)
            ) as thread,
        ):
            arrived: list[Request] = []
            try:
                await asyncio.sleep(0)  # requests of this tick are in the first batch
                while self._inbox or self._scheduler.waiting or self._scheduler.active:
                    # the inbox belongs to the loop's thread, all else to the engine's thread
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
                if self._closed:  # close() had to wait until the pass was over
                    self._leave_mode()
                    self._forget()

    def _fail(self, error: BaseException, arrived: list[Request]) -> None:
        """Raise the error in every waiting turn. Pages may hold anything now, so drop them all."""
        fault = error if isinstance(error, Exception) else RuntimeError("sampling was interrupted")
        begun = [*self._scheduler.waiting, *self._scheduler.active]
        for request in [*arrived, *self._inbox, *begun]:
            if not request.future.done():
                request.future.set_exception(fault)
        self._inbox = []
        self._forget()

    @torch.inference_mode()
    def _advance(self, arrived: list[Request]) -> list[tuple[Request, Completion]]:
        """Sample a token in every active turn, again and again until a turn ends or a new one is
        requested. Returns the turns that ended."""
        while True:
            if self._closed:
                raise RuntimeError("the engine was closed while turns were being sampled")
            several = self._scheduler.begin(arrived)
            arrived = []
            if not self._scheduler.active:
                return []
            finished = self._pass(several)
            if finished or self._inbox or self._stopping:
                return finished

    def _pass(self, several: list[Request]) -> list[tuple[Request, Completion]]:
        """Sample a token in each active turn, and return the turns that it ends.

        Args:
            several: The turns with more than one token to read: the last ones.
        """
        assert self.passes is not None
        active = self._scheduler.active
        with self.passes.weights():
            ended = self.passes.draw(active, self.passes.step(active, several))
        if ended:
            self._scheduler.end([request for request, _ in ended])
        return [
            (
                request,
                Completion(
                    tuple(request.token_ids), tuple(request.logprobs), reason, self._version
                ),
            )
            for request, reason in ended
        ]


def _compute_on(device: torch.device) -> None:
    """Make a GPU this thread's current one: third-party kernels launch on the thread's GPU, which
    is the first by default."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
