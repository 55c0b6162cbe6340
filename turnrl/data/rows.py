"""Rows of files and of data sets on the hub, read one by one, and the questions made of them.

Rows are never all in memory: each row of HotpotQA has ten paragraphs.
"""

from __future__ import annotations

import ast
import csv
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from turnrl.data.sources import NAMED_BY, Fields
from turnrl.errors import DataError, did_you_mean
from turnrl.policy.hub import reach_hub
from turnrl.types.questions import Question

if TYPE_CHECKING:
    import datasets

Row = Mapping[str, Any]

FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv", ".arrow")

_AT_ONCE = 1000


# JSON and CSV are read here, not by `datasets`: its readers guess types, so that the answer
# "1999-05-04" comes back as a timestamp, the id "007" as 7 and Namibia's code "NA" as nothing.
def read_file(source: str) -> Iterator[Row]:
    """The rows of a file.

    Raises:
        DataError: If it is not a file of one of `FILE_KINDS`, or cannot be read.
    """
    path, kind = Path(source), Path(source).suffix.lower()
    file_here(source)
    if kind not in FILE_KINDS:
        raise DataError(f"cannot tell the format of {source!r}. Name it {', '.join(FILE_KINDS)}.")
    try:
        of_tables = {".parquet": _parquet, ".arrow": _arrow}
        for row in of_tables[kind](path) if kind in of_tables else _text(path, kind):
            if not isinstance(row, dict):
                raise DataError(
                    f"{source!r} is not a list of objects. Give one JSON object per question."
                )
            yield row
    except (OSError, ValueError, csv.Error) as error:
        if isinstance(error, DataError):
            raise
        step = ". Save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(f"cannot read {source!r}: {error}{step}") from error


def file_here(source: str) -> bool:
    """True if the file exists.

    Raises:
        DataError: If it does not.
    """
    path = Path(source)
    if not path.is_file():
        raise DataError(
            f"no file {source!r} in {path.absolute().parent}. Check {' and '.join(NAMED_BY.get())}."
        )
    return True


def refuse_split(path: str, split: str) -> None:
    """Refuse a split of a file, which is one split without a name.

    Raises:
        DataError: If a split is named.
    """
    if split:
        raise DataError(
            f"the file {path!r} is one split; leave out the split {split!r}, or name another file"
        )


def _parquet(path: Path) -> Iterator[object]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_AT_ONCE):
            yield from batch.to_pylist()


def _arrow(path: Path) -> Iterator[object]:
    """Rows of a file in either of Arrow's formats; `datasets` writes the streaming one."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            table = pyarrow.ipc.open_file(file)
            batches = (table.get_batch(n) for n in range(table.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(file))
        for batch in batches:
            for first in range(0, batch.num_rows, _AT_ONCE):
                yield from batch.slice(first, _AT_ONCE).to_pylist()


def _text(path: Path, kind: str) -> Iterator[object]:
    with path.open(encoding="utf-8-sig", newline="" if kind == ".csv" else None) as file:
        if kind == ".csv":
            for row in csv.DictReader(file, strict=True):
                yield {name: _cell(value) for name, value in row.items()}
        elif kind == ".jsonl":
            yield from json_rows(file, repr(str(path)))
        else:
            rows = json.load(file)
            yield from rows if isinstance(rows, list) else [None]


_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""


def _cell(text: object) -> object:
    """The list that a text spells: in JSON; as Python prints a list; or as numpy prints an array,
    without commas, as pandas writes it into CSV files. Any other value stays as it is."""
    if not isinstance(text, str) or not re.match(r"\s*\[.*\]\s*$", text, re.DOTALL):
        return text
    try:
        values: object = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        bare = text.strip()[1:-1]
        try:
            if re.fullmatch(rf"\s*{_QUOTED}(?:[\s,]+{_QUOTED})*[\s,]*", bare):
                values = [ast.literal_eval(part) for part in re.findall(_QUOTED, bare)]
            else:
                values = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return text
    return values if isinstance(values, list) else text


def json_rows(lines: Iterable[str], where: str, skip: int = 0) -> Iterator[dict[str, Any]]:
    """Read one JSON object from each line that is not blank.

    Args:
        lines: The lines.
        where: Their file, for messages.
        skip: How many rows to skip, unread.
    Raises:
        DataError: Naming the line that is not a JSON object.
    """
    filled = ((number, line) for number, line in enumerate(lines, 1) if not line.isspace())
    for number, line in itertools.islice(filled, skip, None):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}, line {number}: not JSON ({error}).") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{where}, line {number}: not a JSON object, but {line[:40]!r}. "
                "Give one on each line."
            )
        yield row


def open_hub(path: str, config: str | None, split: str) -> datasets.Dataset:
    """Open a split of a data set on the hub, or of a folder with the files of one.

    `datasets` downloads it once into its cache, from which rows are read as they are needed.

    Raises:
        DataError: If there is none.
    """
    import datasets

    with hub_errors(path, config, split):
        rows: datasets.Dataset = datasets.load_dataset(path, config, split=split)
    return rows


def cached_hub(path: str, config: str | None, split: str) -> bool:
    """True if `open_hub` would find a data set in the cache. Asks the hub for its name only.

    Raises:
        DataError: If it is not on the hub either.
    """
    import datasets

    with hub_errors(path, config, split):
        builder = datasets.load_dataset_builder(path, config)
    return Path(path).is_dir() or Path(builder.cache_dir).is_dir()


@contextmanager
def hub_errors(
    path: str, config: str | None, split: str, advice: str | None = None
) -> Iterator[None]:
    """Turn an error of the hub's client into a `DataError` with the next step.

    Args:
        path: The data set's name on the hub, or a folder with the files of one.
        config: Its configuration, if one is named.
        split: The split.
        advice: The next step, as a sentence; None for the one about a set of questions.
    """
    if not Path(path).is_dir():  # `datasets` reads folders too
        reach_hub()
    import datasets

    try:
        yield
    except Exception as error:  # the hub's client raises what its transport raises
        cause = str(error).strip().split("\n")[0]
        if cause.startswith("Split name should match"):  # it does not name the splits
            cause = f"Should be one of {datasets.get_dataset_split_names(path, config)}."
        if advice is None:
            names = ", ".join([*NAMED_BY.get(), "data.config"])
            advice = f"Check {names} and the splits, or name a local file."
        raise DataError(
            f"cannot load {path!r} (configuration {config}, split {split!r}) from the hub: "
            f"{cause.rstrip('.')}. {advice}"
        ) from error


def is_saved(folder: Path) -> bool:
    """True if a folder was written by `save_to_disk` of `datasets`."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def open_saved(folder: str) -> datasets.Dataset | datasets.DatasetDict:
    """Open a folder that `save_to_disk` wrote.

    Raises:
        DataError: If it cannot be read.
    """
    import datasets

    try:
        return datasets.load_from_disk(folder)
    except Exception as error:  # of json, pyarrow or the file system
        cause = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(
            f"cannot read the data set in {folder!r}: {cause}. Write the folder again with "
            "save_to_disk, or name a file."
        ) from error


