"""Starts the process that measures, and takes over when it ends.

That process may die (of a lost device, a signal, the machine's memory), or end itself because a
part hangs. The driver records this as an error of the running part, and starts another process for
the parts that are left. Ctrl-C ends all of it, and the parts that are there are kept.
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
from dataclasses import asdict, replace
from pathlib import Path

from turnrl import RecipeError
from turnrl_bench.gpu.floors import Network, model_bytes
from turnrl_bench.gpu.parts import HUNG, Part, chosen
from turnrl_bench.gpu.report import show
from turnrl_bench.gpu.results import Results, now
from turnrl_bench.gpu.shapes import RANK, SMALL, WHOLE, check_disk

_WORKER = (sys.executable, "-m", "turnrl_bench.gpu.worker")
_GRACE_S = 20.0
"""A part that is over its time by so much and has not come back is ended with its process."""


def bench(args: argparse.Namespace) -> int:
    """Measure a GPU, as the options of `turnrl bench gpu` say, and print what was measured.

    Returns:
        The exit code: 1 if a part failed.
    Raises:
        RecipeError: Before anything is measured, if it cannot be.
    """
    if not args.json.absolute().parent.is_dir():
        raise RecipeError(f"--json is {str(args.json)!r}, in a folder that is not there. Make it.")
    if args.json.is_dir():
        raise RecipeError(f"--json is {str(args.json)!r}, a folder. Name a file in it.")
    parts = chosen(args.parts)
    results = Results(args.json.absolute())
    if results.found["parts"] and not args.resume:
        raise RecipeError(
            f"--json is {str(args.json)!r}, which is there. Add --resume to go on with it, or name "
            "another file."
        )
    todo = [part for part in parts if not results.is_done(part.name)]
    import torch  # takes seconds, which a mistake in --parts or --json need not wait for

    if todo and not args.tiny and not torch.cuda.is_available():
        raise RecipeError(
            "there is no GPU here. On a machine with one, this takes nine minutes; --tiny runs the "
            "same on this one, in a small shape."
        )
    results.describe(args.tiny)
    if todo:
        setting = SMALL if args.tiny else WHOLE
        asked = {part.name for part in todo} - {"machine"}
        made = [setting.smaller] if "train" in asked else []
        made += [setting.network] if asked - {"train"} else []
        needed = sum(model_bytes(Network(network, size=2, rank=RANK)) for network in made)
        with models(needed) as folder:
            drive(results, todo, folder, args.tiny, args.minutes, args.threads)
    print(show(results, args.markdown), flush=True)
    return int(any(results.part(part.name).get("status") == "error" for part in parts))


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
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
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
            command, quiet = [*_WORKER, json.dumps(settings)], subprocess.DEVNULL
            subprocess.run(command, env=environment, stdout=quiet, check=True)
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
