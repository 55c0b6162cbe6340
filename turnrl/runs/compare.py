"""Evaluations of runs, paired by question or by seed.

sides = open_sides(["runs/a/version_0", "runs/b/version_0"])
(comparison,) = compare(sides)
print(comparison.figures["exact_match"].low)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from turnrl.plugin.errors import DataError
from turnrl.runs import record
from turnrl.runs.find import find_run, resolve_run
from turnrl.runs.load import Run, group_experiments, open_runs
from turnrl.runs.statistics import Difference, difference_over_seeds, paired_difference

_COLUMNS = (
    *("iteration", "policy_version", "split", "group", "member"),
    *("question_id", "question", "answers", "answer", "rewards"),
    *("turns", "prompt_tokens", *record.CURVES, "f1"),
)
_MATCH = "exact_match"
_TOTAL = "reward/total"
_FIGURES = (*record.CURVES, "f1", _TOTAL, "turns", "calls", "sampled_tokens")
_NOT_EVERYWHERE = ("f1", "sampled_tokens")
"""Figures that a run may lack, because its answers are not words, or its server counts no
tokens."""
_STEP = "Evaluate both on the same data: 'turnrl eval RECIPE --ckpt_path RUN'."


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one run.

    Args:
        run: The run.
        number: Number of the run in a report of the same runs.
        iteration: Number of iterations behind the policy.
        questions: The rows of each question, by its id.
    """

    run: Run
    number: int
    iteration: int
    questions: Mapping[str, Sequence[record.Row]]

    def value(self, question: str, name: str) -> float | None:
        """A figure of one question, averaged over its attempts; None if no attempt has it."""
        values = [value for row in self._scores[question] if (value := row[name]) is not None]
        return fmean(values) if values else None

    @cached_property
    def _scores(self) -> Mapping[str, Sequence[Mapping[str, float | None]]]:
        return {q: [record.scores(row) for row in rows] for q, rows in self.questions.items()}


@dataclass(frozen=True)
class Side:
    """Evaluations that are compared as one: of a single run, or of runs that differ in their seeds.

    Args:
        name: The name of the run, or the names of the runs.
        evaluations: One per seed.
    """

    name: str
    evaluations: Sequence[Evaluation]

    @property
    def one(self) -> Evaluation:
        """The first evaluation."""
        return self.evaluations[0]


@dataclass(frozen=True)
class Comparison:
    """Two sides on the questions that both answered.

    Args:
        first: The baseline, with the evaluations that were paired.
        second: The other side, with the same number of evaluations in the same order.
        questions: The ids of the questions in common.
        asked: Number of questions that the first run of each side answered, in common or not.
        figures: The differences, by the names of `turnrl.runs.record.scores`.
        main: The figure that decides: `exact_match`, or `reward/total` if no question has an
            accepted answer.
        won: Questions with more of the main figure on the second side, in the order of the first.
        lost: Questions with less of it on the second side.
        notes: Sentences about things that cannot be read or were left out, and why.
    """

    first: Side
    second: Side
    questions: Sequence[str]
    asked: tuple[int, int]
    figures: Mapping[str, Difference]
    main: str
    won: Sequence[str]
    lost: Sequence[str]
    notes: Sequence[str]


def open_sides(
    places: Sequence[str], split: str = "val", iteration: int | None = None
) -> list[Side]:
    """The evaluations at the given places, by side. Runs that differ only in their seeds form one
    side, unless there would be no other side.

    Args:
        places: Runs, as `turnrl.runs.find_run` takes them. `quickstart@10` is the policy after
            iteration 10.
        split: The split that was evaluated.
        iteration: For places that name no iteration, take the evaluation after this one; None for
            the last of each run.
    Raises:
        DataError: If there is no run or no such evaluation, or nothing to compare.
    """
    placed = [_parse_place(place, iteration) for place in places]
    folders = [find_run(place, "figures") for place, _ in placed]
    homes = {folder.resolve(): folder for folder in reversed(folders)}  # as first named
    order = [*dict.fromkeys(folder.resolve() for folder in folders)]
    runs = open_runs([homes[home] for home in order])
    evaluations = []
    for folder, (_, wanted) in zip(folders, placed, strict=True):
        number = order.index(folder.resolve())
        evaluations.append(_evaluation(runs[number], number, split, wanted))
    _refuse_twice(places, evaluations)
    return _make_sides(runs, evaluations, [wanted for _, wanted in placed])


def sides_of(runs: Sequence[Run], split: str = "val") -> list[Side]:
    """The last evaluations of runs, by side, as in `open_sides`.

    Args:
        runs: Two or more runs.
        split: The split that was evaluated.
    Raises:
        DataError: If a run has no such evaluation.
    """
    every = [_evaluation(run, number, split, None) for number, run in enumerate(runs)]
    return _make_sides(runs, every, [None] * len(every))


