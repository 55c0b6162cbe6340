"""One iteration of a policy with seven billion parameters, as it would be trained on one GPU.

Qwen2.5-7B's shape with random weights, drawn on the device: what is measured does not depend on
what they are. The base is kept in 4 bits (NF4), an adapter of rank 16 is trained. 8 questions x 16
trajectories of 600 prompt tokens, 150 sampled, 500 of a tool's result, 200 sampled; each is learnt
from twice. The tokens are forced, so that the work is the same whatever the weights are.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch.nn.utils.rnn import pad_sequence

from turnrl import ClippedSurrogate, OutcomeOnly, Policy, Trajectory
from turnrl_bench.forced import Forced
from turnrl_bench.measure import NONE, Found, Report, Table, megabytes
from turnrl_bench.ours import (
    AnswerHash,
    Timed,
    Watch,
    policy_of,
    rollout_of,
    sampled_tokens,
    script_of,
    slots_of,
    train,
)
from turnrl_bench.task import TINY, Shape, make

SEVEN_B = {
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
LARGE = Shape(8, 16, 600, (150, 200), 500)
SMALL = Shape(2, 2, 160, (40, 8), 16)
UPDATES, RANK = 2, 16
_LONG_S = 150
"""After an iteration that took longer there is none to compare it with: there are minutes to do."""


class _Watch(Watch):
    """Notes the most memory of the device, too."""

    def __init__(self) -> None:
        super().__init__(0)
        self.began = 0.0
        self.acting: list[int | None] = []
        self.learning: list[int | None] = []
        self.generated: list[float] = []
        self.generating: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.began = time.perf_counter()
        tell("an iteration: rollouts")

    def on_train_batch_start(self, *args: Any) -> None:
        super().on_train_batch_start(*args)
        if args[-1] == 0:
            self.acting.append(device_peak())
            tell("learning")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        synchronize()
        super().on_train_epoch_end(trainer, pl_module)
        self.learning.append(device_peak())
        taken = self.clock.times["whole step"][-1][0]
        trainer.should_stop = taken > _LONG_S
        tell(f"the iteration took {taken:.1f} s")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # here, because afterwards Lightning moves the module off the device
        module = cast(Timed, pl_module)
        assert module.experience is not None
        _free()
        device_peak()
        tell("transformers' generate")
        try:
            self.generated = generate_seconds(module.policy, list(module.experience.trajectories))
        except torch.OutOfMemoryError:  # all else has been measured
            return
        self.generating = device_peak()


def tell(what: str) -> None:
    """Say what begins."""
    print(f"\n    {what}", end="", file=sys.stderr, flush=True)


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_peak() -> int | None:
    """The most bytes of the device's memory since this was last asked; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return int(found)


