"""Experience: the groups that one process collected in an iteration, and the credit given to them.

The algorithm learns from it, and its figures become the iteration's row in `metrics.csv`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from turnrl.credit.estimators import Credit
from turnrl.rewards import scoring
from turnrl.rewards.scoring import Tally
from turnrl.types import Group, Reward, Trajectory


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Scored groups, and the cost of sampling them.

    Args:
        groups: One for each question.
        seconds: Time that the policy took to act.
        scoring_seconds: Time that rewards and the estimator's `prepare` took afterwards.
        sampled: Tokens sampled, including those that are not learned from.
        probe_tokens: Those of them that belong to no member of a group: they only gave state
            values.
        restarted: Attempts that began again after the world lost them.
    """

    groups: tuple[Group, ...]
    seconds: float
    scoring_seconds: float
    sampled: int
    probe_tokens: int
    restarted: int

    def join(self, other: "Collected", groups: tuple[Group, ...]) -> "Collected":
        """These groups, at the cost of both collections."""
        return Collected(
            groups=groups,
            seconds=self.seconds + other.seconds,
            scoring_seconds=self.scoring_seconds + other.scoring_seconds,
            sampled=self.sampled + other.sampled,
            probe_tokens=self.probe_tokens + other.probe_tokens,
            restarted=self.restarted + other.restarted,
        )


class Evaluated(NamedTuple):
    """A batch of questions that an evaluation scored.

    Args:
        groups: One for each question.
        greedy: True for one greedy trajectory per question.
    """

    groups: tuple[Group, ...]
    greedy: bool


@dataclass(frozen=True)
class Experience:
    """Groups with their credit, collected by one process in one iteration.

    Args:
        collected: The groups, and the cost of sampling them.
        credit: Each group's credit.
        redrawn: Number of trajectories of redrawn groups.
        first: The first draw of the same questions, if some of its groups were redrawn.
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
    def first_draw(self) -> "Experience":
        """The first draw of each question, before groups were redrawn."""
        return self.first or self

    @property
    def degenerate_groups(self) -> list[int]:
        """Numbers of the groups that teach nothing."""
        return [i for i, credit in enumerate(self.credit) if credit.is_degenerate]

    @property
    def degenerate_trajectories(self) -> int:
        """Number of trajectories, without branches, in the groups that teach nothing."""
        return sum(len(self.groups[i].trunks) for i in self.degenerate_groups)

    def with_redrawn(self, numbers: Sequence[int], anew: "Experience") -> "Experience":
        """The same experience with newly drawn groups in place of those with these numbers."""
        groups, credit = list(self.groups), list(self.credit)
        for i, group, its_credit in zip(numbers, anew.groups, anew.credit, strict=True):
            groups[i], credit[i] = group, its_credit
        collected = self.collected.join(anew.collected, tuple(groups))
        redrawn = self.redrawn + sum(len(group.trunks) for group in anew.groups)
        return Experience(collected, tuple(credit), redrawn, self.first_draw)

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
        """The figures of the iteration, by their names in `metrics.csv`.

        They are means over the trajectories, without branches, except for `rollout/tokens_per_s`
        and the two times. A group is degenerate if all its advantages are zero.

        Metrics of behaviour describe only the first draw: redrawing keeps groups whose attempts
        differ, which would bias them. Metrics of learning and of cost count every draw.
        """
        drawn = self.first_draw
        tallies = {
            name if name.startswith("reward/") else f"train/{name}": figure
            for name, figure in scoring.tally_groups(drawn.groups, rewards).items()
        }
        trunks = [group.trajectories[i] for group in drawn.groups for i in group.trunks]
        sums: dict[str, float] = {
            "rollout/turns": sum(len(t.turns) for t in trunks),
            "rollout/histories": sum(len(t.samples) for t in trunks),
            "rollout/tokens": sum(t.tokens for t in trunks),
            "rollout/sampled_tokens": sum(map(len, self.advantages)),
            "rollout/truncated": sum(t.ended_by == "length" for t in trunks),
            "rollout/degenerate_groups": drawn.degenerate_trajectories,
            "train/degenerate_groups": self.degenerate_trajectories,
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
