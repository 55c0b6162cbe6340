"""Three iterations with forced turns by `turnrl fit`: undisturbed, killed, and resumed.

The resumed run has to end like the undisturbed one. On a CPU every digit is the same. On a GPU the
order of sums may differ from run to run, so a metric may be off by a small share of its range in
the undisturbed run. A run that lost its optimiser or drew other samples is off by all of it.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.floors import Network
from turnrl_bench.gpu.results import Cases
from turnrl_bench.gpu.scripted import write_recipe
from turnrl_bench.gpu.shapes import RANK
from turnrl_bench.measure import BenchError, Found

TIMED = ("rollout/seconds", "rollout/tokens_per_s")
OFF = 0.02
"""The most that a metric of a GPU may be off, as a share of its range."""


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    folder = bench.folder / "training"
    folder.mkdir(exist_ok=True)
    recipe = ["fit", str(prepared(bench, folder))]
    runs = Runs(folder)
    cases.run("undisturbed", lambda: _trained(runs, "whole", recipe))
    cases.run("killed", lambda: _killed(runs, [*recipe, str(folder / "killed.yaml")]))
    at = folder / "runs" / "killed" / "version_0" / "checkpoints" / "last.ckpt"
    cases.run("resumed", lambda: _trained(runs, "killed", [*recipe, "--ckpt_path", str(at)]))
    cases.run("the same end", lambda: _compared(folder, 0.0 if not bench.on_gpu else OFF))


def prepared(bench: Bench, folder: Path) -> Path:
    """The recipe, once its model is made."""
    setting, model = bench.setting, folder / "model"
    bench.drop()
    task = bench.made(model, setting.smaller, setting.short)
    net = Network.of(setting.smaller, 2 if bench.on_gpu else 4, RANK)
    rows = setting.short.prompts * setting.short.group_size
    room = int(1.5 * net.kv_bytes * setting.short.tokens * rows) // 10**6 + 1
    return write_recipe(folder, task, model, bench.on_gpu, f"{room}MB")


class Runs:
    """Runs of `turnrl` in processes of their own, which share what they import: a server imports it
    once, without touching the GPU, and forks.

    Args:
        folder: Where they run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["turnrl_bench.gpu.nursery"])

    def run(self, name: str, arguments: Sequence[str]) -> tuple[int, float]:
        """The exit code of one run, and its seconds. Its output goes to `NAME.log`."""
        named = ["--trainer.logger.init_args.name", name]
        log = self.folder / f"{name}.log"
        began = time.perf_counter()
        process = self._context.Process(
            target=_turnrl, args=(str(self.folder), str(log), [*arguments, *named])
        )
        process.start()
        try:
            process.join()
        finally:
            if process.is_alive():
                process.kill()
                process.join()
        return int(process.exitcode or 0), time.perf_counter() - began


def _turnrl(folder: str, log: str, arguments: list[str]) -> None:
    """`turnrl ARGUMENTS` in a folder."""
    with Path(log).open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.argv = ["turnrl", *arguments]
    runpy.run_module("turnrl", run_name="__main__", alter_sys=True)


def _trained(runs: Runs, name: str, arguments: Sequence[str]) -> Found:
    code, seconds = runs.run(name, arguments)
    if code:
        raise BenchError(f"the run {name!r} ended with {code}: {_last_line(runs.folder, name)}")
    return {"run_s": seconds, "metrics": rows_of(runs.folder, name)}


def _killed(runs: Runs, arguments: Sequence[str]) -> Found:
    code, seconds = runs.run("killed", arguments)
    if code != -9:
        why = f"ended with {code}, before anything killed it: {_last_line(runs.folder, 'killed')}"
        raise BenchError(f"the run that was to be killed {why}")
    return {"run_s": seconds}


def _last_line(folder: Path, name: str) -> str:
    lines = (folder / f"{name}.log").read_text("utf-8", errors="replace").strip().splitlines()
    return " ".join(lines[-1].split())[:400] if lines else "it said nothing"


def rows_of(folder: Path, name: str) -> list[dict[str, float]]:
    """The metrics of the last part of a run, without what the clock says."""
    parts = sorted((folder / "runs" / name).glob("version_*"), key=lambda p: int(p.name[8:]))
    with (parts[-1] / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{k: float(v) for k, v in row.items() if v and k not in TIMED} for row in rows]


def differences(
    whole: Sequence[Mapping[str, float]], resumed: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """The largest error of each metric of a resumed run, as a share of the metric's range in the
    whole run (of its size, where it never moves).

    Raises:
        BenchError: If the resumed run has a row or a metric that the whole one has not, or none.
    """
    spread: dict[str, list[float]] = {}
    for row in whole:
        for name, value in row.items():
            spread.setdefault(name, []).append(value)
    known = {(row["epoch"], row["step"], *sorted(row)): row for row in whole}
    found: dict[str, float] = {}
    for row in resumed:
        other = known.get((row["epoch"], row["step"], *sorted(row)))
        if other is None:
            raise BenchError(f"the whole run has no row of step {row['step']:.0f} like the resumed")
        for name, value in row.items():
            off = abs(value - other[name])
            range_ = max(spread[name]) - min(spread[name]) or abs(other[name])
            found[name] = max(found.get(name, 0.0), off / range_ if off else 0.0)
    if not any("train/loss" in row for row in resumed):
        raise BenchError("the resumed run has no rows: it had nothing left to learn")
    return found


def _weights_off(folder: Path) -> float:
    """The relative distance of the trained weights."""
    both = []
    for name in ("whole", "killed"):
        parts = sorted((folder / "runs" / name).glob("version_*"), key=lambda p: int(p.name[8:]))
        file = parts[-1] / "checkpoints" / "last.ckpt"
        state: Any = torch.load(file, map_location="cpu", weights_only=False)["state_dict"]
        # the part that begins at zero: all of it was learnt
        both.append(torch.cat([v.flatten() for k, v in sorted(state.items()) if "lora_B" in k]))
    return float((both[0] - both[1]).norm() / both[0].norm())


def _compared(folder: Path, most: float) -> Found:
    off = differences(rows_of(folder, "whole"), rows_of(folder, "killed"))
    weights = _weights_off(folder)
    worst = max(off, key=off.__getitem__)
    if off[worst] > most or weights > most:
        raise BenchError(
            f"the resumed run ends otherwise: {worst} is off by {off[worst]:.2%} of its range, the "
            f"weights by {weights:.2%}, and {most:.0%} is allowed"
        )
    return {"off": off, "worst": worst, "weights_off": weights, "allowed": most}
