"""The measurements of `turnrl bench`: which processes take turns, and what their report says.

Each is named as on the command line, takes the command's options, and returns its report. This
process itself measures nothing, so that what needs torch is imported by the measurement that asks
for it.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from turnrl_doctor import plan

from turnrl import RecipeError, parse_bytes
from turnrl_bench.gpu.driver import drive, models
from turnrl_bench.gpu.floors import Network, model_bytes
from turnrl_bench.gpu.parts import chosen
from turnrl_bench.gpu.report import report_of
from turnrl_bench.gpu.results import Results
from turnrl_bench.gpu.shapes import RANK, SMALL, WHOLE
from turnrl_bench.measure import (
    MEMORY,
    NONE,
    Report,
    Side,
    Table,
    alternate,
    megabytes,
    ratio,
    seconds,
    typical,
)
from turnrl_bench.task import Shape, make


def _threads(args: argparse.Namespace) -> str:
    return f"{args.threads} thread{'' if args.threads == 1 else 's'}"


def _shape(args: argparse.Namespace) -> Shape:
    first = -(-args.tokens * 5 // 9)
    turns = (first, args.tokens - first)
    return Shape(args.prompts, args.group_size, args.prompt_tokens, turns)


# -------------------------------------------------------------------------------------- trl


def trl(args: argparse.Namespace) -> Report:
    """Training steps beside those of TRL's `GRPOTrainer`, once both are known to do equal work."""
    from turnrl_bench.equal import compare, template

    text = template()
    count = args.prompts * args.group_size
    if count % args.trl_rows:
        raise RecipeError(
            f"--trl-rows is {args.trl_rows}, which does not divide the {count} trajectories. "
            "Give a divisor."
        )
    if args.group_size < 2:
        raise RecipeError("--group-size is 1, and trajectories are compared with each other.")
    shape = _shape(args)
    title = (
        f"A training step: {args.prompts} prompts x {args.group_size} trajectories, "
        f"{sum(shape.turn_tokens)} sampled tokens each,\nby {_threads(args)}"
    )
    with tempfile.TemporaryDirectory(prefix="turnrl-bench-") as name:
        folder = Path(name)
        make(folder / "model", shape, text)

        def sides(**more: Any) -> list[Side]:
            ours = {"folder": str(folder / "model"), "steps": args.steps, "warm_up": 1, **more}
            theirs = {**ours, "rows": args.trl_rows}
            return [
                Side("turnrl", "turnrl_bench.ours:iterations", ours, args.threads),
                Side("TRL", "turnrl_bench.trl:iterations", theirs, args.threads),
            ]

        kept = (folder / "ours.pt", folder / "theirs.pt")
        ours, theirs = (
            replace(side, settings={**side.settings, "gradient": str(file)}).run("equal work: ")
            for side, file in zip(sides(steps=1, warm_up=0), kept, strict=True)
        )
        gate, passed = compare(ours, theirs, kept)
        equal = Table(("equal work", "", "turnrl and TRL"), tuple(gate))
        raw: dict[str, Any] = {"shape": vars(shape), "equal_work": passed}
        if not passed:
            why = "The two sides did not do the same work, so nothing was timed."
            return Report(title, [why], [equal], raw, code=1)

        cases: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
            ("", {}, ("rollouts", "learning", "whole step")),
            ("two updates", {"updates": 2}, ("whole step",)),
        ]
        if args.tool_ms is not None:
            cases.append((f"{args.tool_ms:g} ms tool", {"tool_ms": args.tool_ms}, ("whole step",)))
        rows = []
        for label, more, parts in cases:
            case = label or "one update"
            raw[case] = measured = alternate(sides(**more), args.blocks, f"{case}, ")
            mine, others = measured["turnrl"], measured["TRL"]
            for part in parts:
                cells = [f"{typical(b, part, c):.2f}" for b in (others, mine) for c in (0, 1)]
                wall, cpu = (
                    ratio(seconds(others, part, c), seconds(mine, part, c)) for c in (0, 1)
                )
                named = f"{part}, {label}" if label else part
                rows.append((named, *cells, str(wall), f"{cpu.value:.2f}x"))
    header = ("seconds", "TRL", "CPU", "turnrl", "CPU", "TRL/turnrl", "CPU")
    first = raw["one update"]["turnrl"][0]
    notes = [
        f"{first['trajectories']} trajectories, {first['prompt']}-token prompts on both sides, "
        f"{first['sampled']} sampled tokens, {first['tokens']} in all; medians of "
        f"{args.blocks} x {args.steps} steps.",
        "Same model (Qwen2, 1.8 M parameters, float32), tokens, calls and rewards on both sides; "
        f"TRL without checkpointing, beta 0, loss_type dapo, micro-batches of {args.trl_rows}; "
        "turnrl with its defaults, but for TRL's advantages of the outcome alone. A step's "
        "learning is all of it but the rollouts.",
    ]
    if args.tool_ms is not None:
        notes.append(
            f"The tool that takes {args.tool_ms:g} ms is a coroutine on both sides, which sleeps. "
            "turnrl's gets a batch of calls and asks for all at once; TRL awaits the calls of one "
            "trajectory before it takes up the next one's."
        )
    return Report(title, notes, [equal, Table(header, tuple(rows))], raw)


