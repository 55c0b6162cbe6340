"""Check that turnrl and TRL do equal work: before anything is timed, one step of each is
compared."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from turnrl import RecipeError
from turnrl_bench.measure import Found

LEAST_COSINE = 0.9999
_PARTS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "prompt tokens": lambda did: did["prompt"],
    "sampled tokens": lambda did: list(itertools.compress(did["ids"], did["loss"])),
    "tokens after the prompts": lambda did: did["ids"],
    "loss tokens": lambda did: [n for n, counts in enumerate(did["loss"]) if counts],
    "tool calls": lambda did: did["calls"],
    "rewards": lambda did: [did["reward"]],
}
"""Parts of each trajectory that have to be equal."""


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
    text: str = importlib.import_module("trl.chat_template_utils").qwen2_5_chat_template
    return text


def compare(
    ours: Found, theirs: Found, gradients: tuple[Path, Path]
) -> tuple[list[tuple[str, str, str]], bool]:
    """Compare the work that both sides did in a first step.

    Args:
        ours: What `ours.iterations` gave.
        theirs: What `trl.iterations` gave.
        gradients: Where the two have left their gradients.
    Returns:
        A row for each thing that has to be equal (its name, the verdict, the figures), and True if
        all are equal.
    """
    sides = [sorted(f["work"], key=lambda w: (w["prompt"], w["ids"])) for f in (ours, theirs)]
    rows = []
    for what, part in _PARTS.items():
        mine, others = ([part(one) for one in side] for side in sides)
        counts = [sum(map(len, some)) for some in (mine, others)]
        rows.append((what, mine == others, f"{counts[0]} and {counts[1]}"))
    cosine, norms = gradient_cosine(*gradients)
    figures = f"cosine {cosine:.7f}, norms {norms[0]:.6g} and {norms[1]:.6g}"
    rows.append(("gradients", cosine > LEAST_COSINE, figures))
    shown = [(what, "equal" if fits else "DIFFERENT", cell) for what, fits, cell in rows]
    return shown, all(fits for _, fits, _ in rows)


def gradient_cosine(first: Path, second: Path) -> tuple[float, tuple[float, float]]:
    """The cosine of two gradients, and their norms. Names have to be the same."""
    one, other = (torch.load(file, weights_only=True) for file in (first, second))
    if set(one) != set(other):
        return 0.0, (float(len(one)), float(len(other)))
    a, b = (torch.cat([g[n].flatten().double() for n in sorted(g)]) for g in (one, other))
    return float(a @ b / (a.norm() * b.norm())), (float(a.norm()), float(b.norm()))
