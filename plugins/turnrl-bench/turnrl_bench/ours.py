"""Iterations of turnrl on a task, as anybody would run them: `MTGRPO` and a Lightning Trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast, final

import lightning as L
import torch
from turnrl_react import ReAct

from turnrl import (
    MTGRPO,
    ChatFormat,
    ClippedSurrogate,
    Engine,
    Lora,
    OutcomeOnly,
    OutcomeReward,
    Policy,
    Question,
    QuestionData,
    RecipeError,
    Rollout,
    Tool,
    ToolCall,
    ToolResult,
    Trajectory,
    installed,
)
from turnrl_bench.forced import Forced, Script
from turnrl_bench.measure import Clock, Found, Peak
from turnrl_bench.task import DESCRIPTION, SCHEMA, TOOL, Task, reward


class Articles(Tool):
    """The task's search tool. A batch of calls is asked for at once, as of a server.

    Args:
        task: Which has the articles.
        tool_ms: How long an answer takes.
    """

    name, description = TOOL, DESCRIPTION
    parameters = cast("dict[str, Any]", SCHEMA["parameters"])

    def __init__(self, task: Task, tool_ms: float) -> None:
        self.task, self.seconds = task, tool_ms / 1000

    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        return await asyncio.gather(*(self._find(call.arguments["query"]) for call in calls))

    async def _find(self, query: str) -> ToolResult:
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return ToolResult(self.task.article(query))


@final
class AnswerHash(OutcomeReward):
    """The task's reward."""

    def score(self, trajectory: Trajectory) -> float:
        return reward(trajectory.answer or "")


class Timed:
    """Notes when a module's collector began and when it was done, and passes on the rest.

    It says nothing of how it is done: the rest of an iteration is what it takes to learn.

    Args:
        module: Whose collector it stands in for.
    """

    def __init__(self, module: MTGRPO) -> None:
        self._collector = module.collector
        self.began = self.collected = Clock.now()
        self.peak: Peak | None = None
        module.collector = cast(Any, self)

    def collect(self, *args: Any) -> Any:
        """See `Collector.collect`."""
        self.began = Clock.now()
        found = self._collector.collect(*args)
        self.collected = Clock.now()
        self.peak = Peak()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collector, name)


class Watch(L.Callback):
    """Times iterations, from the end of the one before to their own: all that is done is in it.

    Args:
        warm_up: Iterations at the beginning that are not kept.
        gradient: Where the first step's gradient goes, by the names of transformers' model.
    """

    def __init__(self, warm_up: int, gradient: str | None = None) -> None:
        self.warm_up, self.gradient = warm_up, gradient
        self.clock, self.peaks = Clock(), list[int | None]()
        self.ended = self.first = Clock.now()
        self._timed: Timed | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._timed = Timed(cast(MTGRPO, pl_module))
        self.ended = Clock.now()

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
        timed = cast(Timed, self._timed)
        if trainer.current_epoch >= self.warm_up:
            self.clock.keep("before learning", timed.collected, self.first)
            self.clock.keep_step(self.ended, (timed.began, timed.collected))
            self.peaks.append(None if timed.peak is None else timed.peak.bytes)
        self.ended = Clock.now()


def save_gradient(parameters: Any, file: str) -> None:
    """Keep a gradient, by name."""
    torch.save({n: p.grad.clone() for n, p in parameters if p.grad is not None}, file)


