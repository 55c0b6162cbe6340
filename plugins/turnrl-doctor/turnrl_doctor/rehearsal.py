"""A rehearsal: runs the recipe's own parts on a few questions, as a run would.

    data        the questions are read, and a few of them chosen
    tools       a session is opened for each question, and every tool is called
    attempts    scripted attempts, with real calls and results
    sampling    more attempts, by the recipe's engine and a miniature of the recipe's model
    rewards     each reward scores all attempts
    learning    one iteration of a few attempts: credit, and an optimiser step

A step that fails is the last one, because later steps need what it makes.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.seed import isolate_rng

from turnrl import (
    MTGRPO,
    Finding,
    Policy,
    Question,
    QuestionData,
    Rollout,
    Stateful,
    Tool,
    ToolCall,
    Toolset,
    Trajectory,
    load_questions,
    score_group,
)
from turnrl.data.sources import open_source
from turnrl.plugin.errors import PluginError, describe_value
from turnrl.plugin.text import format_count
from turnrl.policy.model import LanguageModel
from turnrl.testing import ScriptedEngine
from turnrl.types import Reward, Start
from turnrl_doctor.command import error_finding
from turnrl_doctor.miniature import make_miniature
from turnrl_doctor.staged import Staged
from turnrl_doctor.tools import call_twice, example_calls, judge_tools

_ATTEMPTS = 4
_TURN_TOKENS = 12
_ROOM = 512
"""Tokens that a sampled trajectory may have beyond the longest scripted one."""


def rehearse(start: Start, module: MTGRPO) -> Iterator[Finding]:
    """The findings of a rehearsal; see `checks.Rehearsal`."""
    on_gpu = start.device.type == "cuda"
    with isolate_rng(include_cuda=on_gpu), contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        steps = _Steps(start, module, stack)
        for step in (steps.data, steps.tools, steps.attempts, steps.sampling, steps.rewards):
            failed = False
            for finding in _guard(step.__name__, step):
                failed |= finding.status == "fail"
                yield finding
            if failed or steps.ended:
                return
        yield from _guard("learning", steps.learning)


def _guard(name: str, find: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings about a part; an error is one of them, because a part is anybody's code."""
    try:
        yield from find()
    except Exception as error:
        yield error_finding(name, error, "A run would stop there too. Fix it first.")


def _enter(stack: contextlib.ExitStack, part: Toolset | Reward, kind: type) -> Any:
    """Enter a part's own rehearsal, which ends when the stack does.

    Raises:
        PluginError: If it is not a context that gives a part of this kind.
    """
    context: Any = part.rehearsal()  # anybody's code
    entered = stack.enter_context(context) if isinstance(context, AbstractContextManager) else None
    if not isinstance(entered, kind):
        raise PluginError(
            f"rehearsal of {type(part).__name__} must be a context that gives a {kind.__name__}, "
            f"and gives {describe_value(entered)}. Put @contextlib.contextmanager above it, and "
            "yield one."
        )
    return entered


