"""A few tokens, sampled and learned from by a miniature of the recipe's own model."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning.fabric.utilities import move_data_to_device

from turnrl import MTGRPO, Check, Engine, Finding, Policy, Sampling, Start

_WIDTH, _VOCABULARY, _TOKENS = 256, 512, 96
_FORWARD_S = 60
_OF_SIZE = ("keys and values", "turns at once")


class Trial(Check):
    """The recipe's policy and engine, run for real: two layers of the model's kind with its own
    heads, random weights and few words, on the device that the run would use.

    It shows the choices that are only made while running: which attention samples and which
    learns, whether beginnings are shared, whether CUDA graphs are recorded.
    """

    quick = False

    def run(self, start: Start) -> Iterable[Finding]:
        if isinstance(start.module, MTGRPO):
            yield from _tried(start.module, start.device)


def _tried(module: MTGRPO, device: torch.device) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = miniature(module.policy, Path(folder))
        policy.load(device)
        policy.to(device)
        attention = dict(policy.in_force)
        text = "; ".join(f"{name}: {value}" for name, value in attention.items())
        if module.policy.share_prefixes and not policy.share_prefixes:
            step = "Learning takes longer than it could. Report the model and the versions above."
            yield Finding("warn", "sharing", f"not in force; {text}", step)
        else:
            yield Finding("pass", "sharing", text)
        engine = _small_engine(module.engine)
        vocabulary = policy.config.get_text_config().vocab_size
        rows = asyncio.run(_sampled(engine, policy, vocabulary))
        in_force = dict(engine.in_force)
        for name in _OF_SIZE:  # of this small engine's, not of the run's
            in_force.pop(name, None)
        engine.close()
        choices = "; ".join(f"{name}: {value}" for name, value in in_force.items())
        text = f"{len(rows)} turns by {type(engine).__name__} on {device}"
        yield Finding("pass", "sampling", f"{text}; {choices}" if choices else text)
        yield _learned(policy, rows, device)


def miniature(policy: Policy, folder: Path) -> Policy:
    """A policy as the recipe's, of a model with two of its layers, narrow, and with few words. Its
    heads, which the kernels of attention depend on, are those of the recipe's.

    Args:
        policy: The recipe's; only its configuration is read.
        folder: Where the model is written.
    """
    config = copy.deepcopy(policy.config)
    text: Any = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    text.head_dim = size
    text.hidden_size = min(text.hidden_size, _WIDTH)
    text.intermediate_size = min(text.intermediate_size, 2 * _WIDTH)
    text.num_hidden_layers = min(text.num_hidden_layers, 2)
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = kinds[: text.num_hidden_layers]
    text.vocab_size = min(text.vocab_size, _VOCABULARY)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for part in (config, text):
            if getattr(part, name, None) is not None:
                setattr(part, name, 0)
    network: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network.generation_config = transformers.GenerationConfig()
    network.save_pretrained(folder)
    small = Policy(
        str(folder),
        policy.quantization,
        policy.lora,
        policy.dtype,
        policy.gradient_checkpointing and True,
        share_prefixes=policy.share_prefixes,
        fused_kernels=policy.fused_kernels,
    )
    small.critic = policy.critic
    small.tokenizer = policy.tokenizer
    return small


def _small_engine(engine: Engine) -> Engine:
    """The recipe's engine with its options, but for memory and slots."""
    small: Any = copy.deepcopy(engine)
    for name, value in {"slots": 8, "prefill_tokens": 512, "kv_memory": "256MB"}.items():
        if hasattr(small, name):
            setattr(small, name, value)
    return small  # type: ignore[no-any-return]


async def _sampled(engine: Engine, policy: Policy, vocabulary: int) -> list[Any]:
    """Rows of two prompts with four turns each, whose sampled tokens are asked for."""
    engine.start(policy, _TOKENS)
    engine.sync(0)
    prompts = [[(7 * n + 3 * i) % vocabulary for n in range(40)] for i in range(2)]
    sessions = []
    for prompt in prompts:
        first = engine.open(prompt)
        sessions += [(prompt, first), *((prompt, first.fork()) for _ in range(3))]
    async with asyncio.timeout(_FORWARD_S), asyncio.TaskGroup() as crowd:
        turns = [
            # of unequal length, so that rows come to an end while others go on
            crowd.create_task(session.generate([], Sampling(6 + n, seed=n)))
            for n, (_, session) in enumerate(sessions)
        ]
    await engine.drain()
    rows = []
    for (prompt, session), turn in zip(sessions, turns, strict=True):
        session.close()
        ids = [*prompt, *turn.result().token_ids]
        rows.append((ids, [n >= len(prompt) for n in range(len(ids))]))
    return rows


def _learned(policy: Policy, rows: list[Any], device: torch.device) -> Finding:
    """A forward and a backward pass of what was sampled."""
    assert policy.network is not None
    policy.network.train()
    for _, layout in policy.passes(rows, 1024):
        chosen, _, values = policy(move_data_to_device(layout, device))
        (chosen.sum() + values.sum()).backward()
    trained = policy.trainable_parameters()
    gradients = [p.grad for p in trained.values() if p.grad is not None]
    if not gradients or not all(bool(g.isfinite().all()) for g in gradients):
        text = f"{len(gradients)} of {len(trained)} weights got a gradient, or it is not finite"
        return Finding("fail", "learning", text, "Report the model and the versions above.")
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in policy.parameters()})
    text = f"forward and backward on {device}, {len(gradients)} gradients, {', '.join(kinds)}"
    return Finding("pass", "learning", text)
