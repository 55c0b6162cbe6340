"""The files that a run leaves, and the lines that it prints while it trains.

folders     the folders in which runs leave their files
metrics     a row per policy, to every logger and `metrics.csv`
announce    a line about the work of a run, through its progress bar
kept        checkpoints that a run keeps: the last, and the best
record      the columns and their version; files to rows, figures with intervals, text
recording   from scored groups to rows and into files, by a callback of every run
loggers     advantages by turn and transcripts, for loggers that can show them
statistics  95 % intervals: of a figure, and of two runs on the same questions
runs        a run's folder: its settings, metrics and record, and missing parts
pairing     evaluations of runs, paired by question or by seed, with reasons for those that cannot
be links       addresses in a report: of a trajectory, or of all attempts at a question
console/    a row of figures per iteration, and the end of the run
alarms/     a line when a run goes wrong or learns nothing, with the iteration in which it began
card/       the trained policy, for use without turnrl: weights, tokenizer, model card
"""
