"""Rows of files of questions and of passages, read one by one.

A row that cannot be read as it was meant is an error that names its line: bytes that are not UTF-8,
a quote that never closes, more or fewer cells than the header has names, a torn archive.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import gzip
import io
import itertools
import json
import re
import sys
import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO, cast

from turnrl.data.rows import Row
from turnrl.plugin.errors import DataError

FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv")
"""Kinds of files. Those of text may end in `.gz`, too."""

_AT_ONCE = 1000


def file_kind(name: str) -> str | None:
    """The kind of a file by its name, one of `FILE_KINDS`; None if it is of no such kind."""
    plain = name.lower().removesuffix(".gz")
    kind = Path(plain).suffix
    is_packed_table = kind == ".parquet" and plain != name.lower()
    return kind if kind in FILE_KINDS and not is_packed_table else None


def require_file(source: str) -> None:
    """Raise `DataError` if there is no such file."""
    if not Path(source).is_file():
        parent = Path(source).absolute().parent
        raise DataError(f"no file {source!r} in {parent}. Check its name.")


# JSON and CSV are read here and not by `datasets`, whose readers guess types: the answer
# "1999-05-04" would become a timestamp, the id "007" 7, and Namibia's code "NA" nothing.
def read_file(source: str, columns: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a file. Cells of CSV are texts.

    Args:
        source: The file.
        columns: The only columns to read, if the file is Parquet and has any of them.
    Raises:
        DataError: If there is no such file, it is not of one of `FILE_KINDS`, or it cannot be read.
    """
    path, kind = Path(source), file_kind(source)
    require_file(source)
    if kind is None:
        raise DataError(f"cannot tell the format of {source!r}. Name it {', '.join(FILE_KINDS)}.")
    try:
        for row in _parquet(path, columns) if kind == ".parquet" else _text(path, kind):
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
    if file_kind(source) != ".csv":
        return read_file(source)

    def cell(name: str, text: object) -> object:
        if name in answers:
            return parse_quoted_list(text)
        return text if name in texts else parse_list(text)

    return ({name: cell(name, text) for name, text in row.items()} for row in read_file(source))


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[object]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            chosen = [name for name in columns if name in file.schema_arrow.names] or None
            for batch in file.iter_batches(batch_size=_AT_ONCE, columns=chosen):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:  # only some of them are ValueErrors
        raise ValueError(error) from error


def _text(path: Path, kind: str) -> Iterator[object]:
    with (
        path.open("rb") as raw,
        io.TextIOWrapper(_unpack(path, raw), encoding="utf-8-sig", newline="") as file,
    ):
        if kind == ".csv":
            yield from _cells(file)
            return
        blank, first = "", file.read(1) if kind == ".json" else ""
        while first.isspace():
            blank, first = blank + first, file.read(1)
        if first == "[":
            yield from cast("list[object]", _load_json(first + file.read()))
        else:
            yield from json_rows(
                itertools.chain(blank.splitlines(True), [first + file.readline()], file), str(path)
            )


def _unpack(path: Path, raw: BinaryIO) -> IO[bytes]:
    return cast("IO[bytes]", gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw)


def _cells(lines: Iterable[str]) -> Iterator[Row]:
    """The rows of a table, by the names in its first row.

    Raises:
        ValueError: Naming the line that has an open quote, or does not fit the header.
    """
    csv.field_size_limit(sys.maxsize)  # by default 128 kB, less than an article
    reader = csv.reader(lines, strict=True)
    try:
        header = next(reader, [])
        if twice := {name for name in header if name and header.count(name) > 1}:
            raise ValueError(f"its header names {min(twice)!r} twice. Rename one of the columns")
        for cells in filter(None, reader):
            if len(cells) != len(header):
                raise ValueError(
                    f"line {reader.line_num}: {len(cells)} cells, and the header has "
                    f"{len(header)}. Put quotes around a cell that contains ','"
                )
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ValueError(
            f"line {reader.line_num}: {error}. Close the quotes around its cells, and double "
            "each quote within one"
        ) from error


def _load_json(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_rows(lines: Iterable[str], where: str) -> Iterator[dict[str, object]]:
    """Read one JSON object from each line that is not blank.

    Args:
        lines: The lines.
        where: Their file, for messages.
    Raises:
        DataError: Naming the line that is not a JSON object.
    """
    for number, line in enumerate(lines, 1):
        if not line or line.isspace():
            continue
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


def parse_quoted_list(text: object) -> object:
    """The list that a text spells out, if it is one of quoted texts; any other value unchanged."""
    values = parse_list(text)
    kinds = {type(value) for value in values} if isinstance(values, list) else set()
    return values if str in kinds and kinds <= {str, type(None)} else text


def parse_list(text: object) -> object:
    """The list that a text spells out, in JSON or as Python prints a list. Any other value stays as
    it is, such as an array that numpy has printed, without commas."""
    if not isinstance(text, str) or not re.fullmatch(r"\s*\[.*\]\s*", text, re.DOTALL):
        return text
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        if not re.search(r"""['"]\s+['"]""", text):  # Python joins them, and numpy means two texts
            value = ast.literal_eval(text.strip())
            return value if isinstance(value, list) else text
    return text
