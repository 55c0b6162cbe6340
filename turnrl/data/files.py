"""Rows of files of questions and of passages, read one by one.

A row that cannot be read as it was meant is an error that names its line: bytes that are not UTF-8,
a quote that never closes, more or fewer cells than the header has names, a torn archive.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import itertools
import json
import re
import sys
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, cast

from turnrl.data.rows import Row, named_labels
from turnrl.plugin.errors import DataError

if TYPE_CHECKING:
    import pyarrow

FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
"""Kinds of files. Those of text may end in `.gz`, too."""

_TABLES = {".csv": ",", ".tsv": "\t"}
"""Kinds of text in cells, and what separates these."""
_AT_ONCE = 1000


def file_kind(name: str) -> str | None:
    """The kind of a file by its name, one of `FILE_KINDS`; None if it is of no such kind."""
    plain = name.lower().removesuffix(".gz")
    kind = Path(plain).suffix
    is_packed_table = kind == ".parquet" and plain != name.lower()
    return kind if kind in FILE_KINDS and not is_packed_table else None


# JSON and CSV are read here and not by `datasets`, whose readers guess types: the answer
# "1999-05-04" would become a timestamp, the id "007" 7, and Namibia's code "NA" nothing.
def require_file(source: str) -> None:
    """Raise `DataError` if there is no such file."""
    if not Path(source).is_file():
        parent = Path(source).absolute().parent
        raise DataError(f"no file {source!r} in {parent}. Check its name.")


def read_file(
    source: str,
    skip: int = 0,
    columns: Sequence[str] = (),
    report: Callable[[float], None] | None = None,
) -> Iterator[Row]:
    """The rows of a file. Cells of CSV are texts.

    Args:
        source: The file.
        skip: Number of rows to skip.
        columns: The only columns to read, if the file is Parquet and has any of them.
        report: Called now and then with the share of the file that was read.
    Raises:
        DataError: If there is no such file, it is not of one of `FILE_KINDS`, or it cannot be read.
    """
    path, kind = Path(source), file_kind(source)
    require_file(source)
    if kind is None:
        raise DataError(f"cannot tell the format of {source!r}. Name it {', '.join(FILE_KINDS)}.")
    try:
        if kind == ".parquet":
            rows: Iterator[object] = _parquet(path, skip, columns, report)
        else:
            rows = _text(path, kind, skip, report)
        for row in rows:
            if not isinstance(row, dict):
                raise DataError(
                    f"{source!r} is not a list of objects. Give one JSON object for each row."
                )
            yield row
    except UnicodeDecodeError as error:
        byte = f"{error.reason} {error.object[error.start]:#x}"
        raise DataError(f"cannot read {source!r}: {byte}. Save it as UTF-8") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot read {source!r}: {error}") from error


def read_questions(source: str, texts: Container[str], answers: Container[str]) -> Iterator[Row]:
    """The rows of a file of questions. A cell of CSV that spells out a list is that list.

    Args:
        source: The file.
        texts: The columns of texts, whose cells stay texts.
        answers: Those of answers. Only a list of quoted texts is a list there, so the interval
            [0, 1] is a text.
    Raises:
        DataError: As `read_file`.
    """
    is_table = file_kind(source) in _TABLES

    def cell(name: str, text: object) -> object:
        if not is_table:
            return text
        if name in answers:
            return quoted_list(text)
        return text if name in texts else spelt_list(text)

    for row in read_file(source):
        yield {name: cell(name, text) for name, text in row.items()}


def _parquet(
    path: Path, skip: int, columns: Sequence[str], report: Callable[[float], None] | None
) -> Iterator[object]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            total, passed = max(file.metadata.num_rows, 1), 0
            chosen = [name for name in columns if name in file.schema_arrow.names] or None
            for batch in file.iter_batches(batch_size=_AT_ONCE, columns=chosen):
                if passed + batch.num_rows > skip:
                    yield from _rows(batch.slice(max(skip - passed, 0)))
                passed += batch.num_rows
                if report:
                    report(passed / total)
    except pyarrow.ArrowException as error:  # only some of them are ValueErrors
        raise ValueError(error) from error


def _rows(batch: pyarrow.RecordBatch) -> list[Row]:
    """The rows of a batch. If `datasets` wrote it, class labels are their names."""
    described = (batch.schema.metadata or {}).get(b"huggingface")
    features = json.loads(described).get("info", {}).get("features") if described else None
    return named_labels(batch.to_pylist(), features or {})


def _text(
    path: Path, kind: str, skip: int, report: Callable[[float], None] | None
) -> Iterator[object]:
    size, where = max(path.stat().st_size, 1), str(path)
    with (
        path.open("rb") as raw,
        io.TextIOWrapper(_unpack(path, raw), encoding="utf-8-sig", newline="") as file,
    ):
        if kind in _TABLES:
            rows: Iterator[object] = _cells(file, _TABLES[kind], skip)
        elif kind == ".jsonl":
            rows = json_rows(file, where, skip)
        else:
            rows = itertools.islice(_json(file.read(), where), skip, None)
        for number, row in enumerate(rows):
            if report and number % 256 == 0:
                report(min(raw.tell() / size, 1.0))
            yield row


def _unpack(path: Path, raw: BinaryIO) -> IO[bytes]:
    return cast("IO[bytes]", gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw)


def _cells(lines: Iterable[str], delimiter: str, skip: int) -> Iterator[Row]:
    """The rows of a table, by the names in its first row.

    Raises:
        ValueError: Naming the line that has an open quote, or does not fit the header.
    """
    csv.field_size_limit(sys.maxsize)  # by default 128 kB, less than an article
    reader = csv.reader(lines, strict=True, delimiter=delimiter)
    try:
        header = next(reader, [])
        if twice := {name for name in header if name and header.count(name) > 1}:
            raise ValueError(f"its header names {min(twice)!r} twice. Rename one of the columns")
        for cells in itertools.islice(filter(None, reader), skip, None):
            if len(cells) != len(header):
                raise ValueError(
                    f"line {reader.line_num}: {len(cells)} cells, and the header has "
                    f"{len(header)}. Put quotes around a cell that contains {delimiter!r}"
                )
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ValueError(
            f"line {reader.line_num}: {error}. Close the quotes around its cells, and double "
            "each quote within one"
        ) from error


def _json(text: str, where: str) -> Iterator[object]:
    """The rows of a list of objects, or of one object on each line."""
    try:
        rows = _load_json(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return json_rows(text.split("\n"), where)
    if isinstance(rows, dict) and not all(isinstance(v, dict | list) for v in rows.values()):
        rows = [rows]
    return iter(rows if isinstance(rows, list) else [None])


def _load_json(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_rows(lines: Iterable[str], where: str, skip: int = 0) -> Iterator[dict[str, object]]:
    """Read one JSON object from each line that is not blank.

    Args:
        lines: The lines.
        where: Their file, for messages.
        skip: Number of rows to skip unread.
    Raises:
        DataError: Naming the line that is not a JSON object.
    """
    filled = ((number, line) for number, line in enumerate(lines, 1) if line and not line.isspace())
    for number, line in itertools.islice(filled, skip, None):
        try:
            row = _load_json(line)
        except ValueError as error:
            raise DataError(f"{where}, line {number}: not JSON ({error}).") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{where}, line {number}: not a JSON object, but {line[:40]!r}. "
                "Give one on each line."
            )
        yield row


_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""


def quoted_list(text: object) -> object:
    """The list that a text spells out, if it is one of quoted texts; any other value unchanged."""
    values = spelt_list(text)
    kinds = {type(value) for value in values} if isinstance(values, list) else set()
    return values if str in kinds and kinds <= {str, type(None)} else text


def spelt_list(text: object) -> object:
    """The list that a text spells out: in JSON, as Python prints a list, or as numpy prints an
    array (without commas, as pandas writes it into CSV files). Any other value stays as it is."""
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
