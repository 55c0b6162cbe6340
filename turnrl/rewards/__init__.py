"""Rewards applied to trajectories, functions as rewards, and answers compared.

scoring    rewards applied to a group, and curves of what they earned
functions  functions as rewards, in TRL's signature too
answers    answers compared by the rule of their question
"""
