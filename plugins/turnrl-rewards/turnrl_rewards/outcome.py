"""Rewards of how a trajectory ended."""

from __future__ import annotations

from typing import final

from turnrl import OutcomeReward, Trajectory, exact_match


@final
class F1(OutcomeReward):
    """weight x max over the accepted answers of 2 P R / (P + R), with P the share of the answer's
    words that are the accepted one's, and R the share of the accepted one's that are the answer's.
    0 without an answer. In units of reward.

    SQuAD's (Rajpurkar et al. 2016, arXiv 1606.05250), with words counted as often as they stand
    there; unlike it, a text that normalises to nothing scores 0 even against another such. An
    outcome of its own, not a shaping: it pays for a part of an answer, and so for naming several.
    Of two equally likely names of one word, giving both earns 0.67 and giving one 0.5 on average.
    Set it beside `ExactMatch`, or take `AnswerPresent`, which a list never beats. An answer that is
    no phrase (`data.answers`) has no parts: it earns weight if it is right.

    Args:
        weight: Reward of an answer that has the words of an accepted one, and no others.
    """

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.bounds = (0.0, weight)

    def score(self, trajectory: Trajectory) -> float:
        from turnrl import record  # which loads Arrow

        share = record.f1(trajectory.answer, trajectory.question)
        if share is None:
            share = exact_match(trajectory.answer, trajectory.question)
        return self.weight * share
