"""A recipe trained with several seeds and settings: each run in a process and a folder of its own,
and a table with intervals over seeds at the end.

matrix    seeds times settings, read as `turnrl fit` reads a recipe
results   a line of metrics for each finished run, which counts as done
child     `turnrl fit` as a process that never outlives its sweep
jobs      runs side by side, on their cores
training  a sweep in its folder: read, trained, shown at the end
table     the metrics of all settings, and their differences
command   `turnrl sweep`
"""
