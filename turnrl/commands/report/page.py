"""One file with all of it: summaries that are read at once, details that are unpacked on demand.

The data lie in the page as gzip in base64, which no parser of HTML takes for markup, and the page's
policy lets no script run but its own. Whatever a trajectory says becomes text in the page.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import cache
from importlib.metadata import packages_distributions
from importlib.resources import files
from typing import Any

from turnrl.applied import Applied, Made, applied, make
from turnrl.plugins import find_class, installed
from turnrl.run import record
from turnrl.run.alarms.rules import alarms
from turnrl.run.runs import Run, differences, experiments
from turnrl.types.contracts import AdvantageEstimator
from turnrl.why import Term

_CHUNK = 48
"""Trajectories that are unpacked together, a group at least."""


def page(runs: Sequence[Run], title: str, most: int | None = None) -> Iterator[str]:
    """The page, in pieces.

    Args:
        runs: The runs, in the order of their lines.
        title: Title of the page.
        most: About how many trajectories of each run, whole groups from all parts; None for all.
    """
    assets = files("turnrl.commands.report") / "assets"
    style = "\n".join((assets / name).read_text() for name in ("uPlot.min.css", "report.css"))
    script = "\n".join((assets / name).read_text() for name in ("uPlot.iife.min.js", "report.js"))
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest(script)}",
            f"style-src {_digest(style)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    yield (
        (assets / "report.html")
        .read_text()
        .format(policy=policy, title=html.escape(title), style=style)
    )
    listed = _Listed()
    for number, run in enumerate(runs):
        for chunk in _chunks(run, most):
            yield _block(f"d{listed.chunks}", [_detail(members) for members in chunk])
            listed.add(number, chunk)
    yield _block("summary", _summary(runs, listed, title))
    yield f"<script>{script}</script>\n</body>\n</html>\n"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _block(name: str, value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{packed}</script>\n'


def _chunks(run: Run, most: int | None) -> Iterator[list[list[record.Row]]]:
    chunk: list[list[record.Row]] = []
    for members in run.groups(most):
        chunk.append(members)
        if sum(map(len, chunk)) >= _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


# ---------------------------------------------------------------------- summaries


class _Listed:
    """The columns of all trajectories, for the list. A question is kept once."""

    def __init__(self) -> None:
        self.chunks = 0
        self.questions: dict[tuple[str, str], int] = {}
        self.columns: dict[str, list[Any]] = {}

    def add(self, run: int, chunk: Sequence[Sequence[record.Row]]) -> None:
        """Add the groups of a chunk."""
        for place, members in enumerate(chunk):
            for row in members:
                asked = (row["question_id"] or "", row["question"])
                question = self.questions.setdefault(asked, len(self.questions))
                summary = {
                    "run": run,
                    "chunk": self.chunks,
                    "place": place,
                    "question": question,
                    "answer": (row["answer"] or "")[:200] if row["answer"] is not None else None,
                    "total": _short(row["outcome"] + sum(turn["reward"] for turn in row["turns"])),
                    "tokens": sum(turn["tokens"] for turn in row["turns"]),
                    "advantages": [_short(turn["advantage"]) for turn in row["turns"]],
                    **{name: row[name] for name in ("split", "iteration", "policy_version")},
                    **{name: row[name] for name in ("group", "member", "ended_by")},
                    **{name: _short(row[name]) for name in ("outcome", *record.CURVES)},
                }
                for name, value in summary.items():
                    self.columns.setdefault(name, []).append(value)
        self.chunks += 1


def _summary(runs: Sequence[Run], listed: _Listed, title: str) -> dict[str, Any]:
    return {
        "title": title,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "problems": run.problems,
                "metrics": run.metrics,
                "alarms": [asdict(alarm) for alarm in alarms(run.metrics)],
            }
            for run in runs
        ],
        "experiments": experiments(runs),
        "differences": differences(runs),
        "questions": list(listed.questions),
        "trajectories": listed.columns,
    }


def _short(value: float | None) -> float | None:
    """Nine digits: more than float32 has."""
    return None if value is None else float(f"{value:.9g}")


# ------------------------------------------------------------------------ details


def _detail(members: Sequence[record.Row]) -> dict[str, Any]:
    """A group: its trajectories in full, and why each turn got its advantage."""
    first = members[0]
    return {
        "mean": first["group_mean"],
        "std": first["group_std"],
        "estimator": record.json_object(first["estimator"]) if first["estimator"] else None,
        "rows": [_row(row) for row in members],
        "why": _why(members),
    }


def _row(row: record.Row) -> dict[str, Any]:
    names = ("answers", "answer", "begins", "prompt_tokens", "rewards", "figures", "turns")
    kept = {name: row[name] for name in names}
    if row["token_ids"]:
        kept |= {name: row[name] for name in ("turn_index", "learner_logprobs", "entropies")}
    return kept


def _why(members: Sequence[record.Row]) -> list[dict[str, Any]]:
    """The credit of this group: that of the run first, then that of every other estimator."""
    if any(turn["advantage"] is None for row in members for turn in row["turns"][row["begins"] :]):
        return []  # greedy: nothing was compared
    name, rule = _recorded(members[0]["estimator"])
    own, *others = applied(record.group(members), rule, name)
    return [_of_this_run(own, members), *(_credit(one, len(members)) for one in others)]


def _recorded(estimator: str | None) -> tuple[str, Made]:
    """The name of the run's estimator, and the estimator made again, or why it cannot be."""
    if estimator is None:
        return "the estimator", LookupError("the record does not say which it was")
    told = record.json_object(estimator)
    if told is None or "name" not in told or not isinstance(told.get("arguments"), dict):
        return "the estimator", LookupError(f"the record has no JSON of it, but {estimator[:60]!r}")
    kind = _class_of(told)
    if kind is None:
        return told["name"], LookupError("it is not installed here")
    # an error if it is of another version, or with a part that is no number
    return told["name"], make(kind, **told["arguments"])


