"""The beginning of a plugin, and the list of the installed ones.

command     `turnrl plugin new`: a renamed copy of `templates/turnrl-example`
listing     `turnrl plugins`
"""