class _Steps:
    """The steps of a rehearsal, in order.

    Args:
        start: The run.
        module: Its module.
        stack: Ends what the steps begin.

    Attributes:
        ended: True if later steps cannot be tried, although nothing failed.
    """

    def __init__(self, start: Start, module: MTGRPO, stack: contextlib.ExitStack) -> None:
        self._start, self._module, self._stack = start, module, stack
        self._questions: list[Question] = []
        self._tools: list[Toolset] = []
        self._tried: list[list[Trajectory]] = []
        self._rewards: list[Reward] = []
        self.ended = False

    # data

    def data(self) -> Iterator[Finding]:
        """Read the questions of each role as a run would, and choose some of them."""
        data = self._start.data
        if isinstance(data, QuestionData):
            for role, source in data.sources.items():
                if source is not None:
                    yield from _guard(f"data {role}", partial(self._role, data, role, source))

    def _role(
        self, data: QuestionData, role: Literal["train", "val"], source: Any
    ) -> Iterator[Finding]:
        opened = open_source(source, data.fields, data.config)
        split = data.splits[role] or opened.default_splits[role]
        if split is not None and not opened.at_hand(split):
            yield Finding("pass", f"data {role}", f"{source} is on the hub, to be downloaded")
            return
        read = load_questions(opened, split, role=role, rule=data.rule)
        rollout, chat = self._module.rollout, self._module.chat
        questions, overlong = rollout.questions_with_room(read, chat)
        if overlong:
            step = "Raise model.rollout.max_tokens to ask them."
            text = f"a run leaves out {overlong}"
            yield Finding("warn" if questions else "fail", f"data {role}", text, step)
        else:
            yield Finding("pass", f"data {role}", format_count(len(questions), "question"))
        self._module.collector.check_questions(questions)
        if questions:
            # a run trips over the longest first, and over the one with the fewest columns
            longest = max(questions, key=lambda q: len(q.text))
            barest = min(questions, key=lambda q: len(q.metadata))
            self._questions += {q.id: q for q in (questions[0], longest, barest)}.values()

    # tools

    def tools(self) -> Iterator[Finding]:
        """Check each toolset, and call each tool with arguments that it allows."""
        for toolset in self._module.rollout.toolsets:
            name = f"tool {toolset.name}" if isinstance(toolset, Tool) else str(toolset)
            yield from _guard(name, partial(self._toolset, name, toolset))

    def _toolset(self, name: str, toolset: Toolset) -> Iterator[Finding]:
        tools = _enter(self._stack, toolset, Toolset)
        self._tools.append(tools)
        with replace(self._module.rollout, tools=[tools]).running_tools():
            tools.check()
        if not self._questions:
            if isinstance(tools, Stateful):
                self.ended = True
                text = "not called: its sessions need questions, which are not on this machine yet"
                yield Finding("warn", name, text, "Run the doctor again when they are.")
                return
            self._questions.append(Question("example", "What is asked?", ("an answer",)))
        try:
            calls = [example_calls(tools, question) for question in self._questions]
        except PluginError as error:  # this would not stop a run
            yield replace(error_finding(name, error), status="warn")
            return
        pairs = zip(self._questions, calls, strict=True)
        replies = [reply for question, own in pairs for reply in call_twice(tools, question, own)]
        yield judge_tools(name, tools, replies)

    # attempts

    def attempts(self) -> Iterator[Finding]:
        """Make scripted attempts at each question, with probes if the estimator asks for them."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        rollout = replace(self._module.rollout, tools=[*self._tools])
        try:
            settings = make_miniature(self._module.policy, folder)
        except ValueError as error:
            self.ended = True
            step = "A run itself will show whether it samples and learns."
            yield Finding("warn", "attempts", str(error), step)
            return
        self._small = _shrink_module(self._module, settings, rollout)
        policy = self._small.policy
        policy.load(self._start.device)
        policy.to(self._start.device)
        if policy.settings.share_prefixes and not policy.way.share:
            step = "Learning takes longer than it could. Report the model and its version."
            yield Finding("warn", "sharing", f"not in force; {policy.way.text}", step)
        else:
            yield Finding("pass", "sharing", policy.way.text)
        size, probes = self._small.group_size, self._small.estimator.probes
        for question in self._questions:
            self._stage(question)
            tried = self._small.collector.explore([question], size, (0,), probes=probes)
            branches = (probe.trajectory for probe in tried.probes[0])
            self._tried.append([*tried.trajectories[0], *branches])

    def _stage(self, question: Question) -> None:
        """Script the next attempts, at this question."""
        calls = list[ToolCall]()
        for toolset in self._tools:
            with contextlib.suppress(PluginError):  # reported where the tools are tried
                calls += example_calls(toolset, question)
        rollout = self._small.rollout = replace(self._module.rollout, tools=[*self._tools])
        _ = rollout.specs  # asked for here, because the prompt is written while attempts run
        if rollout.segmenter is not None:  # a player reads the scripted texts itself
            staged = Staged(rollout, rollout.segmenter, question, calls)
            self._small.rollout = replace(rollout, segmenter=staged)

    # sampling

    def sampling(self) -> Iterator[Finding]:
        """Let the miniature make attempts with the recipe's engine and segmenter."""
        small, rollout = self._small, self._module.rollout
        small.collector.close()
        script, small.engine = small.engine, self._module.engine_settings.for_rehearsal().build()
        longest = max(t.tokens for group in self._tried for t in group)
        small.rollout = replace(
            rollout,
            tools=[*self._tools],
            max_tokens=min(rollout.max_tokens, longest + _ROOM),
            max_turn_tokens=min(rollout.max_turn_tokens, _TURN_TOKENS),
        )
        try:
            sampled = small.collector.explore(self._questions[:2], small.group_size, (0,))
            self._tried += sampled.trajectories
            turns = sum(len(t.turns) for group in sampled.trajectories for t in group)
            text = f"{format_count(turns, 'turn')} by {small.engine.name} on {small.policy.device}"
            yield Finding("pass", "sampling", text)
        finally:
            small.collector.close()
            small.engine = script

    # rewards

    def rewards(self) -> Iterator[Finding]:
        """Score all attempts with each reward."""
        for reward in self._module.rewards:
            yield from _guard(str(reward), partial(self._reward, reward))
        if not self._rewards:
            return
        names = ", ".join(str(reward).removeprefix("reward ") for reward in self._rewards)
        attempts = format_count(sum(map(len, self._tried)), "attempt")
        yield Finding("pass", "rewards", f"{names} score {attempts}")

    def _reward(self, reward: Reward) -> Iterator[Finding]:
        rehearsed = _enter(self._stack, reward, Reward)
        groups = [score_group(g, [rehearsed], policy=self._small.policy) for g in self._tried]
        self._rewards.append(rehearsed)
        best = max(float(paid) for group in groups for paid in group.outcome)
        # scripted attempts include correct ones, unless tools act
        acts = any(tools.acts for tools in self._module.rollout.toolsets)
        if reward.right_at is not None and not acts and 0 < best < reward.right_at - 1e-6:
            text = f"right_at is {reward.right_at}, and scripted attempts get at most {best:g}"
            step = "Set right_at to the reward of a right attempt, weight included."
            yield Finding("warn", str(reward), text, step)

    # learning

    def learning(self) -> Iterator[Finding]:
        """Learn one iteration of scripted attempts at one question."""
        small, data, question = self._small, self._start.data, self._questions[0]
        small.rewards = self._rewards
        if isinstance(data, QuestionData):
            per_process = data.questions_per_iteration // self._start.processes
            self._module.count_steps(max(per_process, 1))
        self._stage(question)
        (optimizer,), schedules = small.configure_optimizers()
        assert small.policy.network is not None
        small.policy.network.train()
        for step in small.iterate([question], 0):
            for minibatch in step:
                small.loss(move_data_to_device(minibatch, self._start.device))[0].backward()
        small.collector.close()
        trained = small.policy.trainable_parameters()
        gradients = [p.grad for p in trained.values() if p.grad is not None]
        if not gradients or not all(bool(g.isfinite().all()) for g in gradients):
            text = f"{len(gradients)} of {len(trained)} weights got a gradient, or it is not finite"
            yield Finding("fail", "learning", text, "Report the model and its version.")
            return
        optimizer.step()
        for schedule in schedules:
            schedule["scheduler"].step()
        text = f"a step of {type(optimizer).__name__} with {type(small.estimator).__name__}"
        yield Finding("pass", "learning", text)


def _shrink_module(module: MTGRPO, settings: Policy, rollout: Rollout) -> MTGRPO:
    """The recipe's module with a miniature of its policy and a few attempts at a question."""
    small = MTGRPO(
        settings,
        rollout,
        [*module.rewards],
        module.estimator,
        module.objective,
        module.engine_settings,
        max(_ATTEMPTS, module.estimator.min_group_size),
        optimizer=module.optimizer,
        scheduler=module.scheduler,
        seed=module.seed,
    )
    small.policy = LanguageModel(settings, module.estimator.critic, module.policy.tokenizer)
    small.engine = ScriptedEngine(module.policy.tokenizer, lambda session, turn: "a")
    return small
