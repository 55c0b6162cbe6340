"""Layouts: what sequences begin with is read once, and everything computed from it is the same."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import turnrl.policy.layout
import turnrl.policy.varlen
from runs import adamw, column, data, make_module, trainer
from turnrl import ClippedSurrogate, Policy
from turnrl.policy.layout import Layout, forward_passes, lay_out
from turnrl.policy.settings import Lora
from turnrl_estimators import TurnCritic

few = st.lists(st.integers(0, 2), min_size=1, max_size=9)
sequences = st.lists(few, min_size=1, max_size=8)


def rows_of(ids, seed=0):
    """Sequences, any of whose tokens but the first may be asked for."""
    draw = random.Random(seed)
    return [(sequence, [False, *(draw.random() < 0.5 for _ in sequence[1:])]) for sequence in ids]


def beginnings(ids):
    """Every different beginning of some sequences: the least that has to be read."""
    return {tuple(sequence[: n + 1]) for sequence in ids for n in range(len(sequence))}


@given(sequences, st.booleans())
def test_every_token_follows_its_own_history_and_shared_tokens_appear_once(ids, share):
    rows = rows_of(ids)
    layout = lay_out(rows, share)
    flat, positions = layout.input_ids.flatten(), layout.position_ids.flatten()
    if share:
        assert len(flat) == len(beginnings(ids))
        assert layout.attention_mask is None
    else:
        assert flat.numel() == len(ids) * max(map(len, ids))
        assert layout.attention_mask.sum(1).tolist() == list(map(len, ids))
    asked = [
        (sequence[t - 1], t - 1, sequence[t])
        for sequence, a in rows
        for t in range(len(sequence))
        if a[t]
    ]
    before, targets = layout.before[layout.wanted], layout.targets[layout.wanted]
    assert asked == list(
        zip(flat[before].tolist(), positions[before].tolist(), targets.tolist(), strict=True)
    )
    assert len(set(zip(layout.before.tolist(), layout.targets.tolist(), strict=True))) == len(
        layout.before
    )


def naive_attention(ids, query, key, value, scale, window):
    """Of each beginning of a sequence, by its own history: {beginning: (heads, D)}."""
    outputs = {}
    for history in beginnings(ids):
        at = [history[: n + 1] for n in range(len(history))][-window if window else 0 :]
        repeat = len(query[history]) // len(key[history])
        scores = [(query[history] * key[h].repeat_interleave(repeat, 0)).sum(-1) for h in at]
        weights = (torch.stack(scores) * scale).softmax(0)
        values = torch.stack([value[h].repeat_interleave(repeat, 0) for h in at])
        outputs[history] = (weights[..., None] * values).sum(0)
    return outputs


def histories(layout):
    """The beginning that stands at each place of a layout, as its ragged segments spell it."""
    histories, ragged = {}, layout.ragged
    for n in range(len(ragged.own) - 1):
        path = ragged.keys[ragged.reach[n] : ragged.reach[n + 1]].tolist()
        ids = layout.input_ids[0, path].tolist()
        count = int(ragged.own[n + 1] - ragged.own[n])
        histories |= {path[t]: tuple(ids[: t + 1]) for t in range(len(path) - count, len(path))}
    return [histories[n] for n in range(layout.input_ids.shape[1])]


@given(sequences, st.sampled_from([None, 1, 3]), st.sampled_from(["one batch", "many", "ragged"]))
@settings(deadline=None)
def test_attention_over_a_layout_matches_attention_over_each_sequence_alone(ids, window, way):
    with pytest.MonkeyPatch.context() as patch:
        if way == "many":
            patch.setattr(turnrl.policy.layout, "_CALL", 0)
        layout = lay_out(rows_of(ids), kernel=True)
    at = histories(layout)
    if way != "ragged":
        layout.ragged = None
    assert set(at) == beginnings(ids)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, len(at), 4) for heads in (4, 2, 2))
    named = [{h: part[0, :, n] for n, h in enumerate(at)} for part in (query, key, value)]
    wanted = naive_attention(ids, *named, 0.7, window)
    with pytest.MonkeyPatch.context() as patch:
        if way == "ragged":
            patch.setattr(turnrl.policy.varlen, "varlen_attn", naive_varlen)
        attended = layout.attend(0, query, key, value, 0.7, window)
    assert torch.allclose(attended[0], torch.stack([wanted[h] for h in at]), atol=1e-5)


def naive_varlen(query, key, value, own, reach, longest_own, longest_reach, **options):
    """What torch documents of its kernel: sequences one after the other, the last query of each on
    a level with its last key, and a window to either side."""
    assert (own.dtype, reach.dtype) == (torch.int32, torch.int32)
    assert int(own.diff().max()) == longest_own
    assert int(reach.diff().max()) == longest_reach
    left, right = options.pop("window_size")
    assert right == 0
    outputs = []
    for n in range(len(own) - 1):
        q = query[own[n] : own[n + 1]].transpose(0, 1)
        k, v = (part[reach[n] : reach[n + 1]].transpose(0, 1) for part in (key, value))
        level = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        apart = level - torch.arange(k.shape[1])
        mask = (apart >= 0) if left < 0 else (apart >= 0) & (apart <= left)
        read = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options)
        outputs.append(read.transpose(0, 1))
    return torch.cat(outputs)


@given(sequences, st.integers(1, 30), st.booleans())
def test_passes_hold_every_sequence_once_and_keep_within_the_budget(ids, budget, share):
    rows = rows_of(ids)
    seen = []
    for members, layout in forward_passes(rows, budget, share):
        assert layout.input_ids.numel() <= budget or len({tuple(ids[i]) for i in members}) == 1
        assert len(layout.wanted) == sum(sum(rows[i][1]) for i in members)
        seen += members
    assert sorted(seen) == list(range(len(ids)))


def test_a_pass_gathers_no_more_than_four_times_its_budget():
    # 40 sequences of 101 tokens that share 100 of them are 140 tokens, of which each sees 101
    ids = [[7] * 100 + [10 + n] for n in range(40)]
    sizes = [len(members) for members, _ in forward_passes(rows_of(ids), 200)]
    assert sizes == [7] * 5 + [5]


@pytest.mark.parametrize("asked", [[True, False, True], [False, True]])
def test_a_first_token_cannot_be_asked_for_and_all_are_accounted_for(asked):
    for share in (True, False):
        with pytest.raises(ValueError, match="False for the first"):
            lay_out([([5, 6, 7], asked)], share)


def test_sequences_are_batched_by_shared_prefix_and_otherwise_by_length():
    # in turns of one prompt and the other; with a budget of 12 tokens, a prompt of 6 and three
    # answers of 2 fit: two passes, and not the six of two sequences that the order given would make
    ids = [[p] * 6 + [10 + n, p] for n in range(3) for p in (1, 2)]
    assert [len(members) for members, _ in forward_passes(rows_of(ids), 12)] == [3, 3]
    assert [len(members) for members, _ in forward_passes(rows_of(ids), 12, share=False)] == [1] * 6
    mixed = [[1] * n for n in (1, 3) * 4]
    assert [len(members) for members, _ in forward_passes(rows_of(mixed), 8, share=False)] == [
        4,
        2,
        2,
    ]


# ---------------------------------------------------------------------------- a model and a run


def logprobs_and_gradient(policy, rows, share, weights):
    policy.zero_grad()
    with policy.eval_mode():
        logprobs, entropy, _ = policy(lay_out(rows, share), 0.8)
        (logprobs * weights).sum().backward()
    gradients = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    return logprobs.detach(), entropy, gradients


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 8}),
        ("Llama", {}),
        ("Mistral", {"sliding_window": 6}),
        ("Gemma", {"head_dim": 8}),
        ("Gemma3Text", {"head_dim": 8, "sliding_window": 6, "sliding_window_pattern": 2}),
        ("Olmo2", {}),
    ],
)
def test_models_compute_the_same_from_a_shared_layout(random_model, name, options):
    policy = Policy(str(random_model(name, **options))).build()
    policy.load()
    assert policy.way.share
    draw = random.Random(0)
    system = [draw.randrange(3, 300) for _ in range(12)]
    ids = [
        [*system, *prompt, *(draw.randrange(3, 300) for _ in range(length))]
        for prompt in ([5, 6, 7], [8, 9])
        for length in (9, 1, 14, 9)
    ]
    rows = rows_of([*ids, ids[0], ids[2][:20]])
    weights = torch.randn(sum(sum(asked) for _, asked in rows))
    logprobs, entropy, gradient = logprobs_and_gradient(policy, rows, True, weights)
    wanted, other, plain = logprobs_and_gradient(policy, rows, False, weights)
    assert (logprobs - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (entropy - other).abs().max() < 1e-5 * other.abs().max()
    largest = max(float(g.abs().max()) for g in plain.values())
    assert plain.keys() == gradient.keys()
    for part, value in plain.items():
        assert (gradient[part] - value).norm() <= 1e-5 * max(value.norm(), 1e-3 * largest), part


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # layers that the mask alone gives a window: the attention is not told of it
        ("Doge", {"sliding_window": 8}),
        (
            "Qwen2Moe",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        # what a token reads is more than the tokens that it attends to
        ("Jamba", {"use_mamba_kernels": False, "num_experts": 2}),
        # layers that see a chunk, and layers that scale by the place in the row
        ("Llama4Text", {"intermediate_size_mlp": 64, "num_local_experts": 2}),
        (
            "Llama4Text",
            {"intermediate_size_mlp": 64, "num_local_experts": 2, "no_rope_layers": [0, 0]},
        ),
    ],
)
def test_a_model_that_cannot_read_a_shared_layout_gets_padded_rows(random_model, name, options):
    policy = Policy(str(random_model(name, **options))).build()
    policy.load()
    assert not policy.way.share
    rows = rows_of([[5, 6, 7, 8], [5, 6, 7, 9, 10]])
    ((_, layout),) = policy.forward_passes(rows, 1000)
    assert layout.attention_mask is not None


def test_a_model_whose_log_probabilities_differ_gets_padded_rows(tiny_model, monkeypatch, caplog):
    right = Layout.attend
    monkeypatch.setattr(Layout, "attend", lambda self, *seen: right(self, *seen) + 0.01)
    policy = Policy(str(tiny_model)).build()
    with caplog.at_level("INFO"):
        policy.load()
    assert not policy.way.share
    assert "nats apart" in caplog.text


def test_a_lack_of_memory_is_not_taken_for_a_model_that_cannot_share(tiny_model, monkeypatch):
    def out_of_memory(self, *seen):
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr(Layout, "attend", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        Policy(str(tiny_model)).build().load()


def test_a_model_with_custom_attention_gets_padded_rows_and_one_log_message(random_model, caplog):
    module = make_module(random_model("Falcon"))
    with caplog.at_level("INFO"):
        module.configure_model()
        module.configure_model()
    messages = [r.message for r in caplog.records if "each trajectory is read from" in r.message]
    assert len(messages) == 1
    assert "FalconForCausalLM has attention of its own" in messages[0]
    policy = module.policy
    rows = rows_of([[5, 6, 7, 8], [5, 6, 7, 9, 10]])
    ((members, layout),) = policy.forward_passes(rows, 1000)
    assert layout.attention_mask is not None
    assert len(members) == 2
    assert len(policy.score_tokens(rows, 1000)) == 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"policy": {"gradient_checkpointing": True}}, marks=pytest.mark.slow),
        pytest.param(
            {"policy": {"quantization": "nf4", "lora": Lora(r=4)}}, marks=pytest.mark.slow
        ),
        {
            "policy": {"lora": Lora(r=4), "gradient_checkpointing": True},
            "objective": ClippedSurrogate(kl_coef=0.1, ratio_level="turn"),
        },
        {"estimator": TurnCritic()},
    ],
)
def test_a_run_learns_the_same_from_shared_and_from_padded_layouts(tiny_model, tmp_path, options):
    logged = []
    for share in (True, False):
        torch.manual_seed(0)
        policy = {**options.get("policy", {}), "share_prefixes": share, "minibatch_tokens": 150}
        module = make_module(
            tiny_model,
            **{**options, "policy": policy},
            passes_per_iteration=2,
            optimizer=adamw(1e-3),
        )
        folder = tmp_path / str(share)
        trainer(folder, 1, limit_val_batches=0).fit(module, data())
        names = ["train/loss", "train/grad_norm", "train/ratio", "train/entropy"]
        logged.append([column(folder, name)[0] for name in names])
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)
