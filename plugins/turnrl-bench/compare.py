"""Compare turnrl on a CPU with TRL, with a vLLM server, and with plainer ways to do the same work:

    python plugins/turnrl-bench/compare.py trl|engine|learn|tools|scale

The sides run in fresh processes that take turns, A B A B, so if the machine slows down, both sides
slow down. Each process is a block. A figure is the median of all repetitions in all blocks. A ratio
is one side's median over the other's, with the least and the greatest ratio of two neighbouring
blocks. docs/explanation/performance.md explains each comparison. Set OMP_NUM_THREADS for more than
one thread.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast

import httpx2
import lightning as L
from jsonargparse import auto_cli

from bench_task import (
    STARTER,
    AnswerHash,
    Search,
    Shape,
    Task,
    Watch,
    make,
    make_module,
    print_machine,
    print_table,
    qwen2,
    silence,
    train,
)
from trl_step import by_trl, by_turnrl, check_equal
from turnrl import MTGRPO, Policy, RecipeError, Rollout, Sampling
from turnrl.policy.settings import Lora
from turnrl_atlas import Atlas
from turnrl_segmenters import TwoTurn
from turnrl_slots import Slots

Figures = dict[str, list[float]]
"""The figures of a block by name, each with a value for every repetition."""

# ------------------------------------------------------------------------------ blocks, figures


def fresh(function: Callable[[], Any]) -> Any:
    """Call a function in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare) as process:
        return process.submit(function).result()


def _prepare() -> None:
    silence()
    sys.stdout = sys.stderr


def alternate(blocks: int, sides: Mapping[str, Callable[[], Figures]], case: str = "") -> None:
    """Run the blocks of each side in turns. Print a row for each figure, with the ratio if there
    are two sides."""
    blocks_of: dict[str, list[Figures]] = {name: [] for name in sides}
    for n, name in itertools.product(range(blocks), sides):
        print(f"  block {n + 1} of {blocks}: {name} ...", file=sys.stderr, flush=True)
        blocks_of[name].append(fresh(sides[name]))
    rows = []
    for name in next(iter(blocks_of.values()))[0]:
        by_side = [[block[name] for block in side] for side in blocks_of.values()]
        middles = [median(itertools.chain(*figures)) for figures in by_side]
        cells = [name, *(f"{value:,.2f}" for value in middles)]
        if len(sides) == 2:
            ratios = [median(a) / median(b) for a, b in zip(*by_side, strict=True)]
            cells.append(f"{middles[0] / middles[1]:.2f}x ({min(ratios):.2f}-{max(ratios):.2f})")
        rows.append(tuple(cells))
    last = ["/".join(sides)] if len(sides) == 2 else []
    print()
    print_table((case, *sides, *last), rows)


def held_mb(field: str) -> float:
    """Memory of this process: now (`VmRSS`), or at its peak (`VmHWM`). NaN except on Linux."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text("utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024 / 1e6
    return float("nan")


def new_peak() -> float:
    """Forget the peak so far, and return the memory in use."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
    return held_mb("VmRSS")


def return_memory() -> None:
    """Make later processes return freed memory at once. Else they would use it again, uncounted."""
    os.environ.update(MALLOC_MMAP_THRESHOLD_="1048576", MALLOC_TRIM_THRESHOLD_="1048576")


# ------------------------------------------------------------------------ trl: a training step


def trl(blocks: int = 3, steps: int = 2, prompts: int = 8, rows: int = 16) -> None:
    """Compare training steps with TRL's `GRPOTrainer`, once both are known to do equal work.

    Args:
        blocks: Processes of each side.
        steps: Steps of a block that count, after one that does not.
        prompts: Questions of a step, with eight trajectories each.
        rows: Trajectories of a TRL micro-batch; must divide the number of all trajectories.
    """
    if importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed. Install it with: pip install '.[bench]'")
    # TRL recognises a model's family by comparing the template with its own copy
    template = importlib.import_module("trl.chat_template_utils").qwen2_5_chat_template
    with TemporaryDirectory() as folder:
        make(Path(folder), Shape(prompts), template)
        sides = {"TRL": partial(by_trl, folder, rows), "turnrl": partial(by_turnrl, folder)}
        check_equal(*(fresh(partial(side, steps=0)) for side in sides.values()))
        for case, passes, ms in (
            ("one update", 1, 0),
            ("two passes", 2, 0),
            ("50 ms tool", 1, 50),
        ):
            timed = {
                name: partial(side, steps=steps, passes=passes, tool_ms=ms)
                for name, side in sides.items()
            }
            alternate(blocks, timed, case)


# --------------------------------------------------------------------- engine: sampled tokens


