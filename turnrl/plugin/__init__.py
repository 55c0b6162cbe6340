"""What plugins share beside the names of `turnrl`.

errors    every error, by who can fix it, and checks of settings
hooks     installed packages found, and what they bring
text      phrases, neutralising, visible text, lines for a terminal
patience  waiting for a server that is away
cache     answers kept in a file
hub       a check that the Hugging Face hub answers
signals   Ctrl-C and SIGTERM, and processes that end with their first
"""
