"""Iterations of turnrl on a task, as anybody would run them: `MTGRPO` and a Lightning Trainer."""

from __future__ import annotations

import asyncio
import sys
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, cast, final

import lightning as L
import torch
from transformers import AutoTokenizer
from turnrl_react import ReAct
from turnrl_slots import Slots

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
from turnrl_bench.measure import Clock, Found, Peak
from turnrl_bench.task import DESCRIPTION, SCHEMA, TOOL, Task, reward


class SlowSearch(Tool):
    """A search tool that takes its time. A batch of calls is asked for at once, as of a server.

    Args:
        ms: How long an answer takes, on average.

    Attributes:
        jitter: True if each call takes a time of its own, between nothing and twice as long.
    """

    def __init__(self, ms: float = 0) -> None:
        self.ms, self.jitter = ms, False

    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        return await asyncio.gather(
            *(self._answer(call.arguments.get("query", "")) for call in calls)
        )

    async def _answer(self, query: str) -> ToolResult:
        share = zlib.crc32(query.encode()) % 1000 / 500 if self.jitter else 1.0
        if self.ms:
            await asyncio.sleep(self.ms / 1000 * share)
        return self.find(query)

    @abstractmethod
    def find(self, query: str) -> ToolResult:
        """The result of a query."""


@final
class Articles(SlowSearch):
    """The task's search tool.

    Args:
        folder: The task's folder.
        tool_ms: How long an answer takes.
    """

    name, description = TOOL, DESCRIPTION
    parameters = cast("dict[str, Any]", SCHEMA["parameters"])

    def __init__(self, folder: str, tool_ms: float = 0) -> None:
        super().__init__(tool_ms)
        self.task = Task.read(folder)

    def find(self, query: str) -> ToolResult:
        return ToolResult(self.task.article(query))


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
            number = self._number[prompt_ids] = next(n for n, one in questions if one in text)
        return self._task.script[number][member][turn]


@final
class Watch(L.Callback):
    """Times iterations, from the end of the one before to their own: all that is done is in it.

    Args:
        warm_up: Iterations at the beginning that are not kept.
        gradient: Where the first step's gradient goes, by the names of transformers' model.
    """

    def __init__(self, warm_up: int, gradient: str | None = None) -> None:
        self.warm_up, self.gradient = warm_up, gradient
        self.clock, self.peaks = Clock(), list[int | None]()
        self.began = self.collected = self.ended = self.first = Clock.now()
        self._peak: Peak | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        cast(Forced, cast(MTGRPO, pl_module).engine).note = self._note
        self.ended = Clock.now()

    def _note(self, when: Literal["sync", "drain"]) -> None:
        if when == "sync":
            self.began = Clock.now()
        else:
            self.collected, self._peak = Clock.now(), Peak()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.first = Clock.now()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        if self.gradient is not None and trainer.global_step == 0:
            policy = cast(MTGRPO, pl_module).policy
            save_gradient(policy.load().named_parameters(), self.gradient)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch >= self.warm_up:
            self.clock.keep("before learning", self.collected, self.first)
            self.clock.keep_step(self.ended, (self.began, self.collected))
            self.peaks.append(None if self._peak is None else self._peak.bytes)
        self.ended = Clock.now()


def save_gradient(parameters: Any, file: str) -> None:
    """Keep a gradient, by name."""
    torch.save({n: p.grad.clone() for n, p in parameters if p.grad is not None}, file)


def sampled_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Number of sampled tokens in some trajectories."""
    return sum(len(turn.token_ids) for t in trajectories for turn in t.turns)


def iterations(
    folder: str,
    steps: int,
    warm_up: int,
    updates: int = 1,
    tool_ms: float = 0,
    samples: bool = True,
    gradient: str | None = None,
    policy: dict[str, Any] | None = None,
) -> Found:
    """Iterations on the task in a folder.

    Args:
        folder: That `task.make` made.
        steps: Iterations that are kept.
        warm_up: Iterations before them.
        updates: Passes over each iteration's trajectories.
        tool_ms: How long the tool takes.
        samples: Whether an engine samples; otherwise the tokens are there at once.
        gradient: Where the first step's gradient goes, and then the trajectories are returned.
        policy: Options of the policy.
    """
    engine = Slots() if samples else None
    module = module_of(folder, policy_of(folder, **(policy or {})), engine, updates, tool_ms)
    watch = Watch(warm_up, gradient)
    train(module, [watch], folder, warm_up + steps)
    shown = module.experience
    assert shown is not None
    block: Found = {
        "times": watch.clock.times,
        "peaks": watch.peaks,
        "trajectories": len(shown.trajectories),
        "sampled": sampled_tokens(shown.trajectories),
        "prompt": len(shown.trajectories[0].prompt_ids or ()),
        "tokens": sum(len(t.token_ids) for t in shown.trajectories),
    }
    if gradient is not None:
        block["work"] = [_work(t) for t in shown.trajectories]
    return block


def module_of(
    folder: str, policy: Policy, engine: Engine | None, updates: int = 1, tool_ms: float = 0
) -> MTGRPO:
    """The agent of a task, which calls a tool and answers, and whose turns are forced.

    Args:
        folder: The task's folder.
        policy: Learns.
        engine: Samples; None is as in `Forced`.
        updates: Passes over each iteration's trajectories.
        tool_ms: How long the tool takes.
    """
    task = Task.read(folder)
    rollout = Rollout(
        ReAct(max_turns=2, answer="plain", instructions=task.system),
        [Articles(folder, tool_ms)],
        max_turn_tokens=max(task.shape.turn_tokens),
        max_result_tokens=2 * task.shape.result_tokens,
        max_tokens=task.shape.tokens,
    )
    return MTGRPO(
        policy,
        rollout,
        [AnswerHash()],
        OutcomeOnly(min_std=1e-4),  # TRL's; a group of two is likely below turnrl's own floor
        ClippedSurrogate(aggregation="token"),
        Forced(engine, TaskScript(folder)),
        group_size=task.shape.group_size,
        updates_per_iteration=updates,
    )


def train(
    module: MTGRPO,
    callbacks: list[L.Callback],
    folder: str,
    epochs: int,
    accelerator: str = "cpu",
) -> None:
    """Run a module on the task in a folder, with nothing that is written or shown."""
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


def _work(trajectory: Trajectory) -> dict[str, Any]:
    """Prompt, tokens, loss mask, calls and reward of a trajectory, to be compared."""
    prompt = trajectory.prompt_ids or ()
    return {
        "prompt": list(prompt),
        "ids": list(trajectory.token_ids[len(prompt) :]),
        "loss": [int(k >= 0) for k in trajectory.turn_index[len(prompt) :]],
        "calls": [
            [c.name, dict(c.arguments)] for turn in trajectory.turns for c in turn.reading.calls
        ],
        "reward": AnswerHash().score(trajectory),
    }


def full_logits(folder: str) -> Found:
    """The most memory that the task's log-probabilities and their gradient take by the plainest
    means: one tensor with the logits of all loss tokens."""
    policy = policy_of(folder, 8, share_prefixes=False)
    rows = [trajectory.token_row for trajectory in played(folder, policy)]
    ((_, layout),) = policy.passes(rows, sys.maxsize)
    peak = Peak()
    hidden = policy.hidden(layout.input_ids, layout.attention_mask, layout.position_ids)
    states = hidden.flatten(0, 1)[layout.before]
    logprobs = policy.logits(states).log_softmax(-1)
    logprobs.gather(-1, layout.targets[:, None]).mean().backward()
    return {"peaks": [peak.bytes], "sampled": len(states)}