def slots_of(**options: Any) -> Engine:
    """The engine Slots.

    Raises:
        RecipeError: If it is not installed.
    """
    if (found := installed("turnrl_engines").get("Slots")) is None:
        raise RecipeError("the engine Slots is not installed, and is what is to be measured.")
    return cast(Engine, found(**options))


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
    task = Task.read(folder)
    rollout, learner = rollout_of(task, tool_ms), policy_of(folder, **(policy or {}))
    module = MTGRPO(
        learner,
        rollout,
        [AnswerHash()],
        OutcomeOnly(min_std=1e-4),  # TRL's; a group of two is likely below turnrl's own floor
        ClippedSurrogate(aggregation="token"),
        Forced(slots_of() if samples else None, script_of(task, rollout, learner)),
        group_size=task.shape.group_size,
        updates_per_iteration=updates,
    )
    watch = Watch(warm_up, gradient)
    train(module, watch, task, warm_up + steps)
    shown = module.experience
    assert shown is not None
    found: Found = {
        "times": watch.clock.times,
        "peaks": watch.peaks,
        "trajectories": len(shown.trajectories),
        "sampled": sampled_tokens(shown.trajectories),
        "prompt": len(shown.trajectories[0].prompt_ids),
        "tokens": sum(len(t.token_ids) for t in shown.trajectories),
    }
    if gradient is not None:
        found["work"] = [_work(t) for t in shown.trajectories]
    return found


def train(module: MTGRPO, watch: Watch, task: Task, epochs: int, **options: Any) -> None:
    """Run a module, with nothing that is written or shown."""
    L.Trainer(
        **{
            "max_epochs": epochs,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "callbacks": [watch],
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **options,
        }
    ).fit(module, QuestionData(questions_of(task), questions_per_iteration=task.shape.prompts))


def script_of(task: Task, rollout: Rollout, policy: Policy) -> Script:
    """Build the script of a task, which finds its turns by prompt, whatever order prompts come
    in."""
    chat = ChatFormat(policy.tokenizer)
    said = {rollout.prompt(q, chat): task.script[n] for n, q in enumerate(questions_of(task))}
    return lambda prompt_ids, member, turn: said[prompt_ids][member][turn]


def questions_of(task: Task) -> list[Question]:
    """The task's questions."""
    return [Question(str(n), text, ("none",)) for n, text in enumerate(task.questions)]


def policy_of(folder: str, lora: int | None = None, **options: Any) -> Policy:
    """A policy; `lora` is the rank of its adapter."""
    return Policy(folder, lora=None if lora is None else Lora(r=lora), **options)


def rollout_of(task: Task, tool_ms: float) -> Rollout:
    """The task's agent: a call, then what is said is the answer."""
    most = max(task.shape.turn_tokens)
    segmenter = ReAct(max_turns=2, answer="plain", instructions=task.system)
    return Rollout(
        segmenter,
        [Articles(task, tool_ms)],
        max_turn_tokens=most,
        max_result_tokens=2 * task.shape.result_tokens,
        max_tokens=task.shape.tokens,
    )


def _work(trajectory: Trajectory) -> dict[str, Any]:
    """Prompt, tokens, loss mask, calls and reward of a trajectory, to be compared."""
    size = len(trajectory.prompt_ids)
    return {
        "prompt": list(trajectory.prompt_ids),
        "ids": list(trajectory.token_ids[size:]),
        "loss": [int(k >= 0) for k in trajectory.turn_index[size:]],
        "calls": [
            [c.name, dict(c.arguments)] for turn in trajectory.turns for c in turn.reading.calls
        ],
        "reward": AnswerHash().score(trajectory),
    }


def full_logits(folder: str) -> Found:
    """The most memory that the task's log-probabilities and their gradient take by the plainest
    means: one tensor with the logits of all loss tokens."""
    task = Task.read(folder)
    rollout, policy = rollout_of(task, 0), Policy(folder, lora=Lora(r=8))
    module = MTGRPO(
        policy, rollout, [AnswerHash()], engine=Forced(None, script_of(task, rollout, policy))
    )
    played = module.ask(questions_of(task), task.shape.group_size)
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor(t.token_ids) for t in played], True)
    turns = pad([torch.tensor(t.turn_index) for t in played], True, -1)
    real = pad([torch.ones(len(t.token_ids), dtype=torch.long) for t in played], True)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    peak = Peak()
    states = policy.hidden(ids, real, positions)[:, :-1][turns[:, 1:] >= 0]
    logprobs = policy.logits(states).log_softmax(-1)
    logprobs.gather(-1, ids[turns >= 0][:, None]).mean().backward()
    return {"peaks": [peak.bytes], "sampled": len(states)}
