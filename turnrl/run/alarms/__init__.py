"""Alarms: a line when a run goes wrong, with the iteration in which it began.

rules       the rules, a function of rows of metrics
watch       the callback that says them while a run goes on, and can stop it
"""