# ----------------------------------------------------------------------------------- engine


def engine(args: argparse.Namespace) -> Report:
    """Tokens sampled in a second by Slots, and by a vLLM server if there is one."""
    sizes = (args.prompts, args.group_size, args.prompt_tokens, args.tokens)
    settings = {"sizes": sizes, "rounds": args.steps, "warm_up": 1}
    sides = [Side("Slots", "turnrl_bench.world:slots", settings, args.threads)]
    if args.url is not None:
        from turnrl_bench.world import served_model

        served_model(args.url)
        more = {**settings, "url": args.url}
        sides.append(Side("vLLM", "turnrl_bench.world:served", more, args.threads))
    measured = alternate(sides, args.blocks)
    rows = []
    for name, blocks in measured.items():
        wall, sampled = typical(blocks, "sampling"), blocks[0]["sampled"]
        rows.append((name, str(sampled), f"{wall:.2f} s", f"{sampled / wall:,.0f}"))
    if args.url is None:
        rows.append(("vLLM", NONE, NONE, NONE))
        note = "vLLM was not measured: --url names no server."
    else:
        mine, others = (seconds(measured[name], "sampling") for name in ("Slots", "vLLM"))
        rows.append(("ratio", "", str(ratio(others, mine)), ""))
        note = (
            "The server is asked over HTTP by 64 threads, for token ids and log-probabilities, as "
            "a trainer needs both; prompts are new in each round. Slots runs with "
            f"{_threads(args)}; the server's are its own."
        )
    return Report(
        f"Sampling: {args.prompts * args.group_size} requests x ({args.prompt_tokens} prompt + "
        f"{args.tokens} sampled tokens),\nprompts shared by {args.group_size}, Atlas starter (0.9 "
        "M parameters)",
        [note],
        [Table(("", "sampled tokens", "seconds", "tokens/s"), tuple(rows))],
        {"blocks": measured},
    )


# ------------------------------------------------------------------------------------ learn

WIDE = plan.Shape(
    hidden=896, inner=128, layers=1, heads=14, kv_heads=2, head_size=64, vocab=152_064, tied=True
)
"""A head as wide as Qwen2.5-0.5B's, and hardly anything before it."""


