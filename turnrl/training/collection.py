"""Collecting: the policy acts on questions, and its attempts are scored.

    act       G trajectories for each question, and probes of them if the estimator asks   (agent/)
    score     turn rewards and outcome rewards                                          (rewards/)
    prepare   whatever else the estimator asks of a group: state values, branches, a critic's values

The algorithm gives credit to these groups, which makes them its `Experience` (experience.py).
Nothing here knows about a Trainer.
"""

import contextlib
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

from lightning.pytorch.utilities import rank_zero_info

from turnrl.agent.capacity import Shares
from turnrl.agent.chat import ChatFormat
from turnrl.agent.rollout import Rollout
from turnrl.agent.running import BackgroundTask
from turnrl.credit.estimators import count_sampled_tokens
from turnrl.plugin.errors import EngineError, PluginError, RecipeError, blaming
from turnrl.policy.memory import Memory
from turnrl.policy.model import LanguageModel
from turnrl.policy.scoring import score_trajectories
from turnrl.rewards import scoring
from turnrl.runs.checkpoints import Position
from turnrl.training.experience import Collected
from turnrl.types import (
    AdvantageEstimator,
    Attempts,
    Engine,
    Group,
    Objective,
    Question,
    Reward,
    RunContext,
    TokenRow,
    TokenScores,
    Toolset,
    Trajectory,
)


class _Collection(NamedTuple):
    """Attempts under way.

    Args:
        work: The attempts.
        questions: What they answer.
        version: The version of the weights with which they began.
    """

    work: BackgroundTask[Attempts]
    questions: Sequence[Question]
    version: int


class Parts(Protocol):
    """The parts that act and score; an `MTGRPO` has them all.

    Attributes:
        policy: The policy that acts.
        rollout: How it acts.
        engine: Samples the policy. The collector starts it and closes it.
        rewards: Turn rewards and outcome rewards.
        estimator: Prepares the groups, probes included.
        objective: Learns from them.
        group_size: G, trajectories per question.
        max_staleness: Number of iterations that are sampled ahead.
        redraws: How many times groups that teach nothing are drawn again.
        gpu_memory: The memory to plan for.
        memory: Names the phase if a device's memory runs out.
    """

    policy: LanguageModel
    rollout: Rollout
    engine: Engine
    rewards: list[Reward]
    estimator: AdvantageEstimator
    objective: Objective
    group_size: int
    max_staleness: int
    redraws: int
    gpu_memory: str | None
    memory: Memory

    @property
    def surroundings(self) -> RunContext:
        """The place where they work."""

    @property
    def position(self) -> Position:
        """The policy's position in training."""

    def score_tokens(self, rows: Sequence[TokenRow]) -> list[TokenScores]:
        """The learner's log-probabilities and values of token sequences."""


@runtime_checkable
class KnownQuestions(Protocol):
    """Data whose questions are known before a run begins."""

    def leave_out_overlong(self, rollout: Rollout, chat: ChatFormat) -> None:
        """Leave out the questions whose prompts are too long, and warn."""

    def loaded_questions(self) -> Iterable[Sequence[Question]]:
        """The questions of each split that has been read."""


