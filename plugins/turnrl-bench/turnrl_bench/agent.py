"""The agent that works on a task, as anybody would write it: `MTGRPO` and a Lightning Trainer."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, final

import lightning as L
from transformers import AutoTokenizer

from turnrl import (
    MTGRPO,
    ClippedSurrogate,
    Engine,
    Lora,
    OutcomeOnly,
    OutcomeReward,
    Policy,
    Question,
    QuestionData,
    Rollout,
    Tool,
    ToolCall,
    ToolResult,
    Trajectory,
)
from turnrl_bench.forced import Forced
from turnrl_bench.gpu import device
from turnrl_bench.task import DESCRIPTION, SCHEMA, TOOL, Task, reward
from turnrl_segmenters import ReAct


@final
class Search(Tool):
    """A search tool that may take its time. A batch of calls ends with its slowest one.

    Args:
        find: Returns the page for a query.
        ms: Milliseconds of a call.
        jitter: Each call takes its own time, from 0 to twice as long.
    """

    name, description, parameters = TOOL, DESCRIPTION, cast(Any, SCHEMA["parameters"])

    def __init__(self, find: Callable[[str], str], ms: float = 0, jitter: bool = False) -> None:
        self.find, self.ms, self.jitter = find, ms, jitter

    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        queries = [call.arguments.get("query", "") for call in calls]
        times = [zlib.crc32(q.encode()) % 1000 / 500 if self.jitter else 1.0 for q in queries]
        if self.ms:
            await asyncio.sleep(max(times) * self.ms / 1000)
        return [ToolResult(self.find(query)) for query in queries]


@final
class AnswerHash(OutcomeReward):
    """The task's reward."""

    def score(self, trajectory: Trajectory) -> float:
        return reward(trajectory.answer or "")


@final
class TaskScript:
    """The script of a task, looked up by the question in the prompt.

    Args:
        folder: The task's folder, with a tokenizer.
    """

    def __init__(self, folder: str) -> None:
        self._task = Task.read(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._number: dict[tuple[int, ...], int] = {}

    def __call__(self, prompt_ids: tuple[int, ...], member: int, turn: int) -> Sequence[int]:
        if (number := self._number.get(prompt_ids)) is None:
            text = self._tokenizer.decode(list(prompt_ids))
            questions = enumerate(self._task.questions)
            number = self._number[prompt_ids] = next(
                n for n, question in questions if question in text
            )
        return self._task.script[number][member][turn]


@final
class Watch(L.Callback):
    """Times iterations. A step lasts from the end of the previous step to its own end, so nothing
    is left out.

    Args:
        longest_s: No iteration follows an iteration that took longer.
        until: `time.monotonic()` by which the next iteration would have to end.
    Attributes:
        times: Seconds of each iteration: `rollouts`; `learning`, which is everything else; `before
            learning`, the part of `learning` before its first batch; and the `whole step`.
        peaks: The most bytes that each iteration took on a GPU for `sampling` and for `learning`.
    """

    def __init__(self, longest_s: float = float("inf"), until: float = float("inf")) -> None:
        self.times: list[dict[str, float]] = []
        self.peaks: list[dict[str, int | None]] = []
        self._longest_s, self._until = longest_s, until
        self._began = self._collected = self._first = self._ended = 0.0
        self._sampling: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        cast(Forced, cast(MTGRPO, pl_module).engine).note = self._note
        device.peak()
        self._ended = time.perf_counter()

    def _note(self, when: Literal["sync", "drain"]) -> None:
        if when == "sync":
            self._began = time.perf_counter()
        else:
            self._collected = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self._first, self._sampling = time.perf_counter(), device.peak()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        before, self._ended = self._ended, device.clock()
        rollouts, whole = self._collected - self._began, self._ended - before
        self.times.append(
            {
                "rollouts": rollouts,
                "before learning": self._first - self._collected,
                "learning": whole - rollouts,
                "whole step": whole,
            }
        )
        self.peaks.append({"sampling": self._sampling, "learning": device.peak()})
        late = time.monotonic() + whole > self._until
        trainer.should_stop = whole > self._longest_s or late


def sampled_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Number of sampled tokens of all trajectories."""
    return sum(len(t.sampled_turns) for t in trajectories)


def module_of(
    folder: str, policy: Policy, engine: Engine | None, passes: int = 1, search: Tool | None = None
) -> MTGRPO:
    """The agent of a task, which calls a tool and answers, and whose turns are forced.

    Args:
        folder: The task's folder.
        policy: The policy that learns.
        engine: The engine that samples; see `Forced` for None.
        passes: Passes over each iteration's trajectories.
        search: The tool; None finds the task's articles.
    """
    task = Task.read(folder)
    rollout = Rollout(
        ReAct(max_turns=2, answer="plain", instructions=task.system),
        [search or Search(task.article)],
        max_turn_tokens=max(task.shape.turn_tokens),
        max_result_tokens=2 * task.shape.result_tokens,
        max_tokens=task.shape.tokens,
    )
    return MTGRPO(
        policy,
        rollout,
        [AnswerHash()],
        OutcomeOnly(min_std=1e-4),  # TRL's floor; a group of two is likely below turnrl's
        ClippedSurrogate(aggregation="token"),
        Forced(engine, TaskScript(folder)),
        group_size=task.shape.group_size,
        passes_per_iteration=passes,
    )


def train(
    module: MTGRPO,
    callbacks: list[L.Callback],
    folder: str,
    epochs: int,
    accelerator: str = "cpu",
) -> None:
    """Train a module on the task in a folder. Nothing is written or shown."""
    task = Task.read(folder)
    L.Trainer(
        max_epochs=epochs,
        accelerator=accelerator,
        devices=1,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    ).fit(module, QuestionData(questions_of(task), questions_per_iteration=task.shape.prompts))


def played(folder: str, policy: Policy) -> list[Trajectory]:
    """The trajectories of a task, from its script, without an engine."""
    task = Task.read(folder)
    return module_of(folder, policy, None).ask(questions_of(task), task.shape.group_size)


def questions_of(task: Task) -> list[Question]:
    """The task's questions."""
    return [Question(str(n), text, ("none",)) for n, text in enumerate(task.questions)]


def policy_of(folder: str, lora: int | None = None, **options: Any) -> Policy:
    """A policy; `lora` is the rank of its adapter."""
    return Policy(folder, lora=None if lora is None else Lora(r=lora), **options)
