"""torch's attention of sequences of any length, with the arguments of torch 2.11 and of later ones:
the same numbers, and the same ways of sampling and learning."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import turnrl.policy.trials
import turnrl.policy.varlen
from engines import varlen_of_torch_2_11
from turnrl import Policy
from turnrl.policy.layout import lay_out, supports_ragged
from turnrl.policy.settings import Lora
from turnrl.policy.varlen import torch_varlen_attn, varlen_attn


@pytest.fixture
def torch_2_11(monkeypatch):
    """A torch whose `varlen_attn` is 2.11's, on a CPU that counts as a GPU in half precision."""
    monkeypatch.setattr(turnrl.policy.varlen, "torch_varlen_attn", varlen_of_torch_2_11)
    monkeypatch.setattr(turnrl.policy.trials, "supports_ragged", lambda *_: True)


def test_a_gpu_in_half_precision_uses_varlen_kernels_of_any_signature(monkeypatch):
    monkeypatch.setattr(turnrl.policy.varlen, "torch_varlen_attn", varlen_of_torch_2_11)
    asked = [("cuda", torch.bfloat16), ("cuda", torch.float32), ("cpu", torch.bfloat16)]
    assert [supports_ragged(torch.device(d), t) for d, t in asked] == [True, False, False]


def test_the_installed_torch_accepts_the_arguments_passed_to_varlen_attention(monkeypatch):
    calls, signature = [], inspect.signature(torch_varlen_attn)

    def notes(*arguments, **options):
        signature.bind(*arguments, **options)
        calls.append(options)
        return arguments[0]

    notes.__signature__ = signature
    monkeypatch.setattr(turnrl.policy.varlen, "torch_varlen_attn", notes)
    query = torch.zeros(1, 2, 4)
    ends, used = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    varlen_attn(query, query, query, ends, ends, 1, 1, scale=0.5)
    varlen_attn(query, query, query, ends, ends, 1, 1, seqused_k=used)
    assert [options["scale"] for options in calls] == [0.5, None]
    if "enable_gqa" in signature.parameters:
        assert [options["enable_gqa"] for options in calls] == [True] * 2
        assert [options["seqused_k"] for options in calls] == [None, used]
        assert [options["window_size"] for options in calls] == [(-1, -1)] * 2
    else:
        assert [*signature.parameters] == [*inspect.signature(varlen_of_torch_2_11).parameters]


lengths = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 3)), min_size=1)


@given(lengths, st.booleans(), st.sampled_from([None, 0.3]), st.sampled_from([-1, 0, 2]))
@settings(deadline=None)
def test_keys_that_a_sequence_does_not_use_count_for_nothing(sizes, alone, scale, left):
    # of each sequence: its queries, keys before them, and keys behind them that it does not use
    if alone:
        sizes, left = [(1, *rest) for _, *rest in sizes], -1
    asked, used = ([s[0] for s in sizes], [s[0] + s[1] for s in sizes])
    laid = [u + s[2] for u, s in zip(used, sizes, strict=True)]
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(sum(asked), 4, 8, generator=rng)
    key, value = (torch.randn(sum(laid), 2, 8, generator=rng) for _ in range(2))

    def ends(counts):
        return torch.tensor([0, *counts]).cumsum(0).int()

    most = max(asked)
    # a single query sees all keys that are used, and may be told no end of its window
    window = (left, -1 if most == 1 else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turnrl.policy.varlen, "torch_varlen_attn", varlen_of_torch_2_11)
        attended = varlen_attn(
            query, key, value, ends(asked), ends(laid), most, max(laid),
            scale=scale, window_size=window, seqused_k=torch.tensor(used, dtype=torch.int32),
        )  # fmt: skip
    wanted = []
    keys = zip(key.split(laid), value.split(laid), strict=True)
    for q, (k, v), n in zip(query.split(asked), keys, used, strict=True):
        for i, heads in enumerate(q):
            end = n - len(q) + i + 1
            seen = slice(0 if left < 0 else max(end - 1 - left, 0), end)
            for head in range(4):
                scores = (k[seen, head // 2] @ heads[head]) * (8**-0.5 if scale is None else scale)
                wanted.append(scores.softmax(0) @ v[seen, head // 2])
    assert torch.allclose(attended.flatten(0, 1), torch.stack(wanted), atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_torch_2_11_learns_from_ragged_rows(tiny_model, random_model, torch_2_11, window):
    model = tiny_model if window is None else random_model("Mistral", sliding_window=window)
    ragged, padded = (
        Policy(str(model), lora=Lora(r=4), share_prefixes=share).build() for share in (True, False)
    )
    rows = [([1, 2, 3, 4, *rest], [False] * 4 + [True] * len(rest)) for rest in ([5, 6], [9] * 7)]
    results = []
    for policy in (ragged, padded):
        torch.manual_seed(0)  # of the adapter
        policy.load()
        layout = lay_out(rows, policy is ragged, policy is ragged)
        values = policy(layout).logprobs
        values.sum().backward()
        results.append((values, [p.grad for p in policy.parameters() if p.grad is not None]))
    assert (
        ragged.active_choices["attention while learning"] == "prompts once, torch's varlen kernel"
    )
    (values, slopes), (wanted, steep) = results
    assert torch.allclose(values, wanted, atol=1e-5)
    assert any(slope.abs().max() > 1e-3 for slope in steep)
    for by_rows, by_padding in zip(slopes, steep, strict=True):
        assert torch.allclose(by_rows, by_padding, atol=1e-4)
