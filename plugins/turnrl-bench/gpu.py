"""How fast a 7B policy is on a GPU, and how much memory it takes:

    python plugins/turnrl-bench/gpu.py sampling|minibatch|iteration

The policy has the shape of Qwen2.5-7B, random weights in 4 bits and an adapter of rank 16. Its
tokens are forced, so the work does not depend on the weights. docs/explanation/performance.md has
the results. `--tiny true` runs the same code on any machine, and its times say nothing. To see the
time of each kernel, run `turnrl fit` with Lightning's `--trainer.profiler pytorch`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from jsonargparse import auto_cli
from lightning.fabric.utilities import move_data_to_device

from bench_task import (
    Shape,
    Task,
    Watch,
    clock,
    make,
    make_module,
    peak_bytes,
    print_machine,
    print_table,
    qwen2,
    silence,
    train,
)
from turnrl import Policy, RecipeError, Sampling
from turnrl.engines import Engine
from turnrl.policy.compute import checkpoint_activations
from turnrl.policy.model import LanguageModel
from turnrl.policy.settings import Lora
from turnrl_slots import Slots

SEVEN_B = qwen2(152_064, 3584, 18_944, layers=28, heads=28, kv_heads=4, tied=False)
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def make_task(folder: str, tiny: bool) -> Task:
    """Write the policy and its task to a folder."""
    if tiny:
        network, shape = (
            qwen2(1024, 192, 512, layers=2, heads=4, kv_heads=2),
            Shape(2, 2, 220, (40, 8), 16),
        )
    else:
        network, shape = SEVEN_B, Shape(8, 16, 600, (150, 200), 500)
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    return make(Path(folder), shape, network=network, device=str(DEVICE), dtype=dtype)


def load_policy(folder: str) -> LanguageModel:
    """The policy on the device, loaded as Lightning does, inside its device's context."""
    policy = Policy(folder, lora=Lora(r=16), quantization="nf4").build()
    with DEVICE:
        policy.load(DEVICE)
    return policy.to(DEVICE)


# ------------------------------------------------------------------------------------ sampling


async def sample_turns(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    group: int,
    turns: Sequence[Sequence[int]],
    result: Sequence[int],
) -> None:
    """Sample turns of these lengths for each row, in lockstep, with a result between them."""
    roots = [engine.open(prompt) for prompt in prompts]
    sessions = [root.fork() for root in roots for _ in range(group)]
    for root in roots:
        root.close()
    for number, lengths in enumerate(turns):
        replies = []
        for row, (session, length) in enumerate(zip(sessions, lengths, strict=True)):
            forced = tuple(16 + (31 * row + 7 * n) % 900 for n in range(length))
            sampling = Sampling(max_tokens=length, seed=row, forced_ids=forced)
            replies.append(session.generate(result if number else (), sampling))
        await asyncio.gather(*replies)
    for session in sessions:
        session.close()
    await engine.drain()


