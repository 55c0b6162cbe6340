"""The console of a run: its progress, a row of figures per iteration, and its end.

lines      the lines printed in place of Lightning's default bar
warnings   lines of the log meanwhile
resumed    the figures that a run began with, and settings that changed when it was resumed
"""
