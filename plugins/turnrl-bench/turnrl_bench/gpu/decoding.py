"""Sampling alone, by each way to hold weights, with graphs and without, and by each attention.

Two turns with a tool's result between them. Turns have ragged lengths, so rows drop out from step
to step. Without lockstep each trajectory begins its second turn at once, and its result is read in
the middle of the others' steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.attention

from turnrl import Engine, Sampling
from turnrl_bench.gpu import device, floors
from turnrl_bench.gpu.bench import Bench, Kind
from turnrl_bench.gpu.floors import Network, Work
from turnrl_bench.gpu.loading import options
from turnrl_bench.gpu.passes import TimedPolicy, summary
from turnrl_bench.gpu.results import Cases, Found
from turnrl_bench.task import Shape
from turnrl_slots import Slots
from turnrl_slots.ways import Attention

Weights = Literal["dense", "adapter"]


@dataclass(frozen=True)
class Case:
    """One way to sample.

    Args:
        kind: Kind of the base.
        weights: The engine's `decode_weights`.
        graphs: Whether CUDA graphs may be used.
        rows: Trajectories at once.
        attention: The engine's option of that name.
        lockstep: Whether second turns begin together.
    """

    kind: Kind = "nf4"
    weights: Weights = "dense"
    graphs: bool = True
    rows: int = 128
    attention: Attention = "auto"
    lockstep: bool = True

    @property
    def name(self) -> str:
        """In the JSON file."""
        weights = "dense copy" if self.weights == "dense" else f"{self.kind} + adapter"
        parts = [weights, f"graphs {'on' if self.graphs else 'off'}", f"{self.rows} rows"]
        parts += [f"attention {self.attention}"] if self.attention != "auto" else []
        return ", ".join(parts if self.lockstep else [*parts, "free"])

    @property
    def floor(self) -> str:
        """As `floors` names the weights."""
        return "dense" if self.weights == "dense" else self.kind


def cases_of(setting_rows: tuple[int, int], attentions: Sequence[Attention]) -> list[Case]:
    """All cases, the most telling first. The 16-bit base comes last because it has to be loaded."""
    few, many = setting_rows
    cases = [Case(weights=w, graphs=g, rows=few) for g in (True, False) for w in _WEIGHTS]
    cases += [Case(weights=w, rows=many) for w in _WEIGHTS]
    cases += [Case(rows=few, attention=way) for way in attentions]
    cases += [Case(rows=few, lockstep=False)]
    cases += [Case(weights=w, graphs=False, rows=many) for w in _WEIGHTS]
    dense = partial(Case, kind="dense", weights="adapter")
    return [*cases, *(dense(graphs=g, rows=n) for n in (few, many) for g in (True, False))]


_WEIGHTS: tuple[Weights, ...] = ("dense", "adapter")


@dataclass(frozen=True)
class Wave:
    """Rows to be sampled: prompts, lengths, and what is said.

    Args:
        prompts: One for each group.
        group: Rows of each.
        lengths: Length of each turn, for each row.
        result: Tokens between the turns.
    """

    prompts: list[tuple[int, ...]]
    group: int
    lengths: list[list[int]]
    result: tuple[int, ...]

    @classmethod
    def drawn(
        cls, rows: int, shape: Shape, turns: tuple[int, ...], vocabulary: int, ragged: bool = True
    ) -> Wave:
        """A wave of turns of so many tokens on average; ragged ones have between half and half as
        many again."""
        draw = random.Random(rows)
        group = next(g for g in range(min(shape.group_size, rows), 0, -1) if rows % g == 0)

        def ids(n: int) -> tuple[int, ...]:
            return tuple(draw.randrange(16, vocabulary) for _ in range(n))

        spread = [(-(-mean // 2), mean + mean // 2) if ragged else (mean, mean) for mean in turns]
        lengths = [[draw.randint(*span) for _ in range(rows)] for span in spread]
        prompts = [ids(shape.prompt_tokens) for _ in range(rows // group)]
        return cls(prompts, group, lengths, ids(shape.result_tokens))

    @property
    def rows(self) -> int:
        """Rows in all."""
        return len(self.prompts) * self.group

    @property
    def sampled(self) -> int:
        """Tokens sampled in all."""
        return sum(map(sum, self.lengths))

    @property
    def longest(self) -> int:
        """Tokens of the longest history."""
        own: int = max(sum(turns) for turns in zip(*self.lengths, strict=True))
        return len(self.prompts[0]) + (len(self.lengths) - 1) * len(self.result) + own

    def works(self, net: Network, weights: str) -> list[Work]:
        """The least work of the wave: prompts once a group, results for each row, and the steps of
        turns that begin together."""
        prompt, result = len(self.prompts[0]), len(self.result)
        each = floors.pairs_of(0, prompt)
        works = floors.reading(
            net, weights, prompt * len(self.prompts), each * len(self.prompts), self.rows
        )
        seen = [prompt] * self.rows
        for turn, lengths in enumerate(self.lengths):
            if turn:
                pairs = sum(floors.pairs_of(h, result) for h in seen)
                works += floors.reading(net, weights, result * self.rows, pairs, self.rows)
                seen = [h + result for h in seen]
            for rows, history in floors.turn_steps(seen, lengths):
                works += floors.decode_step(net, weights, rows, history)
            seen = [h + n for h, n in zip(seen, lengths, strict=True)]
        return works


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    ways = get_args(Attention) if bench.on_gpu else ("plain",)  # a CPU has no choice of kernels
    for case in cases_of(bench.setting.rows, [way for way in ways if way != "auto"]):
        loads = case.kind == "dense" and bench.on_gpu
        cases.run(case.name, partial(sampled, bench, case), 30 if loads else 0)


def sampled(bench: Bench, case: Case) -> Found:
    """Sample a wave in one way."""
    setting = bench.setting
    wave = Wave.drawn(case.rows, setting.shape, setting.turns, setting.network.vocab)
    policy = TimedPolicy(bench.policy(case.kind))
    device.free()
    device.peak()
    began = device.clock()
    with engine_of(bench, wave, case, policy) as engine:
        started = device.clock()
        asyncio.run(play(engine, wave, policy, case.lockstep))
        seconds = device.clock() - started
        in_force = dict(engine.in_force)
    return {
        "tokens_per_s": wave.sampled / seconds,
        "wave_s": seconds,
        **bench.against(seconds, wave.works(bench.net, case.floor)),
        "sampled": wave.sampled,
        "started_s": started - began,
        "peak_bytes": device.peak(),
        "in_force": in_force,
        "options": options(engine),
        "step_floor_ms": _step_floor(bench, wave, case),
        **summary(policy.passes),
    }


@contextlib.contextmanager
def engine_of(bench: Bench, wave: Wave, case: Case, policy: TimedPolicy) -> Iterator[Slots]:
    """Within it the engine has started, with room for all rows if the device has it."""
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
    engine.start(cast(Any, policy), wave.longest)
    try:
        engine.sync(1)
        policy.begin()
        yield engine
    finally:
        engine.close()
        if torch.nn.attention.current_flash_attention_impl() is not None:
            # an engine that was told to has activated another one, for the whole process
            torch.nn.attention.restore_flash_attention_impl()
        device.free()


async def play(engine: Engine, wave: Wave, policy: TimedPolicy, lockstep: bool = True) -> None:
    """Sample all turns of all rows."""
    roots = [engine.open(prompt) for prompt in wave.prompts]
    sessions = [root.fork() for root in roots for _ in range(wave.group)]
    for root in roots:
        root.close()

    async def turn(row: int, k: int) -> None:
        said = [16 + (31 * row + 7 * n) % 900 for n in range(wave.lengths[k][row])]
        asked = Sampling(max_tokens=len(said), seed=row, forced_ids=tuple(said))
        await sessions[row].generate(wave.result if k else (), asked)

    async def both(row: int) -> None:
        for k in range(len(wave.lengths)):
            await turn(row, k)

    if lockstep:
        for k in range(len(wave.lengths)):
            await asyncio.gather(*(turn(row, k) for row in range(wave.rows)))
            policy.pause()
    else:
        await asyncio.gather(*map(both, range(wave.rows)))
        policy.pause()
    for session in sessions:
        session.close()
    await engine.drain()


def _step_floor(bench: Bench, wave: Wave, case: Case) -> float | None:
    """Milliseconds that a step of all rows takes at least, in the middle of both turns."""
    seen = len(wave.prompts[0]) + len(wave.result) // 2 + sum(bench.setting.turns) // 2
    works = floors.decode_step(bench.net, case.floor, wave.rows, wave.rows * seen)
    floor = bench.floor(*works)
    return None if floor is None else 1e3 * floor