def learn(args: argparse.Namespace) -> Report:
    """Learning with prompts computed once beside rows padded, and the memory of a wide head."""
    function = "turnrl_bench.ours:iterations"
    with tempfile.TemporaryDirectory(prefix="turnrl-bench-") as name:
        folder, wide = str(Path(name, "model")), str(Path(name, "wide"))
        make(Path(folder), _shape(args))
        settings = {"folder": folder, "samples": False, "warm_up": 1, "steps": args.steps}
        sides = [
            Side(name, function, {**settings, "policy": {"share_prefixes": on}}, args.threads)
            for name, on in (("prompts once", True), ("rows padded", False))
        ]
        results = alternate(sides, args.blocks)

        def measured(side: Side, **changes: Any) -> dict[str, Any]:
            once = {**side.settings, **changes}
            return replace(side, settings=once, environment=MEMORY).run("memory: ")

        peaks = {side.name: measured(side, steps=1)["peaks"][-1] for side in sides}
        make(Path(wide), Shape(1, 8, 281, (256, 256)), network=WIDE)
        chunks = Side("chunks", function, {**settings, "steps": 1, "warm_up": 0}, args.threads)
        mine = measured(chunks, folder=wide, policy={"lora": 8})
        plain = {"folder": wide}
        whole = measured(Side("full logits", "turnrl_bench.ours:full_logits", plain, args.threads))
    rows = [
        (name, f"{typical(b, 'learning'):.2f} s", f"{typical(b, 'learning', 1):.2f} s",
         megabytes(peaks[name]))
        for name, b in results.items()
    ]  # fmt: skip
    shared, padded = (seconds(blocks, "learning") for blocks in results.values())
    rows.append(("ratio", str(ratio(padded, shared)), "", ""))
    sizes = [mine["peaks"][-1], whole["peaks"][-1]]
    share = NONE if None in sizes else f"{100 * sizes[0] / sizes[1]:.0f} %"
    both = (("turnrl", megabytes(sizes[0])), ("full logits", megabytes(sizes[1])))
    return Report(
        f"Learning: {args.prompts} prompts x {args.group_size} trajectories, {args.prompt_tokens} "
        f"+ {args.tokens} tokens,\none epoch, by {_threads(args)}",
        [
            f"Trajectories come from a script, so there are no rollouts; "
            f"{results['prompts once'][0]['sampled']} sampled tokens an epoch, medians of "
            f"{args.blocks} x {args.steps}.",
            f"Peak memory is what the process holds above what it held before learning. The wide "
            f"vocabulary: {mine['sampled']} loss tokens, an adapter, a frozen head; the full "
            "logits are those of the loss tokens alone, in one tensor.",
        ],
        [
            Table(("", "wall", "CPU", "peak memory"), tuple(rows)),
            Table(("vocabulary 152,064, hidden 896", "peak memory"), (*both, ("share", share))),
        ],
        {"blocks": results, "peaks": peaks, "wide": {"turnrl": mine, "full_logits": whole}},
    )


# ------------------------------------------------------------------------------------ tools


def tools(args: argparse.Namespace) -> Report:
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
    measured = alternate(sides, args.blocks)
    rows = []
    for name, _, _ in delays:
        cells = [f"{typical(b, name):.2f} s" for b in measured.values()]
        both = [seconds(measured[side], name) for side in ("lockstep", "free")]
        rows.append((name, *cells, str(ratio(both[0], both[1]))))
    return Report(
        f"Collecting {args.prompts} x {args.group_size} trajectories of the quickstart, "
        f"by {_threads(args)}",
        [
            "A tool is a coroutine that answers a batch when all of its calls are answered. 'Each "
            "its own': a call takes between nothing and twice the time. The same tokens on both "
            f"sides, as far as rounding goes; medians of {args.blocks} x {args.steps} collections."
        ],
        [Table(("a call takes", "lockstep", "free", "lockstep/free"), tuple(rows))],
        {"blocks": measured},
    )


# ------------------------------------------------------------------------------------ scale


def scale(args: argparse.Namespace) -> Report:
    """Time and memory of collections of more and more trajectories."""
    parse_bytes(args.kv_memory, "--kv-memory")  # one that is no size is told at once
    for n in args.trajectories:
        if n % args.group_size:
            what = f"--trajectories has {n}, which groups of {args.group_size} do not divide."
            raise RecipeError(f"{what} Give multiples.")
    settings = {"group": args.group_size, "engine": {"kv_memory": args.kv_memory}}
    sides = [
        Side(str(n), "turnrl_bench.world:scale", {**settings, "trajectories": n}, args.threads,
             MEMORY)
        for n in args.trajectories
    ]  # fmt: skip
    measured = alternate(sides, args.blocks, "trajectories, ")
    rows, last = [], (0, 0.0)
    for name, blocks in measured.items():
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
    return Report(
        f"Collections of the quickstart's trajectories, {args.group_size} of a question, "
        f"by {_threads(args)},\nkeys and values within {args.kv_memory}",
        [
            "Peak memory is what the process holds above what it held before, the trajectories "
            "themselves included. One more: what each has added since the row above."
        ],
        [Table(header, tuple(rows))],
        {"blocks": measured},
    )


# -------------------------------------------------------------------------------------- gpu


def gpu(args: argparse.Namespace) -> Report:
    """A 7B policy on a GPU; each part is written to the JSON file when it ends."""
    import torch

    parts = chosen(args.parts)
    results = Results(args.json.absolute())
    if results.found["parts"] and not args.resume:
        raise RecipeError(
            f"--json is {str(args.json)!r}, which is there. Add --resume to go on with it, or name "
            "another file."
        )
    todo = [part for part in parts if not results.is_done(part.name)]
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
    report = report_of(results)
    report.code = int(any(results.part(p.name).get("status") == "error" for p in parts))
    measured = [table for table in report.tables if any(NONE not in row for row in table.rows)]
    report.tables = measured or report.tables
    return report
