"""The tables of a results file. A missing figure is `not measured`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnrl_bench.gpu.parts import PARTS
from turnrl_bench.gpu.results import Results
from turnrl_bench.measure import NONE, Found, Report, Table

ROWS = (128, 336)
"""Of the whole shape; the tiny one has others."""
_KINDS = (("merged weights", "merged"), ("NF4 and adapter", "nf4 + adapter"),
          ("16 bits and adapter", "dense + adapter"))  # fmt: skip


def report_of(results: Results, rows: Sequence[int] = ROWS) -> Report:
    """Tables of what was measured.

    Args:
        results: The file.
        rows: Trajectories sampled at once, as measured.
    """
    device = results.case("machine", "device")
    versions = results.case("machine", "versions")
    size = "tiny" if results.found["about"].get("tiny") else "7B"
    report = Report(f"A {size} policy on {device.get('name', 'a GPU')}: NF4, an adapter of rank 16")
    report.tables = [
        _sampling(results, rows),
        _learning(results),
        _iteration(results),
        _machine(results),
    ]
    report.notes = _notes(results, device, versions)
    return report


def _get(found: Found, *path: str) -> Any:
    value: Any = found
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _cell(value: float | None, form: str = "{:,.1f}", scale: float = 1.0) -> str:
    return NONE if value is None else form.format(value * scale)


def _seconds(found: Found, *path: str) -> str:
    value = _get(found, *path)
    return NONE if value is None else f"{value:.3f} s" if value < 1 else f"{value:.1f} s"


def _times(found: Found, *path: str) -> str:
    return _cell(_get(found, *path, "ratio"), "{:.2f}x")


def _bytes(value: float | None) -> str:
    return _cell(value, "{:,.1f} GB", 1e-9)


def _sampling(results: Results, rows: Sequence[int]) -> Table:
    lines = []
    for many in rows:
        for name, weights in _KINDS:
            for graphs in ("on", "off"):
                case = results.case("decoding", f"{weights}, graphs {graphs}, {many} rows")
                lines.append((
                    f"{many} rows, {name}, graphs {graphs}",
                    _cell(case.get("tokens_per_s"), "{:,.0f}"),
                    _times(case),
                    _cell(case.get("step_ms"), "{:.1f} ms"),
                    _cell(case.get("step_floor_ms"), "{:.1f} ms"),
                ))  # fmt: skip
    return Table(("sampling", "tokens/s", "x floor", "a step", "floor"), tuple(lines))


def _learning(results: Results) -> Table:
    both = [results.case("learning", name) for name in ("recomputed", "kept")]
    read, step = (results.case("learning", name) for name in ("old log-probabilities", "optimiser"))
    parts: tuple[tuple[str, Callable[[Found], str]], ...] = (
        ("forward", lambda c: _seconds(c, "forward_s")),
        ("log-probabilities", lambda c: _seconds(c, "head_s")),
        ("backward", lambda c: _seconds(c, "backward_s")),
        ("together", lambda c: _seconds(c, "minibatch_s")),
        ("x floor", _times),
        ("TFLOP/s that are needed", lambda c: _cell(c.get("tflops"))),
        ("peak memory", lambda c: _bytes(c.get("peak_bytes"))),
    )
    lines = [(name, *map(cell, both)) for name, cell in parts]
    lines += [("old log-probabilities", _seconds(read, "read_s"), "")]
    lines += [("a step of the optimiser", _seconds(step, "step_s"), "")]
    return Table(("a minibatch of 8,192 tokens", "computed again", "all kept"), tuple(lines))


def _iteration(results: Results) -> Table:
    found = results.case("iteration", "iteration")
    turns = [results.case("trl", f"turn {k}") for k in range(2)]
    generate = None
    if all(turns):
        generate = sum(t["sampled"] for t in turns) / sum(t["generate_s"] for t in turns)
    plan = _get(found, "plan")

    def memory(phase: str) -> tuple[str, str]:
        planned = plan.get(phase) if isinstance(plan, dict) else None
        said = NONE if plan is None else "no plan" if planned is None else _bytes(planned[0])
        return _bytes(_get(found, "memory", phase, "peak_bytes")), said

    rest = _seconds(found, "old log-probabilities", "read_s")
    lines = (
        ("rollouts", _seconds(found, "rollouts", "rollouts_s"), _times(found, "rollouts"),
         *memory("sampling")),
        ("old log-probabilities", rest, "", "", ""),
        ("learning, 2 updates", _seconds(found, "learning", "learning_s"),
         _times(found, "learning"), *memory("learning")),
        ("whole iteration", _seconds(found, "whole", "whole_s"), _times(found, "whole"), "", ""),
        ("rollouts, tokens/s", _cell(found.get("tokens_per_s"), "{:,.0f}"), "", "", ""),
        ("transformers' generate, tokens/s", _cell(generate, "{:,.0f}"), "", "", ""),
    )  # fmt: skip
    return Table(("8 x 16 trajectories", "measured", "x floor", "peak memory", "planned"), lines)


def _machine(results: Results) -> Table:
    copy, matmul = (results.case("machine", name).get("rate") for name in ("copy", "matmul"))
    load = results.case("loading", "nf4")
    lines = (
        ("a copy, read and written", _cell(copy, "{:,.0f} GB/s", 1e-9)),
        ("a product of matrices", _cell(matmul, "{:,.1f} TFLOP/s", 1e-12)),
        ("loading in NF4", _seconds(load, "loaded_s")),
        ("peak memory while loading", _bytes(load.get("peak_bytes"))),
    )
    return Table(("the machine", "measured"), lines)


def _notes(results: Results, device: Found, versions: Found) -> list[str]:
    notes = []
    if device.get("capability"):
        names = ("cuda", "bitsandbytes", "triton", "liger-kernel", "flash-attn")
        held = ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
        notes.append(
            f"{device['name']}, {device['bytes'] / 1e9:.0f} GB, compute capability "
            f"{device['capability']}; {held}."
        )
    loaded = results.case("loading", "nf4")
    in_force = {
        **(loaded.get("in_force") or {}),
        **(results.case("loading", "in force").get("engine") or {}),
    }
    if loaded:
        shared = "shared" if loaded["share_prefixes"] else "not shared"
        told = "".join(f"; {name}: {value}" for name, value in in_force.items())
        notes.append(f"In force: prefixes are {shared} while learning{told}.")
    if end := results.case("train", "the same end"):
        worst, off = end["worst"], end["off"][end["worst"]]
        notes.append(
            "A run that was killed and resumed ends like one that was not: "
            f"{worst} is off by {off:.2%} of its range, the weights by {end['weights_off']:.2%}."
        )
    for name in PARTS:
        notes += _missing(name, results.part(name))
    return notes


def _missing(name: str, part: Found) -> list[str]:
    """The missing results of a part, each with its reason."""
    status = part.get("status")
    found = []
    if status in ("error", "skipped"):
        found.append(f"{name}: {_why(part)}.")
    for case, entry in part.get("cases", {}).items():
        if entry["status"] != "done":
            found.append(f"{name}, {case}: {_why(entry)}.")
    return found


def _why(entry: Found) -> str:
    return str(entry.get("error") or entry.get("why")).rstrip(".")
