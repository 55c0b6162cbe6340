"""Learning: an iteration's trajectories as optimiser steps, and steps as minibatches that fit.

One update of the weights is computed from one *step*, which is one batch to Lightning. A step is a
list of *minibatches*, each computed at once. Credit ends here: after this module there are only
tokens, with turns at most as stretches of tokens, and no groups.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from turnrl.credit.estimators import sampled_turns
from turnrl.policy.layout import ForwardPass, Layout
from turnrl.types import Objective, TokenRow, Trajectory
from turnrl.types.objective import Need, SampledTokens


@dataclass
class Minibatch:
    """N sampled tokens of several trajectories, as columns, and the layout of the forward pass that
    computes them.

    Not frozen, because Lightning moves its tensors in place.

    Args:
        layout: The trajectories as one forward pass that returns their sampled tokens.
        trajectory: (N,), the number of each token's trajectory in the iteration.
        turn: (N,), the turn of each token.
        advantages: (N,), the advantage of each token.
        weights: (N,), each token's share of the step's loss.
        sampler_logprobs: (N,), the sampler's log-probability of each token.
        old_logprobs: (N,), the learner's log-probabilities before the first step, which the ratio
            is taken to; None in the first step, where it is 1 by definition, and for an objective
            that does not need them.
        exact_logprobs: (N,), those without dropout, for the first step; None if its own forward
            pass computes the same, or nothing needs them.
        returns: (N,), the critic's target for each token; None without a critic.
        first_step: True in the first step after the tokens were sampled.
        keep: Takes the log-probabilities (N,) that this step computes, for later steps; None if no
            later step needs them.
    """

    layout: Layout
    trajectory: Tensor
    turn: Tensor
    advantages: Tensor
    weights: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor | None = None
    exact_logprobs: Tensor | None = None
    returns: Tensor | None = None
    first_step: bool = True
    keep: Callable[[Tensor], None] | None = None

    def __len__(self) -> int:
        return len(self.turn)

    def weightless(self) -> "Minibatch":
        """The same tokens, with no share of the loss."""
        return replace(self, weights=torch.zeros_like(self.weights), keep=None)

    def tokens(
        self,
        logprobs: Tensor,
        entropies: Tensor,
        reference: Tensor | None,
        needs: Set[Need],
    ) -> SampledTokens:
        """The streams that an objective sees.

        Args:
            logprobs: (N,), under the current policy.
            entropies: (N,), of its distributions.
            reference: (N,), log-probabilities of the reference policy, if they are needed.
            needs: The log-probabilities that the objective needs.
        """
        # in the first step the ratio is 1, not 1 + rounding
        old = logprobs.detach() if self.old_logprobs is None else self.old_logprobs
        compared: dict[Need, Tensor | None] = {
            "old": old,
            "reference": reference,
            "sampler": self.sampler_logprobs,
        }
        return SampledTokens(
            logprobs=logprobs,
            advantages=self.advantages,
            weights=self.weights,
            entropies=entropies,
            trajectories=self.trajectory,
            turns=self.trajectory * (self.turn.max() + 1) + self.turn,
            compared={k: v for k, v in compared.items() if k in needs and v is not None},
            exact_logprobs=self.exact_logprobs,
        )


_COMPARED = 8
"""Number of trajectories on which the sampler's log-probabilities are compared to the learner's."""

_SAME_NATS = 1e-5
"""Two log-probabilities of a token count as the same if they differ by less than this."""

Step = list[Minibatch]
"""The minibatches of one update of the weights."""

Column = Sequence[Tensor]
"""For each trajectory (N_i,), one number per sampled token, in order."""


class TokenColumns:
    """An iteration's trajectories, and columns of numbers for their sampled tokens.

    Args:
        trajectories: N trajectories.
        advantages: Advantages of their sampled tokens.
        returns: Returns of their sampled tokens, for a critic; None without a critic.
    """

    def __init__(
        self, trajectories: Sequence[Trajectory], advantages: Column, returns: Column | None = None
    ) -> None:
        self.trajectories = trajectories
        self.turns = list(map(sampled_turns, trajectories))  # raises if one has no tokens
        self.prompts = list(map(_prompt, trajectories))
        self.counts = torch.tensor(list(map(len, self.turns)))
        self.sampler_logprobs = [torch.tensor(t.sampler_logprobs) for t in trajectories]
        self.advantages, self.returns = advantages, returns

    def order(self, shuffle: torch.Generator) -> Tensor:
        """(N,), the numbers of the trajectories in random order, but one prompt's together."""
        by_prompt: dict[tuple[int, ...] | None, list[int]] = {}
        for i in torch.randperm(len(self.trajectories), generator=shuffle).tolist():
            by_prompt.setdefault(self.prompts[i], []).append(i)
        return torch.tensor([i for numbers in by_prompt.values() for i in numbers])

    def minibatch(
        self,
        numbers: Tensor,
        layout: Layout,
        weights: Tensor,
    ) -> Minibatch:
        """The columns of the trajectories that one layout has, in its order.

        Args:
            numbers: (M,), the trajectories' numbers.
            layout: The layout of their rows.
            weights: (M,), the share of the loss of each token of a trajectory.
        """
        counts = self.counts[numbers]
        rows = numbers.tolist()

        def joined(column: Column) -> Tensor:
            return torch.cat([column[i] for i in rows])

        return Minibatch(
            layout=layout,
            trajectory=numbers.repeat_interleave(counts),
            turn=joined(self.turns),
            advantages=joined(self.advantages),
            weights=weights.repeat_interleave(counts),
            sampler_logprobs=joined(self.sampler_logprobs),
            returns=None if self.returns is None else joined(self.returns),
        )


