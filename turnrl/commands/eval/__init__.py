"""Questions asked and scored, with an interval for every figure; a record as a log of inspect_ai.

command     `turnrl eval` and `turnrl export`
asked       the checkpoint of a run in a recipe's place
evaluating  the questions asked, of the policy or of a server, and their rows
figures     rows to figures, as lines or as JSON
inspecting  rows to a log of inspect_ai
"""
