"""Alarms: a line when a run goes wrong, with the iteration in which it began.

rules       the rules, as a function of rows of metrics
health      the warning that a run learns nothing
watch       the callback that prints both while a run trains, and can stop it
"""
