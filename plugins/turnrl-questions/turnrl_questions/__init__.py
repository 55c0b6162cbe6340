"""Question sets by name: files, known data sets, and the Hugging Face hub.

`read_file` and `read_hub` give rows; `questions_of` makes questions of them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, final

from turnrl import DataError, Fields, Question, QuestionSource, SourceOpener, hookimpl, reach_hub

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Preset:
    """A data set on the hub that is known by a short name.

    Args:
        path: Its name on the hub.
        config: Its configuration there, if it has several.
        train: Split to train on, or None.
        val: Split with public answers to evaluate on.
        fields: Where its rows keep what is needed.
    """

    path: str
    config: str | None
    train: str | None
    val: str
    fields: Fields


PRESETS: Mapping[str, Preset] = {
    # the open-domain set: `rc` has each question once for the web and once for Wikipedia
    "triviaqa": Preset(
        "mandarjoshi/trivia_qa",
        "unfiltered.nocontext",
        "train",
        "validation",
        Fields(
            "question_id", answers=["answer.value", "answer.aliases", "answer.normalized_aliases"]
        ),
    ),
    "nq_open": Preset(
        "google-research-datasets/nq_open",
        None,
        "train",
        "validation",
        Fields(None, answers="answer"),
    ),
    "hotpotqa": Preset(
        "hotpotqa/hotpot_qa", "distractor", "train", "validation", Fields(answers="answer")
    ),
    # a copy in Parquet: `datasets` no longer runs the loading script of the original
    "2wikimultihopqa": Preset(
        "framolfese/2WikiMultihopQA", None, "train", "validation", Fields(answers="answer")
    ),
    "musique": Preset(
        "dgslibisey/MuSiQue",
        None,
        "train",
        "validation",
        Fields(answers=["answer", "answer_aliases"]),
    ),
    "popqa": Preset("akariasai/PopQA", None, None, "test", Fields(answers="possible_answers")),
    "bamboogle": Preset(
        "chiayewken/bamboogle", None, None, "test", Fields(None, "Question", "Answer")
    ),
}
"""Data sets by short name."""

FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv")


@final
class QuestionFile(QuestionSource):
    """The questions of a file, which is one split without a name.

    Args:
        path: The file: one JSON object a line, a JSON list, Parquet or CSV.
        fields: Where its rows keep what is needed.
    """

    default_splits = {"train": "", "val": ""}
    uses = ("fields",)

    def __init__(self, path: str, fields: Fields | None = None) -> None:
        self._path = path
        self._fields = fields or Fields()

    def questions(self, split: str) -> Iterable[Question]:
        if split:
            raise DataError(
                f"the file {self._path!r} is one split; leave out the split {split!r}, or name "
                "another file"
            )
        return questions_of(read_file(self._path), self._fields, self._path)


@final
class HubDataset(QuestionSource):
    """The questions of a data set on the hub, read with the `datasets` library.

    Args:
        preset: What is known of it.
    """

    uses = ("fields", "config")

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        self.default_splits = {"train": preset.train, "val": preset.val}

    def questions(self, split: str) -> Iterable[Question]:
        preset = self._preset
        rows = read_hub(preset.path, preset.config, split)
        return questions_of(rows, preset.fields, f"{preset.path} ({split})")


class _ByName:
    """See `turnrl.SourceOpener`."""

    names: Sequence[str] = tuple(PRESETS)
    takes = f"a file ({', '.join(FILE_KINDS)}), or a data set on the hub, 'owner/name'"

    def __call__(
        self, name: str, fields: Fields | None, config: str | None
    ) -> QuestionSource | None:
        path = Path(name)
        if path.is_file() or path.suffix.lower() in FILE_KINDS:
            return QuestionFile(name, fields)
        if path.is_dir():
            found = [p.name for p in sorted(path.iterdir()) if p.suffix.lower() in FILE_KINDS]
            raise DataError(
                f"{name!r} is a folder. Name a file in it ({', '.join(found) or 'it has none'})."
            )
        known = PRESETS.get(name)
        if known is None and name.count("/") != 1:
            return None
        known = known or Preset(name, None, "train", "validation", Fields())
        return HubDataset(
            replace(known, config=config or known.config, fields=fields or known.fields)
        )


@hookimpl
def turnrl_openers() -> Iterable[SourceOpener]:
    """Files, presets and the hub."""
    return [_ByName()]


# JSON and CSV are read here, not by `datasets`: its readers guess types, so that the answer
# "1999-05-04" comes back as a timestamp, the id "007" as 7 and Namibia's code "NA" as nothing.
def read_file(source: str) -> list[Row]:
    """The rows of a file."""
    path, kind = Path(source), Path(source).suffix.lower()
    if not path.is_file():
        raise DataError(
            f"no file {source!r} in {path.absolute().parent}. Check data.train and data.val."
        )
    if kind not in FILE_KINDS:
        raise DataError(f"cannot tell the format of {source!r}. Name it {', '.join(FILE_KINDS)}.")
    try:
        if kind == ".parquet":
            import pyarrow.parquet

            return cast(list[Row], pyarrow.parquet.read_table(path).to_pylist())
        with path.open(encoding="utf-8-sig", newline="" if kind == ".csv" else None) as file:
            if kind == ".csv":
                return list(csv.DictReader(file, strict=True))
            rows = json.load(file) if kind == ".json" else list(_json_lines(file))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"cannot read {source!r}: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{source!r} is not a list of objects. Give one JSON object per question.")
    return rows


def _json_lines(lines: Iterable[str]) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is not JSON ({error.msg})") from error


def read_hub(path: str, config: str | None, split: str) -> list[Row]:
    """The rows of a split of a data set on the hub."""
    if not Path(path).is_dir():  # which `datasets` takes too
        reach_hub()
    import datasets

    try:
        rows = datasets.load_dataset(path, config, split=split)
    except Exception as error:  # the hub's client raises what its transport raises
        cause = str(error).strip().split("\n")[0]
        raise DataError(
            f"cannot load {path!r} (configuration {config}, split {split!r}) from the hub: {cause} "
            "Check data.train and data.val, data.config and the splits, or name a local file."
        ) from error
    return cast(list[Row], rows.to_list())


_ABSENT = object()


def _at(row: Any, path: str) -> Any:
    """The value at a dotted path, through lists too; `_ABSENT` if there is no such field."""
    if isinstance(row, list):
        found = [_at(item, path) for item in row]
        return [value for value in found if value is not _ABSENT] or (_ABSENT if found else [])
    if row is None:
        return None
    if not isinstance(row, Mapping):
        return _ABSENT
    if path in row:
        return row[path]
    head, _, rest = path.partition(".")
    return _at(row[head], rest) if rest and head in row else _ABSENT


def _texts(value: Any) -> Iterator[str]:
    """The answers in a value: a text, a number, a list of them, or a JSON list in a text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            yield value
            return
    if isinstance(value, list):
        for item in value:
            if isinstance(item, Mapping):
                raise DataError(
                    "the answers are lists of objects. Set data.fields.answers to a path into "
                    f"them, such as answers.{next(iter(item), 'text')!s}."
                )
            yield from _texts(item)
    elif value is not None:
        yield str(value)


