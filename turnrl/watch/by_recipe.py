"""A note in the trainer of a run that was started from a recipe, for callbacks that print."""

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ProgressBar


class ByRecipe(L.Callback):
    """Notes about a run that was started from a recipe. Other trainers lack this callback.

    Attributes:
        folder: The folder that the command has announced; None if the run leaves no files.
        default_bar: Lightning's own progress bar; None if the recipe names a bar or wants none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.default_bar: ProgressBar | None = None
