"""Rollouts: one turn as a function from state to state, and the rules it follows.

A recipe configures `Rollout`, and the module calls its `explore`. The loop around the turns is in
`turnrl/agent/explore.py`. Whatever the policy does is data. Whatever the world does wrong is an
exception, and ends the collection with nothing collected.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from tqdm.auto import tqdm

from turnrl import types
from turnrl.agent.chat import ChatFormat
from turnrl.agent.explore import Exploration, State, on_loop
from turnrl.agent.toolbox import Toolbox, check_tools
from turnrl.errors import DataError, PluginError, RecipeError, ToolError, at_least, blaming

_logger = logging.getLogger(__name__)


@final
class Agent:
    """A rollout's rules bound to an engine: begins trajectories, and takes turns.

    Args:
        rollout: The rules.
        engine: Whose weights act.
        chat: The policy's chat format.
        greedy: Take the likeliest tokens instead of sampling.
    """

    def __init__(
        self, rollout: Rollout, engine: types.Engine, chat: ChatFormat, greedy: bool = False
    ) -> None:
        self._rollout = rollout
        self._engine = engine
        self._chat = chat
        self._temperature = 0.0 if greedy else rollout.temperature
        self.tools = Toolbox(rollout.tools, self._make_safe, rollout.max_calls_per_turn)

    def begin(
        self, question: types.Question, group_size: int, seed: tuple[int, ...]
    ) -> list[State]:
        """The states from which a question's trajectories start; they share one prompt.

        Args:
            question: What is asked.
            group_size: G, how many.
            seed: Integers that name the group; the number of the trajectory is added.
        Raises:
            DataError: If the question leaves no room to act.
        """
        rollout = self._rollout
        prompt_ids = rollout.prompt(question, self._chat)
        room = rollout.max_tokens - len(prompt_ids)
        if room < 1:
            raise DataError(
                f"question {question.id!r} makes a prompt of {len(prompt_ids)} tokens: no room "
                f"within rollout.max_tokens = {rollout.max_tokens}. Raise it, or leave it out."
            )
        bench = self.tools.bench
        with contextlib.closing(self._engine.open(prompt_ids)) as root:
            return [
                State(question, prompt_ids, root.fork(), bench(question), (*seed, member), room)
                for member in range(group_size)
            ]

    async def turn(self, state: State) -> State:
        """Take one turn: sample, read, act, observe.

        The calls of a turn after which nothing could be read are not run: of the last turn, and of
        one that was cut. If their results leave no room to go on, they were in vain; the policy
        never reads them, so neither do the rewards.
        """
        rollout, k = self._rollout, len(state.turns)
        sampling = types.Sampling(
            max_tokens=min(rollout.max_turn_tokens, state.room),
            temperature=self._temperature,
            seed=stream_seed(*state.seed, k),
            stop=rollout.segmenter.stop,
            end_ids=self._chat.end_ids,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            top_p=rollout.top_p,
        )
        completion = await state.session.generate(state.new_ids, sampling)
        text, cut = self._chat.text(completion.token_ids), completion.reason == "length"
        reading: types.Reading = rollout.ask("read", text, k, cut)
        turn = types.Turn(text, completion.token_ids, completion.logprobs, reading, cut=cut)
        room = state.room - len(completion.token_ids)
        stop: types.Stop | None = None
        new_ids: tuple[int, ...] = ()
        if reading.answer is not None:
            stop = "answer"
        elif cut:
            stop = "length"
        elif k + 1 == rollout.segmenter.max_turns:
            stop = "turns"
        else:
            results = await state.bench.answer(reading.calls)
            messages = rollout.ask("observe", reading, results)
            new_ids = self._chat.observation(messages, completion.token_ids[-1])
            room -= len(new_ids)
            if room < 1:
                stop, new_ids = "length", ()
            else:
                turn = replace(turn, results=results, observation_ids=new_ids)
        return replace(state, turns=(*state.turns, turn), new_ids=new_ids, room=room, stop=stop)

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
        tools: What the policy can call.
        temperature: Of sampling while collecting; evaluation is greedy.
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
    tools: list[types.Tool]
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
        if not self.temperature > 0:
            raise RecipeError(f"rollout.temperature is {self.temperature}; it must be above 0")
        if not 0 < self.top_p <= 1:
            raise RecipeError(f"rollout.top_p is {self.top_p}; it must be above 0, and at most 1")
        if not 0 <= self.min_p <= 1:
            raise RecipeError(f"rollout.min_p is {self.min_p}; it must be from 0 to 1")
        at_least(0, "rollout.", self, "top_k")
        limits = ("max_turn_tokens", "max_calls_per_turn", "max_result_tokens", "max_tokens")
        at_least(1, "rollout.", self, *limits)
        at_least(1, f"{type(self.segmenter).__name__}.", self.segmenter, "max_turns")
        check_tools(self.tools)

    @property
    def truncated(self) -> bool:
        """True if tokens are drawn from a part of the distribution."""
        cut = types.Sampling(1, top_k=self.top_k, min_p=self.min_p, top_p=self.top_p)
        return cut.truncated

    def check(self, chat: ChatFormat) -> None:
        """Preflight what the chat template has to take, and every tool.

        Args:
            chat: The policy's chat format.
        Raises:
            RecipeError: If it does not take the segmenter's messages.
            ToolError: From the first tool that cannot work.
        """
        if self.truncated:
            _logger.warning(
                "rollout.top_k, min_p or top_p cuts the distribution that tokens are drawn from. "
                "The sampler's log-probabilities are of what is left and the learner's are not, so "
                "their ratio is biased; a policy gradient assumes that all of it was drawn from."
            )
        self.ask("check", self.tools)
        if not self.tools and self.segmenter.max_turns > 1:
            _logger.warning(
                f"rollout.tools is empty, and {type(self.segmenter).__name__} takes up to "
                f"{self.segmenter.max_turns} turns: whatever the policy calls, it reads that there "
                "is no such tool. Name tools in model.rollout.tools, unless it is to answer from "
                "memory."
            )
        example = types.Question("check", "?", ("!",))
        plain = chat.prompt(self.ask("prompt", example, self.tools))
        if self.segmenter.tools_in_template and self.tools and self.prompt(example, chat) == plain:
            raise RecipeError(
                f"{type(self.segmenter).__name__} leaves it to the chat template to describe the "
                f"tools, and the policy's does not. {chat.advice_on_tools(self.tools[0])}"
            )
        call, replies = (types.ToolCall("check"),), (types.ToolResult("checked"),)
        for calls, wrong in ((call, None), (call, "wrong"), ((), "wrong")):
            reading = types.Reading(calls, None, wrong)
            messages = self.ask("observe", reading, replies[: len(calls)])
            roles = {m.get("role") for m in messages} if isinstance(messages, list) else {"none"}
            if not roles or roles - {"user", "tool"}:
                told = f"{type(self.segmenter).__name__}.observe gave {messages!r}"
                raise PluginError(f"{told}; it gives messages of role user or tool, at least one")
            chat.observation(messages, None)
        for tool in self.tools:
            with blaming(ToolError, f"{tool} in check", "Mend the tool, or what it needs."):
                tool.check()

    def at_once(self, engine: types.Engine, probes: int) -> int | None:
        """Number of trajectories that may be under way at a time; None for any number.

        Args:
            engine: What samples; it may come to hold more than it says now.
            probes: Continuations from the beginning of each turn.
        """
        if engine.capacity is None:
            return None
        # at worst each has all its turns, and all the branches of each of them are still alive
        return max(engine.capacity // (1 + probes * self.segmenter.max_turns), 1)

    def prompt(self, question: types.Question, chat: ChatFormat) -> tuple[int, ...]:
        """Token ids of a question's prompt. The question's text is as untrusted as a tool's."""
        safe = replace(question, text=chat.inert(question.text, self.segmenter.tags))
        messages = self.ask("prompt", safe, self.tools)
        return chat.prompt(messages, self.tools if self.segmenter.tools_in_template else ())

    def ask(self, method: str, *arguments: Any) -> Any:
        """Ask the segmenter; it is to be total, so an exception is a fault of its package."""
        what = f"{type(self.segmenter).__name__}.{method} on {str(arguments[0])[:200]!r}"
        advice = "A segmenter must accept any text; mend it, and try turnrl.testing.check_segmenter"
        with blaming(PluginError, what, f"{advice} on it."):
            return getattr(self.segmenter, method)(*arguments)

    def collect(
        self,
        engine: types.Engine,
        chat: ChatFormat,
        questions: Sequence[types.Question],
        group_size: int,
        seed: Sequence[int],
        greedy: bool = False,
        description: str | None = None,
    ) -> list[list[types.Trajectory]]:
        """Let the policy act on each question `group_size` times. Blocks; safe inside a notebook.

        Args:
            engine: Whose weights act; it has been started.
            chat: The policy's chat format.
            questions: What to ask.
            group_size: G, trajectories per question.
            seed: Integers that name the collection; trajectory and turn numbers are added to them.
            greedy: Take the likeliest tokens instead of sampling.
            description: Of a progress bar, shown if the collection takes more than a few seconds.
        Returns:
            G trajectories for each question, in order.
        Raises:
            ToolError: If a tool's world is broken.
            DataError: If a question leaves no room to act within `max_tokens`.
        """
        return self.explore(
            engine, chat, questions, group_size, seed, 0, greedy=greedy, description=description
        )[0]

    def explore(
        self,
        engine: types.Engine,
        chat: ChatFormat,
        questions: Sequence[types.Question],
        group_size: int,
        seed: Sequence[int],
        probes: int,
        greedy: bool = False,
        description: str | None = None,
    ) -> tuple[list[list[types.Trajectory]], list[list[types.Probe]]]:
        """`collect`, and continuations besides: at the beginning of each turn of each trajectory,
        `probes` branches go their own way from there to the end.

        No more trajectories are under way than the engine holds at once, with all the probes that
        they may have: in lockstep they are played in waves, whole groups together if it can be;
        without it the next begins when one ends.

        Args:
            probes: How many; see `collect` for the others.
        Returns:
            G trajectories for each question, and the probes of each question's. Without lockstep a
            trajectory still begins a turn together with its own probes.
        Raises:
            ToolError: As `collect`, and if a tool's session cannot be copied.
        """
        agent, total = Agent(self, engine, chat, greedy), len(questions) * group_size
        hidden = True if description is None else None  # None: shown on a terminal only
        bar = tqdm(total=total, desc=description, delay=3, leave=False, disable=hidden, unit="traj")
        exploration = Exploration(
            agent.turn, self.at_once, agent.tools, engine, group_size, probes, bar
        )
        # lazily: what has been begun is closed if the next group cannot be
        groups = (agent.begin(q, group_size, (*seed, n)) for n, q in enumerate(questions))
        return on_loop(exploration.run(groups, self.lockstep))


def stream_seed(*key: int) -> int:
    """A random stream's number from what it belongs to; different keys give independent streams."""
    return int(np.random.SeedSequence([k % 2**32 for k in key]).generate_state(1, np.uint64)[0])
