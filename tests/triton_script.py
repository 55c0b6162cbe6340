"""Computes with the engine's Triton kernel on a CPU, by Triton's interpreter. Run by
test_engine_gpu.py, because the interpreter is chosen by an environment variable that is read when a
kernel is defined. Prints one JSON object."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import sys
from pathlib import Path

import torch

import turnrl_slots.kernel_trial
import turnrl_slots.triton_pages
from turnrl_slots.pages import Pool, Shapes
from turnrl_slots.sizes import PAGE

torch.set_num_threads(1)


def gap(kernel, asking, heads, size, dtype, parts, used, device="cpu"):
    """How far the kernel is, at most, from attention in plain loops. Where nothing was written,
    and behind each sequence's last token, lie numbers that would be seen in the result."""
    rng = torch.Generator().manual_seed(0)
    width = max(-(-n // PAGE) for n in used) + 1
    count = len(used) * width + 3
    shapes = Shapes()
    shapes.layers, shapes.heads, shapes.size, shapes.asking = 1, heads, size, asking
    shapes.dtype = dtype
    pool = Pool(count, shapes, torch.device(device), kernel=True)
    pool.store.copy_(torch.randn(pool.store.shape, generator=rng).to(dtype))
    query = torch.randn(len(used), asking, size, generator=rng).to(device, dtype)
    table = torch.randperm(count, generator=rng)[: len(used) * width].view(len(used), width)
    table = table.int().to(device)
    keys, values = pool.store[0]
    lengths = torch.tensor(used, dtype=torch.int32, device=device)
    attended = kernel.attend_rows(query, keys, values, table, lengths, size**-0.5, parts)
    wanted = []
    for row, n in enumerate(used):
        k, v = (side[table[row].long()].flatten(0, 1)[:n].float() for side in (keys, values))
        k, v = (side.repeat_interleave(asking // heads, 1) for side in (k, v))
        weights = (torch.einsum("hd,thd->ht", query[row].float(), k) * size**-0.5).softmax(-1)
        wanted.append(torch.einsum("ht,thd->hd", weights, v))
    return float((attended.float() - torch.stack(wanted)).abs().max())


CASES = {
    "28/4 heads, half": (28, 4, 128, torch.float16, 1, [31, 33]),
    "28/4 heads, divided": (28, 4, 64, torch.float16, 2, [7, 70]),
    "4/4 heads": (4, 4, 64, torch.float32, 1, [64, 65, 127, 128, 129]),
    "4/4 heads, divided": (4, 4, 64, torch.float32, 4, [1, 64, 65, 256, 257]),
    "width 8": (4, 2, 8, torch.float32, 2, [5, 130]),
    "width 80": (2, 1, 80, torch.float32, 2, [5, 130]),
    "width 96": (2, 1, 96, torch.float32, 1, [5, 130]),
    "width 256": (2, 1, 256, torch.float32, 8, [5, 130]),
    "parts by shape": (2, 1, 16, torch.float32, None, [3, 500]),
}


def correct():
    return {name: gap(turnrl_slots.triton_pages, *case) for name, case in CASES.items()}


MUTANTS = {
    "a token too many": ("there = at < end", "there = at <= end"),
    "a token too few": ("there = at < end", "there = at < end - (end == length)"),
    "a tile on one page": ("pages + at // PAGE", "pages + first // PAGE + 0 * at"),
    "parts that overlap": ("begin = part * tiles * KEYS", "begin = part * tiles * KEYS // 2"),
    "weighed wrongly": ("weights = tl.exp2(logs -", "weights = tl.exp2(0.5 * logs -"),
}


def mutants(folder):
    """How far the kernel is with a mistake in it: over rows of one part, and of several."""
    source = Path(turnrl_slots.triton_pages.__file__).read_text()
    largest = {}
    for n, (name, (right, wrong)) in enumerate(MUTANTS.items()):
        assert source.count(right) == 1, name
        path = Path(folder, f"mutant_{n}.py")
        path.write_text(source.replace(right, wrong))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        cases = [(2, 1, 16, torch.float32, parts, [40, 100, 191]) for parts in (1, 2)]
        gaps = [gap(module, *case) for case in cases]
        largest[name] = math.inf if math.isnan(sum(gaps)) else max(gaps)
    return largest


def sampled(model):
    """Turns of several sessions by the engine, some begun while others are sampled, with what
    torch 2.11 has for prompts."""
    import turnrl.policy.varlen
    from conftest import greedy_reference
    from engines import Recorder, varlen_of_torch_2_11
    from turnrl import Policy, Sampling
    from turnrl_slots import Slots

    turnrl_slots.kernel_trial.supports_ragged = lambda *_: True
    turnrl.policy.varlen.torch_varlen_attn = varlen_of_torch_2_11
    policy = Policy(model).build()
    policy.load()
    engine = Slots(slots=2, attention="auto").build()
    engine.start(policy, 128)
    engine.passes.decoder.graphs = graphs = Recorder()

    async def converse(n):
        session, history = engine.open([n + 1] * (PAGE - 3 + n)), [n + 1] * (PAGE - 3 + n)
        for new in ([], [7, 8]):
            completion = await session.generate(new, Sampling(2 + n, temperature=0))
            history += [*new, *completion.token_ids]
        return history, 2 + n

    async def scenario():
        return await asyncio.gather(*map(converse, range(3)))

    turns = asyncio.run(scenario())
    right = [h[-n:] == greedy_reference(policy, h[:-n], n) for h, n in turns]
    replayed = graphs.replayed > 0
    return {"right": right, "replayed": replayed, **engine.active_choices}


if __name__ == "__main__":
    jobs = [job.split("=") for job in sys.argv[1:]]
    print(json.dumps({name: globals()[name](*arguments) for name, *arguments in jobs}))