def measure(folder: str, tiny: bool) -> Found:
    """All of it.

    Args:
        folder: For the model, 15 GB of it.
        tiny: A small shape, on whatever device there is.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network: dict[str, Any] = dict(TINY if tiny else SEVEN_B)
    shape = SMALL if tiny else LARGE
    found: Found = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "cuda": torch.version.cuda,
        "shape": vars(shape),
        "network": network,
        "updates": UPDATES,
        "copy_bytes_per_s": copy_bandwidth(device, 2**20 if tiny else 2**32),
        "matmul_flops": matmul_throughput(device, 256 if tiny else 8192),
    }
    began = time.perf_counter()
    tell("a model with random weights")
    dtype = "bfloat16" if device == "cuda" else "float32"
    task = make(Path(folder), shape, network=network, device=device, dtype=dtype)
    _free()
    device_peak()
    tell("loading it")
    policy = policy_of(folder, RANK, quantization="nf4", gradient_checkpointing=True)
    rollout = rollout_of(task, 0)
    module = Timed(
        policy,
        rollout,
        [AnswerHash()],
        OutcomeOnly(),
        ClippedSurrogate(aggregation="token"),
        # with room for all; left to itself it would take most of what is free
        Forced(slots_of(kv_memory="64MB" if tiny else "16GB"), script_of(task, rollout, policy)),
        group_size=shape.group_size,
        updates_per_iteration=UPDATES,
    )
    watch = _Watch()
    train(module, watch, task, 2, accelerator="gpu" if device == "cuda" else "cpu")
    played = module.experience
    assert played is not None
    trajectories = list(played.trajectories)
    tied = network.get("tie_word_embeddings", True)
    # of the table of embeddings a step reads a few rows, unless it is the head as well
    read = [p for n, p in policy.load().named_parameters() if tied or "embed_tokens" not in n]
    found |= {
        "times": watch.clock.times,
        "setup_s": watch.began - began,
        "acting_peak": watch.acting[-1],
        "learning_peak": watch.learning[-1],
        "generate_s": watch.generated,
        "generate_peak": watch.generating,
        "weights_bytes": sum(p.numel() * p.element_size() for p in read),
        "sampled": sampled_tokens(trajectories),
        "trajectories": len(trajectories),
        "tokens_each": len(trajectories[0].token_ids),
        "prompt": len(trajectories[0].prompt_ids),
    }
    return found


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def generate_seconds(policy: Policy, trajectories: list[Trajectory]) -> list[float]:
    """What transformers' `generate` takes for each turn of the same trajectories: the way of TRL
    without a server, which reads the whole history anew in each turn."""
    from transformers import LogitsProcessorList

    from turnrl_bench.trl import ScriptedTokens

    network, tokenizer = cast(Any, policy.load()), policy.tokenizer
    device = next(network.parameters()).device
    end, pad, taken = tokenizer.eos_token_id, tokenizer.pad_token_id, []
    network.eval()
    for k in range(len(trajectories[0].turns)):
        histories = [[*t.prompt_ids] for t in trajectories]
        for history, trajectory in zip(histories, trajectories, strict=True):
            for turn in trajectory.turns[:k]:
                history += [*turn.token_ids, *turn.observation_ids]
        said = [t.turns[k].token_ids for t in trajectories]
        ids = pad_sequence(list(map(torch.tensor, histories)), True, pad, "left").to(device)
        real = torch.tensor(list(map(len, histories)), device=device)[:, None]
        mask = (torch.arange(ids.shape[1], device=device) >= ids.shape[1] - real).long()
        synchronize()
        began = time.perf_counter()
        with torch.inference_mode():
            network.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(map(len, said)),
                do_sample=True,
                eos_token_id=end,
                pad_token_id=pad,
                logits_processor=LogitsProcessorList([ScriptedTokens(said, end)]),
            )
        synchronize()
        taken.append(time.perf_counter() - began)
    network.train()
    return taken


def copy_bandwidth(device: str, size: int) -> float:
    """Bytes a second that a copy reads and writes.

    Args:
        device: Where.
        size: Bytes copied.
    """
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_seconds(lambda: target.copy_(source))


def matmul_throughput(device: str, size: int) -> float:
    """Operations a second of a product of two square matrices, in bfloat16 on a GPU.

    Args:
        device: Where.
        size: Rows.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    one = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _best_seconds(lambda: one @ one)


def _best_seconds(work: Callable[[], Any], repetitions: int = 10) -> float:
    least = math.inf
    for _ in range(repetitions):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        least = min(least, time.perf_counter() - began)
    return least


# ------------------------------------------------------------------------------------ report


def linear_parameters(network: dict[str, Any]) -> int:
    """Weights of a Qwen2's linear layers but the head's: what each token is multiplied with."""
    hidden, layers = network["hidden_size"], network["num_hidden_layers"]
    kv = hidden * network["num_key_value_heads"] // network["num_attention_heads"]
    return int(
        layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * network["intermediate_size"])
    )


def learning_operations(found: Found) -> float:
    """Operations that an iteration's updates need at least: two for each weight and token forward,
    and two backward, as the base is frozen; each prompt once for its group; logits of sampled
    tokens alone. Attention, and what checkpointing computes again, is not counted."""
    shape, network = found["shape"], found["network"]
    own = found["trajectories"] * (found["tokens_each"] - found["prompt"])
    tokens = shape["prompts"] * found["prompt"] + own
    head = network["hidden_size"] * network["vocab_size"] * found["sampled"]
    return float(4 * found["updates"] * (linear_parameters(network) * tokens + head))


