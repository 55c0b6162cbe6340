"""The tables of a results file. A missing figure is `not measured`."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from turnrl_bench.gpu.parts import SMALL, WHOLE
from turnrl_bench.gpu.results import DONE, Found, Results

_KINDS = (("dense copy and adapter", "dense copy"), ("NF4 and adapter", "nf4 + adapter"),
          ("16 bits and adapter", "dense + adapter"))  # fmt: skip


NONE = "not measured"


@dataclass(frozen=True)
class Table:
    """Rows of text under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def show(self, markdown: bool = False) -> str:
        """The table as aligned columns, or as markdown."""
        if markdown:
            lines = (self.header, ("---",) * len(self.header), *self.rows)
            return "\n".join(f"| {' | '.join(row)} |" for row in lines)
        lines = (self.header, *self.rows)
        first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
        return "\n".join(
            "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip()
            for row in lines
        )


def show(results: Results, markdown: bool) -> str:
    """All measurements, at most 80 columns wide unless it is markdown. A table without any
    measurement is left out, if another table has one."""
    device = results.case("machine", "device")
    size = "tiny" if results.about.get("tiny") else "7B"
    title = f"A {size} policy on {device.get('name', 'a GPU')}: NF4, an adapter of rank 16"
    tables = tables_of(results)
    measured = [table for table in tables if any(NONE not in row for row in table.rows)]
    shown = [table.show(markdown) for table in measured or tables]
    notes = _notes(results, device, results.case("machine", "versions"))
    if markdown:
        return "\n\n".join([*shown, "\n".join(f"- {note}" for note in notes)])
    lines = [textwrap.fill(n, 80, subsequent_indent="  ", break_on_hyphens=False) for n in notes]
    return "\n\n".join([title, *shown, "\n".join(lines)])


def tables_of(results: Results) -> list[Table]:
    """The tables. They have the same rows whatever was measured."""
    rows = SMALL.rows if results.about.get("tiny") else WHOLE.rows
    return [
        _sampling(results, rows),
        *(table(results) for table in (_learning, _iteration, _machine)),
    ]


_SECONDS, _TIMES, _PER_S = "{:.3g} s", "{:.2f}x", "{:,.0f}"
_GB = "{:,.1f} GB"


def _cell(case: Found, name: str, form: str, scale: float = 1.0) -> str:
    """A figure of a case, for a table."""
    value = case.get(name)
    return NONE if value is None else form.format(value * scale)


def _sampling(results: Results, rows: Sequence[int]) -> Table:
    lines = []
    for count, (name, weights), graphs in itertools.product(rows, _KINDS, ("on", "off")):
        case = results.case("decoding", f"{weights}, graphs {graphs}, {count} rows")
        figures = _cell(case, "tokens_per_s", _PER_S), _cell(case, "ratio", _TIMES)
        lines.append((f"{count} rows, {name}, graphs {graphs}", *figures))
    return Table(("sampling", "tokens/s", "x floor"), tuple(lines))


def _learning(results: Results) -> Table:
    modes = [results.case("learning", name) for name in ("recomputed", "kept")]
    read, step = (results.case("learning", name) for name in ("old log-probabilities", "optimiser"))
    lines = [
        (text, *(_cell(case, name, form, scale) for case in modes))
        for text, name, form, scale in (
            ("forward", "forward_s", _SECONDS, 1),
            ("log-probabilities", "head_s", _SECONDS, 1),
            ("backward", "backward_s", _SECONDS, 1),
            ("together", "minibatch_s", _SECONDS, 1),
            ("x floor", "ratio", _TIMES, 1),
            ("TFLOP/s that are needed", "tflops", "{:,.1f}", 1),
            ("peak memory", "peak_bytes", _GB, 1e-9),
        )
    ]
    lines += [
        ("old log-probabilities", _cell(read, "read_s", _SECONDS), ""),
        ("a step of the optimiser", _cell(step, "step_s", _SECONDS), ""),
    ]
    return Table(("a minibatch of 8,192 tokens", "computed again", "all kept"), tuple(lines))


def _iteration(results: Results) -> Table:
    case = results.case("iteration", "iteration")
    plan = case.get("plan", {})

    def taken(phase: str, name: str) -> tuple[str, str]:
        measured = case.get(phase, {})
        return _cell(measured, name, _SECONDS), _cell(measured, "ratio", _TIMES)

    def memory(phase: str) -> tuple[str, str]:
        measured = case.get("memory", {}).get(phase, {})
        planned = {"planned": plan[phase][0]} if phase in plan else {}
        text = "no plan" if plan == "no plan" else _cell(planned, "planned", _GB, 1e-9)
        return _cell(measured, "peak_bytes", _GB, 1e-9), text

    lines = (
        ("rollouts", *taken("rollouts", "rollouts_s"), *memory("sampling")),
        ("old log-probabilities", taken("old log-probabilities", "read_s")[0], "", "", ""),
        ("learning, 2 passes", *taken("learning", "learning_s"), *memory("learning")),
        ("whole iteration", *taken("whole", "whole_s"), "", ""),
        ("rollouts, tokens/s", _cell(case, "tokens_per_s", _PER_S), "", "", ""),
    )
    return Table(("8 x 16 trajectories", "measured", "x floor", "peak memory", "planned"), lines)


def _machine(results: Results) -> Table:
    copy, matmul = (results.case("machine", name) for name in ("copy", "matmul"))
    load = results.case("loading", "nf4")
    lines = (
        ("a copy, read and written", _cell(copy, "rate", "{:,.0f} GB/s", 1e-9)),
        ("a product of matrices", _cell(matmul, "rate", "{:,.1f} TFLOP/s", 1e-12)),
        ("loading in NF4", _cell(load, "loaded_s", _SECONDS)),
        ("peak memory while loading", _cell(load, "peak_bytes", _GB, 1e-9)),
    )
    return Table(("the machine", "measured"), lines)


def _notes(results: Results, device: Found, versions: Found) -> list[str]:
    names = ("python", "turnrl", "torch", "transformers", "cuda", "bitsandbytes", "triton")
    held = [f"{name} {versions[name]}" for name in names if versions.get(name)]
    notes = [", ".join(held)] if held else []
    if device.get("capability"):
        notes.append(
            f"{device['name']}, {device['bytes'] / 1e9:.0f} GB, compute capability "
            f"{device['capability']}."
        )
    if loaded := results.case("loading", "nf4"):
        shared = "shared" if loaded["share_prefixes"] else "not shared"
        choices = "".join(f"; {name}: {value}" for name, value in loaded["in_force"].items())
        notes.append(f"In force: prefixes are {shared} while learning{choices}.")
    for name, part in results.parts.items():
        cases = {f"{name}, {case}": entry for case, entry in part.get("cases", {}).items()}
        for label, entry in {name: part, **cases}.items():
            if entry["status"] not in (DONE, "partial"):
                why = str(entry.get("error") or entry.get("why"))
                notes.append(f"{label}: {why.rstrip('.')}.")
    return notes
