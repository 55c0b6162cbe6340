"""`WeightsFolder`: where the weights for the servers are written, by one process or several."""

from __future__ import annotations

import atexit
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import final

from turnrl import RecipeError
from turnrl.engines import RunContext, SampledPolicy
from turnrl_servers.files import has_adapter


def check_together(
    policy: SampledPolicy, where: RunContext, starts: bool, folder: str | None
) -> None:
    """Refuse settings with which several processes cannot share servers.

    Args:
        policy: The policy.
        where: The run's context, with the number of processes.
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


@final
class WeightsFolder:
    """A place for the folders of this run alone, one for each start of the engine. Of several
    processes that learn together the first makes them, and the others find them.

    All processes construct this at the same time. Later calls must not wait for other processes: a
    process without a question to validate publishes no version.

    Args:
        folder: The folder that the recipe gives; None for temporary files, or the run's folder if
            several processes learn together.
        where: The run's context.
    Attributes:
        follows: True if another process publishes the weights.
    """

    def __init__(self, folder: str | None, where: RunContext) -> None:
        import torch.distributed as processes

        together = processes.is_initialized() and processes.get_world_size() > 1
        self.follows = together and processes.get_rank() > 0
        parent = Path(tempfile.gettempdir())
        if folder is not None:
            parent = Path(folder).expanduser()
        elif together and where.folder is not None:
            parent = where.folder
        self._mode = 0o700 if folder is None and not together else 0o755  # for other users' servers
        path = str(parent.absolute() / f"turnrl-weights-{secrets.token_hex(4)}")
        if together:
            shared = [path]
            processes.broadcast_object_list(shared)
            path = shared[0]
        self._path, self._starts = path, 0

    def make(self) -> Path:
        """The folder for the next start of the engine.

        Raises:
            RecipeError: If it cannot be made.
        """
        self._starts += 1
        home = Path(f"{self._path}-{self._starts}")
        if not self.follows:
            try:
                home.mkdir(parents=True, mode=self._mode)
            except OSError as error:
                raise RecipeError(
                    f"the folder {str(home)!r}, for the weights that servers read, cannot be made "
                    f"({error}). Set model.engine.folder to another one."
                ) from error
            atexit.register(shutil.rmtree, home, ignore_errors=True)  # whatever ends the program
        return home
