"""Recipes: merged, explained, built and run.

bundled     the recipes that come with turnrl
agents      finds a run, a checkpoint or a recipe by a word
reading     YAML files, and the words of a command line
merging     merges values, and fills in their paths
invocation  a command with its recipes and options, merged before torch is loaded
location    where a run writes
filling     variables in a recipe's values
trust       whether a stranger's recipe may name code and keys
keys        names of settings in other libraries
explain     why a recipe does not fit the classes that it describes
build       makes module, data and trainer with LightningCLI
loading     loads a policy to ask
tidying     removes the folder of a run that failed at its beginning
fit         the command `fit`, and a function that adds other commands that take a recipe
"""