def tokens_per_s(
    policy: LanguageModel,
    shape: Shape,
    rows: int,
    weights: Literal["dense", "adapter"],
    graphs: bool,
) -> float:
    """Sample two turns of ragged lengths, so that rows drop out from step to step."""
    draw = random.Random(rows)
    group = next(g for g in range(shape.group_size, 0, -1) if rows % g == 0)
    prompts = [
        [draw.randrange(16, 1000) for _ in range(shape.prompt_tokens)] for _ in range(rows // group)
    ]
    means = (3, 3) if rows < 10 else (48, 64)
    turns = [[draw.randint(-(-m // 2), m + m // 2) for _ in range(rows)] for m in means]
    result = prompts[0][: shape.result_tokens]
    longest = shape.prompt_tokens + len(result) + 2 * sum(means)
    engine = Slots(decode_weights=weights, cuda_graphs=graphs, slots=rows).build()
    engine.start(policy, longest)
    engine.sync(1)
    began = clock()
    asyncio.run(sample_turns(engine, prompts, group, turns, result))
    seconds = clock() - began
    engine.close()
    return sum(map(sum, turns)) / seconds


def sampling(tiny: bool = False) -> None:
    """Sampled tokens per second, with each way to hold the weights and with and without graphs.

    Args:
        tiny: Use a small shape, on any device.
    """
    with TemporaryDirectory() as folder:
        shape = make_task(folder, tiny).shape
        policy = load_policy(folder)
        names: dict[Literal["dense", "adapter"], str] = {
            "dense": "dense copy and adapter",
            "adapter": "NF4 and adapter",
        }
        cells = []
        for rows, weights, graphs in itertools.product(
            (4, 6) if tiny else (128, 336), names, (True, False)
        ):
            speed = tokens_per_s(policy, shape, rows, weights, graphs)
            shown = f"{rows} rows, {names[weights]}, graphs {'on' if graphs else 'off'}"
            cells.append((shown, f"{speed:,.0f}"))
        print_table(("sampling", "tokens/s"), cells)


# ----------------------------------------------------------------------------------- learning


def time_step(policy: LanguageModel, layout: Any) -> dict[str, float]:
    """Seconds of the forward pass, the head and the backward pass of one minibatch. The loss is a
    weighted sum of log-probabilities, whose gradient is as large as the surrogate's."""
    marks: list[float] = []
    hook = policy.decoder.register_forward_hook(lambda *_: marks.append(clock()))
    began = clock()
    logprobs = policy(layout).logprobs
    headed = clock()
    weights = torch.linspace(-1, 1, len(logprobs), device=logprobs.device) / len(logprobs)
    (logprobs * weights).sum().backward()
    ended = clock()
    hook.remove()
    # checkpointing runs the layers again, but not the decoder, so there is only one mark
    parts = {"forward": marks[0] - began, "log-probabilities": headed - marks[0]}
    return {**parts, "backward": ended - headed, "together": ended - began}


def minibatch(tiny: bool = False) -> None:
    """Learning from one minibatch, with activations computed again and with all kept.

    Args:
        tiny: Use a small shape, on any device.
    """
    with TemporaryDirectory() as folder:
        task, tokens = make_task(folder, tiny), 512 if tiny else 8192
        policy = load_policy(folder)
        module = make_module(folder, policy.settings, None)
        module.policy = policy
        played = module.ask(task.as_questions(), task.shape.group_size)
        rows = [row for trajectory in played for row in trajectory.token_rows]
        numbers, layout = next(policy.forward_passes(rows, tokens))
        layout = move_data_to_device(layout, DEVICE)
        columns = []
        for recomputes in (True, False):
            checkpoint_activations(policy.base, recomputes)
            time_step(policy, layout)
            peak_bytes()
            runs = [time_step(policy, layout) for _ in range(3)]
            column = {
                part: f"{statistics.median(run[part] for run in runs):.3g} s" for part in runs[0]
            }
            columns.append(column | {"peak memory": f"{peak_bytes() / 1e9:.1f} GB"})
        cells = [(part, *(column[part] for column in columns)) for part in columns[0]]
        policy.score_tokens([rows[n] for n in numbers], tokens)
        began = clock()
        policy.score_tokens([rows[n] for n in numbers], tokens)
        cells.append(("old log-probabilities", f"{clock() - began:.3g} s", ""))
        print_table((f"a minibatch of {tokens:,} tokens", "computed again", "all kept"), cells)


def iteration(tiny: bool = False) -> None:
    """Two whole iterations as `turnrl fit` runs them, with two passes; the second one counts.

    Args:
        tiny: Use a small shape, on any device.
    """
    with TemporaryDirectory() as folder:
        shape, watch = make_task(folder, tiny).shape, Watch()
        policy = Policy(folder, lora=Lora(r=16), quantization="nf4")
        module = make_module(folder, policy, Slots(), passes=2)
        train(module, [watch], folder, 2, "cpu" if DEVICE.type == "cpu" else "gpu")
        times, peaks = watch.times[-1], watch.peaks[-1]
        learning = times["learning"] - times["before learning"]
        sampled = shape.prompts * shape.group_size * sum(shape.turn_tokens)
        speed = f"{sampled / times['rollouts']:,.0f}"
        cells = [
            ("rollouts", f"{times['rollouts']:.3g} s", f"{peaks['sampling'] / 1e9:.1f} GB"),
            ("old log-probabilities", f"{times['before learning']:.3g} s", ""),
            ("learning, 2 passes", f"{learning:.3g} s", f"{peaks['learning'] / 1e9:.1f} GB"),
            ("whole iteration", f"{times['whole step']:.3g} s", ""),
            ("the first one", f"{watch.times[0]['whole step']:.3g} s", ""),
            ("rollouts, tokens/s", speed, ""),
        ]
        header = f"{shape.prompts} x {shape.group_size} trajectories"
        print_table((header, "measured", "peak memory"), cells)


def main() -> None:
    """Measure what the command line names, and print the machine."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    silence()
    try:
        auto_cli([sampling, minibatch, iteration], as_positional=False)
    except RecipeError as error:
        sys.exit(str(error))
    print_machine(("bitsandbytes", "triton"))


if __name__ == "__main__":
    main()