class Collector:
    """Lets a policy act on questions, and scores its attempts.

    Args:
        parts: What acts and scores. Each part is looked up at its use, so it may be replaced in
            between.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._started = False
        self._world = contextlib.ExitStack()  # stops the toolsets
        self._tools_run = False
        self._synced: int | None = None  # version of the engine's last sync
        self._begun: dict[tuple[int, ...], _Collection] = {}  # by key

    @property
    def in_progress(self) -> int:
        """The number of collections that have begun and are not finished."""
        return len(self._begun)

    @cached_property
    def chat(self) -> ChatFormat:
        """The policy's chat format."""
        return ChatFormat(self.parts.policy.tokenizer)

    def check(self, learns: bool = False) -> None:
        """Find settings that cannot work, as far as possible before any weights are loaded.

        Args:
            learns: False for a policy that only acts.
        Raises:
            TurnRLError: About the policy, the rollout, a tool's world or the engine.
        """
        self.parts.policy.files.check(self.parts.rollout.max_tokens)
        rollout, estimator = self.parts.rollout, self.parts.estimator
        self._start_tools()
        rollout.check(self.chat)
        if estimator.probes and not rollout.loop.branches:
            raise RecipeError(
                f"{type(estimator).__name__} has probes = {estimator.probes}, which branch off "
                f"between the turns of a segmenter. Attempts of the {rollout.loop.kind} "
                f"{rollout.loop.name} cannot be branched. Take an estimator without probes, such "
                "as TurnLevel."
            )
        rollout.places.tool_capacity(estimator.probes, self._shares)
        self.check_engine(self.parts.surroundings, learns)

    def check_data(self, data: KnownQuestions) -> None:
        """Leave out the questions whose prompts are too long, and check the others; see
        `check_questions`."""
        data.leave_out_overlong(self.parts.rollout, self.chat)
        for questions in data.loaded_questions():
            self.check_questions(questions)

    def check_questions(self, questions: Sequence[Question]) -> None:
        """Find questions that the recipe's parts cannot ask or score, before weights are loaded.

        Raises:
            TurnRLError: Naming a question, and what it lacks.
        """
        rollout = self.parts.rollout
        rollout.loop.check_questions(questions, self.chat)
        parts: list[Toolset | Reward] = [*rollout.toolsets, *self.parts.rewards]
        for part in parts:
            with blaming(PluginError, f"{part} in check_questions", "Fix it, or the data."):
                part.check_questions(questions)

    def check_engine(self, where: RunContext, learns: bool) -> None:
        """Find what the engine cannot do, before any weights are loaded.

        Args:
            where: Where it will work.
            learns: False for a policy that only acts, and so never samples ahead.
        Raises:
            RecipeError: Naming the setting, and the next step.
        """
        engine, rollout = self.parts.engine, self.parts.rollout
        ahead, corrects = self.parts.max_staleness, "sampler" in self.parts.objective.needs
        if learns and ahead and (engine.keeps <= ahead or not corrects):
            raise RecipeError(
                f"model.max_staleness is {ahead}, which samples while the policy learns. It needs "
                f"{ahead + 1} versions of the weights ({engine.name} keeps {engine.keeps}: set "
                f"model.engine.keeps, or take VLLM) and an objective that corrects for older "
                "weights (importance_cap: 2). Set them, or lower max_staleness."
            )
        engine.check(self.parts.policy, rollout.max_tokens, where)

    def begin(self, questions: Sequence[Question], key: tuple[int, ...], bar: str | None) -> None:
        """Begin to act on each question `group_size` times, unless that began earlier.

        Args:
            questions: The questions.
            key: Integers that name the collection, and so its random streams; see
                `turnrl.types.streams`.
            bar: Text of a progress bar; None for no bar.
        """
        if key not in self._begun:
            size, probes = self.parts.group_size, self.parts.estimator.probes
            self._begun[key] = self._begin(questions, size, key, bar, probes)

    def finish(self, key: tuple[int, ...]) -> Collected:
        """Wait for the attempts that began under a key, score them, and prepare their groups for
        credit.

        Raises:
            EngineError: If turns were sampled with weights of another version.
            PluginError: If the estimator prepares other groups than the questions'.
        """
        begun = self._begun.pop(key)
        seconds, attempts = self._result(begun)
        ended = time.perf_counter()
        method = f"{type(self.parts.estimator).__name__}.prepare"
        with blaming(PluginError, method, "Fix the estimator."):
            groups = tuple(self.parts.estimator.prepare(attempts, self))
            valued = self.parts.estimator.critic is None or all(g.token_values for g in groups)
            fits = valued and [g.question.id for g in groups] == [q.id for q in begun.questions]
        if not fits:
            raise PluginError(
                f"{method} must give one group for each question, in their order, with the values "
                "of a critic. Fix the estimator."
            )
        branches = (probe.trajectory for probes in attempts.probes for probe in probes)
        sampled = count_sampled_tokens(itertools.chain(*attempts.trajectories, branches))
        learned = count_sampled_tokens(t for group in groups for t in group.trajectories)
        scoring_seconds = time.perf_counter() - ended
        if not self.parts.max_staleness:
            self.parts.engine.release_memory()
            self.forget()
        return Collected(
            groups=groups,
            seconds=seconds,
            scoring_seconds=scoring_seconds,
            sampled=sampled,
            probe_tokens=sampled - learned,
            restarted=attempts.restarted,
        )

    def with_values(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The groups, with the critic's value of each sampled token as `token_values`."""
        every = [trajectory for group in groups for trajectory in group.trajectories]
        values = iter(
            scores.values for scores in score_trajectories(every, self.parts.score_tokens)
        )
        parts = [tuple(itertools.islice(values, len(group.trajectories))) for group in groups]
        return tuple(replace(g, token_values=p) for g, p in zip(groups, parts, strict=True))

    def explore(
        self,
        questions: Sequence[Question],
        size: int | None,
        key: tuple[int, ...],
        bar: str | None = None,
        probes: int = 0,
        rollout: Rollout | None = None,
    ) -> Attempts:
        """Let the policy act on each question; see `Rollout.begin`.

        Args:
            questions: The questions.
            size: Trajectories to sample for each; None for one greedy trajectory.
            key: Integers that name the collection, and so its random streams; see
                `turnrl.types.streams`.
            bar: Text of a progress bar; None for no bar.
            probes: Branches from the beginning of each turn.
            rollout: The rollout to use in place of the recipe's.
        """
        return self._result(self._begin(questions, size, key, bar, probes, rollout))[1]

    def _begin(
        self,
        questions: Sequence[Question],
        size: int | None,
        key: tuple[int, ...],
        bar: str | None,
        probes: int,
        rollout: Rollout | None = None,
    ) -> _Collection:
        version = self.sync()
        with self._phase():
            work = (rollout or self.parts.rollout).begin(
                self.parts.engine,
                self.chat,
                questions,
                size or 1,
                key,
                probes,
                greedy=size is None,
                description=bar,
                shares=self._shares,
            )
        return _Collection(work, questions, version)

    def sync(self) -> int:
        """Start the engine if it has not started, and have it act with the weights as they are now.

        Returns:
            The weights' version.
        """
        version = self.parts.position.step
        with self._phase():
            if not self._started:
                self._start()
            if version != self._synced:
                self.parts.engine.sync(version)
                self._synced = version
        return version

    def _result(self, begun: _Collection) -> tuple[float, Attempts]:
        """The seconds that sampling took, and the attempts."""
        with self._phase():
            attempts = begun.work.result()
        self._check_versions(attempts, begun.version)
        return begun.work.seconds, attempts

    @property
    def _shares(self) -> Shares:
        return Shares(1 + self.parts.max_staleness, self.parts.surroundings.processes)

    def _phase(self) -> contextlib.AbstractContextManager[None]:
        return self.parts.memory.phase("sampling", self.parts.engine.memory_setting)

    def forget(self) -> None:
        """Sync the engine before it acts again, whatever the version: the weights were replaced."""
        self._synced = None

    def _check_versions(self, attempts: Attempts, begun: int) -> None:
        """Refuse turns sampled by weights other than the initial ones or newer ones: learning from
        them would be biased.

        Raises:
            EngineError: Naming the engine and both versions.
        """
        sampled = [t for trajectories in attempts.trajectories for t in trajectories]
        sampled += [probe.trajectory for probes in attempts.probes for probe in probes]
        versions = {version for t in sampled for version in t.versions}
        newest = begun if self._synced is None else self._synced
        if foreign := versions - {*range(begun, newest + 1)}:
            name = self.parts.engine.name
            raise EngineError(
                f"{name} sampled with weights of version {foreign.pop()}, and sync gave "
                f"it version {begun}. Fix the engine, and try "
                "turnrl.testing.check_engine on it."
            )

    def score(self, trajectories: Sequence[Sequence[Trajectory]]) -> tuple[Group, ...]:
        """The scored group of each question's trajectories."""
        turns = self.parts.rollout.max_turns
        return scoring.score_groups(trajectories, self.parts.rewards, turns, self.parts.policy)

    def _start(self) -> None:
        rollout, engine, estimator = self.parts.rollout, self.parts.engine, self.parts.estimator
        engine.start(self.parts.policy, rollout.max_tokens)
        self._started = True
        self._start_tools()
        holds = rollout.places.max_in_progress(engine, estimator.probes, self._shares)
        places, tool = rollout.places.tool_capacity(estimator.probes, self._shares)
        size = self.parts.group_size
        if holds is not None and holds < size:
            name, setting = engine.name, engine.memory_setting or "its memory"
            raises = f"Raise {setting}, or lower model.rollout.max_tokens."
            if places == holds:
                name, raises = str(tool), "Raise its capacity, if it can serve more."
            rank_zero_info(
                f"{name} has room for {holds} of a group's {size} trajectories and their probes, "
                f"and running so few at once is slow. {raises}"
            )

    def _start_tools(self) -> None:
        """Start the toolsets, unless they run. They run from the check of a run to its end."""
        if not self._tools_run:
            self._world.enter_context(self.parts.rollout.running_tools())
            self._tools_run = True

    def cancel(self) -> None:
        """End the attempts that are sampled ahead."""
        while self._begun:
            self._begun.popitem()[1].work.cancel()

    def close(self) -> None:
        """Close the engine, and end what is being sampled. The engine starts again when next
        used."""
        self.cancel()
        started, self._started, self._tools_run = self._started, False, False
        with self._world:  # stops the toolsets, also if the engine fails to close
            if started:
                self.parts.engine.close()
                self.forget()