def _prompt(trajectory: Trajectory) -> tuple[int, ...]:
    """The prompt of the first history that the policy wrote in."""
    samples = trajectory.samples
    return next((sample for sample in samples if sample.sampled), samples[0]).prompt_ids


@dataclass(frozen=True)
class LearningSettings:
    """The steps of an iteration, and what its first step does for the old log-probabilities, which
    the ratios of all steps are taken to:

        first step, no dropout      the step's own, so the ratio is 1 by definition
        first step, with dropout    the step's own too; but an objective that compares them with
                                    the sampler's takes numbers read without dropout
        later steps, no dropout     computed by the first step, or read beforehand
        later steps, with dropout   read beforehand, in forward passes without dropout

    Args:
        passes: Number of passes over all trajectories.
        steps_per_pass: Number of steps in one pass over the trajectories.
        dropout: True if forward passes of a step have dropout.
        needs: The log-probabilities that the objective needs. Without the old ones, none are kept
            or read.
        sampler_differs: True if the sampler may have older weights than the learner.
    """

    passes: int = 1
    steps_per_pass: int = 1
    dropout: bool = False
    needs: Set[Need] = frozenset({"old"})
    sampler_differs: bool = False

    @property
    def first_step_gives(self) -> bool:
        """True if later steps use the log-probabilities that the first one computes."""
        return "old" in self.needs and self.passes > 1 and not self.dropout

    @property
    def first_step_needs(self) -> bool:
        """True if the first step needs log-probabilities that it does not compute."""
        return self.dropout and {"old", "sampler"} <= self.needs


