"""Rewards from the policy's own probabilities: how likely it finds the accepted answer, and how
likely its actions are compared with the reference. All forward passes happen in `prepare`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, final

from turnrl import RecipeError, Trajectory, TurnReward
from turnrl.engines import SampledPolicy
from turnrl.policy.scoring import score_trajectories
from turnrl.rewards.answers import usable_answers
from turnrl.types import Sample
from turnrl_rewards.calls import check_cost
from turnrl_rewards.progress import Difference, StateScore, informed_turns

Measure = Literal["logprob", "mean_logprob", "probability"]
_State = tuple[str, tuple[int, ...]]
"""An accepted answer, and the token ids of a history."""


@final
@dataclass(eq=False, repr=False)
class AnswerLikelihood(StateScore):
    """The likelihood of the accepted answer under the policy, given the history so far.

    phi(s) = log p(a | s, opening), with a the tokens of the first accepted answer that the
    question's rule can read, under the current policy, at temperature 1. s is the history up to and
    including the last successful result, because errors and the policy's own later words are not
    information. 0 if the rule can read no accepted answer.

    Args:
        opening: Text before the answer; see `InformationGain`.
        measure: `logprob`, in nats; `mean_logprob`, in nats per token of the answer; `probability`,
            the exponential of `mean_logprob`, from 0 to 1.
        reference: Use the policy that training began from, so that a state's
            score does not move while the policy learns.
    """

    opening: str = "<answer>"
    measure: Measure = "logprob"
    reference: bool = False

    def __post_init__(self) -> None:
        self._phi: dict[_State, float] = {}

    def prepare(self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None) -> None:
        self._phi = {}
        if policy is None:
            return
        states = dict.fromkeys(
            (answer, trajectory.history(informed_turns(trajectory, turns)))
            for trajectory in trajectories
            if (answer := _first_accepted(trajectory)) is not None
            for turns in range(len(trajectory.turns) + 1)
        )
        tokenised = {answer: self._tokenize(policy, answer) for answer, _ in states}
        rows = []
        for answer, history in states:
            opening, tokens = tokenised[answer]
            scored = [False] * (len(history) + len(opening)) + [True] * len(tokens)
            rows.append(((*history, *opening, *tokens), scored))
        reader = _reference(policy, "reference: true") if self.reference else nullcontext()
        with reader:
            read = policy.score_tokens(rows)
        for state, scores in zip(states, read, strict=True):
            mean = float(scores.logprobs.mean())
            kinds = {
                "logprob": float(scores.logprobs.sum()),
                "mean_logprob": mean,
                "probability": math.exp(mean),
            }
            self._phi[state] = kinds[self.measure]

    def _tokenize(self, policy: SampledPolicy, answer: str) -> tuple[list[int], list[int]]:
        """Token ids of the opening, and of the answer after it.

        The two are tokenised together, as the policy would write them, so a space at the end of the
        opening becomes part of the answer's first token.
        """
        alone, together = (
            policy.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (self.opening, self.opening + answer)
        )
        equal = [a == b for a, b in zip(alone, together, strict=False)]
        begin = min([*equal, False].index(False), len(together) - 1)
        return together[:begin], together[begin:]

    def score(self, trajectory: Trajectory, turns: int) -> float:
        answer = _first_accepted(trajectory)
        if answer is None:
            return 0.0
        state = answer, trajectory.history(informed_turns(trajectory, turns))
        if state not in self._phi:
            raise _unprepared_error("The likelihood of an answer")
        return self._phi[state]


@final
class InformationGain(Difference):
    """r_k = weight x (phi(s_{k+1}) - phi(s_k)), with phi(s) = log p(a | s, opening): how much more
    likely the policy finds the accepted answer a after the results of turn k. In nats.

    Information gain (Wang et al., IGPO, arXiv 2510.14967). There phi is `measure: probability`, the
    exponential of the mean log-probability of the answer's tokens; log-probabilities also show a
    gain while the answer is still unlikely. A turn without a successful result earns 0. Its text is
    part of the next turn's history.

    Potential-based: the sum over a trajectory is weight x (last - first), so reading something
    twice earns nothing. It pays for the last state (see `turnrl_rewards.progress`), so also for a
    right guess written before a search; words without a search earn nothing. phi moves with the
    learning policy, unless `reference` is set.

    Each distinct history, including the question alone, is read once per collection. Histories with
    a common beginning, such as the turns of one trajectory, share the computation of that part.

    Args:
        weight: Reward of one nat, or of one unit of `measure`.
        opening: The text between a result and the answer: everything that the policy itself would
            write there, including spaces. Its tokens are not counted.
        measure: `logprob`, in nats; `mean_logprob`, in nats per token of the answer; `probability`,
            the exponential of `mean_logprob`, from 0 to 1.
        reference: Use the policy that training began from; needs policy.lora.
    """

    def __init__(
        self,
        weight: float = 1.0,
        opening: str = "<answer>",
        measure: Measure = "logprob",
        reference: bool = False,
    ) -> None:
        super().__init__(AnswerLikelihood(opening, measure, reference), weight)


@final
class KLPenalty(TurnReward):
    """r_k = -coef x sum over the sampled tokens t of turn k of (log p(t) - log p_ref(t)).

    p is the policy that acted and p_ref the one that training began from, both at temperature 1. In
    nats; needs policy.lora. If tokens are sampled at temperature 1, the expectation is
    -coef x KL(policy || reference) of the turn. So it is never above 0, though a single turn may
    earn a little.

    This is KL as a *reward*: earlier turns get credit for it through their return-to-go, and it is
    normalised with the group's other turn rewards. `objective.kl_coef` is KL as a *loss*: a
    separate gradient on each token, outside advantages and clipping, which does not look beyond
    the token. Use one of the two. Not potential-based: the best policy moves nearer to the
    reference (Ziegler et al. 2019, arXiv 1909.08593).

    Args:
        coef: Reward lost for each nat.
    """

    def __init__(self, coef: float) -> None:
        self.coef = check_cost(self, "coef", coef)
        self._divergence: dict[tuple[tuple[Sample, ...], int], list[float]] = {}

    def prepare(self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None) -> None:
        self._divergence = {}
        if policy is None:
            return
        distinct = {(t.samples, t.begins): t for t in trajectories}
        policy_scores = score_trajectories([*distinct.values()], policy.score_tokens)
        with _reference(policy, "KLPenalty"):
            reference_scores = score_trajectories([*distinct.values()], policy.score_tokens)
        for (key, trajectory), scores, reference in zip(
            distinct.items(), policy_scores, reference_scores, strict=True
        ):
            sampled = trajectory.sampled_turns
            turns = [0.0] * (max(sampled, default=-1) + 1)
            log_ratios = (scores.logprobs - reference.logprobs).tolist()
            for k, log_ratio in zip(sampled, log_ratios, strict=True):
                turns[k] += log_ratio
            self._divergence[key] = turns

    def score(self, trajectory: Trajectory, turn: int) -> float:
        turns = self._divergence.get((trajectory.samples, trajectory.begins))
        if turns is None:
            raise _unprepared_error("KLPenalty")
        return -self.coef * turns[turn]


def _unprepared_error(name: str) -> RecipeError:
    return RecipeError(
        f"{name} is computed in `prepare`, which has not seen this trajectory with a policy. Score "
        "with turnrl.score_group(trajectories, rewards, policy=policy), or prepare first."
    )


def _first_accepted(trajectory: Trajectory) -> str | None:
    """The first accepted answer that the question's rule can read."""
    return next(iter(usable_answers(trajectory.question)), None)


def _reference(policy: SampledPolicy, option: str) -> AbstractContextManager[None]:
    """The policy that training began from. Errors name the option that needs it."""
    from peft import PeftModel  # loads torch

    if not isinstance(policy.load(), PeftModel):
        raise RecipeError(
            f"{option} needs the policy that training began from, which only a policy with an "
            "adapter still has. Set model.policy.lora, such as {r: 16, alpha: 32}, or remove "
            f"{option} from model.rewards."
        )
    return policy.reference()
