"""Objectives: from the streams of sampled tokens to a loss.

    tokens     TokenObjective: a loss for each token, and what all such losses share
    clipped    ClippedSurrogate: PPO's clipped surrogate, and GSPO's
    applying   an objective of anybody's called, and its result checked

The contract is `Objective` in `turnrl.types.objective`. `plugins/turnrl-objectives` has more of
them.
"""
