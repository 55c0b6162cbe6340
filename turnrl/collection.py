"""Collecting: the policy acts on questions, and what it did is scored.

    act       G trajectories for each question, and probes of them if the estimator asks   (agent/)
    score     turn rewards and outcome rewards                                          (scoring.py)
    prepare   whatever else the estimator asks of a group: state values, branches, a critic's values

The algorithm gives credit to these groups, which makes them its `Experience`. Nothing here knows of
a Trainer.
"""

import contextlib
import itertools
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from turnrl import scoring
from turnrl.agent.chat import ChatFormat
from turnrl.agent.rollout import Rollout
from turnrl.agent.running import Underway
from turnrl.credit import Credit, sampled_tokens
from turnrl.errors import EngineError, PluginError, RecipeError, blaming
from turnrl.policy.memory import Memory
from turnrl.policy.model import Policy
from turnrl.policy.reading import read_trajectories
from turnrl.scoring import Tally
from turnrl.types import (
    AdvantageEstimator,
    Attempts,
    Engine,
    Group,
    Question,
    Reward,
    TokenRow,
    TokenScores,
    Trajectory,
)


class Collected(NamedTuple):
    """Scored groups, and what it took to sample them.

    Args:
        groups: One for each question.
        seconds: Time that the policy took to act.
        scoring_seconds: Time that rewards took after that, and what the estimator prepares.
        sampled: Tokens sampled in that time, including those that are not learned from.
        probe_tokens: Those of them that are in no member of a group: they gave state values alone.
        restarted: Attempts that were begun again after the world lost them.
    """

    groups: tuple[Group, ...]
    seconds: float
    scoring_seconds: float
    sampled: int
    probe_tokens: int
    restarted: int


