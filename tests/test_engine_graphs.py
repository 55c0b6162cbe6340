"""Passes that only sample: padded to few sizes, recorded, and replayed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines import (
    GREEDY,
    PROMPTS,
    Recorder,
    converse_by_steps,
    kernel,
    move,
    run,
    started,
    together,
)
from turnrl import Policy, Sampling
from turnrl.policy.settings import Lora
from turnrl_slots.decode import Decoder, padded_size
from turnrl_slots.kernel import Tables
from turnrl_slots.pages import Pool, Shapes
from turnrl_slots.sizes import PAGE

__all__ = ["kernel"]  # fixtures


def test_rows_are_padded_to_few_sizes_and_at_most_by_a_fifth_where_they_cost_most():
    wanted = {1: 1, 2: 2, 3: 4, 5: 8, 8: 8, 9: 12, 13: 16, 17: 24, 25: 32, 100: 128, 129: 192}
    wanted |= {193: 256, 256: 256, 257: 320, 336: 384, 500: 512, 513: 640, 840: 896}
    assert {rows: padded_size(rows) for rows in wanted} == wanted
    assert len({padded_size(rows) for rows in range(1, 513)}) == 18
    assert all(rows > 0.8 * padded_size(rows) for rows in range(257, 2000))


def test_padding_changes_no_token_and_writes_to_an_unused_page(tiny_policy, kernel):
    read = converse_by_steps(tiny_policy, None, slots=3)
    assert {1, 2, 4} <= set(read)  # three rows take four
    pool = Pool(4, shapes_of(2, 2, 8), torch.device("cpu"), kernel=True)
    table = [pool.take(), pool.take()]

    def hidden(tokens, positions, attend):
        parts = (torch.ones(1, heads, len(tokens), 8) for heads in (4, 2, 2))
        return attend(0, *parts, None, None)[0].flatten(1)

    step = Decoder(pool, hidden, None, PAGE)
    step(Tables([table] * 5, pool), np.full(5, PAGE + 2), [7] * 5)
    written = pool.store[0].ne(0).any(-1).any(-1).any(0)
    assert written.nonzero().tolist() == [[table[1], 2], [pool.nobody, 0]]
    assert pool.nobody == 4


def shapes_of(layers, heads, size):
    shapes = Shapes()
    shapes.layers, shapes.heads, shapes.size, shapes.asking = layers, heads, size, 2 * heads
    return shapes


def test_a_size_is_computed_once_then_recorded_and_replayed(tiny_policy, kernel):
    graphs = Recorder()
    converse_by_steps(tiny_policy, graphs)
    # 7 rows while all last, then 6, 5, 4, .. 2: sizes of 8, 4 and 2, in both collections
    assert sorted(graphs.recorded) == [2, 2, 4, 4, 8, 8]
    assert len(graphs.recorded) == len(graphs.warmed)
    assert graphs.replayed > 40
    assert graphs.forgotten >= 4  # at each sync and each drain


def test_graphs_are_forgotten_with_the_memory_that_they_know(tiny_policy, kernel):
    engine = started(tiny_policy)
    engine.passes.decoder.graphs = graphs = Recorder()

    async def scenario():
        for version in range(2):
            engine.sync(version)
            await engine.open(PROMPTS[0]).generate([], GREEDY)
            assert engine.passes.decoder.steps
            await engine.drain()
            assert not engine.passes.decoder.steps
        return len(graphs.recorded)

    assert run(scenario()) == 2


class Broken(Recorder):
    def record(self, compute):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


class Stale(Recorder):
    """Its replays leave what they left when they were recorded: they do not read the buffers."""

    def record(self, compute):
        completions = torch.randn_like(compute())
        return lambda: None, completions


@pytest.mark.parametrize("broken", [Broken, Stale])
def test_steps_that_cannot_be_recorded_still_run_with_one_warning(
    tiny_policy, kernel, broken, caplog
):
    with caplog.at_level("WARNING"):
        converse_by_steps(tiny_policy, broken())
    (warning,) = (r.message for r in caplog.records if "CUDA graphs" in r.message)
    assert "capturing)." in warning or "a replayed step is off by" in warning
    assert "model.engine.cuda_graphs to false" in warning


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("decode_weights", ["adapter", "dense"])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_gpu_kernel_and_graph_sampling_match_the_learners_log_probabilities(
    tiny_model, quantization, decode_weights
):
    policy = Policy(str(tiny_model), quantization, Lora(r=4), dtype="bfloat16").build()
    policy.load("cuda")
    policy.to("cuda")
    move(policy, 1)
    prompts = [[n + 1] * (3 + 9 * n) for n in range(7)]
    forced = [tuple(range(50, 60 + 7 * n)) for n in range(7)]

    def logprobs(**options):
        engine = started(policy, 256, kv_memory="64MB", decode_weights=decode_weights, **options)
        assert engine.pool.kernel  # what was tried, and why not, is in the log

        async def scenario():
            scores = await together(
                *(
                    engine.open(prompt).generate([], Sampling(len(ids), forced_ids=ids))
                    for prompt, ids in zip(prompts, forced, strict=True)
                )
            )
            replayed = [step for step in engine.passes.decoder.steps.values() if step.replay]
            await engine.drain()
            return torch.tensor([p for f in scores for p in f.logprobs]), len(replayed)

        return run(scenario())

    (plain, none), (replayed, graphs) = logprobs(cuda_graphs=False), logprobs()
    assert none == 0
    assert graphs > 2
    assert torch.allclose(plain, replayed, atol=1e-2)
    rows = [
        ([*p, *ids], [False] * len(p) + [True] * len(ids))
        for p, ids in zip(prompts, forced, strict=True)
    ]
    learned = torch.cat([scores[0] for scores in policy.score_tokens(rows, 10_000)])
    # of some 20 nats each; bfloat16 alone makes a tenth of a nat
    assert (plain - learned).abs().mean() < 0.25
