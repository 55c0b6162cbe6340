"""Rollouts: one turn as a function from state to state, and the rules it follows.

A recipe configures `Rollout`, and the module calls its `explore`. The loop around the turns is in
`turnrl/agent/explore.py`. Whatever the policy does is data. Whatever the world does wrong is an
exception, and ends the collection with nothing collected.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, final

import numpy as np
from tqdm.auto import tqdm

from turnrl import types
from turnrl.agent.chat import ChatFormat
from turnrl.agent.conversation import Conversation, MessageConversation, TokenConversation
from turnrl.agent.explore import Exploration, Opening, State, on_loop
from turnrl.agent.toolbox import Toolbox, check_tools
from turnrl.errors import (
    DataError,
    PluginError,
    RecipeError,
    ToolError,
    at_least,
    blaming,
    instance_of,
    numbers,
    within,
)

_logger = logging.getLogger(__name__)


@final
class Agent:
    """A rollout's rules bound to a sampler: begins trajectories, and takes turns.

    Args:
        rollout: The rules.
        sampler: Says the turns.
        chat: The policy's chat format.
        greedy: Take the likeliest tokens instead of sampling.
    """

    def __init__(
        self, rollout: Rollout, sampler: types.Sampler, chat: ChatFormat, greedy: bool = False
    ) -> None:
        self._rollout = rollout
        self._sampler = sampler
        self._chat = chat
        temperature = 0.0 if greedy else rollout.temperature
        self._sampling = replace(rollout.sampling, temperature=temperature)
        self.tools = Toolbox(rollout.tools, self._make_safe, rollout.max_calls_per_turn)

    def begin(self, openings: Iterable[Opening]) -> Iterator[State]:
        """The states that trajectories start from, in order. Those with one prompt that stand side
        by side share the work of reading it.

        Raises:
            DataError: If a question leaves no room to act.
        """
        most = self._rollout.max_tokens
        for _, alike in groupby(openings, lambda o: (id(o.question), o.sessions.prompt)):
            first, *others = alike
            with contextlib.closing(self._converse(first.question, first.sessions.prompt)) as root:
                if root.tokens >= most:
                    raise DataError(
                        f"question {first.question.id!r} makes a prompt of {root.tokens} tokens: "
                        f"no room within rollout.max_tokens = {most}. Raise it, or leave it out."
                    )
                for opening in (first, *others):
                    yield State(opening, root.fork())

    def _converse(self, question: types.Question, more: str) -> Conversation:
        rollout = self._rollout
        if isinstance(self._sampler, types.MessageSampler):
            messages = rollout.messages(question, self._chat, more)
            return MessageConversation(self._sampler, self._chat, messages, rollout.templated)
        assert isinstance(self._sampler, types.Engine)
        prompt_ids = rollout.prompt(question, self._chat, more)
        return TokenConversation(self._sampler.open(prompt_ids), self._chat, prompt_ids)

    async def close(self) -> None:
        """Let go of the tools' batches, and have the sampler give back what only sampling needs."""
        self.tools.close()
        await self._sampler.drain()

    async def turn(self, state: State) -> State:
        """Take one turn: sample, read, act, observe.

        The calls of a turn after which nothing could be read are not run: of the last turn, and of
        one that was cut. If their results leave no room to go on, they were in vain; the policy
        never reads them, so neither do the rewards.
        """
        rollout, k, talk = self._rollout, len(state.turns), state.conversation
        most = min(rollout.max_turn_tokens, rollout.max_tokens - talk.tokens)
        seed = stream_seed(*state.opening.seed, k)
        turn = await talk.say(replace(self._sampling, max_tokens=most, seed=seed))
        reading: types.Reading = rollout.consult("read", turn.text, k, turn.cut)
        turn = replace(turn, reading=reading)
        ended_by: types.Ending | None = None
        if reading.answer is not None:
            ended_by = "answer"
        elif turn.cut:
            ended_by = "length"
        elif k + 1 == rollout.segmenter.max_turns:
            ended_by = "turns"
        else:
            results = await state.opening.sessions.answer(reading.calls, k)
            observation_ids = talk.tell(rollout.consult("observe", reading, results))
            if talk.tokens >= rollout.max_tokens:
                ended_by = "length"
            else:
                turn = replace(turn, results=results, observation_ids=observation_ids)
        return replace(state, turns=(*state.turns, turn), ended_by=ended_by)

    def _make_safe(self, text: str) -> str:
        """A tool's text, cut to the budget and inert."""
        budget = self._rollout.max_result_tokens
        tags = self._rollout.segmenter.tags
        safe = self._chat.inert(self._chat.cut(text, budget), tags)
        # what is inert may be longer, and a cut may make a tag of `<tools`: so inert comes last
        most = budget
        while self._chat.cut(safe, budget) != safe and most:
            most -= 1  # of a vocabulary that cannot say what is inert, the same would come again
            safe = self._chat.inert(self._chat.cut(text, most), tags)
        return safe


