"""Announcements: the progress bar of a run prints them."""

import lightning as L


def announce(trainer: L.Trainer | None, text: str) -> None:
    """Print the progress of a run, once, whatever the number of processes.

    Args:
        trainer: The run's. Without one, or without a bar, nothing is printed.
        text: The line.
    """
    bar = None if trainer is None else trainer.progress_bar_callback
    if bar is not None and trainer is not None and trainer.is_global_zero:
        bar.print(text)