def read_hub(rows: datasets.Dataset) -> Iterator[Row]:
    """The rows of an opened data set, twice as fast as by iterating over it."""
    for batch in rows.with_format("arrow").iter(_AT_ONCE):
        yield from batch.to_pylist()


_ABSENT = object()


def _at(row: object, path: str) -> object:
    """The value at a dotted path, through lists too; `_ABSENT` if there is no such field."""
    if isinstance(row, list):
        values = [_at(item, path) for item in row]
        return [value for value in values if value is not _ABSENT] or (_ABSENT if values else [])
    if row is None:
        return None
    if not isinstance(row, Mapping):
        return _ABSENT
    if path in row:
        return row[path]
    head, _, rest = path.partition(".")
    return _at(row[head], rest) if rest and head in row else _ABSENT


_WORDS = (str, int, float, Decimal, date, time)
"""Types with one way to write a value as a text."""


def _missing(value: object) -> bool:
    """True if a row has nothing there; pandas has NaN in an empty cell."""
    return value is _ABSENT or value is None or (isinstance(value, float) and math.isnan(value))


def _native(value: object) -> object:
    """An array, a number of a library's, or a tuple as a list or a number of Python's."""
    if hasattr(value, "tolist"):  # of numpy, torch, pandas
        value = value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _written(value: object, path: str, place: str, setting: str) -> str:
    """The text of a field; empty if nothing is there.

    Args:
        value: The value of the field.
        path: The field.
        place: The source and the row, for messages.
        setting: The setting that names the field, for messages.
    Raises:
        DataError: If it is neither a text nor a number nor a date.
    """
    if _missing(value := _native(value)):
        return ""
    if isinstance(value, _WORDS):
        return str(value)
    kind, step = f"a {type(value).__name__}", "Write a text there."
    if isinstance(value, Mapping):
        inner = next(iter(value), "text")
        kind, step = "a mapping", f"Set {setting} to a path into it, such as {path}.{inner}."
    elif isinstance(value, bytes | bytearray):
        kind, step = "bytes", "Decode them, and write a text there."
    elif _is_chat(value):
        kind, step = "a list of chat messages", "Only data.fields.question takes these."
    raise DataError(f"{place}: {path!r} is {kind}, {value!r:.60}, not a text. {step}")


def _is_chat(value: object) -> TypeGuard[list[Row]]:
    """True for a list of chat messages, `{"role": ..., "content": ...}`."""
    several = value if isinstance(value, list) else []
    return bool(several) and all(isinstance(m, Mapping) and "role" in m for m in several)