def decode_bytes(found: Found, width: int) -> float:
    """Bytes that a decode step of all trajectories has to read: the weights, and keys and values of
    what came before, on average.

    Args:
        found: What `measure` gave.
        width: Bytes of a key's number.
    """
    network = found["network"]
    head = network["hidden_size"] // network["num_attention_heads"]
    each = 2 * network["num_hidden_layers"] * network["num_key_value_heads"] * head * width
    # the first turn reads the prompt, the second all but its own end
    (first, second), length = found["shape"]["turn_tokens"], found["tokens_each"]
    mean = (first * (found["prompt"] + first / 2) + second * (length - second / 2)) / (
        first + second
    )
    return float(found["weights_bytes"] + found["trajectories"] * mean * each)


def _whole(rate: float) -> str:
    return NONE if math.isnan(rate) else f"{rate:,.0f}"


def report_of(found: Found) -> Report:
    """Tables of what `measure` gave."""
    shape = found["shape"]
    steps = sum(shape["turn_tokens"])
    rolled, before, whole, learnt = (
        found["times"][name][-1][0]
        for name in ("rollouts", "before learning", "whole step", "learning")
    )
    learnt -= before
    generated = sum(found["generate_s"]) or math.nan
    took = NONE if math.isnan(generated) else f"{generated:.1f} s"
    on_gpu = found["acting_peak"] is not None
    reading = decode_bytes(found, 2 if on_gpu else 4) * steps / rolled
    operations = learning_operations(found) / learnt

    def share(part: float, ceiling: float) -> str:
        return f"{100 * part / ceiling:.0f} %"

    rows = (
        ("rollouts", f"{rolled:.1f} s", megabytes(found["acting_peak"])),
        ("old log-probabilities", f"{before:.1f} s", ""),
        (f"learning, {found['updates']} updates", f"{learnt:.1f} s",
         megabytes(found["learning_peak"])),
        ("whole iteration", f"{whole:.1f} s", ""),
        ("transformers' generate, same turns", took,
         megabytes(found["generate_peak"])),
    )  # fmt: skip
    rates = (
        ("decode, tokens/s", _whole(found["sampled"] / rolled), ""),
        ("transformers' generate, tokens/s", _whole(found["sampled"] / generated), ""),
        ("decode reads", f"{reading / 1e9:,.1f} GB/s", share(reading, found["copy_bytes_per_s"])),
        ("a copy, read and written", f"{found['copy_bytes_per_s'] / 1e9:,.1f} GB/s", "100 %"),
        ("learning computes", f"{operations / 1e12:,.2f} TFLOPS",
         share(operations, found["matmul_flops"])),
        ("a product of matrices", f"{found['matmul_flops'] / 1e12:,.2f} TFLOPS", "100 %"),
    )  # fmt: skip
    first, second = shape["turn_tokens"]
    report = Report(
        f"An iteration on {found['device']}: {shape['prompts']} x {shape['group_size']} "
        f"trajectories,\nprompt/turn/result/turn of {shape['prompt_tokens']}/{first}/"
        f"{shape['result_tokens']}/{second} tokens;\n"
        f"{found['network']['num_hidden_layers']} layers of {found['network']['hidden_size']}, "
        f"NF4 + LoRA {RANK}"
    )
    report.tables = [Table(("", "seconds", "peak memory"), rows)]
    report.tables += [Table(("", "rate", "of the ceiling"), rates)]
    count = len(found["times"]["whole step"])
    report.notes = [
        f"The last of {count} iterations; making and loading the model took "
        f"{found['setup_s']:.0f} s. CUDA {found['cuda'] or 'was not used'}.",
        "Decode's rate is that of whole rollouts, prompts and results read included. What decode "
        "reads: weights as they lie, and keys and values, once a step. What learning computes: 4 "
        "operations for a weight and token, prompts once a group; not what is computed again.",
    ]
    report.raw = found
    return report
