"""Draws the attempt of README's first picture, from the record of a run.

    python docs/attempt.py

`_static/attempt.json` has the attempt, and what the sixteen attempts of its group earned. The
advantages are computed from these, by turnrl's own estimators.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import torch

from turnrl import Merged, OutcomeOnly, TurnLevel

HERE = Path(__file__).parent / "_static"
THEMES = {
    "light": {"text": "#1f2328", "soft": "#59636e", "line": "#d1d9e0"},
    "dark": {"text": "#f0f6fc", "soft": "#9198a1", "line": "#3d444d"},
}
SIGNS = {"light": ("#0a5ca8", "#b03a06"), "dark": ("#79b8ff", "#ffa657")}
"""Of advantages above 0 and below."""
RULES = {
    "MT-GRPO": (
        TurnLevel(),
        "an advantage for each turn",
        ("credits searches,", "blames answer"),
    ),
    "GRPO-MR": (Merged(), "one for all rewards", ("rewards", "the error")),
    "GRPO-OR": (OutcomeOnly(), "one for the outcome", ("blames", "searches")),
}
"""By the paper's name: the estimator, what it is, and what it does to this attempt."""
WIDTH, LEFT, FIRST, STEP = 880, 8, 602, 110
LONGEST = 74
"""Characters of a result in a line."""


def advantages(told: Mapping[str, Any]) -> dict[str, list[float]]:
    """The advantages of the attempt's turns, by the paper's name of the rule."""
    attempts = told["attempts"]
    turns = max(len(one["turn_rewards"]) for one in attempts)
    rewards = torch.zeros(len(attempts), turns)
    reached = torch.zeros(len(attempts), turns).bool()
    for row, one in enumerate(attempts):
        taken = len(one["turn_rewards"])
        rewards[row, :taken] = torch.tensor(one["turn_rewards"])
        reached[row, :taken] = True
    outcome = torch.tensor([one["outcome"] for one in attempts])
    member, taken = told["member"], len(told["turns"])
    return {
        name: rule.advantages(rewards, outcome, reached)[member, :taken].tolist()
        for name, (rule, *_) in RULES.items()
    }


def picture(told: Mapping[str, Any], theme: str) -> str:
    """The attempt as SVG, on no background."""
    own = advantages(told)
    body = [*_head(told), *_turns(told, own, SIGNS[theme])]
    height = 70 + 72 * len(told["turns"]) + 42
    colors = "".join(f".{name}{{fill:{color}}}" for name, color in THEMES[theme].items())
    said = "; ".join(f"{name} {', '.join(map(_signed, row))}" for name, row in own.items())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            f"<title>{escape(told['question'])} Advantages of its turns: {said}</title>",
            f"<style>text{{font:14px system-ui,'Segoe UI',Helvetica,Arial,sans-serif}}{colors}"
            ".b{font-weight:600}.s{font-size:12px}.n{font-size:17px;font-weight:600;"
            "text-anchor:middle}.m{text-anchor:middle}.i{font-style:italic}"
            "text.c{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13px}</style>",
            *body,
            "</svg>\n",
        ]
    )


def _head(told: Mapping[str, Any]) -> Iterator[str]:
    yield _text(LEFT, 22, "text b", told["question"])
    given = told["turns"][-1]["answer"]
    yield _text(LEFT, 44, "soft", f"answered {given}, accepted {told['accepted']}")
    for column, (name, (_, about, _)) in enumerate(RULES.items()):
        x = FIRST + STEP * column
        yield _text(x, 22, "text b m", name)
        words = about.split()
        half = (len(words) + 1) // 2
        for row, some in enumerate((words[:half], words[half:])):
            yield _text(x, 40 + 14 * row, "soft s m", " ".join(some))


def _turns(
    told: Mapping[str, Any], own: Mapping[str, list[float]], signs: tuple[str, str]
) -> Iterator[str]:
    y = 70
    earned = told["attempts"][told["member"]]["turn_rewards"]
    for number, turn in enumerate(told["turns"]):
        yield f'<rect class="line" x="{LEFT}" y="{y}" width="{WIDTH - 2 * LEFT}" height="1"/>'
        yield _text(LEFT, y + 22, "text b", f"{number + 1}")
        yield _text(LEFT + 20, y + 22, "soft i", turn["thought"])
        call = f'search("{turn["call"]}")' if "call" in turn else f"answer {turn['answer']}"
        yield _text(LEFT + 20, y + 42, "text c", call)
        if "result" in turn:
            yield _text(LEFT + 20, y + 61, "soft s", _cut(turn["result"], told["accepted"]))
        if earned[number]:
            yield _text(FIRST - 130, y + 42, "soft s", f"reward {earned[number]}")
        for column, row in enumerate(own.values()):
            color = signs[row[number] < 0]
            x = FIRST + STEP * column
            yield (
                f'<text x="{x}" y="{y + 42}" class="n" style="fill:{color}">'
                f"{_signed(row[number])}</text>"
            )
        y += 72
    yield f'<rect class="line" x="{LEFT}" y="{y}" width="{WIDTH - 2 * LEFT}" height="1"/>'
    for column, (_, _, does) in enumerate(RULES.values()):
        for row, words in enumerate(does):
            yield _text(FIRST + STEP * column, y + 18 + 15 * row, "text s m", words)


def _cut(result: str, accepted: str) -> str:
    """A result in a line: its beginning, and what it says of the accepted answer."""
    if len(result) <= LONGEST:
        return result
    first, *others = result.split(". ")
    for said in others:
        if accepted in said:
            return f"{first}. … {said.rstrip('.')}."
    return f"{result[:LONGEST].rsplit(' ', 1)[0]} …"


def _text(x: int, y: int, names: str, said: str) -> str:
    return f'<text x="{x}" y="{y}" class="{names}">{escape(said)}</text>'


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


if __name__ == "__main__":
    attempt = json.loads((HERE / "attempt.json").read_text())
    for name in THEMES:
        (HERE / f"attempt-{name}.svg").write_text(picture(attempt, name))
        print(HERE / f"attempt-{name}.svg")