def _make_sides(
    runs: Sequence[Run], evaluations: Sequence[Evaluation], wanted: Sequence[int | None]
) -> list[Side]:
    """
    Args:
        runs: The runs.
        evaluations: Evaluations of these runs.
        wanted: For each evaluation, the iteration that was asked for.
    """
    alike = {number: n for n, numbers in enumerate(group_experiments(runs)) for number in numbers}
    sides: dict[object, list[Evaluation]] = {}
    for evaluation, iteration in zip(evaluations, wanted, strict=True):
        sides.setdefault((alike[evaluation.number], iteration), []).append(evaluation)
    parts = [*sides.values()] if len(sides) > 1 else [[evaluation] for evaluation in evaluations]
    return [_make_side(part, len(runs) < len(evaluations)) for part in parts]


def _parse_place(place: str, iteration: int | None) -> tuple[str, int | None]:
    """The run and the iteration of a place such as `run@10`, which may also be the name of a
    run."""
    run, at, number = place.rpartition("@")
    named = bool(at) and number.isdigit() and resolve_run(place) is None
    return (run, int(number)) if named else (place, iteration)


def _refuse_twice(places: Sequence[str], evaluations: Sequence[Evaluation]) -> None:
    """Refuse a single evaluation, or an evaluation that two places mean."""
    first: dict[tuple[int, int], str] = {}
    for place, evaluation in zip(places, evaluations, strict=True):
        if (key := (evaluation.number, evaluation.iteration)) in first:
            raise DataError(
                f"{first[key]!r} and {place!r} both mean {evaluation.run.name} after iteration "
                f"{evaluation.iteration}. Name each evaluation once; NAME@10 is the one after "
                "iteration 10."
            )
        first[key] = place
    if len(evaluations) < 2:
        raise DataError(
            "there is one evaluation. Name two runs or more, or two policies of one run: 'turnrl "
            "compare NAME@0 NAME'."
        )


def _make_side(evaluations: Sequence[Evaluation], several: bool) -> Side:
    """
    Args:
        evaluations: One per seed.
        several: True if a run has several evaluations here, so that names need the iteration.
    """
    names = (e.run.name + f"@{e.iteration}" * several for e in evaluations)
    return Side(", ".join(names), evaluations)


def question_key(row: record.Row) -> str:
    """The key of a question: its id, or its text if it has no id."""
    return str(row["question_id"] or row["question"])


def _evaluation(run: Run, number: int, split: str, wanted: int | None) -> Evaluation:
    """The last evaluation of a run, or the last one after the wanted iteration, which may have
    several (`trainer.val_check_interval`)."""
    rows: list[record.Row] = []
    seen: dict[int, None] = {}
    for file in reversed(record.list_files(run.folder, split)):  # the newest policy first
        here = record.read_checked(file, _COLUMNS)
        if not here:
            continue
        after = here[0]["iteration"]
        seen.setdefault(after)
        wanted = after if wanted is None else wanted
        if after == wanted and (not rows or rows[0]["policy_version"] == here[0]["policy_version"]):
            rows = here + rows
        elif rows:
            break
    if wanted is None or not rows:
        raise DataError(
            f"{run.name} has no evaluation of {split!r} after iteration {wanted}. It has one after "
            f"each of these: {', '.join(map(str, sorted(seen)))}."
        )
    questions: dict[str, list[record.Row]] = {}
    for row in rows:
        questions.setdefault(question_key(row), []).append(row)
    return Evaluation(run, number, wanted, questions)


# ------------------------------------------------------------------------------ two sides


def compare(sides: Sequence[Side]) -> list[Comparison]:
    """Compare every side with the first.

    Args:
        sides: Two or more sides.
    Raises:
        DataError: If two sides were not asked the same questions, or have no seed in common.
    """
    return [_compare_sides(sides[0], side) for side in sides[1:]]


