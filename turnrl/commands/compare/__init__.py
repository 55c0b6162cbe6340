"""Runs compared on the questions that all of them answered.

pairing   evaluations of runs, paired by question or by seed; what cannot be paired, and why
command   `turnrl compare`
"""
