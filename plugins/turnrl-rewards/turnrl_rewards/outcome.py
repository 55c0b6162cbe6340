"""Partial credit for answers."""

from __future__ import annotations

from typing import final

from turnrl import OutcomeReward, Trajectory, exact_match
from turnrl.rewards.answers import f1


@final
class F1(OutcomeReward):
    """weight x max over the accepted answers of 2 P R / (P + R), with P the share of the given
    answer's words that the accepted answer has too, and R the share of the accepted answer's words
    that the given answer has too. 0 without an answer. In units of reward.

    SQuAD's F1 (Rajpurkar et al. 2016, arXiv 1606.05250), which counts repeated words. Unlike there,
    a text that normalises to nothing scores 0 even against another such text. This is an outcome,
    not a shaping. It pays for a part of an answer, and so for listing candidates: with two equally
    likely one-word names, both together earn 0.67 and one alone 0.5 on average. Use it beside
    `ExactMatch`, or use `AnswerPresent`, where lists never pay. An answer that is not a phrase
    (`data.answers`) has no parts: it earns weight if it is right.

    Args:
        weight: Reward of an answer with exactly the words of an accepted one.
    """

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def score(self, trajectory: Trajectory) -> float:
        share = f1(trajectory.answer, trajectory.question)
        if share is None:
            share = exact_match(trajectory.answer, trajectory.question)
        return self.weight * share
