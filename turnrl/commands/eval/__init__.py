"""Questions asked and scored, with an interval for every figure; a record as an inspect_ai log.

command     `turnrl eval` and `turnrl export`
evaluating  the questions put to the policy or to a server, and their rows
figures     rows to figures, as lines or as JSON
inspecting  rows to an inspect_ai log
"""