def rounds(
    count: int, prompts: int, sample: Callable[[list[list[int]]], Iterable[Sized]]
) -> Figures:
    """Sample for new prompts in each round, so that no cache helps. The first does not count."""
    draw, vocabulary = random.SystemRandom(), len(Policy(STARTER).build().tokenizer)
    figures: Figures = {"sampled tokens": [], "s": []}
    for _ in range(1 + count):
        batch = [[draw.randrange(8, vocabulary) for _ in range(195)] for _ in range(prompts)]
        began = time.perf_counter()
        figures["sampled tokens"].append(sum(map(len, sample(batch))))
        figures["s"].append(time.perf_counter() - began)
    return {name: values[1:] for name, values in figures.items()}


def by_slots(count: int, prompts: int) -> Figures:
    """Rounds of requests to Slots."""
    policy, engine = Policy(STARTER).build(), Slots().build()
    policy.load()
    engine.start(policy, 195 + 60)
    engine.sync(0)

    async def sample(batch: list[list[int]]) -> list[Sequence[int]]:
        sessions = []
        for prompt in batch:
            with closing(engine.open(prompt)) as root:
                sessions += [root.fork() for _ in range(8)]
        numbered = enumerate(sessions)
        turns = [s.generate((), Sampling(max_tokens=60, seed=n)) for n, s in numbered]
        completions = await asyncio.gather(*turns)
        for session in sessions:
            session.close()
        await engine.drain()
        return [completion.token_ids for completion in completions]

    figures = rounds(count, prompts, lambda batch: asyncio.run(sample(batch)))
    engine.close()
    return figures


