"""Likelihoods that the policy itself holds: of the accepted answer, and beside its reference of
what it did. All forward passes are made in `prepare`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from turnrl import RecipeError, SampledPolicy, Trajectory, TurnReward, usable_answers
from turnrl_rewards.calls import lost
from turnrl_rewards.progress import Difference, StateScore, informed

Measure = Literal["logprob", "mean_logprob", "probability"]
_State = tuple[str, tuple[int, ...]]
"""The answer asked about, and the token ids of the history."""


@final
@dataclass(eq=False, repr=False)
class AnswerLikelihood(StateScore):
    """Likelihood that the policy gives the accepted answer, having read what it has read so far.

    phi(s) = log p(a | s, opening), with a the tokens of the first accepted answer that the
    question's rule can read, under the policy as it is now, at temperature 1. s is the history up
    to and including the last successful result: an error, or the policy's own words after it, are
    not information. 0 where there is no such answer.

    Args:
        opening: Text after which the answer is put; see `InformationGain`.
        measure: `logprob`, in nats; `mean_logprob`, in nats per token of the answer; `probability`,
            the exponential of that, from 0 to 1.
        reference: Ask the policy that training began from (its adapter off), so that the score of a
            state does not move while the policy learns.
    """

    opening: str = "<answer>"
    measure: Measure = "logprob"
    reference: bool = False

    def __post_init__(self) -> None:
        self._known: dict[_State, float] = {}

    def prepare(self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None) -> None:
        self._known = {}
        if policy is None:
            return
        states = dict.fromkeys(
            (answer, _history(trajectory, informed(trajectory, turns)))
            for trajectory in trajectories
            if (answer := _accepted(trajectory)) is not None
            for turns in range(len(trajectory.turns) + 1)
        )
        put = {answer: self._put(policy, answer) for answer, _ in states}
        rows = []
        for answer, history in states:
            opening, tokens = put[answer]
            asked = [False] * (len(history) + len(opening)) + [True] * len(tokens)
            rows.append(((*history, *opening, *tokens), asked))
        who = _reference(policy, "reference: true") if self.reference else contextlib.nullcontext()
        with who:
            read = policy.read(rows)
        for state, scores in zip(states, read, strict=True):
            mean = float(scores.logprobs.mean())
            kinds = {
                "logprob": float(scores.logprobs.sum()),
                "mean_logprob": mean,
                "probability": math.exp(mean),
            }
            self._known[state] = kinds[self.measure]

    def _put(self, policy: SampledPolicy, answer: str) -> tuple[list[int], list[int]]:
        """Token ids of the opening, and of the answer after it.

        They are tokenised in one, as the policy would write them: a space at the end of the opening
        is a part of the answer's first token, and is counted with it.
        """
        alone, together = (
            policy.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (self.opening, self.opening + answer)
        )
        same = [a == b for a, b in zip(alone, together, strict=False)]
        begin = min([*same, False].index(False), len(together) - 1)
        return together[:begin], together[begin:]

    def score(self, trajectory: Trajectory, turns: int) -> float:
        answer = _accepted(trajectory)
        if answer is None:
            return 0.0
        state = answer, _history(trajectory, informed(trajectory, turns))
        if state not in self._known:
            raise _unprepared("The likelihood of an answer")
        return self._known[state]


@final
class InformationGain(Difference):
    """r_k = weight x (phi(s_{k+1}) - phi(s_k)), with phi(s) = log p(a | s, opening): how much
    likelier the policy holds the accepted answer a after reading what turn k brought. In nats.

    Information gain (Wang et al., IGPO, arXiv 2510.14967), whose phi is `measure: probability`, the
    exponential of the mean log-probability of the answer's tokens; log-probabilities also tell of a
    gain where the answer is still unlikely. A turn that brought no successful result earns 0, an
    error or a remark on form included; its text is a part of the next turn's history.

    Potential-based: the sum over a trajectory is weight x (last - first), so reading a thing twice
    earns nothing. It pays for where a trajectory ends (see `turnrl_rewards.progress`), and so
    for a right guess that is said before a search; words without a search earn nothing. The policy
    that is asked is the one that learns, so phi moves with it, unless `reference` holds it.

    Each distinct history, the question alone included, is read once per collection; what they
    begin with in common, as those of one trajectory's turns do, is read once for all of them.

    Args:
        weight: Reward of one nat, or of one unit of `measure`.
        opening: Text after which the answer is put, right after a result: all that the policy
            itself writes between the two, to the space. Its tokens are not counted.
        measure: `logprob`, in nats; `mean_logprob`, in nats per token of the answer; `probability`,
            the exponential of that, from 0 to 1.
        reference: Ask the policy that training began from (its adapter off); needs policy.lora.
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

    p is the policy that acted, the reference the policy with its adapter off, both at temperature
    1. In nats; needs policy.lora. Where tokens are sampled at temperature 1, the expectation is
    -coef x KL(policy || reference) of the turn, so never above 0, though a single turn may earn a
    little.

    KL as *reward*: the estimator hands it out, it counts for the turns before through their
    return-to-go, and it is normalised with the other turn rewards of the group. `objective.kl_coef`
    is KL as *loss*: a gradient of its own on each token, outside of advantages and of the clip,
    which looks one token ahead and no further. Use one of the two. Not potential-based: it changes
    which policy is best, to one nearer to the reference (Ziegler et al. 2019, arXiv 1909.08593).

    Args:
        coef: Reward lost for each nat.
    """

    def __init__(self, coef: float) -> None:
        self.coef = lost(self, "coef", coef)
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}

    def prepare(self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None) -> None:
        self._known = {}
        if policy is None:
            return
        distinct = {(t.token_ids, t.turn_index): t.token_row for t in trajectories}
        own = policy.read([*distinct.values()])
        with _reference(policy, "KLPenalty"):
            reference = policy.read([*distinct.values()])
        for key, ours, theirs in zip(distinct, own, reference, strict=True):
            sampled = [k for k in key[1] if k >= 0]
            turns = [0.0] * (max(sampled, default=-1) + 1)
            for k, apart in zip(sampled, (ours.logprobs - theirs.logprobs).tolist(), strict=True):
                turns[k] += apart
            self._known[key] = turns

    def score(self, trajectory: Trajectory, turn: int) -> float:
        apart = self._known.get((trajectory.token_ids, trajectory.turn_index))
        if apart is None:
            raise _unprepared("KLPenalty")
        return -self.coef * apart[turn]


def _unprepared(name: str) -> RecipeError:
    return RecipeError(
        f"{name} is asked of the policy in `prepare`, which has not seen this trajectory with one. "
        "Score with turnrl.score_group(trajectories, rewards, policy=policy), or prepare first."
    )


def _accepted(trajectory: Trajectory) -> str | None:
    """The first accepted answer that the question's rule can read."""
    return next(iter(usable_answers(trajectory.question)), None)


def _history(trajectory: Trajectory, turns: int) -> tuple[int, ...]:
    """Token ids of the prompt and the first turns, what was read after them included."""
    ids, later = trajectory.token_ids, trajectory.turns[turns:]
    sizes = (len(turn.token_ids) + len(turn.observation_ids) for turn in later)
    return ids[: len(ids) - sum(sizes)]


def _reference(policy: SampledPolicy, who: str) -> contextlib.AbstractContextManager[None]:
    """The policy with its adapter off."""
    if not hasattr(policy.load(), "disable_adapter"):
        raise RecipeError(
            f"{who} asks the policy that training began from, which is the policy without its "
            "adapter, but policy.lora is not set. Set it, or leave that out of model.rewards."
        )
    return policy.reference()
