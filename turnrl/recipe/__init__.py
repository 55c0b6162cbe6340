"""Recipes: merged, explained, made and run.

bundled   the recipes that come with turnrl
folders   runs and checkpoints found by a word
agents    a run, a checkpoint or a recipe found by a word
given     recipes and options, put together before torch is loaded
keys      unknown keys at any depth, found in the classes' source
explain   why a recipe does not fit the classes that it describes
build     from there to module, data and trainer, by LightningCLI
by_recipe a note in the trainer, for callbacks that print
tidying   the folder of a run that failed at its beginning removed
fit       the command `fit`, and how another command that takes a recipe is made
"""
