"""Questions asked and scored, with an interval for every figure.

command     `turnrl eval`
evaluating  questions put to the policy or to a server
figures     figures as lines or as JSON
"""
