"""Starts the process that measures, and takes over when it ends.

That process may die (of a lost device, a signal, the machine's memory), or end itself because a
part hangs. The driver records this as an error of the running part, and starts another process for
the parts that are left. Ctrl-C ends all of it, and the parts that are there are kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from turnrl_bench.gpu.parts import HUNG, Part
from turnrl_bench.gpu.results import Results
from turnrl_bench.gpu.shapes import check_disk
from turnrl_bench.measure import apart, now

_GRACE_S = 20.0
"""A part that is over its time by so much and has not come back is ended with its process."""


def drive(
    results: Results,
    parts: Sequence[Part],
    folder: Path,
    tiny: bool,
    minutes: float,
    threads: int,
    grace_s: float = _GRACE_S,
) -> None:
    """Measure parts, in as many processes as it takes.

    Args:
        results: Where they go.
        parts: In their order, none of which is done.
        folder: For models. The caller removes it.
        tiny: A small shape, on whatever device there is.
        minutes: For all of them.
        threads: That torch may use.
        grace_s: See above.
    """
    until = time.monotonic() + 60 * minutes
    scale = 60 * minutes / sum(part.most_s for part in parts)
    left = [replace(part, most_s=scale * part.most_s) for part in parts]
    for part in left:
        results.note(part.name, status="waiting")
    while left:
        hung = folder / HUNG
        hung.write_text("", "utf-8")
        settings = {
            "file": str(results.file),
            "folder": str(folder),
            "parts": [asdict(part) for part in left],
            "tiny": tiny,
            "left_s": until - time.monotonic(),
            "grace_s": grace_s,
        }
        why = "it was interrupted"
        try:
            apart("turnrl_bench.gpu.worker:measure", settings, threads)
        except subprocess.CalledProcessError as error:
            why = f"its process ended with {error.returncode}"
        finally:
            results.read()
            where = hung.read_text("utf-8").splitlines()
            died = {"error": "it did not come back in time" if where else why, "where": where}
            left = left[_settle(results, left, **died) :]


def _settle(results: Results, parts: Sequence[Part], **died: object) -> int:
    """Note of what the part that was under way has died, if a process ended before its parts did.

    Returns:
        How many parts were dealt with.
    """
    for n, part in enumerate(parts):
        status = results.part(part.name).get("status")
        # a process that ends before its first part would do so again
        if status == "running" or (status == "waiting" and n == 0):
            results.note(part.name, status="error", ended=now(), **died)
            return n + 1
        if status == "waiting":
            return n
    return len(parts)


@contextlib.contextmanager
def models(needed: int) -> Iterator[Path]:
    """A folder for models, removed however the block ends. Those of earlier runs that were killed
    are removed before.

    Args:
        needed: Bytes that it has to hold.
    Raises:
        RecipeError: If the disk has no room.
    """
    for old in Path(tempfile.gettempdir()).glob("turnrl-bench-gpu-*"):
        number = old.name.rpartition("-")[0].rpartition("-")[2]
        if number.isdecimal() and not Path("/proc", number).exists() and Path("/proc").exists():
            shutil.rmtree(old, ignore_errors=True)
    check_disk(Path(tempfile.gettempdir()), needed)
    folder = tempfile.TemporaryDirectory(prefix=f"turnrl-bench-gpu-{os.getpid()}-")
    try:
        yield Path(folder.name)
    finally:
        # whoever presses Ctrl-C once more is not left with 15 GB
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        folder.cleanup()
        signal.signal(signal.SIGINT, before)
