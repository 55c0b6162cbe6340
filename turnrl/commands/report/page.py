"""The page: summaries that it reads at once, details that it unpacks on demand.

The data are in the page as gzip in base64, which no HTML parser takes for markup, and the page's
policy allows only its own script. The contents of a trajectory become text in the page.
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
from importlib.resources import files
from typing import Any

from turnrl.credit.apply import AppliedCredit, Made, apply_estimators, make_estimator
from turnrl.credit.why import Term
from turnrl.plugin.errors import DataError
from turnrl.plugin.hooks import load_classes
from turnrl.runs import record
from turnrl.runs.alarms import find_alarms
from turnrl.runs.compare import Comparison, Side, compare, question_key, sides_of
from turnrl.runs.load import Run, differing_settings, group_experiments
from turnrl.types.contracts import AdvantageEstimator

_CHUNK = 48
"""Number of trajectories that are unpacked together, but at least one group."""

_SCRIPTS = ("building", "records", "charts", "overview", "list", "attempts", "moving")
"""The page's own scripts, which share one scope."""

PageData = dict[str, object]
"""A part of the page's JSON."""
Advantages = Sequence[Sequence[float | None]]


def render_page(runs: Sequence[Run], most: int | None = None) -> Iterator[str]:
    """The page, in pieces.

    Args:
        runs: The runs, in the order of their lines.
        most: Approximate number of trajectories of each run, in whole groups from all of its parts;
            None for all.
    """
    title = ", ".join(run.name for run in runs)
    assets = files("turnrl.commands.report") / "assets"
    style = "\n".join((assets / name).read_text() for name in ("uPlot.min.css", "report.css"))
    plots, own = (assets / "uPlot.iife.min.js").read_text(), [assets / f"{n}.js" for n in _SCRIPTS]
    joined = "\n".join(file.read_text() for file in own)
    script = f'{plots}\n"use strict";\n(() => {{\n{joined}}})();\n'
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    page = (assets / "report.html").read_text()
    yield page.format(policy=policy, title=html.escape(title), style=style)
    listed = _TrajectoryList()
    for number, run in enumerate(runs):
        for chunk in _chunks(run, most):
            yield _block(f"d{listed.chunks}", [_group_detail(members) for members in chunk])
            listed.add(number, chunk)
    yield _block("summary", _summary(runs, listed, title))
    yield f"<script>{script}</script>\n</body>\n</html>\n"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _block(name: str, value: object) -> str:
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


class _TrajectoryList:
    """The columns of all trajectories, for the list. A question is kept once."""

    def __init__(self) -> None:
        self.chunks = 0
        self.questions: dict[tuple[str, str, str], int] = {}
        self.numbers: dict[str, int] = {}
        """Numbers of the validation questions, by their key (`question_key`)."""
        self.columns: dict[str, list[object]] = {}

    def add(self, run: int, chunk: Sequence[Sequence[record.Row]]) -> None:
        """Add the groups of a chunk."""
        for place, members in enumerate(chunk):
            for row in members:
                accepted = " | ".join((row["answers"] or ())[:4])[:100]
                asked = (row["question_id"] or "", row["question"], accepted)
                question = self.questions.setdefault(asked, len(self.questions))
                if row["split"] == "val":  # other splits may number their own questions alike
                    self.numbers.setdefault(question_key(row), question)
                summary = {
                    "run": run,
                    "chunk": self.chunks,
                    "place": place,
                    "question": question,
                    "answer": (row["answer"] or "")[:200] if row["answer"] is not None else None,
                    "total": _round_digits(
                        row["outcome"] + sum(turn["turn_reward"] for turn in row["turns"])
                    ),
                    "tokens": sum(turn["tokens"] for turn in row["turns"]),
                    "advantages": [_round_digits(turn["advantage"]) for turn in row["turns"]],
                    **{name: row[name] for name in ("split", "iteration", "policy_version")},
                    **{name: row[name] for name in ("group", "member", "ended_by")},
                    **{name: _round_digits(row[name]) for name in ("outcome", *record.CURVES)},
                }
                for name, value in summary.items():
                    self.columns.setdefault(name, []).append(value)
        self.chunks += 1


def _summary(runs: Sequence[Run], listed: _TrajectoryList, title: str) -> PageData:
    compared = _compare_runs(runs, listed)  # it may add to the problems of runs
    return {
        "title": title,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "problems": [*dict.fromkeys(run.problems)],
                "metrics": run.metrics,
                "alarms": [asdict(alarm) for alarm in find_alarms(run.metrics)],
            }
            for run in runs
        ],
        "experiments": group_experiments(runs),
        "differences": differing_settings(runs),
        **compared,
        "questions": list(listed.questions),
        "trajectories": listed.columns,
    }


def _compare_runs(runs: Sequence[Run], listed: _TrajectoryList) -> PageData:
    """Every run, or every experiment, compared with the first on the validation questions of
    both."""
    if len(runs) < 2:
        return {"comparisons": [], "not_compared": ""}
    try:
        comparisons = compare(sides_of(runs))
    except DataError as error:
        return {"comparisons": [], "not_compared": str(error)}
    return {"comparisons": [_comparison(c, listed) for c in comparisons], "not_compared": ""}