def _class_of(told: Mapping[str, Any]) -> type | None:
    """The class of a recorded estimator; None if it is not here.

    A record may come from anyone: it has no file imported that is not part of something installed.
    """
    known = installed("turnrl_estimators")
    path = told.get("class", "")
    module = path.rpartition(".")[0]
    if module in sys.modules or (
        module.partition(".")[0] in _packages() and "__main__" not in module
    ):
        try:
            return find_class(path, known, AdvantageEstimator)
        except LookupError:
            pass
    return known.get(told["name"])


@cache
def _packages() -> Mapping[str, Sequence[str]]:
    return packages_distributions()


def _of_this_run(own: Applied, members: Sequence[record.Row]) -> dict[str, Any]:
    """The recorded credit, and the numbers behind it if the estimator gives them again."""
    given = [[turn["advantage"] for turn in row["turns"]] for row in members]
    shown = _credit(own, len(members)) | {
        "missing": "",
        "advantages": [[_short(advantage) for advantage in row] for row in given],
    }
    problem = own.reason or _differs(given, [*own.advantages.values()])
    if problem:
        shown |= {"terms": None, "unexplained": f"cannot be rebuilt: {problem}"}
    return shown


def _differs(recorded: Sequence[Sequence[Any]], again: Sequence[Sequence[Any]]) -> str:
    """Two advantages of one turn that are not the same in float32, in words; empty if there are
    none."""
    pairs = [
        (was, now)
        for row, other in zip(recorded, again, strict=True)
        for was, now in zip(row, other, strict=True)
        if was is not None
    ]
    allowed = 1e-6 + 1e-5 * max((abs(was) for was, _ in pairs), default=0.0)
    for was, now in pairs:
        if abs(was - now) > allowed:
            return f"its recorded settings give {now:.4g} where {was:.4g} was recorded"
    return ""


def _credit(one: Applied, size: int) -> dict[str, Any]:
    """The part of the page about an estimator; None in the place of a trajectory without credit."""
    shown: dict[str, Any] = {"name": one.name, "own": one.own, "missing": one.reason}
    if one.credit is not None:
        rows = {i: [_short(value) for value in row] for i, row in one.advantages.items()}
        told = {i: [_terms(turn) for turn in row] for i, row in (one.terms or {}).items()}
        shown |= {
            "advantages": [rows.get(i) for i in range(size)],
            "terms": None if one.terms is None else [told.get(i) for i in range(size)],
            "unexplained": one.unexplained,
        }
    return shown


def _terms(some: Sequence[Term]) -> list[Mapping[str, Any]]:
    names = ("weight", "value", "baseline", "divisor", "mean", "std")
    return [
        {"name": term.name, "count": term.count}
        | {name: _short(getattr(term, name)) for name in names}
        for term in some
    ]
