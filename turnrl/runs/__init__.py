"""Runs on disk, read. Nothing here trains, and nothing but `restoring` imports torch.

find         the folder of a run, by a user's word
claim        the folder of a new run
checkpoints  the checkpoints of a run, by name
config       the settings of a run
files        files that are there whole or not at all; tables
columns      the columns of the record
record       files of the record to rows; rows to figures with intervals, and to text
restoring    rows of the record to the group that they record
load         a run: its settings, metrics and record, and missing parts
statistics   95 % intervals: of a figure, and of two runs on the same questions
compare      evaluations of runs, paired by question or by seed
table        means, intervals and differences as text
alarms       signs in the metrics that a run goes wrong
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