def _comparison(comparison: Comparison, listed: _TrajectoryList) -> PageData:
    """A comparison by its main figure. Questions are numbers in the list of all questions."""
    figure, numbers = comparison.figures[comparison.main], listed.numbers

    def of(side: Side) -> list[tuple[int, int]]:
        return [(evaluation.number, evaluation.iteration) for evaluation in side.evaluations]

    return {
        "first": of(comparison.first),
        "second": of(comparison.second),
        "questions": len(comparison.questions),
        "main": comparison.main,
        "verdict": figure.verdict,
        "values": (figure.first, figure.second),
        "interval": (figure.low, figure.high),
        "counts": {"won": len(comparison.won), "lost": len(comparison.lost)},
        # only the questions that the page has
        "won": [numbers[question] for question in comparison.won if question in numbers],
        "lost": [numbers[question] for question in comparison.lost if question in numbers],
        "notes": comparison.notes,
    }


def _round_digits(value: float | None) -> float | None:
    """The value with nine digits, more than float32 has."""
    return None if value is None else float(f"{value:.9g}")


# ------------------------------------------------------------------------ details


def _group_detail(members: Sequence[record.Row]) -> PageData:
    """A group: its trajectories in full, and the derivation of each turn's advantage."""
    first = members[0]
    return {
        "mean": first["group_mean"],
        "std": first["group_std"],
        "estimator": record.parse_json_object(first["estimator"]) if first["estimator"] else None,
        "rows": [_row(row) for row in members],
        "why": _explain_credit(members),
    }


def _row(row: record.Row) -> PageData:
    asked = ("answers", "answer", "opening", "begins", "prompt_tokens", "sample_tokens")
    names = (*asked, "rewards", "figures", "turns")
    kept = {name: row[name] for name in names}
    if row["token_ids"]:
        shown = ("turn_index", "learner_logprobs", "entropies", "token_texts")
        kept |= {name: row[name] for name in shown}
    return kept


def _explain_credit(members: Sequence[record.Row]) -> list[PageData]:
    """The credit of this group by the run's estimator, then by every other estimator."""
    if any(turn["advantage"] is None for row in members for turn in row["turns"][row["begins"] :]):
        return []  # greedy: nothing was compared
    name, rule = _load_estimator(members[0]["estimator"])
    own, *rest = apply_estimators(record.restore_group(members), rule, name)
    return [_recorded_credit(own, members), *(_credit(result, len(members)) for result in rest)]


def _load_estimator(estimator: str | None) -> tuple[str, Made]:
    """The name of the run's estimator, and the estimator built again, or else the error."""
    if estimator is None:
        return "the estimator", LookupError("the record does not name it")
    noted = record.parse_json_object(estimator) or {}
    kinds = {"name": str, "class": str, "arguments": dict}
    if not all(isinstance(noted.get(key), kind) for key, kind in kinds.items()):
        return "the estimator", LookupError(f"the record has no JSON of it, but {estimator[:60]!r}")
    kind = _class_of(noted)
    if kind is None:
        return noted["name"], LookupError("it is not installed here")
    # an error if it is of another version, or has an argument that JSON cannot hold
    return noted["name"], make_estimator(kind, **noted["arguments"])


def _class_of(noted: Mapping[str, Any]) -> type | None:
    """The class of a recorded estimator; None if no plugin brings it, and nobody has imported it.

    Anybody may have written the record, so nothing is imported for it.
    """
    module, _, name = noted["class"].rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    if isinstance(kind, type) and issubclass(kind, AdvantageEstimator):
        return kind
    return load_classes("turnrl_estimators").get(noted["name"])


def _recorded_credit(own: AppliedCredit, members: Sequence[record.Row]) -> PageData:
    """The recorded credit, and the numbers behind it if the estimator reproduces it."""
    noted: Advantages = [[turn["advantage"] for turn in row["turns"]] for row in members]
    shown = _credit(own, len(members)) | {
        "missing": "",
        "advantages": [[_round_digits(advantage) for advantage in row] for row in noted],
    }
    problem = own.reason or _describe_difference(noted, [*own.advantages.values()])
    if problem:
        shown |= {"terms": None, "unexplained": f"cannot be rebuilt: {problem}"}
    return shown


def _describe_difference(recorded: Advantages, again: Advantages) -> str:
    """A phrase about the first advantage that differs by more than float32 rounding; empty if none
    does."""
    pairs = [
        (was, now)
        for old_row, new_row in zip(recorded, again, strict=True)
        for was, now in zip(old_row, new_row, strict=True)
        if was is not None and now is not None
    ]
    allowed = 1e-6 + 1e-5 * max((abs(was) for was, _ in pairs), default=0.0)
    for was, now in pairs:
        if abs(was - now) > allowed:
            return f"its recorded settings give {now:.4g} where {was:.4g} was recorded"
    return ""


def _credit(result: AppliedCredit, size: int) -> PageData:
    """The part of the page about an estimator; a trajectory without credit has None."""
    shown: PageData = {"name": result.name, "own": result.own, "missing": result.reason}
    if result.credit is not None:
        rows = {i: [_round_digits(value) for value in row] for i, row in result.advantages.items()}
        terms = {i: [_terms(turn) for turn in row] for i, row in (result.terms or {}).items()}
        shown |= {
            "advantages": [rows.get(i) for i in range(size)],
            "terms": None if result.terms is None else [terms.get(i) for i in range(size)],
            "unexplained": result.unexplained,
        }
    return shown


def _terms(turn: Sequence[Term]) -> list[PageData]:
    rows = (asdict(term) for term in turn)
    return [
        {k: _round_digits(v) if isinstance(v, float) else v for k, v in row.items()} for row in rows
    ]
