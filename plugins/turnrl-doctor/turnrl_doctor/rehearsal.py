"""A rehearsal: the recipe's own parts do on a few questions what a run does with them.

    data        the questions are read, and a few of them chosen
    tools       a session is opened for each question, and every tool is called
    attempts    scripted ones, with real calls and results
    sampling    more of them, by the recipe's engine and a miniature of the recipe's model
    rewards     each of them scores all attempts
    learning    one iteration of a few attempts: credit, and its optimiser step

Each failure prints one line, and later steps run without the part that failed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device

from turnrl import (
    MTGRPO,
    Check,
    Engine,
    Finding,
    Message,
    PluginError,
    Policy,
    Question,
    QuestionData,
    Reading,
    Reward,
    Rollout,
    Segmenter,
    Start,
    Stateful,
    Tool,
    ToolCall,
    ToolError,
    ToolResult,
    Toolset,
    ToolSpec,
    Trajectory,
    WorldError,
    call_tools,
    kind_of,
    load_questions,
    on_loop,
    open_source,
    score_group,
)
from turnrl.testing import ScriptedEngine
from turnrl_doctor.arguments import arguments_of
from turnrl_doctor.command import of_error
from turnrl_doctor.miniature import miniature

_Part = TypeVar("_Part", Toolset, Reward, Engine)
_ATTEMPTS = 4
_TURN_TOKENS = 12
_ROOM = 512
"""Tokens of a trajectory beyond the longest scripted one, where the engine is tried."""
_SHOWN = 60


class Rehearsal(Check):
    """The recipe, run on a small scale: real questions, the recipe's tools, rewards, estimator and
    engine, and a miniature of its model, two layers of its kind with random weights. It writes
    nothing, trains nothing that stays, and leaves random numbers as they were."""

    quick = False

    def run(self, start: Start) -> Iterable[Finding]:
        with _same_randomness(start.device):
            known = dict[str, list[Question]]()
            if isinstance(start.data, QuestionData):
                yield from _read(start.data, known)
            if isinstance(start.module, MTGRPO):
                left = list[Finding]()
                yield from _rehearsed(start, start.module, _chosen(known), left)
                yield from left


@contextlib.contextmanager
def _same_randomness(device: torch.device) -> Iterator[None]:
    """Leave the random streams of torch, numpy and Python as they were."""
    others = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            yield
    finally:
        random.setstate(others[0])
        np.random.set_state(others[1])


# ------------------------------------------------------------------------ questions


def _read(data: QuestionData, known: dict[str, list[Question]]) -> Iterator[Finding]:
    """Read the questions of each role into `known`, as a run would."""
    for role, source in data.sources.items():
        if source is None:
            continue
        name = f"data {role}"
        about: Literal["machine", "recipe"] = "machine"  # it may lie elsewhere
        try:
            opened = open_source(source, data.fields, data.config)
            split = data.splits[role] or opened.default_splits[role]
            here = split is None or opened.at_hand(split)
            about = "recipe"
            if here:
                known[role] = load_questions(opened, split, role=role, rule=data.rule)
                yield Finding("pass", name, f"{len(known[role])} questions")
            else:
                yield Finding("pass", name, f"{source} is on the hub, and will be downloaded")
        except Exception as error:  # a source is anybody's code, and both are to be seen
            yield of_error(name, error, about=about)


def _chosen(known: dict[str, list[Question]]) -> list[Question]:
    """Pick three questions of each role: the first, the longest, and the one with the fewest
    columns. A run trips over these first."""
    chosen = dict[tuple[str, str], Question]()
    for role, questions in known.items():
        longest = max(questions, key=lambda q: len(q.text))
        barest = min(questions, key=lambda q: len(q.metadata))
        chosen |= {(role, q.id): q for q in (questions[0], longest, barest)}
    return list(chosen.values())


# ------------------------------------------------------------------------ the parts in order


def _rehearsed(
    start: Start, module: MTGRPO, questions: list[Question], left: list[Finding]
) -> Iterator[Finding]:
    """Rehearse the parts in order. What their own rehearsals raise when they are left, at the end,
    is added to `left`."""
    asked = questions or [Question("example", "What is asked?", ("an answer",))]
    with contextlib.ExitStack() as stack:
        tools = list[Toolset]()
        for toolset in module.rollout.tools:
            found, tried = _tried(toolset, asked, bool(questions), stack, left)
            yield found
            tools.append(tried)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            policy = miniature(module.policy, folder)
        except ValueError as error:
            step = "A run itself will show whether it samples and learns."
            yield Finding("warn", "rehearsal", str(error), step)
            return
        small = _small(module, policy, replace(module.rollout, tools=tools))
        policy.load(start.device)
        policy.to(start.device)
        yield _attention(policy, module.policy)
        attempts = list[list[Trajectory]]()
        yield from _scripted(module, small, tools, asked, attempts)
        engine = partial(_entered, module.engine, Engine, "sampling", stack, left)
        sampled = _sampled(module, small, tools, asked[:2], attempts, engine)
        yield from _guarded("sampling", sampled)
        rewards = list[Reward]()
        for reward in module.rewards:
            name = f"reward {type(reward).__name__}"
            try:
                rehearsed = _entered(reward, Reward, name, stack, left)
                for some in attempts:
                    score_group(some, [rehearsed], policy=policy)
            except WorldError as error:  # a judge that is down
                yield of_error(name, error, about="machine")
            except Exception as error:  # anybody's code
                yield of_error(name, error)
            else:
                rewards.append(rehearsed)
        if not rewards or not attempts:
            return
        names = ", ".join(type(reward).__name__ for reward in rewards)
        text = f"{names} score {sum(map(len, attempts))} attempts at {len(asked)} questions"
        yield Finding("pass", "rewards", text)
        small.rewards = rewards
        yield from _guarded("learning", _learned(start, module, small, tools, asked[0]))


def _entered(
    part: _Part, kind: type, name: str, stack: contextlib.ExitStack, left: list[Finding]
) -> _Part:
    """Enter a part's own rehearsal, which is left when the stack is.

    Args:
        part: The part.
        kind: What its rehearsal gives.
        name: Its line's name.
        stack: Leaves the rehearsal.
        left: Where a finding is added if leaving it raises.
    Raises:
        PluginError: If it is no context, or gives something else.
    """
    what = f"rehearsal of {type(part).__name__}"
    given_kind = "Tool" if isinstance(part, Tool) else kind.__name__
    wanted = f"must be a context that gives {'an' if kind is Engine else 'a'} {given_kind}"
    advice = "Put @contextlib.contextmanager above it, and yield one."
    context = part.rehearsal()
    if not isinstance(context, contextlib.AbstractContextManager):
        raise PluginError(f"{what} {wanted}, and returns {kind_of(context)}. {advice}")

    def leave() -> None:
        try:
            context.__exit__(None, None, None)
        except Exception as error:  # anybody's code
            raised = of_error(name, error).text
            text = f"{what} raised on leaving it: {raised}"
            left.append(Finding("fail", name, text, "Fix what follows its yield."))

    try:
        given = context.__enter__()
    except RuntimeError as error:
        if str(error) != "generator didn't yield":
            raise
        raise PluginError(f"{what} {wanted}, and yields nothing. {advice}") from error
    stack.callback(leave)
    if not isinstance(given, kind):
        raise PluginError(f"{what} {wanted}, and gives {kind_of(given)}. {advice}")
    return given


def _guarded(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Findings of a part; what it raises is one too, and hides no other."""
    try:
        yield from findings
    except Exception as error:  # anybody's code
        yield of_error(name, error, "A run would stop there too. Fix it first.")


