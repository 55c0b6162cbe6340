"""A recipe trained with several seeds and settings: each run in a process and a folder of its own,
and a table with intervals over seeds at the end.

matrix    seeds times settings, read as `turnrl fit` reads a recipe
results   a line of figures for each finished run, which counts as done
folders   the folder of a run: its attempts joined, and the checkpoint to resume from
child     `turnrl fit` as a process that never outlives its sweep
jobs      runs side by side, on their cores or GPUs
sweep     a sweep in its folder: read, prepared, trained, shown at the end
table     the figures of all settings, and their differences
command   `turnrl sweep`
"""
