"""Credit: from the rewards of a group to the advantages of turns and tokens.

estimators  `TurnLevel`, `OutcomeOnly`, `Merged`, and advantages spread over tokens
apply       an estimator applied to a finished group, then every other installed one
why         the numbers behind an advantage
earnings    what turn rewards pay to attempts that act, and to those that do not
"""
