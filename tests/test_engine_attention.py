"""Attention over pages: against a loop over keys, and by a GPU's kernel, in plain loops here."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import greedy_reference
from engines import GREEDY, PAGE_BYTES, PROMPTS, kernel, run, started, together
from turnrl_slots.attention import Feed, GatherPlan, Pass
from turnrl_slots.pages import Pool, Shapes
from turnrl_slots.sizes import PAGE

__all__ = ["kernel"]  # fixtures


def naive_attention(pool, layer, tables, starts, counts, query, scale):
    """Each query of each row by a loop over its keys."""
    keys, values = pool.store[layer].double()
    out, at = [], 0
    for table, start, count in zip(tables, starts, counts, strict=True):
        for t in range(start, start + count):
            for head in range(query.shape[1]):
                few = head * keys.shape[1] // query.shape[1]
                places = [(table[i // PAGE], few, i % PAGE) for i in range(t + 1)]
                k = torch.stack([keys[place] for place in places])
                v = torch.stack([values[place] for place in places])
                out.append((k @ query[0, head, at].double() * scale).softmax(0) @ v)
            at += 1
    return torch.stack(out).view(at, query.shape[1], -1)


@pytest.mark.parametrize("seed", range(4))
def test_attention_over_shared_pages_matches_each_row_alone(seed):
    draw = random.Random(seed)
    shapes = Shapes()
    shapes.layers, shapes.heads, shapes.size = 2, 2, 8
    pool = Pool(200, shapes, torch.device("cpu"))
    torch.manual_seed(seed)
    pool.store.normal_()
    # a tree of pages: rows share chains of several lengths and widths, or nothing; the last page
    # of each is its own
    tables = []
    system = [pool.take() for _ in range(draw.randint(0, 3))]
    for _ in range(draw.randint(2, 5)):
        prompt = [*system, *(pool.take() for _ in range(draw.randint(0, 4)))]
        for _ in range(draw.randint(1, 3)):
            turn = [*prompt, *(pool.take() for _ in range(draw.randint(0, 1)))]
            tables += [[*turn, pool.take(), pool.take()] for _ in range(draw.randint(1, 3))]
    draw.shuffle(tables)
    starts = [PAGE * (len(t) - 2) + draw.randrange(2 * PAGE) for t in tables]
    fed = [[pool.take() for _ in range(3)] for _ in range(4)]
    begun = [0, 0, draw.randrange(PAGE), PAGE + 3]
    long = [draw.randint(2, 40) for _ in fed]
    feeds = [Feed(t, s, [0] * n) for t, s, n in zip(fed, begun, long, strict=True)]
    # one pass, its rows and feeds, then one of the rows alone by the same plan
    plan = GatherPlan(tables, pool)
    for rest, at in ((feeds, starts), ([], [n + 1 for n in starts])):
        at = [min(n, PAGE * len(t) - 1) for n, t in zip(at, tables, strict=True)]
        attend = Pass(plan, np.array(at), rest)
        tokens = len(at) + sum(len(feed.ids) for feed in rest)
        query, key, value = (torch.randn(1, tokens, h, 8).transpose(1, 2) for h in (4, 2, 2))
        attended = attend(1, query, key, value, 0.4, None)[0]
        all_tables = [*tables, *(feed.table for feed in rest)]
        all_starts = [*at, *(feed.start for feed in rest)]
        counts = [*[1] * len(at), *(len(feed.ids) for feed in rest)]
        wanted = naive_attention(pool, 1, all_tables, all_starts, counts, query, 0.4)
        assert torch.allclose(attended.double(), wanted, atol=1e-5)
        places = [p for s, c in zip(all_starts, counts, strict=True) for p in range(s, s + c)]
        assert attend.positions.tolist() == places
        # and what the pass brought is where it belongs
        last = all_tables[-1][places[-1] // PAGE], slice(None), places[-1] % PAGE
        assert torch.equal(pool.store[1, 0][last], key[0, :, -1])
        assert torch.equal(pool.store[1, 1][last], value[0, :, -1])


def test_turns_read_by_a_kernel_match_full_forward_passes(tiny_policy, kernel):
    # ragged prompts that begin alike or not, some begun while others are sampled, and forks
    engine = started(tiny_policy, 256, slots=3)
    alike = [(7 * i) % 300 for i in range(2 * PAGE + 5)]
    prompts = [*PROMPTS, [*alike, 1], [*alike, 2, 3]]

    async def converse(n, prompt):
        session, history, seen = engine.open(prompt), list(prompt), []
        for turn in range(3):
            new = [(11 * n + 3 * turn + i) % 300 for i in range(turn * (n + 1))]
            if turn == 2:
                completion = await session.fork().generate([77], GREEDY)
                seen.append(([*history, 77], completion.token_ids))
            completion = await session.generate(new, replace(GREEDY, max_tokens=3 + n))
            seen.append(([*history, *new], completion.token_ids))
            history += [*new, *completion.token_ids]
        return seen

    for seen in run(together(*(converse(n, p) for n, p in enumerate(prompts)))):
        for history, tokens in seen:
            assert list(tokens) == greedy_reference(tiny_policy, history, len(tokens))


def test_sessions_give_up_pages_that_a_kernel_reads_and_continue(tiny_policy, kernel):
    engine = started(tiny_policy, 100, kv_memory=f"{11 * PAGE_BYTES / 1e3}KB")
    assert (engine.pool.count, engine.pool.bytes) == (10, 11 * PAGE_BYTES)

    async def converse(n):
        session, history = engine.open([n + 1] * 20), [n + 1] * 20
        for turn in range(3):
            completion = await session.generate([n] * 9 * turn, replace(GREEDY, max_tokens=9))
            history += [*[n] * 9 * turn, *completion.token_ids]
        return history

    for history in run(together(*map(converse, range(6)))):
        assert history[-9:] == greedy_reference(tiny_policy, history[:-9], 9)
    assert engine.pool.store.shape[2] == 11
