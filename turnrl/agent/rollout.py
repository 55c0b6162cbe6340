"""Rollouts: the rules that attempts follow, and the segmenter or player that drives them.

A recipe configures `Rollout`, and the collector calls its `begin`. A turn is taken in
`turnrl/agent/segmenter_loop.py`, and the loop around the turns is in `turnrl/agent/explore.py`.
Whatever the policy does is data. A fault of the world is an exception: it ends the collection, and
nothing is collected.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, final

from tqdm.auto import tqdm

from turnrl import types
from turnrl.agent.agent import SampledAgent
from turnrl.agent.agent_loop import AgentLoop
from turnrl.agent.capacity import ALONE, Capacity, Shares
from turnrl.agent.chat import ChatFormat
from turnrl.agent.explore import Exploration
from turnrl.agent.parts import as_toolsets
from turnrl.agent.player_loop import PlayerLoop
from turnrl.agent.running import BackgroundTask
from turnrl.agent.segmenter_loop import SegmenterLoop
from turnrl.agent.templates import CLOCK, find_clock_call
from turnrl.agent.toolbox import RunningToolsets, Toolbox, check_specs, check_tools
from turnrl.plugin.errors import (
    RecipeError,
    ToolError,
    blaming,
    check_at_least,
    check_attributes,
    check_instance,
    check_numbers,
)
from turnrl.plugin.text import redact_secrets

_logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Rollout:
    """The rules by which the agent acts: the segmenter or player, the tools, and the limits.

    Args:
        segmenter: The segmenter, which defines a turn. Set either this or `player`.
        tools: Tools that the policy can call, or whole sets of them; or typed functions, by their
            dotted paths, such as `my_module.search`.
        temperature: Sampling temperature while collecting; evaluation is greedy.
        max_turn_tokens: The most tokens that the policy samples in one turn.
        max_calls_per_turn: The most tool calls of one turn that are run. For each call beyond it,
            the policy reads that there were too many.
        max_result_tokens: The most tokens of one tool result that the policy reads; rewards see the
            same text.
        max_tokens: The most tokens of a whole trajectory: prompt, turns and results. If a player
            rewrites its history, the most tokens of each history. A run leaves out questions whose
            prompts alone have as many, and counts them in a warning.
        lockstep: Start the next turn when all trajectories have ended theirs. Then batches, and so
            results to the last digit, do not depend on how fast tools answer. Without it slow tools
            overlap with generation.
        player: Drives the attempts in place of a segmenter.
        max_restarts: How many times one attempt may restart after the world lost it
            (`TrajectoryLost`) before the run stops.
    """

    segmenter: types.Segmenter | None = None
    tools: list[types.Toolset | Callable[..., Any]] = field(default_factory=list)
    temperature: float = 1.0
    max_turn_tokens: int = 512
    max_calls_per_turn: int = 8
    max_result_tokens: int = 512
    max_tokens: int = 2048
    lockstep: bool = True
    player: types.Player | None = None
    max_restarts: int = 2

    def __post_init__(self) -> None:
        if (self.segmenter is None) == (self.player is None):
            advice = (
                "it has neither."
                if self.player is None
                else "it has both. To use the player, write 'segmenter: null' beside it in "
                "the recipe, or add --model.rollout.segmenter null."
            )
            raise RecipeError(
                "rollout takes a segmenter, such as TwoTurn or ReAct, or a player, and exactly one "
                f"of them; {advice}"
            )
        if self.segmenter is not None:
            check_instance(types.Segmenter, "segmenter", self.segmenter)
        if self.player is not None:
            check_instance(types.Player, "player", self.player)
        check_numbers("model.rollout.", self, "temperature", optional=False)
        if not self.temperature > 0:
            raise RecipeError(
                f"model.rollout.temperature is {self.temperature}; it must be above 0"
            )
        check_at_least(0, "model.rollout.", self, "max_restarts", whole=True, optional=False)
        limits = ("max_turn_tokens", "max_calls_per_turn", "max_result_tokens", "max_tokens")
        check_at_least(1, "model.rollout.", self, *limits, whole=True, optional=False)
        name = type(self.plugin).__name__
        check_attributes(name, self.plugin, {"max_turns": "4"})
        check_at_least(1, f"{name}.", self.plugin, "max_turns", whole=True, optional=False)
        check_tools(self.toolsets)

    @cached_property
    def loop(self) -> AgentLoop:
        """Moves the attempts on."""
        if self.player is not None:
            return PlayerLoop(self.player, self.specs)
        assert self.segmenter is not None, "one of them is given"
        return SegmenterLoop(self.segmenter, self.specs)

    @property
    def plugin(self) -> types.Segmenter | types.Player:
        """The segmenter or the player."""
        plugin = self.segmenter or self.player
        assert plugin is not None, "one of them is given"
        return plugin

    @property
    def segmenter_loop(self) -> SegmenterLoop:
        """The loop of a rollout that has a segmenter."""
        assert isinstance(self.loop, SegmenterLoop), "a player drives"
        return self.loop

    @property
    def max_turns(self) -> int:
        """K, the most turns of a trajectory."""
        return self.plugin.max_turns

    @property
    def tags(self) -> tuple[str, ...]:
        """Tag names that are neutralised in questions and tool results."""
        return self.plugin.tags

    @cached_property
    def toolsets(self) -> tuple[types.Toolset, ...]:
        """The tools, with a `FunctionTool` in the place of each function."""
        return as_toolsets(self.tools)

    @cached_property
    def specs(self) -> tuple[types.ToolSpec, ...]:
        """All tools, of all sets. The sets start for it, unless they run already.

        Raises:
            RecipeError: If two tools share a name, or parameters are not a JSON Schema.
            ToolError: If a toolset cannot start.
        """
        with self.running_tools():
            return check_specs(self.toolsets)

    @property
    def sampling(self) -> types.Sampling:
        """Settings to sample any turn while collecting."""
        return types.Sampling(self.max_turn_tokens, self.temperature, stop=self.loop.stop)

    def check(self, chat: ChatFormat, tools: bool = True) -> None:
        """Check the agent loop, the chat template and every tool before a run.

        Args:
            chat: The policy's chat format.
            tools: Check that the tools can work, too.
        Raises:
            RecipeError, PluginError: See `AgentLoop.check`.
            ToolError: From the first tool that cannot work.
        """
        if call := find_clock_call(str(chat.tokenizer.chat_template)):
            _logger.warning(
                f"the policy's chat template calls the clock ({call}). turnrl answers "
                f"{CLOCK:%d %B %Y} on every day, so that a resumed run and the trained policy read "
                "the prompts of the training. For another date, write it into a template of your "
                "own and set model.policy.chat_template."
            )
        with self.running_tools():
            self.loop.check(chat)
            for tool in self.toolsets if tools else ():
                with blaming(ToolError, f"{tool} in check", "Fix the tool, or what it needs."):
                    tool.check()

    def questions_with_room(
        self, questions: Sequence[types.Question], chat: ChatFormat
    ) -> tuple[list[types.Question], str]:
        """The questions whose prompts leave room for a turn within `max_tokens`, as far as that is
        known before a tool's session is open or a player begins.

        Args:
            questions: The questions.
            chat: The policy's chat format.
        Returns:
            These questions, and a phrase that counts the others; empty if there are none.
        """
        limit = self.max_tokens
        sizes = [self.loop.count_prompt_tokens(question, chat, limit) for question in questions]
        kept = [question for question, size in zip(questions, sizes, strict=True) if size < limit]
        if len(kept) == len(questions):
            return kept, ""
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        return kept, (
            f"{len(questions) - len(kept)} of {len(questions)} questions, whose prompts leave no "
            f"room within model.rollout.max_tokens = {limit} ({questions[longest].id!r} makes a "
            f"prompt of {sizes[longest]} tokens)"
        )

    @property
    def places(self) -> Capacity:
        """Counts the attempts that the tools and a sampler can serve."""
        return Capacity(self.toolsets, self.max_turns)

    def running_tools(self) -> contextlib.AbstractContextManager[None]:
        """Inside this block the toolsets run: they start at its beginning, and stop at its end.
        Blocks may be nested.

        Raises:
            ToolError: If a toolset cannot start.
        """
        return RunningToolsets(self.toolsets)

    def make_agent(
        self, sampler: types.Sampler, chat: ChatFormat, greedy: bool = False
    ) -> SampledAgent:
        """An agent that acts by these rules; see `play` for the arguments."""
        sampling = replace(self.sampling, temperature=0.0) if greedy else self.sampling

        def make_safe(text: str) -> str:
            return chat.sanitize(redact_secrets(text), self.tags, self.max_result_tokens)

        box = Toolbox(self.toolsets, make_safe, self.max_calls_per_turn)
        return SampledAgent(self.loop.plugin, sampler, chat, sampling, self.max_tokens, box)

    def play(
        self,
        sampler: types.Sampler,
        chat: ChatFormat,
        questions: Sequence[types.Question],
        group_size: int,
        key: Sequence[int],
        greedy: bool = False,
        description: str | None = None,
    ) -> list[list[types.Trajectory]]:
        """Let the policy act on each question `group_size` times. Blocks; safe inside a notebook.

        Args:
            sampler: Writes the turns: an engine that has been started, or a `MessageSampler`.
            chat: The policy's chat format. A `MessageSampler` does not use it, but the limits are
                still counted in its tokens.
            questions: What to ask.
            group_size: G, trajectories per question.
            key: Integers that name the collection, and so its random streams; the numbers of
                trajectory and turn are added.
            greedy: Take the likeliest tokens instead of sampling.
            description: Label of a progress bar, which shows up after a few seconds; None for none.
        Returns:
            G trajectories for each question, in order; a `MessageSampler`'s have no tokens.
        Raises:
            ToolError: If a tool's world is broken.
            DataError: If a question leaves no room to act within `max_tokens`.
        """
        return self.begin(
            sampler, chat, questions, group_size, key, 0, greedy=greedy, description=description
        ).result()[0]

    def begin(
        self,
        sampler: types.Sampler,
        chat: ChatFormat,
        questions: Sequence[types.Question],
        group_size: int,
        key: Sequence[int],
        probes: int,
        greedy: bool = False,
        description: str | None = None,
        shares: Shares = ALONE,
        driver: AgentLoop | None = None,
    ) -> BackgroundTask[types.Attempts]:
        """Begin what `play` does, and add probes: at the beginning of each turn of each trajectory,
        `probes` branches leave it and go on independently to their ends.

        Only as many trajectories are under way as the sampler and the tools can serve with all
        their probes. In lockstep they are played in waves, in whole groups if possible. Without
        lockstep the next begins when one ends, and a trajectory still takes its turns together with
        its own probes.

        Args:
            probes: Number of branches per turn; see `play` for the other arguments.
            shares: The collections and processes that share the capacity of tools and sampler.
            driver: Moves the attempts on in place of the rollout's own `loop`.
        Returns:
            The collection under way. Its result is G trajectories for each question, and their
            probes. It raises what `play` raises, and a ToolError if a tool's session cannot be
            copied.
        """
        total = len(questions) * group_size
        hidden = True if description is None else None  # None: shown on a terminal only
        bar = tqdm(total=total, desc=description, delay=3, leave=False, disable=hidden, unit="traj")
        exploration = Exploration(
            driver or self.loop,
            self.make_agent(sampler, chat, greedy),
            lambda: self.places.max_in_progress(sampler, probes, shares),
            questions,
            group_size,
            tuple(key),
            probes,
            self.max_restarts,
            bar,
        )
        return BackgroundTask(exploration.run(self.lockstep))
