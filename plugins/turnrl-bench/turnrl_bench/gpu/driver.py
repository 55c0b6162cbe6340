"""Starts the process that measures, and watches it.

That process may die (of a lost device, a signal, the machine's memory) or hang. The driver records
this as an error of the running part, and starts another process for the parts that are left. Ctrl-C
ends all of it, and the parts that are there are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnrl_bench.gpu.parts import Part
from turnrl_bench.gpu.results import Results, now
from turnrl_bench.gpu.shapes import check_disk

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
        parts: In their order. Those that are done are left out.
        folder: For models. The caller removes it.
        tiny: A small shape, on whatever device there is.
        minutes: For all of them.
        threads: That torch may use.
        grace_s: See above.
    """
    until = time.monotonic() + 60 * minutes
    left = [part for part in parts if not results.is_done(part.name)]
    scale = 60 * minutes / sum(part.most_s for part in left) if left else 1.0
    for part in left:
        results.note(part.name, status="waiting")
    with _interrupts() as pressed:
        while left:
            settings = {
                "file": str(results.file),
                "folder": str(folder),
                "parts": [asdict(part) for part in left],
                "tiny": tiny,
                "left_s": until - time.monotonic(),
                "scale": scale,
            }
            try:
                watch = _Watch(results.file, left, scale, until, grace_s, pressed)
                why = _process(settings, folder, threads, watch)
            except KeyboardInterrupt:
                results.read()
                _settle(results, left, "it was interrupted")
                raise
            results.read()
            left = left[_settle(results, left, why) :]


def _settle(results: Results, parts: Sequence[Part], why: str) -> int:
    """Note of what the part that was under way has died, if a process ended before its parts did.

    Returns:
        How many parts were dealt with.
    """
    for n, part in enumerate(parts):
        status = results.part(part.name).get("status")
        # a process that ends before its first part would do so again
        if status == "running" or (status == "waiting" and n == 0):
            results.note(part.name, status="error", error=why, ended=now())
            return n + 1
        if status == "waiting":
            return n
    return len(parts)


@dataclass
class _Watch:
    """Decides when a process has to be ended."""

    file: Path
    parts: Sequence[Part]
    scale: float
    until: float
    grace_s: float
    pressed: list[float]
    name: str = ""
    since: float = 0.0

    def is_late(self) -> bool:
        """Tell a part that hangs. A case may begin at a part's last
        moment, and then take as long as all of it may.

        Raises:
            KeyboardInterrupt: If Ctrl-C was pressed.
        """
        if self.pressed:
            raise KeyboardInterrupt
        running = _running(self.file)
        if running != self.name or not self.since:
            self.name, self.since = running, time.monotonic()
        most = next((part.most_s for part in self.parts if part.name == running), 60.0)
        ends = min(self.until, self.since + 2 * self.scale * most)
        return time.monotonic() > ends + self.grace_s


def _process(settings: dict[str, Any], folder: Path, threads: int, watch: _Watch) -> str:
    """Run one process to its end, and say how it ended."""
    file = folder / "worker.json"
    function = "turnrl_bench.gpu.worker:measure"
    request = {"function": function, "settings": settings, "threads": threads}
    file.write_text(json.dumps(request), "utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "turnrl_bench.worker", str(file)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            if watch.is_late():
                return "it did not come back in time"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.3)
        return f"its process ended with {process.returncode}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _running(file: Path) -> str:
    """The part that is under way; empty if none is."""
    found = Results(file).found["parts"]
    return next((name for name, part in found.items() if part["status"] == "running"), "")


@contextlib.contextmanager
def _interrupts() -> Iterator[list[float]]:
    """Within it Ctrl-C is noted, with its time, and left to the process that measures."""
    pressed: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(time.monotonic()))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


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
        with _interrupts():  # whoever presses Ctrl-C once more is not left with 15 GB
            folder.cleanup()