def _small(module: MTGRPO, policy: Policy, rollout: Rollout) -> MTGRPO:
    """The recipe's module with a miniature of its policy and a few attempts at a question."""
    return MTGRPO(
        policy,
        rollout,
        module.rewards,
        module.estimator,
        module.objective,
        ScriptedEngine(policy.tokenizer, lambda session, turn: "a"),
        max(_ATTEMPTS, module.estimator.min_group_size),
        optimizer=module.optimizer,
        scheduler=module.scheduler,
        minibatch_tokens=module.minibatch_tokens,
        seed=module.seed,
        profile=None,
    )


def _attention(policy: Policy, asked: Policy) -> Finding:
    text = "; ".join(f"{name}: {value}" for name, value in policy.in_force.items())
    if asked.share_prefixes and not policy.share_prefixes:
        step = "Learning takes longer than it could. Report the model and the versions above."
        return Finding("warn", "sharing", f"not in force; {text}", step)
    return Finding("pass", "sharing", text)


# ------------------------------------------------------------------------ tools


class _StandIn(Toolset):
    """Answers in place of tools that failed, so that what comes after them is examined too."""

    def __init__(self, toolset: Toolset) -> None:
        self._specs = toolset.specs

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._specs

    def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        return [ToolResult("a result") for _ in calls]


