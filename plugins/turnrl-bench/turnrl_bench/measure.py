"""Measuring: blocks in fresh processes that take turns, medians, and tables of what was found.

What is compared is measured A B A B ..., so that a machine that becomes slower meanwhile does so
for both. A figure of one side is the median over all its repetitions. A ratio is that of the
medians; its spread, the least and the greatest of the ratios of a block with the one beside it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from turnrl import TurnRLError

Found = dict[str, Any]
"""Result of a block. `times`: for each thing timed, the (wall, CPU) seconds of each repetition."""

NONE = "not measured"


class BenchError(TurnRLError, RuntimeError):
    """A block of a measurement has failed."""

    exit_code = 1


def apart(
    function: str,
    settings: Mapping[str, Any],
    threads: int,
    stderr: int | None = None,
    **environment: str,
) -> Found:
    """Call a function in a fresh process.

    Args:
        function: `module:function`, which returns JSON.
        settings: Its keyword arguments.
        threads: That torch may use.
        stderr: See `subprocess.run`; it is shown by default.
        environment: Variables of the process.
    Raises:
        CalledProcessError: If it fails.
    """
    ours = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **ours, "OMP_NUM_THREADS": str(threads), **environment}
    request = {"function": function, "settings": dict(settings), "threads": threads}
    with tempfile.TemporaryDirectory(prefix="turnrl-bench-") as folder:
        file = Path(folder, "block.json")
        file.write_text(json.dumps(request), "utf-8")
        command = [sys.executable, "-m", "turnrl_bench.worker", str(file)]
        quiet = subprocess.DEVNULL
        subprocess.run(command, env=environment, text=True, stdout=quiet, stderr=stderr, check=True)
        result: Found = json.loads(file.read_text("utf-8"))
    return result


@dataclass(frozen=True)
class Side:
    """Process that runs a block, on the CPU.

    Args:
        name: In tables and lines of progress.
        function: `module:function`, which returns JSON.
        settings: Its keyword arguments.
        threads: That torch may use.
        environment: Variables of its process.
    """

    name: str
    function: str
    settings: Mapping[str, Any]
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, what: str = "") -> Found:
        """Run a block, and say on stderr how long it took.

        Raises:
            BenchError: With the last line of what it wrote, if it fails.
        """
        print(f"  {what}{self.name} ...", end="", file=sys.stderr, flush=True)
        begun = time.perf_counter()
        environment = {"CUDA_VISIBLE_DEVICES": "", **self.environment}
        try:
            block = apart(
                self.function, self.settings, self.threads, subprocess.PIPE, **environment
            )
        except subprocess.CalledProcessError as error:
            print(" failed", file=sys.stderr)
            wrote = error.stderr.strip() or f"exit code {error.returncode}"
            last = " ".join(wrote.splitlines()[-1].split())[:400]
            shown = wrote if os.environ.get("TURNRL_DEBUG") else last
            raise BenchError(f"a block of {self.name} failed: {shown}") from None
        print(f" {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        return block


def alternate(sides: Sequence[Side], blocks: int, what: str = "") -> dict[str, list[Found]]:
    """The blocks of each side, run in turns."""
    by_side: dict[str, list[Found]] = {side.name: [] for side in sides}
    for n in range(blocks):
        for side in sides:
            by_side[side.name].append(side.run(f"{what}block {n + 1} of {blocks}: "))
    return by_side


@dataclass(frozen=True)
class Ratio:
    """Factor by which one side needs more than another.

    Args:
        value: Ratio of the medians.
        low: The least ratio of a block with the one beside it.
        high: The greatest.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f}-{self.high:.2f})"


def ratio(more: Sequence[Sequence[float]], less: Sequence[Sequence[float]]) -> Ratio:
    """The ratio of two sides.

    Args:
        more: What the one needed, by block.
        less: What the other did.
    """
    blocks = [median(a) / median(b) for a, b in zip(more, less, strict=True)]
    value = median([x for block in more for x in block]) / median([x for b in less for x in b])
    return Ratio(value, min(blocks), max(blocks))


def seconds(blocks: Sequence[Found], what: str, clock: int = 0) -> list[list[float]]:
    """By block, the seconds of what was timed. `clock` is 0 for wall and 1 for CPU seconds."""
    return [[pair[clock] for pair in block["times"][what]] for block in blocks]


def typical(blocks: Sequence[Found], what: str, clock: int = 0) -> float:
    """The median over all repetitions of all blocks."""
    return median([s for block in seconds(blocks, what, clock) for s in block])


