"""The callbacks of a run: the files that it leaves, and the lines that it prints while it trains.

trainer       a Trainer as a run: its folder, its files, its lines
metrics       a row per policy, to every logger and `metrics.csv`
recorder      scored groups to rows of the record
checkpoints   the checkpoints that a run keeps: the last, and the best
console       a row of figures per iteration, and the end of the run
resume_notes  settings that changed when a run was resumed, or that it is finished
alarms        a line when a run goes wrong
health        a line when a run learns nothing
curves        the four curves as a picture
card          the trained policy, for use without turnrl: weights, tokenizer, model card
"""
