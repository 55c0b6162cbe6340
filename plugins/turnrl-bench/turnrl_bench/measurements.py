"""The measurements of `turnrl bench`: which processes take turns, and what their report says.

Each takes the command's options, and returns its report with an exit code. This process itself
measures nothing, so that what needs torch is imported by the measurement that asks for it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from turnrl import RecipeError
from turnrl_bench.gpu.driver import drive, models
from turnrl_bench.gpu.parts import chosen
from turnrl_bench.gpu.report import ROWS, report_of
from turnrl_bench.gpu.results import Results
from turnrl_bench.gpu.shapes import SMALL, WHOLE, model_bytes
from turnrl_bench.measure import (
    MEMORY,
    NONE,
    Report,
    Side,
    Table,
    alternate,
    median,
    megabytes,
    ratio,
    seconds,
    typical,
)
from turnrl_bench.task import Shape, make


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="turnrl-bench-") as folder:
        yield Path(folder)


def _shape(args: argparse.Namespace) -> Shape:
    first = -(-args.tokens * 5 // 9)
    turns = (first, args.tokens - first)
    return Shape(args.prompts, args.group_size, args.prompt_tokens, turns)


# -------------------------------------------------------------------------------------- trl


def trl(args: argparse.Namespace) -> tuple[Report, int]:
    """Training steps beside those of TRL's `GRPOTrainer`, once both are known to do equal work."""
    from turnrl_bench.equal import template

    text = template()
    count = args.prompts * args.group_size
    if count % args.trl_rows:
        raise RecipeError(
            f"--trl-rows is {args.trl_rows}, which does not divide the {count} trajectories. "
            "Give a divisor."
        )
    if args.group_size < 2:
        raise RecipeError("--group-size is 1, and trajectories are compared with each other.")
    with _folder() as folder:
        return _beside_trl(args, folder, text)


def _beside_trl(args: argparse.Namespace, folder: Path, template: str) -> tuple[Report, int]:
    from turnrl_bench.equal import compare

    shape = _shape(args)
    make(folder / "model", shape, template)
    sampled = sum(shape.turn_tokens)
    report = Report(
        f"A training step: {args.prompts} prompts x {args.group_size} trajectories, "
        f"{sampled} sampled tokens each,\nby {_plural(args.threads, 'thread')}"
    )

    def sides(steps: int, warm_up: int, gradients: Sequence[Path] = (), **more: Any) -> list[Side]:
        made = []
        for n, (name, module) in enumerate((("turnrl", "ours"), ("TRL", "trl"))):
            settings = {"folder": str(folder / "model"), "steps": steps, "warm_up": warm_up, **more}
            if gradients:
                settings["gradient"] = str(gradients[n])
            if module == "trl":
                settings["rows"] = args.trl_rows
            made.append(
                Side(name, f"turnrl_bench.{module}:iterations", settings, threads=args.threads)
            )
        return made

    kept = (folder / "ours.pt", folder / "theirs.pt")
    ours, theirs = (side.run("equal work: ") for side in sides(1, 0, kept))
    gate, passed = compare(ours, theirs, kept)
    report.tables.append(Table(("equal work", "", "turnrl and TRL"), tuple(gate)))
    report.raw = {"shape": vars(shape), "equal_work": passed}
    if not passed:
        report.notes.append("The two sides did not do the same work, so nothing was timed.")
        return report, 1

    cases: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ("", {}, ("rollouts", "learning", "whole step")),
        ("two updates", {"updates": 2}, ("whole step",)),
    ]
    if args.tool_ms is not None:
        cases.append((f"{args.tool_ms:g} ms tool", {"tool_ms": args.tool_ms}, ("whole step",)))
    rows = []
    for label, more, parts in cases:
        found = alternate(sides(args.steps, 1, **more), args.blocks, f"{label or 'one update'}, ")
        report.raw[label or "one update"] = found
        mine, others = found["turnrl"], found["TRL"]
        for part in parts:
            cells = [f"{typical(b, part, c):.2f}" for b in (others, mine) for c in (0, 1)]
            wall, cpu = (ratio(seconds(others, part, c), seconds(mine, part, c)) for c in (0, 1))
            rows.append(
                (f"{part}, {label}" if label else part, *cells, str(wall), f"{cpu.value:.2f}x")
            )
    header = ("seconds", "TRL", "CPU", "turnrl", "CPU", "TRL/turnrl", "CPU")
    report.tables.append(Table(header, tuple(rows)))
    first = report.raw["one update"]["turnrl"][0]
    report.notes += [
        f"{first['trajectories']} trajectories, {first['prompt']}-token prompts on both sides, "
        f"{first['sampled']} sampled tokens, {first['tokens']} in all; medians of "
        f"{args.blocks} x {args.steps} steps.",
        "Same model (Qwen2, 1.8 M parameters, float32), tokens, calls and rewards on both sides; "
        f"TRL without checkpointing, beta 0, loss_type dapo, micro-batches of {args.trl_rows}; "
        "turnrl with its defaults, but for TRL's advantages of the outcome alone. A step's "
        "learning is all of it but the rollouts.",
    ]
    if args.tool_ms is not None:
        report.notes.append(
            f"The tool that takes {args.tool_ms:g} ms is a coroutine on both sides, which sleeps. "
            "turnrl's gets a batch of calls and asks for all at once; TRL awaits the calls of one "
            "trajectory before it takes up the next one's."
        )
    return report, 0