def by_vllm(url: str, count: int, prompts: int) -> Figures:
    """The same rounds by a vLLM server, from 64 clients that ask for tokens and their
    log-probabilities."""
    with httpx2.Client(base_url=url, timeout=300, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        settings = {"model": model, "max_tokens": 60, "temperature": 1.0, "ignore_eos": True}
        settings |= {"return_token_ids": True, "logprobs": 0}

        def complete(prompt: list[int]) -> list[int]:
            answer = client.post("/v1/completions", json={**settings, "prompt": prompt}).json()
            return cast(list[int], answer["choices"][0]["token_ids"])

        with ThreadPoolExecutor(64) as pool:
            return rounds(count, prompts, lambda batch: pool.map(complete, sorted(batch * 8)))


def engine(url: str | None = None, blocks: int = 3, steps: int = 4, prompts: int = 16) -> None:
    """Compare tokens per second of Slots and of a vLLM server.

    Args:
        url: A vLLM server of the Atlas starter, such as http://127.0.0.1:8123. Without one, Slots
            is measured alone.
        blocks: Processes of each side.
        steps: Rounds of a block that count.
        prompts: Prompts of 195 tokens in a round; 8 requests share each, for 60 tokens.
    """
    served = {} if url is None else {"vLLM": partial(by_vllm, url, steps, prompts)}
    alternate(blocks, {**served, "Slots": partial(by_slots, steps, prompts)})


# ----------------------------------------------------------------------------- learn: learning


def learned(folder: str, steps: int, **policy: Any) -> Figures:
    """Seconds of steps without rollouts, after one that is not counted."""
    watch, module = Watch(), make_module(folder, Policy(folder, **policy), None)
    train(module, [watch], folder, 1 + steps)
    return {"learning, s": [seconds["learning"] for seconds in watch.times[1:]]}


class ForgetPeak(L.Callback):
    """Forgets the peak of memory before an iteration is learned from, and keeps what was held."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.held = new_peak()


def learning_peak(folder: str, **policy: Any) -> Figures:
    """The most memory that learning takes, above what was held before."""
    forget = ForgetPeak()
    train(make_module(folder, Policy(folder, **policy), None), [forget], folder, 1)
    return {"peak MB": [held_mb("VmHWM") - forget.held]}


def logits_peak(folder: str, **settings: Any) -> Figures:
    """The most memory of the plainest method: the logits of all loss tokens in one tensor."""
    module = make_module(folder, Policy(folder, share_prefixes=False, **settings), None)
    policy, task = module.policy, Task.read(folder)
    played = module.ask(task.as_questions(), task.shape.group_size)
    rows = [row for trajectory in played for row in trajectory.token_rows]
    ((_, layout),) = policy.forward_passes(rows, sys.maxsize)
    held = new_peak()
    hidden = policy.hidden(layout.input_ids, layout.attention_mask, layout.position_ids)
    logprobs = policy.logits(hidden.flatten(0, 1)[layout.before]).log_softmax(-1)
    logprobs.gather(-1, layout.targets[:, None]).mean().backward()
    return {"peak MB": [held_mb("VmHWM") - held]}


def learn(blocks: int = 3, steps: int = 3, prompts: int = 8) -> None:
    """Compare learning with prompts computed once and with rows padded. Takes 8 GB of memory.

    Args:
        blocks: Processes of each side.
        steps: Steps of a block that count, after one that does not.
        prompts: Questions of a step, with eight trajectories each.
    """
    # a head as wide as Qwen2.5-0.5B's, and hardly anything before it
    wide = qwen2(152_064, 896, 128, layers=1, heads=14, kv_heads=2)
    with TemporaryDirectory() as small, TemporaryDirectory() as large:
        make(Path(small), Shape(prompts))
        make(Path(large), Shape(1, 8, 281, (256, 256)), network=wide)

        def ways(function: Callable[..., Figures]) -> dict[str, Callable[[], Figures]]:
            shared = {"rows padded": False, "prompts once": True}
            return {name: partial(function, share_prefixes=on) for name, on in shared.items()}

        alternate(blocks, ways(partial(learned, small, steps)))
        return_memory()
        alternate(1, ways(partial(learning_peak, small)))
        adapter = {"lora": Lora(r=8)}
        plain = partial(logits_peak, large, **adapter)
        ours = partial(learning_peak, large, **adapter)
        alternate(1, {"full logits": plain, "turnrl": ours}, "vocabulary 152,064")


# --------------------------------------------------------------------- tools, scale: collecting


def quickstart(lockstep: bool = True, **options: Any) -> tuple[MTGRPO, Search]:
    """Quickstart's agent, and its tool, which holds all pages in memory."""
    pages = {page.title: page.text for page in Atlas().passages()}
    search = Search(lambda query: pages.get(query.rpartition(" of ")[2], "no such place"))
    limits: Any = {"max_turn_tokens": 64, "max_result_tokens": 96, "max_tokens": 384}
    rollout = Rollout(TwoTurn("Tools: [search(query)]"), [search], lockstep=lockstep, **limits)
    module = MTGRPO(Policy(STARTER), rollout, [AnswerHash()], engine=Slots(**options))
    return module, search


def collected(lockstep: bool, tool_ms: list[float], steps: int, prompts: int) -> Figures:
    """Collections with tools that take their time, after one that is not counted."""
    questions = list(itertools.islice(Atlas().questions("train"), prompts))
    module, search = quickstart(lockstep)
    module.ask(questions, 16)
    figures: Figures = {}
    for search.ms, search.jitter in itertools.product(tool_ms, (False, True)):
        name = f"{search.ms:g} ms{', each its own' if search.jitter else ''}, s"
        for seed in range(steps):
            began = time.perf_counter()
            module.ask(questions, 16, seed=seed)
            figures.setdefault(name, []).append(time.perf_counter() - began)
    return figures


def tools(blocks: int = 2, steps: int = 2, prompts: int = 16, tool_ms: float = 500) -> None:
    """Compare lockstep with turns that do not wait for each other, while tools take their time.

    Args:
        blocks: Processes of each side.
        steps: Collections of a block, with each tool.
        prompts: Questions of a collection, with 16 trajectories each.
        tool_ms: Milliseconds of a call of the slowest tool; the others take 0 and a tenth of it.
    """
    how = ([0, tool_ms / 10, tool_ms], steps, prompts)
    ways = {"lockstep": partial(collected, True, *how), "free": partial(collected, False, *how)}
    alternate(blocks, ways)


def many(trajectories: int, kv_memory: str) -> Figures:
    """One collection, after a small one."""
    questions = list(itertools.islice(Atlas().questions("train"), trajectories // 16))
    module, _ = quickstart(kv_memory=kv_memory)
    module.ask(questions[:1], 16)
    held, began = new_peak(), time.perf_counter()
    played = module.ask(questions, 16)
    seconds, peak = time.perf_counter() - began, held_mb("VmHWM") - held
    totals = {"tokens": sum(len(t.sampled_turns) for t in played), "ms": 1e3 * seconds}
    figures = {f"{name} each": [value / len(played)] for name, value in totals.items()}
    return {**figures, "s": [seconds], "peak MB": [peak]}


def scale(blocks: int = 2, most: int = 4096, kv_memory: str = "64MB") -> None:
    """Compare collections of 64, 256, 1024 ... trajectories, 16 of each question.

    Args:
        blocks: Processes of each size.
        most: Trajectories of the largest collection.
        kv_memory: Memory for keys and values in Slots.
    """
    return_memory()
    sizes = itertools.takewhile(lambda n: n <= most, (4**k for k in itertools.count(3)))
    alternate(blocks, {str(n): partial(many, n, kv_memory) for n in sizes}, "trajectories")


def main() -> None:
    """Make the comparison that the command line names, and print the machine."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = os.getloadavg()[0]
    try:
        auto_cli([trl, engine, learn, tools, scale], as_positional=False)
    except (RecipeError, httpx2.HTTPError) as error:
        sys.exit(str(error))
    print_machine(("trl",))
    print(f"Load average {before:.1f} -> {os.getloadavg()[0]:.1f}.")


if __name__ == "__main__":
    main()