def _tried(
    toolset: Toolset,
    questions: list[Question],
    real: bool,
    stack: contextlib.ExitStack,
    left: list[Finding],
) -> tuple[Finding, Toolset]:
    """Check tools and call them, and say who is to answer from here on.

    Args:
        toolset: The tools.
        questions: For each a session is opened.
        real: Whether they are of the recipe's data.
        stack: Keeps the toolset's rehearsal open.
        left: Where a finding is added if leaving it raises.
    """
    name = f"tool {toolset.name}" if isinstance(toolset, Tool) else str(toolset)
    try:
        try:
            tools = _entered(toolset, Toolset, name, stack, left)
            tools.check()
        except WorldError as error:  # a server that is down, an index that lies elsewhere
            return of_error(name, error, about="machine"), _StandIn(toolset)
        if isinstance(tools, Stateful) and not real:
            text = "can work; no session was opened, because the questions are not here yet"
            return Finding("pass", name, text), _StandIn(toolset)
        try:
            calls = [_calls(tools, question) for question in questions]
        except PluginError as error:  # which stops no run
            return replace(of_error(name, error), status="warn"), tools
        replies = list[tuple[ToolCall, ToolResult]]()
        for question, some in zip(questions, calls, strict=True):
            replies += _replies(tools, question, some)
    except Exception as error:  # a tool is anybody's code, and others are to be seen too
        return of_error(name, error), _StandIn(toolset)
    if not replies:
        return Finding("pass", name, "has nothing to call"), tools
    good = [reply for reply in replies if reply[1].ok]
    call, result = (good or replies)[0]
    said = " ".join(result.content.split())
    shown = json.dumps(dict(call.arguments), ensure_ascii=False, default=str)
    verdict = f"{len(good)} of {len(replies)} calls succeed"
    text = f"{verdict}, such as {call.name} {_cut(shown)}: {_cut(said)}"
    if good and not any(result.content.strip() for _, result in good):
        text = f"{verdict}, and every result is empty, as of {call.name} {_cut(shown)}"
        step = "Return what the policy is to read: it learns nothing from an empty result."
        return Finding("warn", name, text, step), tools
    if good:
        return Finding("pass", name, text), tools
    text = f"no call succeeds, as {call.name} {_cut(shown)}: {_cut(said)}"
    if any(spec.examples for spec in tools.specs):
        return Finding("warn", name, text, "Correct its examples, or the tool."), tools
    return Finding("pass", name, text), tools


def _replies(
    tools: Toolset, question: Question, calls: list[ToolCall]
) -> list[tuple[ToolCall, ToolResult]]:
    """Each call with its reply, twice: in two sessions, so that calls come in batches as they do in
    a run.

    Raises:
        ToolError: If the world of the tools is broken; of one call where one is enough.
    """
    try:
        answers = on_loop(call_tools([tools], question, [calls, calls]))
    except ToolError:
        for call in calls:
            on_loop(call_tools([tools], question, [[call]]))
        raise
    return [pair for results in answers for pair in zip(calls, results, strict=True)]


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _calls(toolset: Toolset, question: Question) -> list[ToolCall]:
    return [
        ToolCall(spec.name, dict(arguments))
        for spec in toolset.specs
        for arguments in arguments_of(spec, question.text)
    ]


# ------------------------------------------------------------------------ attempts