@dataclass(frozen=True)
class Experience:
    """Groups with their credit, collected by one process in one iteration.

    Args:
        collected: The groups, and what it took to sample them.
        credit: Each group's credit.
        redrawn: Trajectories of redrawn groups.
        first: The first draw of the same questions, if groups of it were redrawn.
    """

    collected: Collected
    credit: tuple[Credit, ...]
    redrawn: int = 0
    first: "Experience | None" = None

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups, one for each question."""
        return self.collected.groups

    @property
    def drawn(self) -> tuple[Group, ...]:
        """The first draw of each question: what the policy did, before groups were redrawn."""
        return (self.first or self).groups

    @property
    def degenerate(self) -> list[int]:
        """Numbers of the groups that teach nothing."""
        return [i for i, credit in enumerate(self.credit) if credit.degenerate]

    @property
    def idle_trajectories(self) -> int:
        """Number of trajectories, without branches, in the groups that teach nothing."""
        return sum(len(self.groups[i].trunks) for i in self.degenerate)

    def with_redrawn(self, places: Sequence[int], anew: "Experience") -> "Experience":
        """The same experience with other groups in these places."""
        groups, credit = list(self.groups), list(self.credit)
        for i, group, one in zip(places, anew.groups, anew.credit, strict=True):
            groups[i], credit[i] = group, one
        first, then = self.collected, anew.collected
        collected = Collected(tuple(groups), *map(operator.add, first[1:], then[1:]))
        redrawn = self.redrawn + sum(len(group.trunks) for group in anew.groups)
        return Experience(collected, tuple(credit), redrawn, self.first or self)

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, group by group."""
        return [t for group in self.groups for t in group.trajectories]

    @property
    def advantages(self) -> list[Tensor]:
        """For each trajectory (N_i,), the advantages of its sampled tokens."""
        return [tokens for credit in self.credit for tokens in credit.tokens]

    @property
    def returns(self) -> list[Tensor] | None:
        """For each trajectory (N_i,), a critic's target for its sampled tokens: GAE's
        lambda-return, the advantage plus the value. None without a critic."""
        values = [expected for group in self.groups for expected in group.token_values]
        if not values:
            return None
        return [a + v for a, v in zip(self.advantages, values, strict=True)]

    def staleness(self, version: int) -> Tally:
        """Average optimiser steps from the weights that sampled a token to the weights that learn.

        Args:
            version: The optimiser steps behind the weights that learn.
        """
        behind = [version - sampled for t in self.trajectories for sampled in t.versions]
        return Tally(sum(behind), len(behind))

    def tallies(self, rewards: Sequence[Reward]) -> dict[str, Tally]:
        """The figures of the iteration, by the names that they have in `metrics.csv`.

        They are means over the trajectories, without branches, except for `rollout/tokens_per_s`
        and the two times. A group is degenerate if all its advantages are zero.

        Metrics of behaviour describe the first draw. Redrawing keeps groups whose attempts differ,
        so they would be biased. What is learned from, and what it cost, counts every draw.
        """
        drawn = self.first or self
        tallies = {
            name if name.startswith("reward/") else f"train/{name}": figure
            for name, figure in scoring.group_tallies(drawn.groups, rewards).items()
        }
        trunks = [group.trajectories[i] for group in drawn.groups for i in group.trunks]
        sums: dict[str, float] = {
            "rollout/turns": sum(len(t.turns) for t in trunks),
            "rollout/histories": sum(len(t.samples) for t in trunks),
            "rollout/tokens": sum(t.tokens for t in trunks),
            "rollout/sampled_tokens": sum(map(len, self.advantages)),
            "rollout/truncated": sum(t.ended_by == "length" for t in trunks),
            "rollout/degenerate_groups": drawn.idle_trajectories,
            "train/degenerate_groups": self.idle_trajectories,
            "rollout/probe_tokens": self.collected.probe_tokens,
            "rollout/redrawn_groups": self.redrawn,
            "rollout/restarted": self.collected.restarted,
        }
        if (returns := self.returns) is not None:
            varied, missed = torch.cat(returns).var(), torch.cat(self.advantages)
            explained = 1 - float(missed.var() / varied) if varied > 1e-12 else 0.0
            sums["critic/explained_variance"] = explained * len(trunks)
            sums["critic/bias"] = -float(missed.mean()) * len(trunks)  # the variance hides it
        seconds = self.collected.seconds
        rate = self.collected.sampled / max(seconds, 1e-9)
        once = {"rollout/seconds": seconds, "rollout/tokens_per_s": rate}
        once["rollout/scoring_seconds"] = self.collected.scoring_seconds
        tallies |= {name: Tally(value, len(trunks)) for name, value in sums.items()}
        return tallies | {name: Tally(value, 1) for name, value in once.items()}


class _Sampling(NamedTuple):
    """Attempts under way.

    Args:
        work: The attempts.
        version: The version of the weights that they began with.
    """

    work: Underway[Attempts]
    version: int


class Setup(Protocol):
    """The parts that act and score; an `MTGRPO` has them all.

    Attributes:
        policy: The policy that acts.
        rollout: How it acts.
        engine: The sampler of the policy. The collector starts it and closes it.
        rewards: Turn rewards and outcome rewards.
        estimator: Says what it asks of a group, and what becomes of probes.
        group_size: G, trajectories per question.
        max_staleness: Iterations that are sampled ahead.
        memory: Names the phase if a device's memory runs out.
        folder: Of the run; None if there is none, or it writes no files.
    """

    policy: Policy
    rollout: Rollout
    engine: Engine
    rewards: list[Reward]
    estimator: AdvantageEstimator
    group_size: int
    max_staleness: int
    memory: Memory
    folder: Path | None

    @property
    def processes(self) -> int:
        """Processes that share the tools."""

    @property
    def divided(self) -> bool:
        """Whether they share the policy too."""

    def read(self, rows: Sequence[TokenRow]) -> list[TokenScores]:
        """The learner's log-probabilities and values of token sequences."""