# ----------------------------------------------------------------------------------- engine


def engine(args: argparse.Namespace) -> tuple[Report, int]:
    """Tokens sampled in a second by Slots, and by a vLLM server if there is one."""
    sizes = (args.prompts, args.group_size, args.prompt_tokens, args.tokens)
    settings = {"sizes": sizes, "rounds": args.steps, "warm_up": 1}
    sides = [Side("Slots", "turnrl_bench.world:slots", settings, args.threads)]
    if args.url is not None:
        from turnrl_bench.world import served_model

        served_model(args.url)
        more = {**settings, "url": args.url}
        sides.append(Side("vLLM", "turnrl_bench.world:served", more, args.threads))
    requests = args.prompts * args.group_size
    report = Report(
        f"Sampling: {requests} requests x ({args.prompt_tokens} prompt + {args.tokens} sampled "
        f"tokens),\nprompts shared by {args.group_size}, Atlas starter (0.9 M parameters)"
    )
    found = alternate(sides, args.blocks)
    report.raw = {"blocks": found}
    rows = []
    for name, blocks in found.items():
        wall, sampled = typical(blocks, "sampling"), blocks[0]["sampled"]
        rows.append((name, str(sampled), f"{wall:.2f} s", f"{sampled / wall:,.0f}"))
    if args.url is None:
        rows.append(("vLLM", NONE, NONE, NONE))
        report.notes.append("vLLM was not measured: --url names no server.")
    else:
        mine, others = (seconds(found[name], "sampling") for name in ("Slots", "vLLM"))
        rows.append(("ratio", "", str(ratio(others, mine)), ""))
        report.notes.append(
            f"The server is asked over HTTP by 64 threads, for token ids and log-probabilities, as "
            f"a trainer needs both; prompts are new in each round. Slots runs with "
            f"{_plural(args.threads, 'thread')}; the server's are its own."
        )
    report.tables.append(Table(("", "sampled tokens", "seconds", "tokens/s"), tuple(rows)))
    return report, 0


# ------------------------------------------------------------------------------------ learn