def _compare_sides(first: Side, second: Side) -> Comparison:
    notes: list[str] = []
    first, second = _by_seed(first, second, notes)
    every = (*first.evaluations, *second.evaluations)
    notes += (f"{e.run.name}: {problem}" for e in every for problem in e.run.problems)
    questions = [q for q in first.one.questions if all(q in e.questions for e in every)]
    _check_questions(first, second, questions)
    asked = (len(first.one.questions), len(second.one.questions))
    after = [evaluation.iteration for evaluation in every]
    if len({*after}) > 1 and len({evaluation.number for evaluation in every}) > 1:
        # an evaluation by `turnrl eval` has only one iteration
        evaluated = any(evaluation.run.was_evaluated for evaluation in every)
        step = "" if evaluated else " To compare at one iteration, add --iteration N."
        notes.append(f"the iterations differ ({', '.join(map(str, after))}).{step}")
    figures = {}
    for name in _FIGURES:
        if name == _TOTAL and not _have_the_same_rewards(first.one, second.one):
            notes.append(f"{name} is left out: the rewards of the runs differ.")
        elif figure := _figure(first, second, questions, name):
            figures[name] = figure
        elif name not in _NOT_EVERYWHERE:
            notes.append(f"{name} is left out: no question in common has it.")
    main = next((name for name in (_MATCH, _TOTAL) if name in figures), None)
    if main is None:
        raise DataError(
            f"{first.name} and {second.name} cannot be compared: their questions have no accepted "
            "answers, and their rewards differ. Name runs with the same rewards."
        )
    means = {q: [_mean(side, q, main) for side in (first, second)] for q in questions}
    won = [q for q, (a, b) in means.items() if b > a]
    lost = [q for q, (a, b) in means.items() if b < a]
    return Comparison(first, second, questions, asked, figures, main, won, lost, notes)


def _by_seed(first: Side, second: Side, notes: list[str]) -> tuple[Side, Side]:
    """The sides, reduced to the seeds that both have, in the same order."""
    if len(first.evaluations) == len(second.evaluations) == 1:
        return first, second
    by_seed = {evaluation.run.seed: evaluation for evaluation in second.evaluations}
    pairs = [(e, by_seed[e.run.seed]) for e in first.evaluations if e.run.seed in by_seed]
    if not pairs:
        raise DataError(
            f"{first.name} and {second.name} have no seed in common, and one has several. Name "
            "runs of the same seeds, or one run of each recipe."
        )
    kept = [evaluation.run.name for pair in pairs for evaluation in pair]
    for evaluation in (*first.evaluations, *second.evaluations):
        name = evaluation.run.name
        if name not in kept:
            notes.append(f"{name} is left out: the other side has no run of its seed.")
    of_first, of_second = zip(*pairs, strict=True)
    return Side(first.name, of_first), Side(second.name, of_second)


def _check_questions(first: Side, second: Side, questions: Sequence[str]) -> None:
    """Refuse sides that were not asked the same questions, or compare answers by two rules."""
    base = first.one
    for other in (*first.evaluations[1:], *second.evaluations):
        names = f"{base.run.name} and {other.run.name}"
        rules = [_rule(evaluation.run) for evaluation in (base, other)]
        if None not in rules and rules[0] != rules[1]:
            both = " and ".join(json.dumps(rule) for rule in rules)
            raise DataError(f"{names} compare answers by two rules: {both}. {_STEP}")
        for q in base.questions.keys() & other.questions.keys():
            for column in ("question", "answers"):
                before, after = (side.questions[q][0][column] for side in (base, other))
                if before != after:
                    raise DataError(
                        f"{names} differ in the {column} of the question {q}: {before!r} and "
                        f"{after!r}. {_STEP}"
                    )
    if not questions:
        raise DataError(f"{first.name} and {second.name} have no question in common. {_STEP}")


def _rule(run: Run) -> dict[str, object] | None:
    """The settings of `data.answers`; None if the run's settings are unknown."""
    if not run.settings:
        return None
    return {name: v for name, v in run.settings.items() if name.startswith("data.answers")}


def _have_the_same_rewards(first: Evaluation, second: Evaluation) -> bool:
    """True if the totals of two runs can be compared."""
    weights = [evaluation.run.settings.get("model.rewards") for evaluation in (first, second)]
    names = [
        {part["name"] for rows in evaluation.questions.values() for part in rows[0]["rewards"]}
        for evaluation in (first, second)
    ]
    return names[0] == names[1] and (None in weights or weights[0] == weights[1])


def _mean(side: Side, question: str, name: str) -> float:
    """The mean over seeds of a figure that is never missing."""
    return fmean(evaluation.value(question, name) or 0.0 for evaluation in side.evaluations)


def _figure(first: Side, second: Side, questions: Iterable[str], name: str) -> Difference | None:
    """A figure of both sides, over the questions for which every run has it."""
    every = (*first.evaluations, *second.evaluations)
    rows = ([evaluation.value(question, name) for evaluation in every] for question in questions)
    full = [[value for value in row if value is not None] for row in rows if None not in row]
    if not full:
        return None
    columns, seeds = [*zip(*full, strict=True)], len(first.evaluations)
    if seeds == 1:
        before, after = columns
        return paired_difference(before, after, record.success_value(name, [*before, *after]))
    means = [fmean(column) for column in columns]
    return difference_over_seeds(means[:seeds], means[seeds:])
