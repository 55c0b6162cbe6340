"""Three iterations with forced turns by `turnrl fit`: undisturbed, killed, and resumed.

The resumed run has to end like the undisturbed one. On a CPU every digit is the same. On a GPU the
order of sums may differ from run to run, so a metric may be off by a small share of its range in
the undisturbed run. A run that lost its optimiser or drew other samples is off by all of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, final

import lightning as L
import torch

from turnrl.run.runs import Run, open_runs
from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.results import Cases, Found

TIMED = (
    *("rollout/seconds", "rollout/scoring_seconds", "rollout/tokens_per_s"),
    *("train/seconds", "train/memory_gb"),
)
OFF = 0.02
"""The most that a metric of a GPU may be off, as a share of its range."""


KILLED_IN = 1
"""The iteration that is killed, between its two updates, of three."""


@final
class Killed(L.Callback):
    """Kills the process, as `kill -9` does, between two updates."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == KILLED_IN and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    folder = bench.folder / "training"
    folder.mkdir(exist_ok=True)
    recipe = ["fit", str(prepared(bench, folder))]
    killed = [*recipe, "--trainer.callbacks", "[turnrl_bench.gpu.training.Killed]"]
    resumed = [*recipe, "--ckpt_path", str(folder / "runs" / "killed" / "version_0")]
    cases.run("undisturbed", lambda: _run(folder, "whole", recipe))
    cases.run("killed", lambda: _run(folder, "killed", killed, -signal.SIGKILL))
    cases.run("resumed", lambda: _run(folder, "killed", resumed))
    cases.run("the same end", lambda: _compared(folder, 0.0 if not bench.on_gpu else OFF))


def prepared(bench: Bench, folder: Path) -> Path:
    """Leave a recipe in a folder, with its questions and its model.

    Random weights never call a tool and never earn a reward, so without forcing there is nothing to
    learn from. Here each trajectory follows a task's script: it calls the tool, reads an article,
    and answers. Rewards are a hash of the answer, so they differ within a group.
    """
    bench.drop()
    task = bench.made(folder / "model", bench.setting.smaller, bench.setting.short)
    questions = (
        json.dumps({"id": str(n), "question": text, "answers": ["none"]}) + "\n"
        for n, text in enumerate(task.questions)
    )
    (folder / "questions.jsonl").write_text("".join(questions), "utf-8")
    shape = task.shape
    recipe = Template(Path(__file__).with_name("training.yaml").read_text("utf-8"))
    settings = recipe.substitute(
        instructions=json.dumps(task.system),
        turn_tokens=max(shape.turn_tokens),
        result_tokens=2 * shape.result_tokens,
        tokens=shape.tokens,
        kv_memory="64MB" if bench.tiny else "2GB",
        group_size=shape.group_size,
        prompts=shape.prompts,
        accelerator="gpu" if bench.on_gpu else "cpu",
    )
    file = folder / "recipe.yaml"
    file.write_text(settings, "utf-8")
    return file


def _run(folder: Path, name: str, arguments: Sequence[str], wanted: int = 0) -> Found:
    """Run `turnrl` in a process of its own, in a folder, with its output in `NAME.log`.

    Raises:
        RuntimeError: With the last line of its output, if it ends with another exit code than the
            one that is wanted.
    """
    command = [sys.executable, "-m", "turnrl", *arguments, "--trainer.logger.init_args.name", name]
    log = folder / f"{name}.log"
    began = time.perf_counter()
    with log.open("a", encoding="utf-8") as file:
        ended = subprocess.run(command, cwd=folder, stdout=file, stderr=file, check=False)
    seconds = time.perf_counter() - began
    if ended.returncode != wanted:
        lines = log.read_text("utf-8", errors="replace").strip().splitlines()
        last = " ".join(lines[-1].split())[:400] if lines else "it said nothing"
        code = f"{ended.returncode}, not {wanted}" if wanted else f"{ended.returncode}"
        raise RuntimeError(f"the run {name!r} ended with {code}: {last}")
    return {"run_s": seconds, **({} if wanted else {"metrics": rows_of(folder, name)})}


def _last_part(folder: Path, name: str) -> Run:
    """The last part of a run: a resumed one has two."""
    (run,) = open_runs([folder / "runs" / name])
    return run


def rows_of(folder: Path, name: str) -> list[dict[str, float]]:
    """The metrics of the last part of a run, without what the clock says."""
    rows = _last_part(folder, name).metrics
    return [{k: v for k, v in row.items() if k not in TIMED} for row in rows]


def differences(
    whole: Sequence[Mapping[str, float]], resumed: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """The largest error of each metric of a resumed run, as a share of the metric's range in the
    whole run (of its size, where it never moves).

    Raises:
        RuntimeError: If the resumed run has a row or a metric that the whole one has not, or none.
    """
    spread: dict[str, list[float]] = {}
    for row in whole:
        for name, value in row.items():
            spread.setdefault(name, []).append(value)
    known = {(row["epoch"], row["step"], *sorted(row)): row for row in whole}
    errors: dict[str, float] = {}
    for row in resumed:
        other = known.get((row["epoch"], row["step"], *sorted(row)))
        if other is None:
            raise RuntimeError(
                f"the whole run has no row of step {row['step']:.0f} like the resumed"
            )
        for name, value in row.items():
            off = abs(value - other[name])
            range_ = max(spread[name]) - min(spread[name]) or abs(other[name])
            errors[name] = max(errors.get(name, 0.0), off / range_ if off else 0.0)
    if not any("train/loss" in row for row in resumed):
        raise RuntimeError("the resumed run has no rows: it had nothing left to learn")
    return errors


def _weights_off(folder: Path) -> float:
    """The relative distance of the trained weights."""
    both = []
    for name in ("whole", "killed"):
        file = _last_part(folder, name).folder / "checkpoints" / "last.ckpt"
        state: Any = torch.load(file, map_location="cpu", weights_only=False)["state_dict"]
        # the part that begins at zero: all of it was learned
        both.append(torch.cat([v.flatten() for k, v in sorted(state.items()) if "lora_B" in k]))
    return float((both[0] - both[1]).norm() / both[0].norm())


def _compared(folder: Path, most: float) -> Found:
    off = differences(rows_of(folder, "whole"), rows_of(folder, "killed"))
    weights = _weights_off(folder)
    worst = max(off, key=off.__getitem__)
    if off[worst] > most or weights > most:
        raise RuntimeError(
            f"the resumed run ends otherwise: {worst} is off by {off[worst]:.2%} of its range, the "
            f"weights by {weights:.2%}, and {most:.0%} is allowed"
        )
    return {"off": off, "worst": worst, "weights_off": weights, "allowed": most}
