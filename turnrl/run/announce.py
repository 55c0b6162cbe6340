"""Announcements, which the progress bar of a run prints."""

import lightning as L


def announce(trainer: L.Trainer | None, text: str) -> None:
    """Print a line about a run's progress, once, whatever the number of processes.

    Args:
        trainer: The run's trainer. Without one, or without a bar, nothing is printed.
        text: The line.
    """
    bar = None if trainer is None else trainer.progress_bar_callback
    if bar is not None and trainer is not None and trainer.is_global_zero:
        bar.print(text)
