"""Real small engines and what surrounds them: `Slots` on a tiny policy, a policy that notes what it
reads, a kernel for pages in plain loops, and adapters that have learned something."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedTokenizerFast

import turnrl.policy.varlen
import turnrl_slots.kernel_trial
import turnrl_slots.triton_pages
from conftest import greedy_reference
from turnrl import Policy, Sampling
from turnrl.policy.settings import Lora
from turnrl_slots import Slots
from turnrl_slots.sizes import PAGE

PROMPTS = [[5, 9, 33, 71, 120, 8], [44, 2, 301], [7] * 40, [250, 251, 252, 253, 254, 255, 256]]
GREEDY = Sampling(max_tokens=12, temperature=0)
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * PAGE
"""Of the tiny model: 2 layers, keys and values, 2 heads of 16 numbers of 4 bytes."""


def run(coroutine):
    return asyncio.run(coroutine)


async def together(*work):
    """The results of coroutines that run side by side."""
    return await asyncio.gather(*work)


def started(policy, max_tokens=64, **options):
    """A started `Slots` with these options."""
    engine = Slots(**options).build()
    engine.start(policy, max_tokens)
    return engine


class Watched:
    """A policy that notes what it is given to read, as (rows, tokens), and can be tampered with."""

    def __init__(self, policy):
        self.policy, self.tokenizer, self.load = policy, policy.tokenizer, policy.load
        self.logits, self.config = policy.logits, policy.config
        self.read = []

    def hidden(self, input_ids, *rest, **options):
        self.read.append(tuple(input_ids.shape))
        return self.policy.hidden(input_ids, *rest, **options)

    def hold(self):
        """Hold each pass. The first event tells that one has begun, the second lets it go on."""
        computing, go_on = threading.Event(), threading.Event()

        def hidden(*rest, **options):
            computing.set()
            assert go_on.wait(10)
            return self.policy.hidden(*rest, **options)

        self.hidden = hidden
        return computing, go_on


def raises(*_, **__):
    raise RuntimeError("out of memory")


@pytest.fixture
def model(random_model):
    """Makes a loaded policy of random weights of any architecture."""

    def make(name, **options):
        policy = Policy(str(random_model(name, **options))).build()
        policy.load()
        return policy

    return make


PIECES = ["\u2581", "a", "x", "\u2581x", "},", "\u2581}", "x}\u2581a", "END"]
"""Texts in the vocabulary of `falling_back`, beside its bytes."""


@pytest.fixture
def falling_back(tiny_policy):
    """The tiny policy with a vocabulary that writes as SentencePiece does, and falls back to bytes
    (`<0x7D>`) for what it lacks, such as a bare `}`."""
    of_bytes = [f"<0x{value:02X}>" for value in range(256)]
    names = ["<unk>", "<s>", "</s>", *of_bytes, *PIECES]
    tokenizer = Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.of_bytes = frozenset(range(3, 259))
    policy = Watched(tiny_policy)
    policy.tokenizer = fast
    return policy


def varlen_of_torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    return_aux=None, scale=None, window_size=(-1, -1),
):  # fmt: skip
    """torch 2.11's `varlen_attn`, by its signature, one sequence at a time, with what its kernel
    checks and expects."""
    assert return_aux is None
    assert {cu_seq_q.dtype, cu_seq_k.dtype} == {torch.int32}
    assert cu_seq_q.is_contiguous()
    assert cu_seq_k.is_contiguous()
    assert cu_seq_q.shape == cu_seq_k.shape
    assert int(cu_seq_q.diff().max()) <= max_q
    assert int(cu_seq_k.diff().max()) <= max_k
    assert (int(cu_seq_q[-1]), int(cu_seq_k[-1])) == (len(query), len(key))
    assert query.shape[1] % key.shape[1] == 0
    left, right = window_size
    if max_q == 1 and query.shape[1] > key.shape[1] and left < 0 and right < 0:
        assert len(query) == len(cu_seq_q) - 1  # it packs the heads of a query of each sequence
    (asked, laid), out = ((ends.tolist() for ends in (cu_seq_q, cu_seq_k)), [])
    for begin, end, first, last in zip(asked, asked[1:], laid, laid[1:], strict=False):
        q, k, v = query[begin:end], key[first:last], value[first:last]
        # the last query on a level with the last key
        level = torch.arange(len(q))[:, None] + len(k) - len(q)
        place = torch.arange(len(k))
        seen = (place <= level + right) | (right < 0)
        seen &= (place >= level - left) | (left < 0)
        parts = (side.transpose(0, 1)[None] for side in (q, k, v))
        if len(q):
            read = scaled_dot_product_attention(*parts, seen, scale=scale, enable_gqa=True)
            out.append(read[0].transpose(0, 1))
    return torch.cat(out)


def rows_in_loops(query, keys, values, table, used, scale, parts=None):
    """Our own kernel in plain loops: a query of each row, over its pages in place."""
    out = []
    for q, pages, length in zip(query, table.long(), used.tolist(), strict=True):
        k, v = (side[pages].flatten(0, 1)[:length] for side in (keys, values))
        k, v = (side.repeat_interleave(len(q) // k.shape[1], 1) for side in (k, v))
        weights = (torch.einsum("hd,thd->ht", q, k) * scale).softmax(-1)
        out.append(torch.einsum("ht,thd->hd", weights, v))
    return torch.stack(out)


@pytest.fixture
def kernel(monkeypatch):
    """A CPU that counts as a GPU in half precision, with its kernels in plain loops."""
    monkeypatch.setattr(turnrl_slots.kernel_trial, "supports_ragged", lambda *_: True)
    monkeypatch.setattr(turnrl.policy.varlen, "torch_varlen_attn", varlen_of_torch_2_11)
    monkeypatch.setattr(turnrl_slots.triton_pages, "attend_rows", rows_in_loops)


@pytest.fixture(params=["none", "nf4"])
def adapted(request, tiny_model):
    """A policy whose adapter has learned something, on a plain or a 4-bit base."""
    policy = Policy(str(tiny_model), quantization=request.param, lora=Lora(r=4)).build()
    policy.load()
    move(policy, 1)
    return policy


def move(policy, seed):
    """The adapter as if it had learned something else."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=rng))


