"""Rows of data sets of the `datasets` library, on the hub or saved, read one by one.

Rows are never all in memory: each row of HotpotQA has ten paragraphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from turnrl.plugin.errors import DataError
from turnrl.plugin.hub import check_hub

if TYPE_CHECKING:
    import datasets

Row = Mapping[str, Any]

_AT_ONCE = 1000


ABSENT = object()
"""The value of a field that a row does not have."""

_WORDS = (str, int, float, Decimal, date, time)
"""Types whose values have a single text form."""


def is_missing(value: object) -> bool:
    """True if a row has no value there. In pandas, an empty cell is NaN, NaT or NA."""
    if value is None or value is ABSENT or type(value).__name__ == "NAType":
        return True
    return isinstance(value, float | Decimal | date) and value != value


def to_native(value: Any) -> object:
    """The value as a Python list or number, if it is an array, a library's number, or a tuple."""
    if hasattr(value, "tolist"):  # of numpy, torch, pandas
        if getattr(value, "dtype", None) == "datetime64[ns]":  # else its list has numbers
            value = value.astype("datetime64[us]")
        if getattr(value, "dtype", None) in ("float16", "float32"):
            value = value.astype(str).astype(float)  # .1 as it was written, not .10000000149
        value = value.tolist()
    return list(value) if isinstance(value, tuple) else value


def field_text(value: object, path: str, place: str) -> str:
    """The text of a field; empty if the field has no value.

    Args:
        value: The value of the field.
        path: The field.
        place: The source and the row, for messages.
    Raises:
        DataError: If the value is neither a text nor a number nor a date.
    """
    if is_missing(value := to_native(value)):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # pandas holds whole numbers in a column with gaps as floats
    if isinstance(value, _WORDS):
        return str(value)
    step = "Write a text there"
    if isinstance(value, Mapping):
        step += f", or name a path into it, such as {path}.{next(iter(value), 'text')}"
    raise DataError(
        f"{place}: {path!r} is a {type(value).__name__}, {value!r:.60}, not a text. {step}."
    )


def is_chat(value: object) -> TypeGuard[list[Row]]:
    """True for a list of chat messages, `{"role": ..., "content": ...}`."""
    several = value if isinstance(value, list) else []
    return bool(several) and all(isinstance(m, Mapping) and "role" in m for m in several)


def open_hub(path: str, config: str | None, split: str) -> datasets.Dataset:
    """Open a split of a data set on the hub, or of a folder with the files of one.

    `datasets` downloads it once into its cache, from which rows are read as needed.

    Raises:
        DataError: If there is no such data set.
    """
    import datasets

    with hub_errors(path, config, split):
        rows: datasets.Dataset = datasets.load_dataset(path, config, split=split)
    return rows


def is_cached(path: str, config: str | None, split: str) -> bool:
    """True if `open_hub` would find a data set in the cache. Asks the hub only for its name.

    Raises:
        DataError: If the data set is not on the hub either.
    """
    import datasets

    with hub_errors(path, config, split):
        builder = datasets.load_dataset_builder(path, config)
    return Path(path).is_dir() or Path(builder.cache_dir).is_dir()


@contextmanager
def hub_errors(path: str, config: str | None, split: str) -> Iterator[None]:
    """Turn an error of the hub's client into a `DataError` with the next step.

    Args:
        path: The data set's name on the hub, or a folder with the files of one.
        config: Its configuration, if one is named.
        split: The split.
    """
    if not Path(path).is_dir():  # `datasets` reads folders too
        check_hub()
    import datasets

    try:
        yield
    except Exception as error:  # the hub's client lets through whatever its transport raises
        cause = str(error).strip().split("\n")[0]
        if cause.startswith("Split name should match"):  # the message does not name the splits
            cause = f"Should be one of {datasets.get_dataset_split_names(path, config)}."
        raise DataError(
            f"cannot load {path!r} (configuration {config}, split {split!r}) from the hub: "
            f"{cause.rstrip('.')}. Check the name, the configuration, the split and the "
            "connection, or name a local file."
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
    """The rows of an opened data set, twice as fast as iterating over it. Class labels are their
    names, and one that stands for none, such as the -1 of hidden answers, is None."""
    if getattr(rows, "format", {}).get("type") == "custom":  # what a function makes of them
        yield from rows
        return
    labels = {
        column: feature.names
        for column, feature in (rows.features or {}).items()
        if type(feature).__name__ == "ClassLabel"
    }
    for batch in rows.with_format("arrow").iter(_AT_ONCE):
        for row in batch.to_pylist():
            yield {**row, **{name: _label(row[name], names) for name, names in labels.items()}}


def _label(number: int | None, names: Sequence[str]) -> str | None:
    return None if number is None or number < 0 else names[number]
