"""Whether turnrl and TRL do equal work: before anything is timed, one step of each is compared."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from turnrl import RecipeError
from turnrl_bench.measure import Found

LEAST_COSINE = 0.9999


def template() -> str:
    """TRL's own text of Qwen2.5's chat template, by which it recognises the family.

    Raises:
        RecipeError: If TRL is not there.
    """
    if importlib.util.find_spec("trl") is None:
        raise RecipeError(
            "TRL is not installed, and is what turnrl is compared with. Install it with "
            "pip install 'turnrl[bench]'."
        )
    found: str = importlib.import_module("trl.chat_template_utils").qwen2_5_chat_template
    return found


def compare(ours: Found, theirs: Found, gradients: tuple[Path, Path]) -> tuple[list[str], bool]:
    """Whether both sides did the same work in a first step.

    Args:
        ours: What `ours.iterations` gave.
        theirs: What `iterations` gave.
        gradients: Where the two have left their gradients.
    Returns:
        A line for each thing that has to be equal, and whether all are.
    """
    mine, others = (
        sorted(f["work"], key=lambda w: (w["prompt"], w["ids"])) for f in (ours, theirs)
    )
    lines, passed = [], len(mine) == len(others)

    def told(what: str, fits: bool, detail: str) -> None:
        nonlocal passed
        passed = passed and fits
        lines.append(f"{'equal' if fits else 'DIFFERENT':9}  {what}: {detail}")

    lengths = [sorted({len(w["prompt"]) for w in some}) for some in (mine, others)]
    told("prompts", _same(mine, others, "prompt"), f"{lengths[0]} and {lengths[1]} tokens")
    sampled = [
        [[t for t, m in zip(w["ids"], w["loss"], strict=True) if m] for w in some]
        for some in (mine, others)
    ]
    counts = [sum(map(len, some)) for some in sampled]
    told("sampled tokens", sampled[0] == sampled[1], f"{counts[0]} and {counts[1]}")
    told("all tokens", _same(mine, others, "ids"), _count(mine, others, "ids"))
    told("loss tokens", _same(mine, others, "loss"), f"{counts[0]} and {counts[1]}")
    told("tool calls", _same(mine, others, "calls"), _count(mine, others, "calls"))
    told("rewards", _same(mine, others, "reward"), f"of {len(mine)} and {len(others)}")
    cosine, norms = gradient_cosine(*gradients)
    told(
        "gradients",
        cosine > LEAST_COSINE,
        f"cosine {cosine:.7f}, norms {norms[0]:.6g} and {norms[1]:.6g}",
    )
    return lines, passed


def _same(mine: list[Any], others: list[Any], key: str) -> bool:
    return [w[key] for w in mine] == [w[key] for w in others]


def _count(mine: list[Any], others: list[Any], key: str) -> str:
    return " and ".join(str(sum(len(w[key]) for w in some)) for some in (mine, others))


def gradient_cosine(first: Path, second: Path) -> tuple[float, tuple[float, float]]:
    """The cosine of two gradients, and their norms. Names have to be the same."""
    one, other = (torch.load(file, weights_only=True) for file in (first, second))
    if set(one) != set(other):
        return 0.0, (float(len(one)), float(len(other)))
    a, b = (torch.cat([g[n].flatten().double() for n in sorted(g)]) for g in (one, other))
    return float(a @ b / (a.norm() * b.norm())), (float(a.norm()), float(b.norm()))