class Recorder:
    """Stands in for `Graphs` without a GPU: a replay computes anew from the buffers, and leaves the
    result where the recording did, whatever the step was given in between."""

    def __init__(self):
        self.warmed, self.recorded, self.forgotten = [], [], 0
        self.replayed = 0

    @contextlib.contextmanager
    def aside(self):
        self.warmed.append(None)
        yield

    def record(self, compute):
        output = torch.full_like(compute(), torch.nan)
        self.recorded.append(output.shape[0])

        def replay():
            self.replayed += 1
            output.copy_(compute())

        return replay, output

    def forget(self):
        self.forgotten += 1


def converse_by_steps(policy, graphs, slots=64):
    """Check turns of several lengths, so that rows become fewer and pages more.

    Returns:
        The tokens that each pass read.
    """
    watched = Watched(policy)
    engine = started(watched, 256, slots=slots)
    engine.passes.decoder.graphs = graphs
    watched.read.clear()
    counts = [5, 9, 20, 23, 29, 40, 40]

    async def scenario():
        for version in range(2):
            engine.sync(version)
            sessions = [engine.open([n + 1] * (3 + 5 * n)) for n in range(len(counts))]
            completions = await together(
                *(
                    s.generate([], replace(GREEDY, max_tokens=count))
                    for s, count in zip(sessions, counts, strict=True)
                )
            )
            await engine.drain()
        return completions

    for n, completion in enumerate(run(scenario())):
        wanted = greedy_reference(policy, [n + 1] * (3 + 5 * n), counts[n])
        assert list(completion.token_ids) == wanted
    return [rows for _, rows in watched.read]