def _asked(value: object, path: str, place: str, setting: str) -> tuple[str, str]:
    """The system message of a row, empty if it has none, and the user's question: from a text, or
    from chat messages.

    Raises:
        DataError: If it is neither, or the messages are not a user's alone, after a system message
            perhaps.
    """
    value = _cell(value) if isinstance(value, str) and '"role"' in value else _native(value)
    if not _is_chat(value):
        return "", _written(value, path, place, setting)
    said = [(str(one["role"]), _spoken(one.get("content"))) for one in value]
    roles = [role for role, _ in said]
    if roles not in (["user"], ["system", "user"], ["developer", "user"]):
        raise DataError(
            f"{place}: {path!r} has messages of {', '.join(roles)}. turnrl takes one of the user, "
            "and before it one of the system. Write what was said before into one of them."
        )
    if None in (texts := [text for _, text in said]):
        raise DataError(
            f"{place}: {path!r} has a message whose content is not text, {value!r:.60}. Write a "
            "text there; images are not supported."
        )
    system, text = ["", *cast(list[str], texts)][-2:]
    return system.strip(), text


def _spoken(content: object) -> str | None:
    """The text of a message's content, which may come in parts; None if it is none."""
    parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
    texts = [one.get("text") if isinstance(one, Mapping) else None for one in parts]
    return "".join(map(str, texts)) if all(isinstance(one, str) for one in texts) else None


def _answers(value: object, path: str, place: str, setting: str) -> Iterator[str]:
    """The answers in a field: a text, a number, a list of them, or a list in a text."""
    value = _cell(value) if isinstance(value, str) else _native(value)
    if isinstance(value, list):
        for item in value:
            yield from _answers(item, path, place, setting)
    elif not _missing(value):
        yield _written(value, path, place, setting)


def _answer_in(text: str, pattern: str) -> str | None:
    """The answer in a text of a field of answers; None if the pattern is not there."""
    if not pattern:
        return text
    match = re.search(pattern, text)
    answer: str | None = match and match[min(1, match.re.groups)]
    return answer.strip() if answer is not None else None


def questions_of(
    rows: Iterable[Row],
    fields: Fields,
    where: str,
    setting: str = "data.fields",
    needs_id: bool = False,
    without: Sequence[str] = (),
) -> Iterator[Question]:
    """Make questions of rows. Every other column becomes metadata as it is: a text, a number, a
    list, a mapping. Nulls are left out, because Arrow has null where a row lacks the column.

    Args:
        rows: Rows in their order, read once.
        fields: Where they keep the question, its id and its answers.
        where: The source, for messages.
        setting: The setting that holds `fields`, for messages.
        needs_id: Refuse rows without any `id`, by which the source knows its questions. Otherwise
            they are numbered.
        without: Columns that become no metadata, because they are large.
    Raises:
        DataError: If no row has a needed field (at the end, when all rows have been read); or
            naming the row whose question or answer is not text.
    """
    of_answers = [fields.answers] if isinstance(fields.answers, str) else list(fields.answers)
    paths = [("id", fields.id)] if fields.id else []
    paths += [("question", fields.question), *(("answers", path) for path in of_answers)]
    used = {*(path for _, path in paths), *without}
    missing, names, first_text, matched = paths, set[str](), "", False
    for number, row in enumerate(rows):
        missing = [(name, path) for name, path in missing if _at(row, path) is _ABSENT]
        if missing and number < 100:
            names.update(_names(row))
        place = f"{where}, row {number + 1}"
        texts = [
            text
            for path in of_answers
            for text in _answers(_at(row, path), path, place, f"{setting}.answers")
        ]
        in_texts = (_answer_in(text, fields.answer_pattern) for text in texts)
        answers = tuple(answer for answer in in_texts if answer is not None)
        first_text, matched = first_text or "".join(texts[:1]), matched or bool(answers)
        own = _written(_at(row, fields.id), fields.id, place, f"{setting}.id") if fields.id else ""
        asked = _at(row, fields.question)
        system, text = _asked(asked, fields.question, place, f"{setting}.question")
        metadata = {k: v for k, v in row.items() if k not in used and v is not None}
        rest = {k: v for k, v in row.items() if k not in metadata and k not in without}
        named = own or str(number)
        question = Question(named, text.strip(), metadata=metadata, system=system, row=rest)
        yield replace(question, answers=answers) if answers else question
    if missing and names:
        _refuse_missing(missing, names, where, setting, needs_id)
    if first_text and not matched:
        raise DataError(
            f"{setting}.answer_pattern {fields.answer_pattern!r} matches no answer of {where}; "
            f"the first answer ends with {first_text[-60:]!r}. Fix the pattern, or leave it out."
        )


def _refuse_missing(
    missing: Sequence[tuple[str, str]], names: set[str], where: str, setting: str, needs_id: bool
) -> None:
    """Refuse rows that lack needed fields; see `questions_of`."""
    if not needs_id:  # rows are numbered, unless the user named a field of ids
        missing = [one for one in missing if one != ("id", Fields.id)]
    for name, path in missing:
        numbered = ", or to null to number the rows" if name == "id" and not needs_id else ""
        raise DataError(
            f"{where} has no field {path!r}.{did_you_mean(path, names)} It has: "
            f"{', '.join(sorted(names))}. Set {setting}.{name} to the one that holds it{numbered}."
        )


def _names(row: Row) -> Iterator[str]:
    """A row's field names, nested ones dotted."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _names(value))
        else:
            yield name
