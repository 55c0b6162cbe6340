"""The folder that the weights for the servers are written to, of one process or of several."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import final

from turnrl import RecipeError, SampledPolicy, Surroundings
from turnrl_servers.files import has_adapter

_VISIBLE_S = 30.0
"""Seconds until a file server shows a new folder to all machines."""


def is_together() -> bool:
    """True if this process is one of several in a torch process group."""
    import torch.distributed as processes

    return processes.is_initialized() and processes.get_world_size() > 1


def check_together(
    policy: SampledPolicy, where: Surroundings, starts: bool, folder: str | None
) -> None:
    """Refuse settings with which several processes cannot share servers.

    Args:
        policy: The policy.
        where: The surroundings, with the number of processes.
        starts: Whether the run should start a server.
        folder: The folder that the recipe gives for weights.
    Raises:
        RecipeError: Naming the setting, and the next step.
    """
    if starts:
        raise RecipeError(
            f"model.engine.python would start a server for each of {where.processes} processes, "
            "all with the same memory. Start servers yourself, and give their addresses in "
            "model.engine.url."
        )
    if not has_adapter(policy) and not where.divided:
        raise RecipeError(
            f"{where.processes} processes train all weights, and a server would read new ones "
            "while another process samples. Train an adapter (model.policy.lora), use one "
            "process, or let the processes share one policy (trainer.strategy: fsdp2)."
        )
    if folder is None and where.folder is None:
        raise RecipeError(
            "several processes share the weights for the servers, and this run has no folder. Set "
            "model.engine.folder to a path that all processes and servers have."
        )


def make_folder(folder: str | None) -> Path | None:
    """The folder that a recipe gives for weights, made if it is not there; None if it gives none.

    Raises:
        RecipeError: If it cannot be made.
    """
    if folder is None:
        return None
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(
            f"model.engine.folder is {folder!r}, which cannot be made ({error})"
        ) from error
    return path


def parent_of_weights(folder: str | None, where: Surroundings) -> Path | None:
    """The folder in which the folder for weights will be made, or a folder above it that is there
    already; None for temporary files."""
    if folder is not None or where.processes == 1 or where.folder is None:
        return make_folder(folder)
    path = where.folder.absolute()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


class WeightsFolder(ABC):
    """A folder for this run alone.

    Attributes:
        follows: True if another process publishes the weights.
    """

    follows = False

    @abstractmethod
    def make(self) -> Path:
        """The folder for the next start of the engine."""

    def leave(self) -> None:  # noqa: B027 - only a shared one has more than the starts' folders
        """Remove what the folders of all starts were in."""


@final
class Alone(WeightsFolder):
    """A folder of one process.

    Args:
        folder: The folder that the recipe gives; None for temporary files.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    def make(self) -> Path:
        """See `WeightsFolder.make`."""
        home = Path(tempfile.mkdtemp(prefix="turnrl-weights-", dir=make_folder(self._folder)))
        atexit.register(shutil.rmtree, home, ignore_errors=True)  # whatever ends the program
        if self._folder is not None:
            home.chmod(0o755)  # servers of other users read it
        return home


@final
class Together(WeightsFolder):
    """A folder that the first of several processes makes and the others find.

    All processes construct this at the same time. Later calls must not wait for other processes: a
    process without a question to validate publishes no version.

    Args:
        parent: The folder that it is made in. The first process's value counts.
    Raises:
        RecipeError: If it cannot be made, or this process does not see it.
    """

    def __init__(self, parent: Path) -> None:
        import torch.distributed as processes

        self.follows = processes.get_rank() > 0
        self._home = parent.absolute() / f"turnrl-weights-{secrets.token_hex(4)}"
        self._starts = 0
        problem = "" if self.follows else self._make()
        shared = [str(self._home), problem]
        processes.broadcast_object_list(shared)
        self._home = Path(shared[0])
        if shared[1]:
            raise RecipeError(shared[1])
        until = time.monotonic() + _VISIBLE_S
        while not self._home.is_dir():
            if time.monotonic() > until:
                raise RecipeError(
                    f"the first process of the run writes weights to {shared[0]!r}, which is not "
                    "there for this process. Set model.engine.folder to a path that all have."
                )
            time.sleep(0.1)

    def make(self) -> Path:
        """See `WeightsFolder.make`. All processes get the same."""
        self._starts += 1
        home = self._home / f"{self._home.name}-{self._starts}"
        if not self.follows:
            home.mkdir(parents=True)
        return home

    def leave(self) -> None:
        """See `WeightsFolder.leave`. It stays while the folder of a start is there."""
        if self.follows:
            return
        with contextlib.suppress(OSError):
            self._home.rmdir()

    def _make(self) -> str:
        try:
            self._home.mkdir(parents=True)
        except OSError as error:
            return (
                f"the folder {str(self._home)!r}, for the weights of several processes, cannot be "
                f"made ({error}). Set model.engine.folder to one that can."
            )
        atexit.register(shutil.rmtree, self._home, ignore_errors=True)
        return ""