class Collector:
    """Lets a policy act on questions, and scores what it did.

    Args:
        setup: The parts. They are looked up at each use, so a part may be exchanged in between.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._started = False
        self._world = contextlib.ExitStack()  # the toolsets that are started
        self._synced: int | None = None  # version of the engine's last sync
        self._sampling: dict[tuple[int, ...], _Sampling] = {}  # by key

    @cached_property
    def chat(self) -> ChatFormat:
        """The policy's chat format."""
        return ChatFormat(self.setup.policy.tokenizer)

    def check(self) -> None:
        """Find what cannot work, as far as that shows before any weights are loaded.

        Raises:
            TurnRLError: About the policy, the rollout, a tool's world or the engine.
        """
        self.setup.policy.check_length(self.setup.rollout.max_tokens)
        rollout, estimator = self.setup.rollout, self.setup.estimator
        rollout.check(self.chat)
        if rollout.player is not None and estimator.probes:
            raise RecipeError(
                f"{type(estimator).__name__} has probes = {estimator.probes}, which branch off "
                f"between the turns of a turn scheme. Attempts of the player {rollout.driver} "
                "cannot be branched. Take an estimator without probes, such as TurnLevel."
            )
        rollout.places.of_tools(estimator.probes, *self._shares)
        engine = self.setup.engine
        engine.run_folder, engine.processes = self.setup.folder, self.setup.processes
        engine.divided = self.setup.divided
        engine.check(self.setup.policy, rollout.max_tokens)

    def attempt(
        self, questions: Sequence[Question], key: tuple[int, ...], version: int, bar: str | None
    ) -> Collected:
        """Act on each question `group_size` times, score, and prepare the groups for credit. What
        has begun under the same key is only waited for.

        Args:
            questions: The questions.
            key: Names the random streams.
            version: Optimiser steps behind the weights.
            bar: Text of a progress bar; None for no bar.
        """
        self.begin(questions, key, version, bar)
        seconds, attempts = self._result(self._sampling.pop(key))
        acted = time.perf_counter()
        what = f"{type(self.setup.estimator).__name__}.prepare"
        with blaming(PluginError, what, "Fix the estimator."):
            groups = tuple(self.setup.estimator.prepare(attempts, self))
            valued = self.setup.estimator.critic is None or all(g.token_values for g in groups)
            right = valued and [group.question for group in groups] == list(questions)
        if not right:
            rule = "one group for each question, in their order, with the values of a critic"
            raise PluginError(f"{what} must give {rule}. Fix the estimator.")
        branches = (probe.trajectory for some in attempts.probes for probe in some)
        sampled = sampled_tokens(itertools.chain(*attempts.trajectories, branches))
        learned = sampled_tokens(t for group in groups for t in group.trajectories)
        scoring_seconds = time.perf_counter() - acted
        probing = sampled - learned
        times = seconds, scoring_seconds
        return Collected(groups, *times, sampled, probing, attempts.restarted)

    def begin(
        self, questions: Sequence[Question], key: tuple[int, ...], version: int, bar: str | None
    ) -> None:
        """Begin to act on each question, unless that has begun under this key; see `attempt`."""
        if key not in self._sampling:
            size, probes = self.setup.group_size, self.setup.estimator.probes
            self._sampling[key] = self._begin(questions, size, key, version, bar, probes)

    def valued(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The groups with the critic's value of each sampled token, `token_values`."""
        every = [trajectory for group in groups for trajectory in group.trajectories]
        values = iter(scores.values for scores in read_trajectories(every, self.setup.read))
        parts = [tuple(itertools.islice(values, len(group.trajectories))) for group in groups]
        return tuple(replace(g, token_values=p) for g, p in zip(groups, parts, strict=True))

    def explore(
        self,
        questions: Sequence[Question],
        size: int | None,
        key: tuple[int, ...],
        version: int,
        bar: str | None = None,
        probes: int = 0,
        rollout: Rollout | None = None,
    ) -> Attempts:
        """Let the policy act on each question; see `Rollout.explore`.

        Args:
            questions: The questions.
            size: Trajectories to sample for each; None for one greedy trajectory.
            key: Names the random streams.
            version: Optimiser steps behind the weights.
            bar: Text of a progress bar; None for no bar.
            probes: Branches from the beginning of each turn.
            rollout: Stands in for the recipe's.
        """
        return self._result(self._begin(questions, size, key, version, bar, probes, rollout))[1]

    def _begin(
        self,
        questions: Sequence[Question],
        size: int | None,
        key: tuple[int, ...],
        version: int,
        bar: str | None,
        probes: int,
        rollout: Rollout | None = None,
    ) -> "_Sampling":
        self.sync(version)
        with self._phase():
            collections, processes = self._shares
            work = (rollout or self.setup.rollout).begin(
                self.setup.engine,
                self.chat,
                questions,
                size or 1,
                key,
                probes,
                greedy=size is None,
                description=bar,
                collections=collections,
                processes=processes,
            )
        return _Sampling(work, version)

    def sync(self, version: int) -> None:
        """Have the engine, started if it was not, act with the weights as they are now.

        Args:
            version: Optimiser steps behind them.
        """
        with self._phase():
            if not self._started:
                self._start()
            if version != self._synced:
                self.setup.engine.sync(version)
                self._synced = version

    def _result(self, sampling: "_Sampling") -> tuple[float, Attempts]:
        """The seconds that it took, and what came of it."""
        with self._phase():
            attempts = sampling.work.result()
        self._check_versions(attempts, sampling.version)
        return sampling.work.seconds, attempts

    @property
    def _shares(self) -> tuple[int, int]:
        """Collections that may be under way at a time, and processes that have them."""
        return 1 + self.setup.max_staleness, self.setup.processes

    def _phase(self) -> contextlib.AbstractContextManager[None]:
        return self.setup.memory.phase("sampling", self.setup.engine.memory_setting)

    def forget(self) -> None:
        """Sync the engine before the next act, whatever the version: the weights were replaced."""
        self._synced = None

    def _check_versions(self, attempts: Attempts, begun: int) -> None:
        """Refuse turns that other weights sampled than those of the beginning, or newer ones: what
        is learned from them would be biased.

        Raises:
            EngineError: Naming the engine and both versions.
        """
        sampled = [t for some in attempts.trajectories for t in some]
        sampled += [probe.trajectory for some in attempts.probes for probe in some]
        versions = {version for t in sampled for version in t.versions}
        newest = begun if self._synced is None else self._synced
        if others := versions - {*range(begun, newest + 1)}:
            name = type(self.setup.engine).__name__
            raise EngineError(
                f"{name} sampled with weights of version {others.pop()}, and sync gave "
                f"it version {begun}. Fix the engine, and try "
                "turnrl.testing.check_engine on it."
            )

    def score(self, trajectories: Sequence[Sequence[Trajectory]]) -> tuple[Group, ...]:
        """The trajectories of each question with their rewards."""
        turns = self.setup.rollout.max_turns
        return scoring.score_groups(trajectories, self.setup.rewards, turns, self.setup.policy)

    def _start(self) -> None:
        rollout, engine, estimator = self.setup.rollout, self.setup.engine, self.setup.estimator
        engine.start(self.setup.policy, rollout.max_tokens)
        self._started = True
        self._world.enter_context(rollout.live())
        holds = rollout.places.at_once(engine, estimator.probes, *self._shares)
        places, tool = rollout.places.of_tools(estimator.probes, *self._shares)
        size = self.setup.group_size
        probes = " and their probes" if estimator.probes else ""
        if places is not None and places == holds and places < size:
            rank_zero_info(
                f"{tool} has room for {places} of a group's {size} trajectories{probes}, so the "
                "others wait for their turn, which is slow. Raise its capacity, if it can serve "
                "more."
            )
        elif holds is not None and holds < size:
            rank_zero_info(
                f"{type(engine).__name__} has room for {holds} of a group's {size} trajectories of "
                f"model.rollout.max_tokens = {rollout.max_tokens}{probes}, and running so few at "
                "once "
                f"is slow. Raise {engine.memory_setting or 'its memory'}, or lower "
                "model.rollout.max_tokens."
            )

    def cancel(self) -> None:
        """End what is sampled ahead."""
        while self._sampling:
            self._sampling.popitem()[1].work.cancel()

    def close(self) -> None:
        """Let the engine go, and what is being sampled. The next act starts it again."""
        self.cancel()
        if self._started:
            self._started = False
            with self._world:  # stops the toolsets, also if the engine fails to close
                self.setup.engine.close()
            self.forget()
