"""Runs as a page to look at: curves, trajectories, and why each turn got its advantage.

page      one file of HTML with all of it
links     addresses of trajectories in it
command   `turnrl report`
"""
