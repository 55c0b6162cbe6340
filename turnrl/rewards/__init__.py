"""Rewards applied to trajectories, functions as rewards, and answers compared."""
