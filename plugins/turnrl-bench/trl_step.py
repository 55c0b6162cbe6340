"""A training step by turnrl and by TRL, set up to do equal work, and a check that they do."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L
import numpy as np
import torch
import transformers

from bench_task import ARGUMENT, DESCRIPTION, Search, Task, Watch, make_module, reward, train
from turnrl import MTGRPO, Policy
from turnrl_slots import Slots

Work = dict[str, Any]
"""The parts of a step's work, by name."""


class Gradient(L.Callback):
    """Keeps the gradient of turnrl's last step."""

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.kept = gradient_of(cast(MTGRPO, pl_module).policy.load())


class GradientOfTrl(transformers.TrainerCallback):
    """Keeps the gradient of TRL's last step."""

    def on_pre_optimizer_step(self, *args: object, **kwargs: Any) -> None:
        self.kept = gradient_of(kwargs["model"])


def gradient_of(model: torch.nn.Module) -> Work:
    """The gradient of a model in one array of numpy, and the names of its parameters."""
    named = sorted(model.named_parameters())
    gradients = {n: p.grad.double().flatten() for n, p in named if p.grad is not None}
    return {"parameters": [*gradients], "gradient": torch.cat([*gradients.values()]).numpy()}


def work_of(trajectories: Any, gradient: Gradient | GradientOfTrl) -> Work:
    """The work of a step. A trajectory is a tuple of its prompt, the tokens after it, their part in
    the loss, calls and reward."""
    parts = ("prompt tokens", "tokens after the prompts", "loss tokens", "tool calls", "rewards")
    rows = sorted(trajectories, key=lambda row: (list(row[0]), list(row[1])))
    return {**dict(zip(parts, zip(*rows, strict=True), strict=True)), **gradient.kept}


def by_turnrl(folder: str, steps: int, passes: int = 1, tool_ms: float = 0) -> Work:
    """Time steps of turnrl after a first step. With 0 steps, return the work of the first."""
    search = Search(Task.read(folder).article, tool_ms)
    watch, gradient = Watch(), Gradient()
    module = make_module(folder, Policy(folder), Slots(), passes, search)
    train(module, [watch, gradient] if not steps else [watch], folder, 1 + steps)
    if steps:
        parts = ("rollouts", "learning", "whole step")
        return {f"{part}, s": [seconds[part] for seconds in watch.times[1:]] for part in parts}
    rows = []
    for trajectory in module.experience.trajectories if module.experience else ():
        (sample,) = trajectory.samples
        after = slice(len(sample.prompt_ids), None)
        made = (call for turn in trajectory.turns for call in turn.reading.calls)
        calls = [[call.name, dict(call.arguments)] for call in made]
        loss = [int(turn >= 0) for turn in sample.turn_index[after]]
        answer = reward(trajectory.answer or "")
        written = [*sample.token_ids[after]]
        rows.append(([*sample.prompt_ids], written, loss, calls, answer))
    return work_of(rows, gradient)


class ScriptedTokens(transformers.LogitsProcessor):
    """Leaves only one token possible: the next token of each row's script."""

    def __init__(self, rows: Sequence[Sequence[int]], end: int) -> None:
        longest = max(map(len, rows))
        padded = [[*row, *[end] * (longest - len(row))] for row in rows]
        self.columns = torch.tensor(padded).T.contiguous()
        self.at = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        column = self.columns[min(self.at, len(self.columns) - 1), :, None]
        self.at += 1
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter(1, column, 0.0)  # type: ignore[return-value]


def _trainer(folder: str, task: Task, tool_ms: float, size: dict[str, int]) -> Any:
    """A `GRPOTrainer` set up to do the same work as turnrl: float32, no checkpointing of
    activations, no reference model, a loss that is a mean over tokens, no clipping of gradients."""
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    system = {"role": "system", "content": task.system}
    data = [[system, {"role": "user", "content": question}] for question in task.questions]

    async def search(query: str):  # type: ignore[no-untyped-def]
        if tool_ms:
            await asyncio.sleep(tool_ms / 1000)
        return task.article(query)

    search.__doc__ = f"{DESCRIPTION}\n\nArgs:\n    query: {ARGUMENT}\n"
    settings: dict[str, object] = {
        "bf16": False,
        "gradient_checkpointing": False,
        "beta": 0.0,
        "loss_type": "dapo",
        "max_grad_norm": 0.0,
        "shuffle_dataset": False,
        "max_tool_calling_iterations": 1,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **size,
    }
    return trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [reward(c[-1]["content"]) for c in completions],
        args=trl.GRPOConfig(str(Path(folder, "trl")), use_cpu=True, **settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": data}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder, padding_side="left"),
        tools=[search],
    )


def by_trl(folder: str, rows: int, steps: int, passes: int = 1, tool_ms: float = 0) -> Work:
    """The same by TRL's `GRPOTrainer`. `ScriptedTokens` leaves one token at a time possible; the
    trainer does all of its other work."""
    task, gradient = Task.read(folder), GradientOfTrl()
    shape = task.shape
    size = {
        "num_generations": shape.group_size,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": shape.prompts * shape.group_size // rows,
        "max_completion_length": shape.tokens - shape.prompt_tokens,
        "num_iterations": passes,
        "max_steps": (1 + steps) * passes,
    }
    trainer = _trainer(folder, task, tool_ms, size)
    if not steps:
        trainer.add_callback(gradient)
    model, end = trainer.model, trainer.processing_class.eos_token_id
    turns = itertools.cycle([[s[k] for group in task.script for s in group] for k in range(2)])
    generate, collect, collections = model.generate, trainer._generate, []
    marks: list[tuple[float, float]] = []

    def forced(**kwargs: object) -> object:
        script = ScriptedTokens(next(turns), end)
        return generate(**kwargs, logits_processor=transformers.LogitsProcessorList([script]))

    def timed(prompts: object) -> object:
        began = time.perf_counter()
        collections.append(collect(prompts))
        marks.append((began, time.perf_counter()))
        return collections[-1]

    model.generate, trainer._generate = forced, timed
    trainer.train()
    if steps:
        # a step lasts from one rollout to the next
        began, collected = np.array([*marks, (time.perf_counter(), 0)]).T
        whole, rollouts = np.diff(began)[1:], (collected - began)[1:-1]
        times = {"rollouts, s": rollouts, "learning, s": whole - rollouts, "whole step, s": whole}
        return {name: seconds.tolist() for name, seconds in times.items()}
    work = []
    for prompt, ids, loss, messages in zip(*collections[-1][:4], strict=True):
        made = [call["function"] for m in messages for call in m.get("tool_calls") or ()]
        calls = [[call["name"], dict(call["arguments"])] for call in made]
        work.append(([*prompt], [*ids], [*loss], calls, reward(messages[-1]["content"])))
    return work_of(work, gradient)


def check_equal(ours: Work, theirs: Work) -> None:
    """Compare the first step of two sides.

    Raises:
        SystemExit: Naming the first difference.
    """
    a, b = ours.pop("gradient"), theirs.pop("gradient")
    for part in ours:
        if ours[part] != theirs[part]:
            sys.exit(f"The {part} of the two sides differ, so nothing was timed.")
    cosine = a @ b / np.sqrt((a @ a) * (b @ b))
    if not cosine > 0.9999:
        sys.exit(f"The gradients have a cosine of {cosine:.7f}, so nothing was timed.")
    count = len(ours["rewards"])
    print(f"Equal work: {count} trajectories, a cosine of {cosine:.7f} between the gradients.")
