"""A recipe trained with several seeds and settings: each run in a process and a folder of its own,
and a table with intervals over seeds at the end.

matrix    seeds times settings, read as `turnrl fit` reads a recipe
results   a line of figures for each finished run, which counts as done
folders   the folder of a run: its attempts joined, and where it goes on
child     `turnrl fit` as a process that never outlives its sweep
jobs      runs side by side, on their cores or GPUs
work      the runs that are not done: begun, watched, kept
sweep     a sweep in its folder: read, prepared, shown at the end
table     the figures of all settings, and their differences
command   `turnrl sweep`
"""
