"""The console of a run: what it is doing, a row of figures per iteration, and how it ended.

lines      what is printed in place of Lightning's default bar
health     the warning that a run learns nothing
resumed    the figures that a run began with, and what a run that goes on changed
"""
