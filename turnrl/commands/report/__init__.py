"""Runs as a page to look at: curves, trajectories, and why each turn got its advantage.

page      one file of HTML with all of it; its scripts and style are in assets/
curves    the four curves of a run as a picture
command   `turnrl report`
"""
