"""A rehearsal: runs the recipe's own parts on a few questions, as a run would.

    data        the questions are read, and a few of them chosen
    tools       a session is opened for each question, and every tool is called
    attempts    scripted attempts, with real calls and results
    sampling    more attempts, by the recipe's engine and a miniature of the recipe's model
    rewards     each reward scores all attempts
    learning    one iteration of a few attempts: credit, and an optimiser step

Each failure prints one line, and later steps run without the part that failed.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.seed import isolate_rng

from turnrl import (
    MTGRPO,
    Finding,
    Group,
    Policy,
    Question,
    QuestionData,
    Reading,
    RecipeError,
    Rollout,
    Stateful,
    Tool,
    ToolCall,
    ToolResult,
    Toolset,
    ToolSpec,
    Trajectory,
    load_questions,
    score_group,
)
from turnrl.credit.earnings import earnings
from turnrl.data.sources import open_source
from turnrl.plugin.errors import PluginError, WorldError, kind_of
from turnrl.plugin.text import counted
from turnrl.policy.model import LanguageModel
from turnrl.testing import ScriptedEngine
from turnrl.types import Reward, Start
from turnrl_doctor.command import of_error
from turnrl_doctor.miniature import miniature
from turnrl_doctor.repeats import repeats
from turnrl_doctor.staged import Staged
from turnrl_doctor.tools import StandIn, calls_of, judged, replies_of

_Part = TypeVar("_Part", Toolset, Reward)
_ATTEMPTS = 4
_TURN_TOKENS = 12
_SIZES = ("keys and values", "turns at once")
"""Choices of an engine that depend on its memory, which is small here."""
_ROOM = 512
"""Tokens that a sampled trajectory may have beyond the longest scripted one."""


def rehearse(start: Start) -> Iterator[Finding]:
    """The findings of a rehearsal; see `checks.Rehearsal`."""
    with isolate_rng(include_cuda=start.device.type == "cuda"):
        torch.manual_seed(0)
        questions = dict[str, list[Question]]()
        if isinstance(start.data, QuestionData):
            yield from _read(start.data, questions)
        if isinstance(start.module, MTGRPO):
            yield from _checked(start.module, questions)
            with contextlib.ExitStack() as stack:
                parts = _Parts(start, start.module, _chosen(questions), stack)
                yield from parts.rehearsed()
            yield from parts.left


# ------------------------------------------------------------------------ questions


def _read(data: QuestionData, by_role: dict[str, list[Question]]) -> Iterator[Finding]:
    """Read the questions of each role into `by_role`, as a run would."""
    for role, source in data.sources.items():
        if source is None:
            continue
        name = f"data {role}"
        about: Literal["machine", "recipe"] = "machine"  # the data may lie on another
        try:
            opened = open_source(source, data.fields, data.config)
            split = data.splits[role] or opened.default_splits[role]
            at_hand = split is None or opened.at_hand(split)
            about = "recipe"
            if at_hand:
                by_role[role] = load_questions(opened, split, role=role, rule=data.rule)
                yield Finding("pass", name, counted(len(by_role[role]), "question"))
            else:
                yield Finding("pass", name, f"{source} is on the hub, and will be downloaded")
        except Exception as error:  # a source is anybody's code, and every role is reported
            yield of_error(name, error, about=about)


def _checked(module: MTGRPO, by_role: dict[str, list[Question]]) -> Iterator[Finding]:
    """Leave out the questions whose prompts are too long, as a run does, and report those that lack
    what a reward or a tool takes."""
    for role, questions in [*by_role.items()]:
        kept, overlong = questions, ""
        with contextlib.suppress(Exception):  # reported as its template's or its scheme's
            kept, overlong = module.rollout.with_room(questions, module.chat)
        if overlong:
            step = "Raise model.rollout.max_tokens to ask them."
            text = f"a run leaves out {overlong}"
            yield Finding("warn" if kept else "fail", f"data {role}", text, step)
        by_role[role] = kept
        try:
            module.collector.check_questions(kept)
        except Exception as error:  # a reward is anybody's code, and every role is reported
            yield of_error(f"data {role}", error)


def _chosen(by_role: dict[str, list[Question]]) -> list[Question]:
    """Pick three questions of each role: the first, the longest, and the one with the fewest
    columns. A run trips over these first."""
    chosen = dict[tuple[str, str], Question]()
    for role, questions in filter(lambda item: item[1], by_role.items()):
        longest = max(questions, key=lambda q: len(q.text))
        barest = min(questions, key=lambda q: len(q.metadata))
        chosen |= {(role, q.id): q for q in (questions[0], longest, barest)}
    return list(chosen.values())


# ------------------------------------------------------------------------ the parts in order


class _Parts:
    """The recipe's parts, rehearsed in order.

    Args:
        start: The run.
        module: Its module.
        questions: Questions of its data; empty if they are not on this machine yet.
        stack: Ends the rehearsals of the parts.

    Attributes:
        left: Failures of rehearsals as they end.
    """

    def __init__(
        self,
        start: Start,
        module: MTGRPO,
        questions: list[Question],
        stack: contextlib.ExitStack,
    ) -> None:
        self.start, self.module, self.stack = start, module, stack
        self.real = bool(questions)
        self.questions = questions or [Question("example", "What is asked?", ("an answer",))]
        self.left: list[Finding] = []
        self.tools: list[Toolset] = []
        self.attempts: list[list[Trajectory]] = []

    def rehearsed(self) -> Iterator[Finding]:
        """Rehearse all parts."""
        for toolset in self.module.rollout.toolsets:
            finding, tools = self._tried(toolset)
            yield finding
            self.tools.append(tools)
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            settings = miniature(self.module.policy, folder)
        except ValueError as error:
            step = "A run itself will show whether it samples and learns."
            yield Finding("warn", "rehearsal", str(error), step)
            return
        small = _small(self.module, settings, replace(self.module.rollout, tools=[*self.tools]))
        policy = small.policy
        policy.load(self.start.device)
        policy.to(self.start.device)
        yield _attention(policy)
        yield from self._scripted(small)
        yield from _guarded("turns", self._fitting(small))
        yield from _guarded("sampling", self._sampled(small))
        small.rewards = []
        for reward in self.module.rewards:
            name = str(reward)
            try:
                rehearsed = self._entered(reward, Reward, name)
                groups = [score_group(g, [rehearsed], policy=policy) for g in self.attempts]
            except WorldError as error:  # a judge that is down
                yield of_error(name, error, about="machine")
            except Exception as error:  # anybody's code
                yield of_error(name, error)
            else:
                small.rewards = [*small.rewards, rehearsed]
                yield from self._reached(reward, groups)
        if not small.rewards or not self.attempts:
            return
        names = ", ".join(str(reward).removeprefix("reward ") for reward in small.rewards)
        attempts = counted(sum(map(len, self.attempts)), "attempt")
        text = f"{names} score {attempts} at {counted(len(self.questions), 'question')}"
        yield Finding("pass", "rewards", text)
        if any(reward.by_turn for reward in small.rewards):
            yield from _guarded("turn rewards", self._earned(small))
        yield from _guarded("learning", self._learned(small))

    def _entered(self, part: _Part, kind: type, name: str) -> _Part:
        """Enter a part's own rehearsal, which ends when the stack does.

        Args:
            part: The part.
            kind: The class that its rehearsal must yield.
            name: The name of its line.
        Raises:
            PluginError: If the rehearsal is no context, or yields something else.
        """

        def fault(why: str) -> PluginError:
            wanted = "a Tool" if isinstance(part, Tool) else f"a {kind.__name__}"
            return PluginError(
                f"rehearsal of {type(part).__name__} must be a context that gives {wanted}, and "
                f"{why}. Put @contextlib.contextmanager above it, and yield one."
            )

        context = part.rehearsal()
        if not isinstance(context, contextlib.AbstractContextManager):
            raise fault(f"returns {kind_of(context)}")

        def leave() -> None:
            try:
                context.__exit__(None, None, None)
            except Exception as error:  # anybody's code
                raised = of_error(name, error).text
                text = f"rehearsal of {type(part).__name__} raised on leaving it: {raised}"
                self.left.append(Finding("fail", name, text, "Fix what follows its yield."))

        try:
            entered = context.__enter__()
        except RuntimeError as error:
            if str(error) != "generator didn't yield":
                raise
            raise fault("yields nothing") from error
        self.stack.callback(leave)
        if not isinstance(entered, kind):
            raise fault(f"gives {kind_of(entered)}")
        return entered

    # tools

    def _tried(self, toolset: Toolset) -> tuple[Finding, Toolset]:
        """Check tools and call them, and choose the tools that later parts use: these, or a
        stand-in."""
        name = f"tool {toolset.name}" if isinstance(toolset, Tool) else str(toolset)
        specs: Sequence[ToolSpec] = ()
        try:
            try:
                tools = self._entered(toolset, Toolset, name)
                alone = replace(self.module.rollout, tools=[tools])
                with alone.live():
                    specs = alone.specs
                    tools.check()
            except WorldError as error:  # a server that is down, an index that lies elsewhere
                return of_error(name, error, about="machine"), StandIn(specs)
            if isinstance(tools, Stateful) and not self.real:
                text = "can work; no session was opened, because the questions are not here yet"
                return Finding("pass", name, text), StandIn(specs)
            try:
                calls = [calls_of(tools, question) for question in self.questions]
            except PluginError as error:  # this would not stop a run
                return replace(of_error(name, error), status="warn"), tools
            replies = list[tuple[ToolCall, ToolResult]]()
            for question, question_calls in zip(self.questions, calls, strict=True):
                replies += replies_of(tools, question, question_calls)
        except Exception as error:  # a tool is anybody's code, and the others are still tried
            return of_error(name, error), StandIn(specs)
        return judged(name, tools, replies), tools

    # attempts

    def _stage(self, small: MTGRPO, question: Question) -> None:
        """Script the next attempts, at this question."""
        calls = list[ToolCall]()
        for toolset in self.tools:
            with contextlib.suppress(PluginError):  # reported where the tools are tried
                calls += calls_of(toolset, question)
        rollout = small.rollout = replace(self.module.rollout, tools=[*self.tools])
        _ = rollout.specs  # asked for here, because the prompt is written while attempts run
        if rollout.segmenter is not None:  # a player reads the scripted texts itself
            staged = Staged(rollout, rollout.segmenter, question, calls)
            small.rollout = replace(small.rollout, segmenter=staged)

    def _scripted(self, small: MTGRPO) -> Iterator[Finding]:
        """Make scripted attempts at each question, with probes if the estimator asks for them. The
        first failure gets a line, for example if sessions cannot be copied or no room is left to
        act."""
        size, probes = small.group_size, small.estimator.probes
        failed = False
        for question in self.questions:
            self._stage(small, question)
            explore = partial(small.collector.explore, [question], size, (0,), probes=probes)
            try:
                tried = explore()
            except Exception as error:  # of a tool, or of the turn scheme
                if not failed:
                    yield of_error("attempts", error)
                failed = True
            else:
                branches = (probe.trajectory for probe in tried.probes[0])
                self.attempts.append([*tried.trajectories[0], *branches])

    def _fitting(self, small: MTGRPO) -> Iterator[Finding]:
        """Warn if a turn has no room for a call, as the turn scheme would write it."""
        limit, segmenter = self.module.rollout.max_turn_tokens, self.module.rollout.segmenter
        if segmenter is None:
            return
        needed = dict[str, int]()  # tokens of a call of each tool
        for tools, question in itertools.product(self.tools, self.questions):
            with contextlib.suppress(PluginError, RecipeError):  # not every scheme writes
                for call in calls_of(tools, question):
                    text = segmenter.write(Reading((call,)))
                    tokens = len(small.policy.tokenizer.encode(text, add_special_tokens=False))
                    needed[call.name] = min(tokens, needed.get(call.name, tokens))
        if needed and (least := min(needed.values())) > limit:
            name = min(needed, key=needed.__getitem__)
            text = f"model.rollout.max_turn_tokens is {limit}, and a call of {name} takes {least}"
            step = "Raise it: calls that are cut off are not run."
            yield Finding("warn", "turns", text, step)

    def _sampled(self, small: MTGRPO) -> Iterator[Finding]:
        """Let the miniature make attempts with the recipe's engine and segmenter."""
        small.collector.close()
        rollout, script = self.module.rollout, small.engine
        settings = self.module.engine_settings.for_rehearsal()
        engine = small.engine = settings.build()
        lengths = (t.tokens for group in self.attempts for t in group)
        longest = max(lengths, default=rollout.max_tokens)
        small.rollout = replace(
            rollout,
            tools=[*self.tools],
            max_tokens=min(rollout.max_tokens, longest + _ROOM),
            max_turn_tokens=min(rollout.max_turn_tokens, _TURN_TOKENS),
        )
        try:
            tried = small.collector.explore(self.questions[:2], small.group_size, (0,))
            sampled = tried.trajectories
            self.attempts += sampled
            turns = sum(len(t.turns) for group in sampled for t in group)
            choices = engine.in_force.items()
            chosen = (f"{name}: {value}" for name, value in choices if name not in _SIZES)
            text = f"{counted(turns, 'turn')} by {engine.name} on {small.policy.device}"
            if engine.name != self.module.engine.name:
                text += f", in place of {self.module.engine.name}"
            yield Finding("pass", "sampling", "; ".join((text, *chosen)))
        finally:
            small.collector.close()
            small.engine = script

    def _reached(self, reward: Reward, groups: Sequence[Group]) -> Iterator[Finding]:
        """Warn if no attempt gets the reward's `right_at`, although scripted attempts include right
        ones, as they do unless tools act."""
        best = max((float(paid) for group in groups for paid in group.outcome), default=0.0)
        acts = any(tools.acts for tools in self.module.rollout.toolsets)
        if reward.right_at is not None and not acts and 0 < best < reward.right_at - 1e-6:
            text = f"right_at is {reward.right_at}, and scripted attempts get at most {best:g}"
            step = "Set right_at to the reward of a right attempt, weight included."
            yield Finding("warn", str(reward), text, step)

    def _earned(self, small: MTGRPO) -> Iterator[Finding]:
        """Report if calls would pay off for a policy that acted like the scripted attempts, and if
        the same call would pay off again and again."""
        rewards, policy = small.rewards, small.policy
        groups = [score_group(group, rewards, policy=policy) for group in self.attempts]
        earned = earnings(groups)
        if not any(tools.acts for tools in self.module.rollout.toolsets):
            yield from repeats(groups, rewards, self.module.rollout.max_turns, policy)
        if earned.paying:
            yield Finding("warn", "costs", earned.fault, "Or leave out is_cost, if it is a reward.")
        elif earned.cost > 0:
            rule = type(small.estimator).__name__
            charges_all = small.estimator.charges_costs
            note = "" if charges_all else f" ({rule} does not charge all of them)"
            yield Finding("pass", "costs", f"in scripted attempts {earned.outlook}{note}")

    # learning

    def _learned(self, small: MTGRPO) -> Iterator[Finding]:
        """An iteration of scripted attempts at one question."""
        data, device, question = self.start.data, self.start.device, self.questions[0]
        if isinstance(data, QuestionData):
            self.module.count_steps(max(data.questions_per_iteration // self.start.processes, 1))
        self._stage(small, question)
        (optimizer,), schedules = small.configure_optimizers()
        assert small.policy.network is not None
        small.policy.network.train()
        for step in small.iterate([question], 0):
            for minibatch in step:
                small.loss(move_data_to_device(minibatch, device))[0].backward()
        small.collector.close()
        trained = small.policy.trainable_parameters()
        gradients = [p.grad for p in trained.values() if p.grad is not None]
        if not gradients or not all(bool(g.isfinite().all()) for g in gradients):
            text = f"{len(gradients)} of {len(trained)} weights got a gradient, or it is not finite"
            yield Finding("fail", "learning", text, "Report the model and the versions above.")
            return
        optimizer.step()
        for schedule in schedules:
            schedule["scheduler"].step()
        names = type(small.estimator).__name__, type(optimizer).__name__
        text = f"a step on {device}: credit by {names[0]}, {len(gradients)} gradients, {names[1]}"
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in small.policy.parameters()})
        yield Finding("pass", "learning", f"{text}, {', '.join(kinds)}")


def _guarded(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of a part. If the part raises, the error becomes a finding, and other parts
    still run."""
    try:
        yield from findings
    except Exception as error:  # anybody's code
        yield of_error(name, error, "A run would stop there too. Fix it first.")


def _small(module: MTGRPO, settings: Policy, rollout: Rollout) -> MTGRPO:
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


def _attention(policy: LanguageModel) -> Finding:
    text = "; ".join(f"{name}: {value}" for name, value in policy.in_force.items())
    if policy.settings.share_prefixes and not policy.way.share:
        step = "Learning takes longer than it could. Report the model and the versions above."
        return Finding("warn", "sharing", f"not in force; {text}", step)
    return Finding("pass", "sharing", text)