def questions_of(rows: Sequence[Row], fields: Fields, where: str) -> Iterator[Question]:
    """Rows as questions; what no field names and is plain, or a plain list, becomes metadata."""
    of_answers = [fields.answers] if isinstance(fields.answers, str) else list(fields.answers)
    paths = [("id", [fields.id] if fields.id else []), ("question", [fields.question])]
    paths.append(("answers", of_answers))
    for name, candidates in paths:
        for path in candidates:
            if rows and all(_at(row, path) is _ABSENT for row in rows):
                found = sorted({name for row in rows[:100] for name in _names(row)})
                numbered = ", or to null to number the rows" if name == "id" else ""
                raise DataError(
                    f"{where} has no field {path!r}. It has: {', '.join(found)}. "
                    f"Set data.fields.{name} to the one that holds it{numbered}."
                )
    used = {path.split(".")[0] for _, candidates in paths for path in candidates}
    for number, row in enumerate(rows):
        answers = [_at(row, path) for path in of_answers]
        nested = next((a for a in answers if isinstance(a, Mapping)), None)
        if nested is not None:
            raise DataError(
                f"the answers of {where} are nested. Set data.fields.answers to a path such as "
                f"{of_answers[0]}.{next(iter(nested), 'text')!s}."
            )
        yield Question(
            id=str(number if fields.id is None else _known(_at(row, fields.id), number)),
            text=str(_known(_at(row, fields.question), "")).strip(),
            answers=tuple(t for answer in answers if answer is not _ABSENT for t in _texts(answer)),
            metadata={
                name: value for name, value in row.items() if name not in used and _is_plain(value)
            },
        )


def _is_plain(value: Any) -> bool:
    """Whether it is a text or a number, or a list of them (ids of supporting passages, say)."""
    several = value if isinstance(value, list) else [value]
    return all(isinstance(one, str | int | float) for one in several)


def _known(value: Any, default: Any) -> Any:
    return default if value is _ABSENT or value is None else value


def _names(row: Mapping[str, Any]) -> Iterator[str]:
    """A row's field names, nested ones dotted."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _names(value))
        else:
            yield name
