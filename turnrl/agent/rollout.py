"""Rollouts: the rules that attempts follow, and who drives them, a turn scheme or a player.

A recipe configures `Rollout`, and the collector calls its `begin`. A turn is taken in
`turnrl/agent/turn_scheme.py`, and the loop around the turns is in `turnrl/agent/explore.py`.
Whatever the policy does is data. Whatever the world does wrong is an exception, and ends the
collection with nothing collected.
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
from turnrl.agent.agent import Agent
from turnrl.agent.chat import ChatFormat
from turnrl.agent.driver import Driver
from turnrl.agent.explore import Exploration
from turnrl.agent.function_tools import toolsets_of
from turnrl.agent.places import Places
from turnrl.agent.playing import Played
from turnrl.agent.running import Underway
from turnrl.agent.toolbox import Live, Toolbox, check_tools
from turnrl.agent.turn_scheme import TurnScheme
from turnrl.errors import (
    RecipeError,
    ToolError,
    at_least,
    blaming,
    check_attributes,
    check_numbers,
    instance_of,
    within,
)

_logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Rollout:
    """Rules by which the agent acts: who drives it, the tools, and the limits.

    Args:
        segmenter: The turn scheme: what a turn is. Either this or a `player` is given.
        tools: Tools that the policy can call, or whole sets of them; or typed functions, by their
            dotted paths, such as `my_module.search`.
        temperature: Sampling temperature while collecting; evaluation is greedy.
        max_turn_tokens: The most tokens the policy samples in one turn.
        max_calls_per_turn: The most tool calls of one turn that are run; the policy reads that
            further ones were too many.
        max_result_tokens: The most tokens of one tool result that the policy reads; rewards see the
            same text.
        max_tokens: The most tokens of a whole trajectory: prompt, turns and results. If a player
            rewrites its history, the most tokens of each history.
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
        player: Drives the attempts in place of a turn scheme.
        max_restarts: How often one attempt may begin again after the world lost it
            (`TrajectoryLost`), before the run stops.
    """

    segmenter: types.Segmenter | None = None
    tools: list[types.Toolset | Callable[..., Any]] = field(default_factory=list)
    temperature: float = 1.0
    max_turn_tokens: int = 512
    max_calls_per_turn: int = 8
    max_result_tokens: int = 512
    max_tokens: int = 2048
    lockstep: bool = True
    top_k: int = 0
    min_p: float = 0.0
    top_p: float = 1.0
    player: types.Player | None = None
    max_restarts: int = 2

    def __post_init__(self) -> None:
        if (self.segmenter is None) == (self.player is None):
            advice = (
                "it has neither."
                if self.player is None
                else "it has both. To let the player drive, write 'segmenter: null' beside it in "
                "the recipe, or add --model.rollout.segmenter null."
            )
            raise RecipeError(
                "rollout takes a segmenter, such as TwoTurn or ReAct, or a player, and exactly one "
                f"of them; {advice}"
            )
        if self.segmenter is not None:
            instance_of(types.Segmenter, "segmenter", self.segmenter)
        if self.player is not None:
            instance_of(types.Player, "player", self.player)
        check_numbers("model.rollout.", self, "temperature", "top_p", optional=False)
        if not self.temperature > 0:
            raise RecipeError(
                f"model.rollout.temperature is {self.temperature}; it must be above 0"
            )
        if not 0 < self.top_p <= 1:
            raise RecipeError(
                f"model.rollout.top_p is {self.top_p}; it must be above 0, and at most 1"
            )
        within(0, 1, "model.rollout.", self, "min_p")
        at_least(0, "model.rollout.", self, "top_k", "max_restarts", whole=True, optional=False)
        limits = ("max_turn_tokens", "max_calls_per_turn", "max_result_tokens", "max_tokens")
        at_least(1, "model.rollout.", self, *limits, whole=True, optional=False)
        plugin = self.segmenter or self.player
        name = type(plugin).__name__
        check_attributes(name, plugin, {"max_turns": "4"})
        at_least(1, f"{name}.", plugin, "max_turns", whole=True, optional=False)
        check_tools(self.toolsets)

    @cached_property
    def driver(self) -> Driver:
        """Moves the attempts on."""
        if self.player is not None:
            return Played(self.player, self.specs)
        assert self.segmenter is not None, "one of them is given"
        return TurnScheme(self.segmenter, self.specs)

    @property
    def scheme(self) -> TurnScheme:
        """The driver of a rollout that has a segmenter."""
        assert isinstance(self.driver, TurnScheme), "a player drives"
        return self.driver

    @property
    def max_turns(self) -> int:
        """K, the most turns of a trajectory."""
        return self.driver.plugin.max_turns

    @property
    def tags(self) -> tuple[str, ...]:
        """Tag names that are neutralised in questions and tool results."""
        return self.driver.plugin.tags

    @cached_property
    def toolsets(self) -> tuple[types.Toolset, ...]:
        """The tools, with a `FunctionTool` in the place of each function."""
        return toolsets_of(self.tools)

    @cached_property
    def specs(self) -> tuple[types.ToolSpec, ...]:
        """All tools, of all sets."""
        return tuple(spec for toolset in self.toolsets for spec in toolset.specs)

    @property
    def sampling(self) -> types.Sampling:
        """Settings to sample any turn while collecting."""
        return types.Sampling(
            self.max_turn_tokens,
            self.temperature,
            stop=self.driver.stop,
            top_k=self.top_k,
            min_p=self.min_p,
            top_p=self.top_p,
        )

    def check(self, chat: ChatFormat) -> None:
        """Preflight what the chat template has to take, and every tool.

        Args:
            chat: The policy's chat format.
        Raises:
            RecipeError, PluginError: See `Driver.check`.
            ToolError: From the first tool that cannot work.
        """
        if self.sampling.cuts_distribution:
            _logger.warning(
                "model.rollout.top_k, min_p or top_p cuts the distribution that tokens are drawn "
                "from. The sampler normalises over the tokens that are left, and the learner over "
                "all of them, so their ratio is biased."
            )
        self.driver.check(chat)
        for tool in self.toolsets:
            with blaming(ToolError, f"{tool} in check", "Fix the tool, or what it needs."):
                tool.check()

    @property
    def places(self) -> Places:
        """How many attempts its tools and a sampler can serve."""
        return Places(self.toolsets, self.max_turns)

    def live(self) -> contextlib.AbstractContextManager[None]:
        """Within it the toolsets are started, as a run does before its first trajectory; they are
        stopped at the end.

        Raises:
            ToolError: If one cannot start.
        """
        return Live(self.toolsets)

    def agent(self, sampler: types.Sampler, chat: ChatFormat, greedy: bool = False) -> Agent:
        """What acts by these rules; see `play` for the arguments."""
        sampling = replace(self.sampling, temperature=0.0) if greedy else self.sampling

        def make_safe(text: str) -> str:
            return chat.safe(text, self.tags, self.max_result_tokens)

        box = Toolbox(self.toolsets, make_safe, self.max_calls_per_turn)
        return Agent(self.driver, sampler, chat, sampling, self.max_tokens, box)

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
        return self.begin(
            sampler, chat, questions, group_size, seed, 0, greedy=greedy, description=description
        ).result()[0]

    def begin(
        self,
        sampler: types.Sampler,
        chat: ChatFormat,
        questions: Sequence[types.Question],
        group_size: int,
        seed: Sequence[int],
        probes: int,
        greedy: bool = False,
        description: str | None = None,
        collections: int = 1,
        processes: int = 1,
    ) -> Underway[types.Attempts]:
        """Begin what `play` does, with continuations besides: at the beginning of each turn of each
        trajectory, `probes` branches go their own way from there to the end.

        No more trajectories are under way than the sampler holds at once, with all the probes that
        they may have: in lockstep they are played in waves, whole groups together if it can be;
        without it the next begins when one ends.

        Args:
            probes: How many; see `play` for the others.
            collections: How many may be under way at a time, this one included.
            processes: How many processes share what the tools can serve.
        Returns:
            What is under way. Its result is G trajectories for each question, and the probes of
            each question's; it raises what `play` does, and a ToolError if a tool's session cannot
            be copied. Without lockstep a trajectory still begins a turn together with its own
            probes.
        """
        total = len(questions) * group_size
        hidden = True if description is None else None  # None: shown on a terminal only
        bar = tqdm(total=total, desc=description, delay=3, leave=False, disable=hidden, unit="traj")
        exploration = Exploration(
            self.agent(sampler, chat, greedy),
            lambda: self.places.at_once(sampler, probes, collections, processes),
            questions,
            group_size,
            tuple(seed),
            probes,
            self.max_restarts,
            bar,
        )
        return Underway(exploration.run(self.lockstep))