WIDE = {
    "vocab_size": 152_064,
    "hidden_size": 896,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""A head as wide as Qwen2.5-0.5B's, and hardly anything before it."""


def learn(args: argparse.Namespace) -> tuple[Report, int]:
    """Learning with prompts computed once beside rows padded, and the memory of a wide head."""
    shape = _shape(args)
    report = Report(
        f"Learning: {args.prompts} prompts x {args.group_size} trajectories, {args.prompt_tokens} "
        f"+ {args.tokens} tokens,\none epoch, by {_plural(args.threads, 'thread')}"
    )
    function = "turnrl_bench.ours:iterations"
    options = {
        "prompts once": {"share_prefixes": True},
        "rows padded": {"share_prefixes": False},
    }
    with _folder() as folder:
        make(folder / "model", shape)
        settings = {"folder": str(folder / "model"), "samples": False, "warm_up": 1}
        sides = [
            Side(name, function, {**settings, "steps": args.steps, "policy": p}, args.threads)
            for name, p in options.items()
        ]
        found = alternate(sides, args.blocks)
        peaks = {
            side.name: Side(
                side.name, function, {**side.settings, "steps": 1}, args.threads, MEMORY
            ).run("memory: ")["peaks"][-1]
            for side in sides
        }
        rows = [
            (name, f"{typical(b, 'learning'):.2f} s", f"{typical(b, 'learning', 1):.2f} s",
             megabytes(peaks[name]))
            for name, b in found.items()
        ]  # fmt: skip
        shared, padded = (seconds(found[name], "learning") for name in options)
        rows.append(("ratio", str(ratio(padded, shared)), "", ""))
        report.tables.append(Table(("", "wall", "CPU", "peak memory"), tuple(rows)))
        report.raw = {"blocks": found, "peaks": peaks}

        wide = Shape(1, 8, 281, (256, 256))
        make(folder / "wide", wide, network=WIDE)
        settings = {"folder": str(folder / "wide"), "samples": False, "steps": 1, "warm_up": 0}
        lora = {**settings, "policy": {"lora": 8}}
        mine = Side("chunks", function, lora, args.threads, MEMORY).run("wide vocabulary: ")
        plain = {"folder": str(folder / "wide")}
        whole = Side(
            "full logits", "turnrl_bench.ours:full_logits", plain, args.threads, MEMORY
        ).run("wide vocabulary: ")
        sizes = [mine["peaks"][-1], whole["peaks"][-1]]
        told = NONE if None in sizes else f"{100 * sizes[0] / sizes[1]:.0f} %"
        both = (("turnrl", megabytes(sizes[0])), ("full logits", megabytes(sizes[1])))
        header = ("vocabulary 152,064, hidden 896", "peak memory")
        report.tables.append(Table(header, (*both, ("share", told))))
        report.raw["wide"] = {"turnrl": mine, "full_logits": whole}
        report.notes += [
            f"Trajectories come from a script, so there are no rollouts; "
            f"{found['prompts once'][0]['sampled']} sampled tokens an epoch, medians of "
            f"{args.blocks} x {args.steps}.",
            f"Peak memory is what the process holds above what it held before learning. The wide "
            f"vocabulary: {mine['sampled']} loss tokens, an adapter, a frozen head; the full "
            "logits are those of the loss tokens alone, in one tensor.",
        ]
    return report, 0


# ------------------------------------------------------------------------------------ tools


def tools(args: argparse.Namespace) -> tuple[Report, int]:
    """Collections in lockstep and without, with tools that take their time."""
    delays = [
        (f"{ms:g} ms{', each its own' if jitter else ''}", ms, jitter)
        for ms in args.tool_ms
        for jitter in ([False, True] if ms else [False])
    ]
    settings = {
        "delays": delays,
        "questions": args.prompts,
        "group": args.group_size,
        "rounds": args.steps,
    }
    sides = [
        Side(name, "turnrl_bench.world:tools", {**settings, "lockstep": on}, args.threads)
        for name, on in (("lockstep", True), ("free", False))
    ]
    report = Report(
        f"Collecting {args.prompts} x {args.group_size} trajectories of the quickstart, "
        f"by {_plural(args.threads, 'thread')}"
    )
    found = alternate(sides, args.blocks)
    report.raw = {"blocks": found}
    rows = []
    for name, _, _ in delays:
        cells = [f"{typical(b, name):.2f} s" for b in found.values()]
        both = [seconds(found[side], name) for side in ("lockstep", "free")]
        rows.append((name, *cells, str(ratio(both[0], both[1]))))
    header = ("a call takes", "lockstep", "free", "lockstep/free")
    report.tables.append(Table(header, tuple(rows)))
    report.notes.append(
        "A tool is a coroutine that answers a batch when all of its calls are answered. 'Each its "
        "own': a call takes between nothing and twice the time. The same tokens on both sides, as "
        f"far as rounding goes; medians of {args.blocks} x {args.steps} collections."
    )
    return report, 0


# ------------------------------------------------------------------------------------ scale


def scale(args: argparse.Namespace) -> tuple[Report, int]:
    """Time and memory of collections of more and more trajectories."""
    from turnrl_bench.ours import slots_of

    budget = {"kv_memory": args.kv_memory}
    slots_of(**budget)  # a size that is none is told at once
    report = Report(
        f"Collections of the quickstart's trajectories, {args.group_size} of a question, "
        f"by {_plural(args.threads, 'thread')},\n"
        f"keys and values within {args.kv_memory}"
    )
    settings = {"group": args.group_size, "engine": budget}
    for n in args.trajectories:
        if n % args.group_size:
            what = f"--trajectories has {n}, which groups of {args.group_size} do not divide."
            raise RecipeError(f"{what} Give multiples.")
    sides = [
        Side(str(n), "turnrl_bench.world:scale", {**settings, "trajectories": n}, args.threads,
             MEMORY)
        for n in args.trajectories
    ]  # fmt: skip
    found = alternate(sides, args.blocks, "trajectories, ")
    report.raw = {"blocks": found}
    rows, last = [], (0, 0.0)
    for name, blocks in found.items():
        count, wall = int(blocks[0]["trajectories"]), typical(blocks, "collection")
        peaks = [p for b in blocks for p in b["peaks"] if p is not None]
        peak, sampled = median(peaks) if peaks else None, blocks[0]["sampled"] / count
        more = NONE
        if peak is not None and count > last[0]:
            more = f"{(peak - last[1]) / (count - last[0]) / 1e3:,.0f} kB" if last[0] else ""
            last = (count, peak)
        each = f"{1e3 * wall / count:.1f} ms"
        rows.append((name, f"{sampled:.1f}", f"{wall:.1f} s", each, megabytes(peak), more))
    header = ("trajectories", "tokens each", "wall", "each", "peak memory", "one more")
    report.tables.append(Table(header, tuple(rows)))
    report.notes.append(
        "Peak memory is what the process holds above what it held before, the trajectories "
        "themselves included. One more: what each has added since the row above."
    )
    return report, 0


# -------------------------------------------------------------------------------------- gpu


def gpu(args: argparse.Namespace) -> tuple[Report, int]:
    """A 7B policy on a GPU; each part is written to the JSON file when it ends."""
    parts = chosen(args.parts)
    results = Results(args.json.absolute())
    if results.found["parts"] and not args.resume:
        raise RecipeError(
            f"--json is {str(args.json)!r}, which is there. Add --resume to go on with it, or name "
            "another file."
        )
    results.check({"tiny": args.tiny})
    todo = [part for part in parts if not results.is_done(part.name)]
    if todo and not args.tiny:
        _check_gpu()
    results.describe({"tiny": args.tiny})
    before = Report("").before
    if todo:
        setting = SMALL if args.tiny else WHOLE
        nets = {"machine": 0, "train": model_bytes(setting.smaller)}
        whole = model_bytes(setting.network)
        with models(max(nets.get(part.name, whole) for part in todo)) as folder:
            drive(results, todo, folder, args.tiny, args.minutes, args.threads)
    failed = [part.name for part in parts if results.part(part.name).get("status") == "error"]
    report = report_of(results, (4, 6) if args.tiny else ROWS)
    report.before = before
    measured = [table for table in report.tables if any(NONE not in row for row in table.rows)]
    report.tables = measured or report.tables
    return report, 1 if failed else 0


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise RecipeError(
            "there is no GPU here. On a machine with one, this takes nine minutes; --tiny runs the "
            "same on this one, in a small shape."
        )


MEASUREMENTS: dict[str, Callable[[argparse.Namespace], tuple[Report, int]]] = {
    "trl": trl,
    "engine": engine,
    "learn": learn,
    "tools": tools,
    "scale": scale,
    "gpu": gpu,
}
"""The measurements by their names on the command line."""
