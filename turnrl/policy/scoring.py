"""A policy's numbers for trajectories, each of which may have several token histories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from turnrl.types import TokenRow, TokenScores, Trajectory


def score_trajectories(
    trajectories: Sequence[Trajectory], score: Callable[[Sequence[TokenRow]], Sequence[TokenScores]]
) -> list[TokenScores]:
    """Score the tokens that trajectories sampled.

    Args:
        trajectories: The trajectories.
        score: Scores token sequences, such as `LanguageModel.score_tokens`, all in one call.
    Returns:
        For each trajectory, the scores of its N_i tokens, in the order of
        `Trajectory.sampled_turns`.
    """
    import torch  # rewards import this module, and few commands need torch

    scores = iter(score([row for trajectory in trajectories for row in trajectory.token_rows]))
    by_trajectory = ([*islice(scores, len(trajectory.token_rows))] for trajectory in trajectories)
    return [TokenScores(*map(torch.cat, zip(*rows, strict=True))) for rows in by_trajectory]
