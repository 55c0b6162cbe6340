"""What plugins share beside the names of `turnrl`.

patience  waiting for a server that is away
cache     answers kept in a file
"""
