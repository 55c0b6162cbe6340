"""Recipes: merged, explained, made and run.

bundled    the recipes that come with turnrl
folders    runs and checkpoints found by a word
agents     a run, a checkpoint or a recipe found by a word
reading    YAML files, and the words of a command line
merging    values merged, and their paths filled in
invocation a command with its recipes and options, merged before torch is loaded
place      where a run writes
keys       names that other libraries have for settings
explain    why a recipe does not fit the classes that it describes
source     keys at any depth and plain values, checked by the classes' source code
build      from there to module, data and trainer, by LightningCLI
by_recipe  a note in the trainer, for callbacks that print
tidying    the folder of a run that failed at its beginning removed
fit        the command `fit`, and how another command that takes a recipe is made
"""