class _Staged(Segmenter):
    """The recipe's turn scheme, in which whatever is written is read as what is to be tried: calls,
    right and wrong answers, and turns that say nothing.

    Args:
        rollout: The recipe's, whose segmenter writes the messages.
        question: What is asked.
        calls: What is called.
    """

    def __init__(self, rollout: Rollout, question: Question, calls: Sequence[ToolCall]) -> None:
        self._rollout = rollout
        real = rollout.segmenter
        self.max_turns, self.stop, self.tags = real.max_turns, real.stop, real.tags
        self.tools_in_template = real.tools_in_template
        right = Reading(answer=next(iter(question.answers), "an answer"))
        wrong, nothing = Reading(answer="a wrong answer"), Reading(format_error="nothing was done")
        acts = Reading(tuple(calls)) if calls else nothing
        self._earlier = itertools.cycle((acts, acts, right, nothing))
        self._last = itertools.cycle((right, wrong, nothing, right))

    def prompt(self, question: Question, tools: Sequence[ToolSpec]) -> list[Message]:
        messages: list[Message] = self._rollout.consult("prompt", question, tools)
        return messages

    def read(self, text: str, turn: int, cut: bool) -> Reading:
        self._rollout.consult("read", text, turn, cut)
        return next(self._last if turn + 1 == self.max_turns else self._earlier)

    def observe(self, reading: Reading, results: Sequence[ToolResult]) -> list[Message]:
        messages: list[Message] = self._rollout.consult("observe", reading, results)
        return messages


def _stage(small: MTGRPO, rollout: Rollout, tools: list[Toolset], question: Question) -> None:
    """Let the next attempts be scripted ones at a question."""
    calls = list[ToolCall]()
    for toolset in tools:
        with contextlib.suppress(PluginError):  # told where the tools are tried
            calls += _calls(toolset, question)
    small.rollout = replace(rollout, tools=tools, segmenter=_Staged(rollout, question, calls))


def _scripted(
    module: MTGRPO,
    small: MTGRPO,
    tools: list[Toolset],
    questions: list[Question],
    attempts: list[list[Trajectory]],
) -> Iterator[Finding]:
    """Add scripted attempts at each question to `attempts`, with probes where the estimator asks
    for them. A line for the first that fails: its sessions cannot be copied, say, or it leaves no
    room to act."""
    size, probes = small.group_size, small.estimator.probes
    failed = False
    for question in questions:
        _stage(small, module.rollout, tools, question)
        try:
            (some,), (branches,) = small.collector.explore([question], size, (0,), 0, probes=probes)
        except Exception as error:  # of a tool, or of the turn scheme
            if not failed:
                yield of_error("attempts", error)
            failed = True
        else:
            attempts.append([*some, *(probe.trajectory for probe in branches)])


def _sampled(
    module: MTGRPO,
    small: MTGRPO,
    tools: list[Toolset],
    questions: list[Question],
    attempts: list[list[Trajectory]],
    engine_of: Callable[[], Engine],
) -> Iterator[Finding]:
    """Add attempts of the miniature by the recipe's engine, read by the recipe's own segmenter."""
    small.collector.close()
    script, small.engine = small.engine, engine_of()
    rollout = module.rollout
    longest = max((len(t.token_ids) for some in attempts for t in some), default=rollout.max_tokens)
    small.rollout = replace(
        rollout,
        tools=tools,
        max_tokens=min(rollout.max_tokens, longest + _ROOM),
        max_turn_tokens=min(rollout.max_turn_tokens, _TURN_TOKENS),
    )
    engine, device = small.engine, small.policy.device
    try:
        sampled, _ = small.collector.explore(questions, small.group_size, (0,), 0)
        attempts += sampled
        turns = sum(len(t.turns) for some in sampled for t in some)
        chosen = (f"{name}: {value}" for name, value in engine.in_force.items())
        text = f"{turns} turns by {type(engine).__name__} on {device}"
        yield Finding("pass", "sampling", "; ".join((text, *chosen)))
    finally:
        small.collector.close()
        small.engine = script


def _learned(
    start: Start, module: MTGRPO, small: MTGRPO, tools: list[Toolset], question: Question
) -> Iterator[Finding]:
    """An iteration of scripted attempts at one question."""
    data, device = start.data, start.device
    if isinstance(data, QuestionData):
        module.steps(max(data.questions_per_iteration // start.processes, 1))
    _stage(small, module.rollout, tools, question)
    (optimizer,), schedules = small.configure_optimizers()
    assert small.policy.network is not None
    small.policy.network.train()
    for step in small.iterate([question], 0):
        for minibatch in step:
            small.loss(move_data_to_device(minibatch, device), {}).backward()
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
