"""Three iterations with forced turns by `turnrl fit`: undisturbed, killed, and resumed.

The resumed run has to end like the undisturbed one. On a CPU every digit is the same. On a GPU the
order of sums may differ from run to run, so a metric may be off by a small share of its range in
the undisturbed run. A run that lost its optimiser or drew other samples is off by all of it.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import lightning as L
import torch

from turnrl import installed
from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.results import Cases
from turnrl_bench.measure import BenchError, Found
from turnrl_bench.ours import AnswerHash, Articles, TaskScript

TIMED = ("rollout/seconds", "rollout/tokens_per_s", "train/seconds", "train/memory_gb")
OFF = 0.02
"""The most that a metric of a GPU may be off, as a share of its range."""


ITERATIONS = 3
KILLED_IN = 1
"""The iteration that is killed, between its two updates."""


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
    at = folder / "runs" / "killed" / "version_0" / "checkpoints" / "last.ckpt"
    cases.run("undisturbed", lambda: _run(folder, "whole", recipe))
    killed = [*recipe, str(folder / "killed.yaml")]
    cases.run("killed", lambda: _run(folder, "killed", killed, -signal.SIGKILL))
    cases.run("resumed", lambda: _run(folder, "killed", [*recipe, "--ckpt_path", str(at)]))
    cases.run("the same end", lambda: _compared(folder, 0.0 if not bench.on_gpu else OFF))


def prepared(bench: Bench, folder: Path) -> Path:
    """Leave a recipe in a folder, with its questions and its model.

    Random weights never call a tool and never earn a reward, so without forcing there is nothing to
    learn from. Here each trajectory follows a task's script: it calls the tool, reads an article,
    and answers. Rewards are a hash of the answer, so they differ within a group.
    """
    bench.drop()
    model = folder / "model"
    task = bench.made(model, bench.setting.smaller, bench.setting.short)
    kv_memory = "64MB" if bench.tiny else "2GB"
    lines = (
        json.dumps({"id": str(n), "question": text, "answers": ["none"]})
        for n, text in enumerate(task.questions)
    )
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(lines) + "\n", "utf-8")
    shape = task.shape
    recipe = {
        "seed_everything": 0,
        "model": {
            "policy": {"model": str(model), "lora": {"r": 16, "alpha": 32}},
            "rollout": {
                "segmenter": {
                    "class_path": "ReAct",
                    "init_args": {"max_turns": 2, "answer": "plain", "instructions": task.system},
                },
                "tools": [_named(Articles, folder=str(model))],
                "max_turn_tokens": max(shape.turn_tokens),
                "max_result_tokens": 2 * shape.result_tokens,
                "max_tokens": shape.tokens,
            },
            "rewards": [_named(AnswerHash)],
            "estimator": {"class_path": "OutcomeOnly"},
            "engine": {
                "class_path": "turnrl_bench.Forced",
                "init_args": {
                    "engine": _named(installed("turnrl_engines")["Slots"], kv_memory=kv_memory),
                    "script": _named(TaskScript, folder=str(model)),
                },
            },
            "group_size": shape.group_size,
            "updates_per_iteration": 2,
            # steps that are large enough to be seen: a run that had lost them would show it
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        },
        "data": {
            "train": str(questions),
            "val": str(questions),
            "questions_per_iteration": shape.prompts,
        },
        "trainer": {
            "max_epochs": ITERATIONS,
            "check_val_every_n_epoch": ITERATIONS,
            "accelerator": "gpu" if bench.on_gpu else "cpu",
            "devices": 1,
        },
    }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe, indent=1) + "\n", "utf-8")  # JSON is YAML
    killed = {"trainer": {"callbacks": [_named(Killed)]}}
    (folder / "killed.yaml").write_text(json.dumps(killed) + "\n", "utf-8")
    return file


def _named(cls: type, **options: Any) -> dict[str, Any]:
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": options}


def _run(folder: Path, name: str, arguments: Sequence[str], wanted: int = 0) -> Found:
    """Run `turnrl` in a process of its own, in a folder, with its output in `NAME.log`.

    Raises:
        BenchError: With the last line of its output, if it does not end with the exit code that is
            wanted.
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
        raise BenchError(f"the run {name!r} ended with {code}: {last}")
    return {"run_s": seconds, **({} if wanted else {"metrics": rows_of(folder, name)})}


def _last_part(folder: Path, name: str) -> Path:
    """The folder of the last part of a run: a resumed one has two."""
    return max((folder / "runs" / name).glob("version_*"), key=lambda path: int(path.name[8:]))


def rows_of(folder: Path, name: str) -> list[dict[str, float]]:
    """The metrics of the last part of a run, without what the clock says."""
    with (_last_part(folder, name) / "metrics.csv").open(encoding="utf-8") as file:
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
    errors: dict[str, float] = {}
    for row in resumed:
        other = known.get((row["epoch"], row["step"], *sorted(row)))
        if other is None:
            raise BenchError(f"the whole run has no row of step {row['step']:.0f} like the resumed")
        for name, value in row.items():
            off = abs(value - other[name])
            range_ = max(spread[name]) - min(spread[name]) or abs(other[name])
            errors[name] = max(errors.get(name, 0.0), off / range_ if off else 0.0)
    if not any("train/loss" in row for row in resumed):
        raise BenchError("the resumed run has no rows: it had nothing left to learn")
    return errors


def _weights_off(folder: Path) -> float:
    """The relative distance of the trained weights."""
    both = []
    for name in ("whole", "killed"):
        file = _last_part(folder, name) / "checkpoints" / "last.ckpt"
        state: Any = torch.load(file, map_location="cpu", weights_only=False)["state_dict"]
        # the part that begins at zero: all of it was learned
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
