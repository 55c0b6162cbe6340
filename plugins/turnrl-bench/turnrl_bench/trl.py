"""The same iterations by TRL's `GRPOTrainer` with `tools=`.

TRL is set up as its users would for this machine, and so that it does what turnrl does: float32, no
checkpointing of activations, no penalty (`beta` 0, so no reference model), the loss that is a mean
over tokens, no clipping of gradients. Both sides sample the same tokens: TRL's `generate` is given
a `LogitsProcessor`, its public way to say what may come next, and does everything that it always
does beside.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback

from turnrl_bench.measure import Clock, Found
from turnrl_bench.ours import save_gradient
from turnrl_bench.task import ARGUMENT, DESCRIPTION, Task, reward


class ScriptedTokens(LogitsProcessor):
    """Leaves one token possible: the next one of each row's script."""

    def __init__(self, rows: Sequence[Sequence[int]], end: int) -> None:
        longest = max(map(len, rows))
        padded = [[*row, *[end] * (longest - len(row))] for row in rows]
        self.columns = torch.tensor(padded).T.contiguous()
        self.at = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        column = self.columns[min(self.at, len(self.columns) - 1), :, None].to(scores.device)
        self.at += 1
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter(1, column, 0.0)  # type: ignore[return-value]


class _Watch(TrainerCallback):
    """Times iterations as `ours.Watch` does."""

    def __init__(self, warm_up: int, updates: int, gradient: str | None) -> None:
        self.warm_up, self.updates, self.gradient = warm_up, updates, gradient
        self.clock, self.ended = Clock(), Clock.now()
        self.rolled = ((0.0, 0.0), (0.0, 0.0))

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.ended = Clock.now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.gradient is not None and state.global_step == 0:
            save_gradient(kwargs["model"].named_parameters(), self.gradient)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done, inside = divmod(state.global_step, self.updates)
        if inside:
            return
        if done > self.warm_up:
            self.clock.keep_step(self.ended, self.rolled)
        self.ended = Clock.now()


def iterations(
    folder: str,
    steps: int,
    warm_up: int,
    updates: int = 1,
    tool_ms: float = 0,
    gradient: str | None = None,
    rows: int = 16,
) -> Found:
    """Iterations on the task in a folder; see `ours.iterations`.

    Args:
        rows: Trajectories of a micro-batch.
    """
    from datasets import Dataset

    trl: Any = importlib.import_module("trl")
    transformers: Any = importlib.import_module("transformers")
    task = Task.read(folder)
    size, count = task.shape.group_size, task.shape.prompts * task.shape.group_size
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    watch = _Watch(warm_up, updates, gradient)
    opening = {"role": "system", "content": task.system}
    data = [[opening, {"role": "user", "content": q}] for q in task.questions]
    args = trl.GRPOConfig(
        output_dir=str(Path(folder, "trl")),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        beta=0.0,
        temperature=1.0,
        loss_type="dapo",
        max_grad_norm=0.0,
        num_generations=size,
        num_iterations=updates,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=count // rows,
        max_completion_length=task.shape.tokens - task.shape.prompt_tokens,
        max_tool_calling_iterations=1,
        max_steps=(warm_up + steps) * updates,
        shuffle_dataset=False,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=_rewards,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": data}),
        processing_class=tokenizer,
        tools=[_tool(task, tool_ms)],
        callbacks=[watch],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    turns = [[said[k] for members in task.script for said in members] for k in range(2)]
    calls = iter(range(2 * (warm_up + steps)))
    generate, collect = model.generate, trainer._generate

    def forced(**kwargs: Any) -> Any:
        script = ScriptedTokens(turns[next(calls) % 2], tokenizer.eos_token_id)
        return generate(**kwargs, logits_processor=LogitsProcessorList([script]))

    kept: list[Any] = []

    def timed(prompts: Any) -> Any:
        began = Clock.now()
        output = collect(prompts)
        watch.rolled = (began, Clock.now())
        kept[:] = [output]
        return output

    model.generate, trainer._generate = forced, timed
    trainer.train()
    prompt_ids, ids, mask, completions = kept[0][:4]
    block: Found = {
        "times": watch.clock.times,
        "trajectories": len(ids),
        "sampled": sum(map(sum, mask)),
        "prompt": len(prompt_ids[0]),
        "tokens": sum(map(len, [*prompt_ids, *ids])),
    }
    if gradient is not None:
        block["work"] = [
            {
                "prompt": list(prompt),
                "ids": list(one),
                "loss": list(loss),
                "calls": [_called(call) for m in said for call in m.get("tool_calls") or ()],
                "reward": reward(said[-1]["content"]),
            }
            for prompt, one, loss, said in zip(prompt_ids, ids, mask, completions, strict=True)
        ]
    return block


def _called(call: Any) -> list[Any]:
    return [call["function"]["name"], dict(call["function"]["arguments"])]


def _rewards(completions: list[Any], **_: Any) -> list[float]:
    return [reward(said[-1]["content"]) for said in completions]


def _tool(task: Task, tool_ms: float) -> Any:
    """The search tool as TRL wants it: a typed function, whose docstring describes it. One that
    takes its time is a coroutine, as a request to a server would be."""

    def plain(query: str):  # type: ignore[no-untyped-def]
        return task.article(query)

    async def waits(query: str):  # type: ignore[no-untyped-def]
        await asyncio.sleep(tool_ms / 1000)
        return task.article(query)

    tool: Any = waits if tool_ms else plain
    tool.__name__ = "search"
    tool.__doc__ = f"{DESCRIPTION}\n\nArgs:\n    query: {ARGUMENT}\n"
    return tool