class OldLogprobs:
    """The learner's log-probabilities of sampled tokens before the first step.

    A separate forward pass reads them for a few trajectories first. If the sampler computed the
    same numbers there (in process, in float32), its numbers are used for all others too, and the
    forward pass over those is saved.

    Args:
        columns: The trajectories.
        read: Computes the learner's log-probabilities of trajectories, with its present weights.
        settings: The steps. If the sampler differs, a few trajectories prove nothing about the
            others.
        uneven_passes: Inside this block processes may make different numbers of forward passes; see
            `LanguageModel.uneven_passes`.
    """

    def __init__(
        self,
        columns: TokenColumns,
        read: Callable[[Sequence[Trajectory]], Column],
        settings: LearningSettings,
        uneven_passes: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._columns, self._read, self._uneven_passes = columns, read, uneven_passes
        self._settings = settings
        self._logprobs: dict[int, Tensor] = {}  # by the trajectory's number

    def precompute(self, members: Sequence[Tensor]) -> None:
        """Read the log-probabilities that the steps will need.

        Args:
            members: The numbers of each step's trajectories.
        """
        if "old" not in self._settings.needs:
            return
        from_first_step = set(members[0].tolist()) if self._settings.first_step_gives else set()
        needing = members if self._settings.first_step_needs else members[1:]
        needed = sorted({i for step in needing for i in step.tolist()} - from_first_step)
        compared = _spread(needed, _COMPARED)
        rest = sorted({*needed} - {*compared})
        sampler = self._columns.sampler_logprobs
        with self._uneven_passes():
            self._store(compared)
            gaps = [(self._logprobs[i] - sampler[i]).abs().max() for i in compared]
            alike = bool(gaps) and bool(torch.stack(gaps).max() < _SAME_NATS)  # and finite
            if alike and not self._settings.sampler_differs:
                self._logprobs |= {i: sampler[i] for i in rest}
            else:
                self._store(rest)

    def _store(self, numbers: Sequence[int]) -> None:
        logprobs = self._read([self._columns.trajectories[i] for i in numbers])
        self._logprobs |= zip(numbers, logprobs, strict=True)

    def join(self, minibatch: Minibatch, numbers: Sequence[int], first: bool) -> Minibatch:
        """Complete a minibatch of the first step or a later one: add the log-probabilities that it
        needs, or a `keep` for those that it computes.

        Args:
            minibatch: The minibatch.
            numbers: The numbers of its trajectories.
            first: True in the first step.
        """
        if not first:
            needed = "old" in self._settings.needs
            old = self._of(numbers) if needed else None
            return replace(minibatch, old_logprobs=old, first_step=False)
        if self._settings.first_step_needs:
            return replace(minibatch, exact_logprobs=self._of(numbers))
        if self._settings.first_step_gives:
            return replace(minibatch, keep=partial(self._keep, numbers))
        return minibatch

    def _of(self, numbers: Sequence[int]) -> Tensor:
        return torch.cat([self._logprobs[i] for i in numbers])

    def _keep(self, numbers: Sequence[int], logprobs: Tensor) -> None:
        counts = self._columns.counts[list(numbers)].tolist()
        self._logprobs |= zip(numbers, logprobs.detach().cpu().split(counts), strict=True)


def _spread(numbers: Sequence[int], count: int) -> Sequence[int]:
    """At most `count` of the numbers, spread out so that they come from many questions."""
    return numbers[:: max(1, len(numbers) // count)][:count]


def iteration_steps(
    columns: TokenColumns,
    old: OldLogprobs,
    objective: Objective,
    settings: LearningSettings,
    forward_passes: Callable[[Sequence[TokenRow], Sequence[int]], Iterator[ForwardPass]],
    shuffle: torch.Generator,
    mean_over_processes: Callable[[Tensor], Tensor],
) -> Iterator[Step]:
    """Yield the optimiser steps of one iteration, each made when it is asked for.

    Prompts are shuffled, and so are the trajectories of each prompt. Trajectories of one prompt
    stay together as far as steps of equal size allow, because a minibatch reads each prompt once.

    Args:
        columns: The trajectories and their advantages.
        old: Reads and keeps the log-probabilities that ratios are taken to.
        objective: Weighs tokens.
        settings: The number of passes and steps.
        forward_passes: Divides rows among minibatches; rows with the same owner number stay
            together.
        shuffle: Source of the random order of trajectories.
        mean_over_processes: Averages a tensor over processes; every process calls it once per step.
    """
    orders = [columns.order(shuffle) for _ in range(settings.passes)]
    members = [part for order in orders for part in order.tensor_split(settings.steps_per_pass)]
    old.precompute(members)
    for number, chosen in enumerate(members):
        counts = columns.counts[chosen]
        total = mean_over_processes(torch.tensor([float(counts.sum()), float(len(chosen))]))
        weights = objective.token_weights(counts, *total.tolist())
        step = []
        # a trajectory may have several rows; each row's owner is its position in `chosen`
        owned_rows = [
            (p, row) for p, i in enumerate(chosen) for row in columns.trajectories[i].token_rows
        ]
        owners = [position for position, _ in owned_rows]
        for numbers, layout in forward_passes([row for _, row in owned_rows], owners):
            positions = [*dict.fromkeys(owners[n] for n in numbers)]
            own = chosen[positions]
            minibatch = columns.minibatch(own, layout, weights[positions])
            step.append(old.join(minibatch, own.tolist(), first=number == 0))
        yield step
