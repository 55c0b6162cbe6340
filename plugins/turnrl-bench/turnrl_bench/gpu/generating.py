"""The same turns by transformers' `generate`: TRL's way without a server, which reads the whole
history anew in each turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from turnrl import Policy, Trajectory
from turnrl_bench.gpu import device
from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.results import Cases, Found


class ScriptedTokens(LogitsProcessor):
    """Leaves one token possible: the next one of each row's script."""

    def __init__(self, rows: Sequence[Sequence[int]], end: int) -> None:
        longest = max(map(len, rows))
        padded = [[*row, *[end] * (longest - len(row))] for row in rows]
        self.columns = torch.tensor(padded).T.contiguous()
        self.at = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        column = self.columns[min(self.at, len(self.columns) - 1), :, None].to(scores.device)
        self.at += 1
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter(1, column, 0.0)  # type: ignore[return-value]


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    for turn in range(len(bench.setting.shape.turn_tokens)):
        cases.run(f"turn {turn}", partial(_turn, bench, cases, turn))


def _turn(bench: Bench, cases: Cases, turn: int) -> Found:
    """As many slices of rows as there is time for, one at least."""
    policy, trajectories = bench.policy("nf4"), bench.played()
    size, done, seconds, sampled = len(trajectories), 0, 0.0, 0
    device.peak()
    while done < len(trajectories) and (not done or cases.left_s > seconds * size / done):
        some = trajectories[done : done + size]
        taken: float | None = None
        try:
            taken = generate_seconds(policy, some, turn)
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        if taken is None:  # here, where the exception and what its frames held are gone
            size //= 2
            device.free()
            continue
        done, seconds = done + len(some), seconds + taken
        sampled += sum(len(t.turns[turn].token_ids) for t in some)
    return {
        "generate_s": seconds,
        "tokens_per_s": sampled / seconds,
        "sampled": sampled,
        "rows": done,
        "of_rows": len(trajectories),
        "rows_at_once": size,
        "peak_bytes": device.peak(),
    }


def generate_seconds(policy: Policy, trajectories: Sequence[Trajectory], turn: int) -> float:
    """Time `generate` on one turn of some trajectories."""
    network, tokenizer = cast(Any, policy.load()), policy.tokenizer
    where = next(network.parameters()).device
    rows = {"input_ids": [[*t.token_ids[: t.turn_index.index(turn)]] for t in trajectories]}
    padded = tokenizer.pad(rows, padding_side="left", return_tensors="pt").to(where)
    said = [t.turns[turn].token_ids for t in trajectories]
    script = ScriptedTokens(said, tokenizer.eos_token_id)
    with policy.evaluating(), torch.inference_mode():
        began = device.clock()
        network.generate(
            **padded,
            max_new_tokens=max(map(len, said)),
            do_sample=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            logits_processor=LogitsProcessorList([script]),
        )
        return device.clock() - began
