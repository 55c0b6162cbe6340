"""The console of a run: its progress, a row of figures per iteration, and how it ended.

lines      what is printed in place of Lightning's default bar
warnings   what is logged meanwhile
resumed    the figures that a run began with, and settings that changed when it was resumed
"""
