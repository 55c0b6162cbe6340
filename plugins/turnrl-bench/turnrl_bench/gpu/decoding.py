"""Sampling alone, with each way to hold weights, with and without graphs, and with each attention.

It samples two turns with a tool's result between them. Turns have ragged lengths, so rows drop out
from step to step.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal, get_args

import torch
import torch.nn.attention

from turnrl import Engine, RecipeError, Sampling
from turnrl_bench.gpu import device, floors
from turnrl_bench.gpu.bench import Bench, Kind
from turnrl_bench.gpu.floors import Cost
from turnrl_bench.gpu.results import Cases, Found, Lacking
from turnrl_bench.task import Shape
from turnrl_doctor.work import Work
from turnrl_slots import Slots
from turnrl_slots.ways import Attention

Weights = Literal["dense", "adapter"]


@dataclass(frozen=True)
class Case:
    """One way to sample.

    Args:
        kind: Kind of the base.
        weights: The engine's `decode_weights`.
        graphs: True if CUDA graphs may be used.
        rows: Trajectories at once.
        attention: The engine's option of that name.
    """

    kind: Kind = "nf4"
    weights: Weights = "dense"
    graphs: bool = True
    rows: int = 128
    attention: Attention = "auto"

    @property
    def name(self) -> str:
        """The name in the JSON file."""
        weights = "dense copy" if self.weights == "dense" else f"{self.kind} + adapter"
        parts = [weights, f"graphs {'on' if self.graphs else 'off'}", f"{self.rows} rows"]
        return ", ".join([*parts, *([f"attention {self.attention}"] * (self.attention != "auto"))])

    @property
    def floor(self) -> str:
        """The name of the weights in `floors`."""
        return "dense" if self.weights == "dense" else self.kind


def cases_of(rows: tuple[int, int], attentions: Sequence[Attention]) -> list[Case]:
    """All cases, the most telling first. The 16-bit base comes last because it has to be loaded."""
    ways = [partial(Case, "nf4", "dense"), partial(Case, "nf4", "adapter")]
    settings = [(True, rows[0]), (False, rows[0]), (True, rows[1]), (False, rows[1])]
    cases = [way(*setting) for setting, way in product(settings, ways)]
    cases[6:6] = [Case(rows=rows[0], attention=way) for way in attentions]
    return cases + [Case("dense", "adapter", *setting) for setting in settings]


@dataclass(frozen=True)
class Wave:
    """Rows to be sampled.

    Args:
        prompts: A prompt for each group.
        group: Number of rows in each group.
        lengths: Length of each turn, for each row.
        result: Tokens between the turns.
    """

    prompts: list[tuple[int, ...]]
    group: int
    lengths: list[list[int]]
    result: tuple[int, ...]

    @classmethod
    def drawn(cls, rows: int, shape: Shape, turns: tuple[int, ...], vocabulary: int) -> Wave:
        """A wave of ragged turns, each with between 0.5 and 1.5 times so many tokens."""
        draw = random.Random(rows)
        group = next(g for g in range(min(shape.group_size, rows), 0, -1) if rows % g == 0)

        def ids(n: int) -> tuple[int, ...]:
            return tuple(draw.randrange(16, vocabulary) for _ in range(n))

        spans = [(-(-mean // 2), mean + mean // 2) for mean in turns]
        lengths = [[draw.randint(*span) for _ in range(rows)] for span in spans]
        prompts = [ids(shape.prompt_tokens) for _ in range(rows // group)]
        return cls(prompts, group, lengths, ids(shape.result_tokens))

    @property
    def rows(self) -> int:
        """Total number of rows."""
        return len(self.prompts) * self.group

    @property
    def longest(self) -> int:
        """Tokens of the longest history."""
        sampled: int = max(sum(turns) for turns in zip(*self.lengths, strict=True))
        return len(self.prompts[0]) + (len(self.lengths) - 1) * len(self.result) + sampled

    def costs(self, net: Work, weights: str) -> list[Cost]:
        """The least costs: prompts once a group, results for each row, and the steps of turns that
        begin together."""
        prompt, result, rows = len(self.prompts[0]), len(self.result), self.rows
        count = len(self.prompts)
        pairs = count * floors.pairs_of(0, prompt)
        costs = floors.reading(net, weights, prompt * count, pairs, rows)
        seen = [prompt] * rows
        for turn, lengths in enumerate(self.lengths):
            if turn:
                pairs = sum(floors.pairs_of(h, result) for h in seen)
                costs += floors.reading(net, weights, result * rows, pairs, rows)
                seen = [h + result for h in seen]
            for alive, history in floors.turn_steps(seen, lengths):
                costs += floors.decode_step(net, weights, alive, history)
            seen = [h + n for h, n in zip(seen, lengths, strict=True)]
        return costs


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    ways = get_args(Attention) if bench.on_gpu else ("plain",)  # a CPU has no choice of kernels
    for case in cases_of(bench.setting.rows, [way for way in ways if way != "auto"]):
        loads = case.kind == "dense" and bench.on_gpu
        cases.run(case.name, partial(sample, bench, case), 30 if loads else 0)


def sample(bench: Bench, case: Case) -> Found:
    """Sample a wave in one way."""
    setting = bench.setting
    wave = Wave.drawn(case.rows, setting.shape, setting.turns, setting.network.vocab)
    bench.policy(case.kind)  # loaded first
    device.peak()
    began = device.clock()
    with engine_of(bench, wave, case) as engine:
        started = device.clock()
        asyncio.run(play(engine, wave))
        seconds = device.clock() - started
        in_force = dict(engine.in_force)
    sampled = sum(map(sum, wave.lengths))
    return {
        "tokens_per_s": sampled / seconds,
        "wave_s": seconds,
        **bench.against(seconds, wave.costs(bench.net, case.floor)),
        "sampled": sampled,
        "started_s": started - began,
        "peak_bytes": device.peak(),
        "in_force": in_force,
    }


@contextlib.contextmanager
def engine_of(bench: Bench, wave: Wave, case: Case) -> Iterator[Slots]:
    """A started engine, with room for all rows if the device has it."""
    tokens = (wave.longest + 32) * (wave.rows + 1)
    needed = int(1.05 * tokens * bench.net.kv_bytes)
    room = device.free_bytes()
    if room is not None:
        copy = floors.weights_bytes(bench.net, "dense") if case.weights == "dense" else 0
        needed = min(needed, int(0.6 * max(room - copy, 0)))
    engine = Slots(
        kv_memory=f"{max(needed // 10**6, 1)}MB",
        decode_weights=case.weights,
        cuda_graphs=case.graphs,
        attention=case.attention,
    )
    try:
        engine.start(bench.policy(case.kind), wave.longest)
    except RecipeError as error:
        if case.attention == "auto":
            raise
        raise Lacking(str(error)) from error  # a requested attention that does not work here
    try:
        engine.sync(1)
        yield engine
    finally:
        engine.close()
        if torch.nn.attention.current_flash_attention_impl() is not None:
            # `fa3` has activated another implementation, for the whole process
            torch.nn.attention.restore_flash_attention_impl()
        device.free()


async def play(engine: Engine, wave: Wave) -> None:
    """Sample all turns of all rows, in lockstep."""
    roots = [engine.open(prompt) for prompt in wave.prompts]
    sessions = [root.fork() for root in roots for _ in range(wave.group)]
    for root in roots:
        root.close()
    for k, lengths in enumerate(wave.lengths):
        turns = []
        for row, (session, length) in enumerate(zip(sessions, lengths, strict=True)):
            forced = tuple(16 + (31 * row + 7 * n) % 900 for n in range(length))
            sampling = Sampling(max_tokens=length, seed=row, forced_ids=forced)
            turns.append(session.generate(wave.result if k else (), sampling))
        await asyncio.gather(*turns)
    for session in sessions:
        session.close()
    await engine.drain()
