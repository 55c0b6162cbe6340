"""A policy's numbers for trajectories, each of which may have several token histories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from turnrl.types import TokenRow, TokenScores, Trajectory


def score_trajectories(
    trajectories: Sequence[Trajectory], read: Callable[[Sequence[TokenRow]], Sequence[TokenScores]]
) -> list[TokenScores]:
    """Read the tokens that trajectories sampled.

    Args:
        trajectories: The trajectories.
        read: Reads token sequences, such as `Policy.read`. All are read in one call.
    Returns:
        For each trajectory, the scores of its N_i tokens, in the order of
        `Trajectory.sampled_turns`.
    """
    import torch  # rewards import this module, and few commands need torch

    scores = iter(read([row for trajectory in trajectories for row in trajectory.token_rows]))
    read_rows = ([*islice(scores, len(trajectory.token_rows))] for trajectory in trajectories)
    return [TokenScores(*map(torch.cat, zip(*rows, strict=True))) for rows in read_rows]
