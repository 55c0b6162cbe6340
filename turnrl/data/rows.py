"""Rows of files and of data sets on the hub, read one by one.

Rows are never all in memory: each row of HotpotQA has ten paragraphs.
"""

from __future__ import annotations

import ast
import csv
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnrl.errors import DataError
from turnrl.policy.hub import reach_hub

if TYPE_CHECKING:
    import datasets

Row = Mapping[str, Any]

FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv", ".arrow")

_AT_ONCE = 1000


@dataclass(frozen=True)
class Names:
    """The caller's names of a data set's settings, for messages; by default those of a recipe.

    Args:
        sources: The settings or options that name a data set.
        splits: The settings that name its split; none if the split cannot be chosen.
        config: The setting of its configuration on the hub; empty for none.
        fields: The setting that holds `Fields`; empty if the fields of the rows cannot be named.
        answers: The setting of the answer rule; empty for none.
    """

    sources: tuple[str, ...] = ("data.train", "data.val")
    splits: tuple[str, ...] = ("data.train_split", "data.val_split")
    config: str = "data.config"
    fields: str = "data.fields"
    answers: str = "data.answers"

    def field(self, name: str) -> str:
        """The setting of one of the fields, such as `data.fields.id`; empty for none."""
        return f"{self.fields}.{name}" if self.fields else ""


RECIPE = Names()
"""The settings of a recipe."""


# JSON and CSV are read here and not by `datasets`, whose readers guess types: the answer
# "1999-05-04" would become a timestamp, the id "007" 7, and Namibia's code "NA" nothing.
def read_file(source: str, names: Names = RECIPE) -> Iterator[Row]:
    """The rows of a file.

    Raises:
        DataError: If it is not a file of one of `FILE_KINDS`, or cannot be read.
    """
    path, kind = Path(source), Path(source).suffix.lower()
    file_here(source, names)
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


def file_here(source: str, names: Names = RECIPE) -> bool:
    """True if the file exists.

    Raises:
        DataError: If it does not.
    """
    path = Path(source)
    if not path.is_file():
        raise DataError(
            f"no file {source!r} in {path.absolute().parent}. Check {' and '.join(names.sources)}."
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
    """The rows of a file in either of Arrow's formats; `datasets` writes the streaming format."""
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
                yield {name: spelt_list(value) for name, value in row.items()}
        elif kind == ".jsonl":
            yield from json_rows(file, repr(str(path)))
        else:
            rows = json.load(file)
            yield from rows if isinstance(rows, list) else [None]


_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""


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


def json_rows(lines: Iterable[str], where: str, skip: int = 0) -> Iterator[dict[str, object]]:
    """Read one JSON object from each line that is not blank.

    Args:
        lines: The lines.
        where: Their file, for messages.
        skip: Number of rows to skip unread.
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


def open_hub(path: str, config: str | None, split: str, names: Names = RECIPE) -> datasets.Dataset:
    """Open a split of a data set on the hub, or of a folder with the files of one.

    `datasets` downloads it once into its cache, from which rows are read as needed.

    Raises:
        DataError: If there is no such data set.
    """
    import datasets

    with hub_errors(path, config, split, _check(names)):
        rows: datasets.Dataset = datasets.load_dataset(path, config, split=split)
    return rows


def cached_hub(path: str, config: str | None, split: str, names: Names = RECIPE) -> bool:
    """True if `open_hub` would find a data set in the cache. Asks the hub only for its name.

    Raises:
        DataError: If the data set is not on the hub either.
    """
    import datasets

    with hub_errors(path, config, split, _check(names)):
        builder = datasets.load_dataset_builder(path, config)
    return Path(path).is_dir() or Path(builder.cache_dir).is_dir()


def _check(names: Names) -> str:
    settings = ", ".join(filter(None, [*names.sources, names.config]))
    return f"Check {settings} and the splits, or name a local file."


@contextmanager
def hub_errors(path: str, config: str | None, split: str, advice: str) -> Iterator[None]:
    """Turn an error of the hub's client into a `DataError` with the next step.

    Args:
        path: The data set's name on the hub, or a folder with the files of one.
        config: Its configuration, if one is named.
        split: The split.
        advice: The next step, as a sentence.
    """
    if not Path(path).is_dir():  # `datasets` reads folders too
        reach_hub()
    import datasets

    try:
        yield
    except Exception as error:  # the hub's client lets through whatever its transport raises
        cause = str(error).strip().split("\n")[0]
        if cause.startswith("Split name should match"):  # the message does not name the splits
            cause = f"Should be one of {datasets.get_dataset_split_names(path, config)}."
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
    """The rows of an opened data set, twice as fast as iterating over it."""
    for batch in rows.with_format("arrow").iter(_AT_ONCE):
        yield from batch.to_pylist()