@final
@dataclass(frozen=True)
class Rollout:
    """Rules by which the agent acts: the turn scheme, the tools, and the limits.

    Args:
        segmenter: What a turn is.
        tools: Tools that the policy can call, or whole sets of them.
        temperature: Sampling temperature while collecting; evaluation is greedy.
        max_turn_tokens: The most tokens the policy samples in one turn.
        max_calls_per_turn: The most tool calls of one turn that are run; the policy reads that
            further ones were too many.
        max_result_tokens: The most tokens of one tool result that the policy reads; rewards see the
            same text.
        max_tokens: The most tokens of a whole trajectory: prompt, turns and results.
        lockstep: Start the next turn when all trajectories have ended theirs. Batches, and so every
            last digit, then do not depend on how fast tools answer. Without it slow tools overlap
            with generation.
        top_k: While collecting, draw from that many of the likeliest tokens; 0 from all. This and
            the next two bias learning: a policy gradient assumes draws from all of the policy's
            distribution.
        min_p: While collecting, draw from tokens whose probability is at least this share of the
            likeliest's.
        top_p: While collecting, draw from the fewest likeliest tokens whose probabilities add up to
            this, of those that `top_k` and `min_p` leave.
    """

    segmenter: types.Segmenter
    tools: list[types.Toolset]
    temperature: float = 1.0
    max_turn_tokens: int = 512
    max_calls_per_turn: int = 8
    max_result_tokens: int = 512
    max_tokens: int = 2048
    lockstep: bool = True
    top_k: int = 0
    min_p: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        instance_of(types.Segmenter, "segmenter", self.segmenter)
        numbers("rollout.", self, "temperature", "top_p", optional=False)
        if not self.temperature > 0:
            raise RecipeError(f"rollout.temperature is {self.temperature}; it must be above 0")
        if not 0 < self.top_p <= 1:
            raise RecipeError(f"rollout.top_p is {self.top_p}; it must be above 0, and at most 1")
        within(0, 1, "rollout.", self, "min_p")
        at_least(0, "rollout.", self, "top_k", whole=True, optional=False)
        limits = ("max_turn_tokens", "max_calls_per_turn", "max_result_tokens", "max_tokens")
        at_least(1, "rollout.", self, *limits, whole=True, optional=False)
        scheme = f"{type(self.segmenter).__name__}."
        at_least(1, scheme, self.segmenter, "max_turns", whole=True, optional=False)
        check_tools(self.tools)

    @cached_property
    def specs(self) -> tuple[types.ToolSpec, ...]:
        """All tools, of all sets."""
        return tuple(spec for toolset in self.tools for spec in toolset.specs)

    @property
    def templated(self) -> tuple[types.ToolSpec, ...]:
        """Those that the chat template describes."""
        return self.specs if self.segmenter.tools_in_template else ()

    @property
    def sampling(self) -> types.Sampling:
        """Settings to sample any turn while collecting."""
        return types.Sampling(
            self.max_turn_tokens,
            self.temperature,
            stop=self.segmenter.stop,
            top_k=self.top_k,
            min_p=self.min_p,
            top_p=self.top_p,
        )

    def check(self, chat: ChatFormat) -> None:
        """Preflight what the chat template has to take, and every tool.

        Args:
            chat: The policy's chat format.
        Raises:
            RecipeError: If it does not take the segmenter's messages.
            ToolError: From the first tool that cannot work.
        """
        if self.sampling.cuts_distribution:
            _logger.warning(
                "rollout.top_k, min_p or top_p cuts the distribution that tokens are drawn from. "
                "The sampler's log-probabilities are of what is left and the learner's are not, so "
                "their ratio is biased; a policy gradient assumes that all of it was drawn from."
            )
        self.consult("check", self.specs)
        if not self.specs and self.segmenter.max_turns > 1:
            _logger.warning(
                f"rollout.tools is empty, and {type(self.segmenter).__name__} takes up to "
                f"{self.segmenter.max_turns} turns: whatever the policy calls, it reads that there "
                "is no such tool. Name tools in model.rollout.tools, unless it is to answer from "
                "memory."
            )
        example = types.Question("check", "?", ("!",))
        plain = chat.prompt(self.messages(example, chat))
        if self.templated and self.prompt(example, chat) == plain:
            raise RecipeError(
                f"{type(self.segmenter).__name__} leaves it to the chat template to describe the "
                f"tools, and the policy's does not. {chat.advice_on_tools(self.specs[0])}"
            )
        call, replies = (types.ToolCall("check"),), (types.ToolResult("checked"),)
        for calls, wrong in ((call, None), (call, "wrong"), ((), "wrong")):
            reading = types.Reading(calls, None, wrong)
            messages = self.consult("observe", reading, replies[: len(calls)])
            roles = {m.get("role") for m in messages} if isinstance(messages, list) else {"none"}
            if not roles or roles - {"user", "tool"}:
                gave = f"{type(self.segmenter).__name__}.observe gave {messages!r}"
                raise PluginError(f"{gave}; it gives messages of role user or tool, at least one")
            chat.observation(messages, None)
        for tool in self.tools:
            with blaming(ToolError, f"{tool} in check", "Fix the tool, or what it needs."):
                tool.check()

    def at_once(self, sampler: types.Sampler, probes: int) -> int | None:
        """Number of trajectories that may be under way at a time; None for any number.

        Args:
            sampler: What samples; it may come to hold more than it says now.
            probes: Continuations from the beginning of each turn.
        """
        if sampler.capacity is None:
            return None
        # at worst each has all its turns, and all the branches of each of them are still alive
        return max(sampler.capacity // (1 + probes * self.segmenter.max_turns), 1)

    def messages(
        self, question: types.Question, chat: ChatFormat, more: str = ""
    ) -> list[types.Message]:
        """Messages that open a trajectory. Their text is as untrusted as a tool's.

        Args:
            question: What is asked.
            chat: The policy's chat format.
            more: Text that the tools' sessions add to the question.
        """
        text = f"{question.text}\n\n{more}" if more else question.text
        question = replace(question, text=chat.inert(text, self.segmenter.tags))
        messages: list[types.Message] = self.consult("prompt", question, self.specs)
        return messages

    def prompt(self, question: types.Question, chat: ChatFormat, more: str = "") -> tuple[int, ...]:
        """Token ids of a question's prompt; see `messages`."""
        return chat.prompt(self.messages(question, chat, more), self.templated)

    def consult(self, method: str, *arguments: Any) -> Any:
        """Ask the segmenter. It must never raise, so an exception is a bug of its package."""
        what = f"{type(self.segmenter).__name__}.{method} on {str(arguments[0])[:200]!r}"
        advice = "A segmenter must accept any text; fix it, and try turnrl.testing.check_segmenter"
        with blaming(PluginError, what, f"{advice} on it."):
            return getattr(self.segmenter, method)(*arguments)

    def play(
        self,
        sampler: types.Sampler,
        chat: ChatFormat,
        questions: Sequence[types.Question],
        group_size: int,
        seed: Sequence[int],
        greedy: bool = False,
        description: str | None = None,
    ) -> list[list[types.Trajectory]]:
        """Let the policy act on each question `group_size` times. Blocks; safe inside a notebook.

        Args:
            sampler: Says the turns: an engine that has been started, or a `MessageSampler`.
            chat: The policy's chat format. A `MessageSampler` reads none of it, but the limits are
                counted in its tokens all the same.
            questions: What to ask.
            group_size: G, trajectories per question.
            seed: Integers that name the collection; trajectory and turn numbers are added to them.
            greedy: Take the likeliest tokens instead of sampling.
            description: Label of a progress bar, shown if the collection takes over a few seconds.
        Returns:
            G trajectories for each question, in order; a `MessageSampler`'s have no tokens.
        Raises:
            ToolError: If a tool's world is broken.
            DataError: If a question leaves no room to act within `max_tokens`.
        """
        return self.explore(
            sampler, chat, questions, group_size, seed, 0, greedy=greedy, description=description
        )[0]

    def explore(
        self,
        sampler: types.Sampler,
        chat: ChatFormat,
        questions: Sequence[types.Question],
        group_size: int,
        seed: Sequence[int],
        probes: int,
        greedy: bool = False,
        description: str | None = None,
    ) -> types.Attempts:
        """`play`, and continuations besides: at the beginning of each turn of each trajectory,
        `probes` branches go their own way from there to the end.

        No more trajectories are under way than the sampler holds at once, with all the probes that
        they may have: in lockstep they are played in waves, whole groups together if it can be;
        without it the next begins when one ends.

        Args:
            probes: How many; see `play` for the others.
        Returns:
            G trajectories for each question, and the probes of each question's. Without lockstep a
            trajectory still begins a turn together with its own probes.
        Raises:
            ToolError: As `play`, and if a tool's session cannot be copied.
        """
        total = len(questions) * group_size
        hidden = True if description is None else None  # None: shown on a terminal only
        bar = tqdm(total=total, desc=description, delay=3, leave=False, disable=hidden, unit="traj")
        exploration = Exploration(
            Agent(self, sampler, chat, greedy),
            lambda: self.at_once(sampler, probes),
            questions,
            group_size,
            tuple(seed),
            probes,
            bar,
        )
        return on_loop(exploration.run(self.lockstep))


def stream_seed(*key: int) -> int:
    """A random stream's number from what it belongs to; different keys give independent streams."""
    return int(np.random.SeedSequence([k % 2**32 for k in key]).generate_state(1, np.uint64)[0])