@dataclass(frozen=True)
class Table:
    """Rows of text under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        """As columns."""
        lines = (self.header, *self.rows)
        widths = [max(len(row[i]) for row in lines) for i in range(len(self.header))]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in lines
        )

    def markdown(self) -> str:
        """As a table of a page."""
        lines = (self.header, ("---",) * len(self.header), *self.rows)
        return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _load() -> tuple[float, ...]:
    return os.getloadavg() if hasattr(os, "getloadavg") else ()


_BEFORE = _load()


@dataclass
class Report:
    """Results of a command.

    Args:
        title: Title of the measurement.
        notes: What a reader has to know about it, a sentence each.
        tables: What was found.
        raw: The numbers behind it.
        code: The exit code.
    """

    title: str
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    raw: Found = field(default_factory=dict)
    code: int = 0

    def show(self, markdown: bool) -> str:
        """All of it, at most 80 columns wide unless it is for a page."""
        machine = self.machine()
        if markdown:
            parts = [table.markdown() for table in self.tables]
            where, libraries, load = machine
            lines = [*self.notes, f"Measured on {where}, with {libraries}. {load.capitalize()}."]
            return "\n\n".join([*parts, "\n".join(f"- {note}" for note in lines)])
        notes = [
            textwrap.fill(note, 80, subsequent_indent="  ", break_on_hyphens=False)
            for note in [*self.notes, *machine]
        ]
        return "\n\n".join([self.title, *(t.text() for t in self.tables), "\n".join(notes)])

    def machine(self) -> list[str]:
        """Which machine it was, what ran on it, and how busy it was."""
        load = " -> ".join(f"{some[0]:.1f}" for some in (_BEFORE, _load()) if some)
        return [
            f"{processor()}, {os.cpu_count()} cores, {now()[:10]}",
            ", ".join(f"{name} {version}" for name, version in versions().items()),
            f"load average before -> after: {load}",
        ]

    def save(self, file: Path) -> None:
        """Write the numbers behind it, as JSON."""
        contents = {
            "title": self.title,
            "machine": {
                "processor": processor(),
                "cores": os.cpu_count(),
                "versions": versions(),
                "load_before": _BEFORE,
                "load_after": _load(),
                "at": now(),
            },
            "notes": self.notes,
            "tables": [{"header": t.header, "rows": t.rows} for t in self.tables],
            **self.raw,
        }
        file.write_text(json.dumps(contents, indent=1) + "\n", "utf-8")


def now() -> str:
    """The time, for people."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def processor() -> str:
    """The processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions(
    names: Iterable[str] = ("turnrl", "torch", "transformers", "trl"),
) -> dict[str, str]:
    """Of Python, and of those of some packages that are installed."""
    by_name = {"python": platform.python_version()}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name)
    return by_name


class Clock:
    """Wall and CPU seconds of stretches of a process, by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[list[float]]] = {}

    @staticmethod
    def now() -> tuple[float, float]:
        """Wall and CPU seconds."""
        return time.perf_counter(), time.process_time()

    def keep(self, what: str, begun: tuple[float, float], ended: tuple[float, float]) -> None:
        """Note a stretch."""
        stretch = [b - a for a, b in zip(begun, ended, strict=True)]
        self.times.setdefault(what, []).append(stretch)

    def keep_step(
        self, begun: tuple[float, float], rollouts: Sequence[tuple[float, float]]
    ) -> None:
        """Note a whole step that ends now: its rollouts, from when to when, and the rest."""
        self.keep("rollouts", rollouts[0], rollouts[1])
        self.keep("whole step", begun, self.now())
        whole, rolled = (self.times[what][-1] for what in ("whole step", "rollouts"))
        rest = [a - b for a, b in zip(whole, rolled, strict=True)]
        self.times.setdefault("learning", []).append(rest)


class Peak:
    """The most memory that this process holds from now on, in bytes above what it holds now.

    On Linux the kernel counts it, and can be told to begin anew; elsewhere there is no figure.
    """

    def __init__(self) -> None:
        self.begun: int | None = None
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", "utf-8")
            self.begun = _status("VmRSS")

    @property
    def bytes(self) -> int | None:
        """So far; None if that cannot be told."""
        return None if self.begun is None else _status("VmHWM") - self.begun


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def megabytes(value: float | None) -> str:
    """Bytes, for a table."""
    return NONE if value is None else f"{value / 1e6:,.0f} MB"


MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
"""Environment of a process whose memory is measured: what is freed goes back to the system, and is
not taken for free later on."""
