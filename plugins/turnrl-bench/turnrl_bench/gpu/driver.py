"""Runs the parts, each in its own process. If a process crashes (a lost device, a signal, the
machine's memory) or hangs, only its part has an error, and the others still run. Ctrl-C ends the
benchmark and keeps the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from turnrl import RecipeError
from turnrl_bench.gpu.parts import SMALL, WHOLE, Part
from turnrl_bench.gpu.report import show
from turnrl_bench.gpu.results import DONE, Results, now

_GRACE_S = 30.0
"""A process that takes longer than twice the time of its part plus these seconds is ended."""


def bench(args: argparse.Namespace) -> int:
    """Measure a GPU with the options of `turnrl bench gpu`, and print the tables.

    Returns:
        The exit code: 1 if a part failed.
    Raises:
        RecipeError: If nothing can be measured; it is raised before the first measurement.
    """
    if not args.json.absolute().parent.is_dir():
        raise RecipeError(
            f"--json is {str(args.json)!r}, in a folder that does not exist. Create it."
        )
    if args.json.is_dir():
        raise RecipeError(f"--json is {str(args.json)!r}, a folder. Name a file in it.")
    results = Results(args.json.absolute())
    if results.parts and not args.resume:
        raise RecipeError(
            f"--json is {str(args.json)!r}, which already exists. Add --resume to add to it, or "
            "name another file."
        )
    todo = [part for part in args.parts if results.part(part.name).get("status") != DONE]
    if todo and not args.tiny and not torch.cuda.is_available():
        raise RecipeError(
            "there is no GPU here. On a machine with one, this takes nine minutes; --tiny runs the "
            "same on this one, in a small shape."
        )
    results.describe(args.tiny)
    if todo:
        network = (SMALL if args.tiny else WHOLE).network
        with models(2 * (network.dense + network.embedded)) as folder:
            drive(results, todo, folder, args.tiny, args.minutes, args.threads)
    print(show(results, args.markdown), flush=True)
    return int(any(results.part(part.name).get("status") == "error" for part in args.parts))


def drive(
    results: Results,
    parts: Sequence[Part],
    folder: Path,
    tiny: bool,
    minutes: float,
    threads: int,
    grace_s: float = _GRACE_S,
) -> None:
    """Measure parts.

    Args:
        results: Where the results go.
        parts: The parts in their order; none is done yet.
        folder: The folder for models. The caller removes it.
        tiny: True for a small shape, on any device.
        minutes: Time for all parts.
        threads: Number of threads that torch may use.
        grace_s: See `_GRACE_S`.
    """
    until = time.monotonic() + 60 * minutes
    scale = 60 * minutes / sum(part.most_s for part in parts)
    offline = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **offline, "OMP_NUM_THREADS": str(threads)}
    for part in parts:
        left = until - time.monotonic()
        least = min(part.least_s, 1.0) if tiny else part.least_s
        if left < least:
            why = f"takes {least:.0f} s at least, and {max(left, 0):.0f} s are left"
            results.note(part.name, status="skipped", why=why)
            continue
        seconds = min(left, scale * part.most_s)
        settings = [str(results.file), str(folder), part.name, part.function, tiny, seconds]
        command = [sys.executable, "-m", "turnrl_bench.gpu.worker", json.dumps(settings)]
        cases = results.part(part.name).get("cases", {}).items()
        done = {name: case for name, case in cases if case["status"] == DONE}
        results.parts[part.name] = {"cases": done}
        error = "it was interrupted"
        print(f"  {part.name} ...", file=sys.stderr, flush=True)
        try:  # a reader of the file may end this process from here on
            results.note(part.name, status="running", began=now())
            subprocess.run(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=2 * seconds + grace_s,
            )
        except subprocess.CalledProcessError as ended:
            error = f"its process ended with {ended.returncode}"
        except subprocess.TimeoutExpired:
            error = "it did not come back in time"
        finally:
            results.read()
            if results.part(part.name).get("status") == "running":
                results.note(part.name, status="error", error=error, ended=now())
        _report(part.name, results)


def _report(name: str, results: Results) -> None:
    """Print how a part ended, and its cases that failed."""
    part = results.part(name)
    entries = {name: part, **{f"    {case}": entry for case, entry in part["cases"].items()}}
    for text, entry in entries.items():
        if entry is part or entry["status"] != DONE:
            why = entry.get("error") or entry.get("why") or ""
            print(f"  {text}: {entry['status']} {why}".rstrip(), file=sys.stderr, flush=True)


@contextlib.contextmanager
def models(needed: int) -> Iterator[Path]:
    """A folder for models, which is removed however the block ends. Folders of earlier runs that
    were killed are removed first.

    Args:
        needed: Bytes that the folder has to hold.
    Raises:
        RecipeError: If the disk has no room.
    """
    place = Path(tempfile.gettempdir())
    for old in place.glob("turnrl-bench-gpu-*"):
        number = old.name.rpartition("-")[0].rpartition("-")[2]
        if number.isdecimal() and not Path("/proc", number).exists() and Path("/proc").exists():
            shutil.rmtree(old, ignore_errors=True)
    free = shutil.disk_usage(place).free
    if free < 1.05 * needed:
        raise RecipeError(
            f"the model with random weights takes {needed / 1e9:.1f} GB, and the disk of "
            f"{str(place)!r} has {free / 1e9:.1f} GB free. Set TMPDIR to a folder with more room."
        )
    folder = tempfile.TemporaryDirectory(prefix=f"turnrl-bench-gpu-{os.getpid()}-")
    try:
        yield Path(folder.name)
    finally:
        # a second Ctrl-C must not leave 15 GB behind
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        folder.cleanup()
        signal.signal(signal.SIGINT, before)
