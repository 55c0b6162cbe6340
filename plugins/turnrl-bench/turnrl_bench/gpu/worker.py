"""The process that measures: part after part, each within its time.

`driver` runs it as `python -m turnrl_bench.gpu.worker SETTINGS`, with the arguments of `measure` as
JSON. Its results go to the file.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import pkgutil
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from turnrl_bench.gpu import device
from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.parts import HUNG, Part
from turnrl_bench.gpu.results import Cases, Found, Results, error_of, now

LOST = "the device answers no more; the parts that are left run in another process"


def measure(
    file: str,
    folder: str,
    parts: Sequence[Found],
    tiny: bool,
    left_s: float,
    grace_s: float,
) -> None:
    """Measure parts. A part that hangs ends this process, wherever it hangs. If a part loses the
    device, the parts after it are left to another process.

    Args:
        file: File of the results.
        folder: Folder for models.
        parts: As dictionaries, in order.
        tiny: A small shape, on whatever device there is.
        left_s: Seconds that are left for all.
        grace_s: Seconds that a part may be over its time.
    """
    until = time.monotonic() + left_s
    results = Results(Path(file))
    bench = Bench(Path(folder), tiny, results)
    with Path(folder, HUNG).open("w", encoding="utf-8") as place:
        try:
            for part in (Part(**given) for given in parts):
                # a case may begin at a part's last moment, and then take as long as all of it may
                left = max(0.0, min(until - time.monotonic(), 2 * part.most_s))
                faulthandler.dump_traceback_later(left + grace_s, exit=True, file=place)
                if not run(part, bench, until):
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()


def run(part: Part, bench: Bench, until: float) -> bool:
    """Measure one part, or say why not.

    Args:
        part: Which.
        bench: Everything that it needs.
        until: `time.monotonic()` at which all parts are to be over.
    Returns:
        Whether the device still answers.
    """
    results, left = bench.results, until - time.monotonic()
    least = min(part.least_s, 1.0) if bench.tiny else part.least_s
    if left < least:
        why = f"takes {least:.0f} s at least, and {max(left, 0):.0f} s are left"
        results.note(part.name, status="skipped", why=why)
        _tell(f"{part.name}: skipped, it {why}")
        return True
    before = results.part(part.name).get("cases", {})
    kept = {name: case for name, case in before.items() if case["status"] == "done"}
    results.found["parts"].pop(part.name, None)
    results.note(part.name, status="running", began=now(), cases=kept)
    _tell(f"{part.name} ...")
    began = time.monotonic()
    ends = min(until, began + part.most_s)
    try:
        measured = pkgutil.resolve_name(part.function)
        measured(bench, Cases(results, part.name, ends))
    except (Exception, KeyboardInterrupt) as error:
        results.note(part.name, **error_of(error))
    else:
        results.end(part.name)
    results.note(part.name, seconds=time.monotonic() - began)
    ended = results.part(part.name)
    more = f": {ended['error']}" if "error" in ended else ""
    _tell(f"{part.name}: {ended['status']} after {ended['seconds']:.0f} s{more}")
    for name, case in ended["cases"].items():
        if case["status"] != "done":
            _tell(f"    {name}: {case['status']}, {case.get('error') or case.get('why')}")
    return _answers()


def _answers() -> bool:
    """Try the device: after some CUDA errors a process cannot use it any more."""
    device.free()
    try:
        device.synchronize()
        torch.zeros(1, device=device.device())
    except RuntimeError:
        _tell(LOST)
        return False
    return True


def _tell(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main(settings: str) -> None:
    """Measure, without Lightning's remarks about workers, loggers and the like."""
    warnings.filterwarnings("ignore")
    for noisy in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    measure(**json.loads(settings))


if __name__ == "__main__":
    main(sys.argv[1])
