"""Where passages come from: reading a corpus as a stream, splitting its articles, resuming."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import hashlib
import inspect
import operator
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from turnrl import DataError, Passage, QuestionSource, RecipeError, did_you_mean, installed
from turnrl.data.rows import hub_errors, json_rows

HUB_CONFIGS = {"wikimedia/wikipedia": "20231101.en"}
"""The configuration meant when a data set is named without one."""

_HUB_ADVICE = (
    "Write it as NAME[:CONFIG[:SPLIT]], check the connection, or give a local .jsonl, .parquet or "
    ".csv file."
)
_SAMPLE = 200
"""Passages that a search is tried with."""
_SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".parquet")
_SENTENCE_END = re.compile(r"""([.!?]["'”’)\]]*)\s+(?=["'“‘(\[]*[A-Z0-9])|\n""")
_ABBREVIATIONS = frozenset(
    "Mr Mrs Ms Dr St Prof Jr Sr Gen Col Capt Lt Sgt Rev Hon Mt Ft No no vs etc c ca e.g i.e".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Splitter:
    """Cuts an article into passages of about `words` words, at the ends of sentences.

    A passage is closed at the sentence end nearest to `words`. A sentence that alone is longer than
    one and a half times that is cut between words, and a last passage of less than a third of it
    joins the one before. This is the field's "wiki-18" convention (100 words, the title kept with
    every passage), with sentences kept whole.

    Args:
        words: Words (as divided by white space) in a passage; None leaves every text as it is.
    """

    words: int | None

    @classmethod
    def parse(cls, text: str) -> Splitter:
        """Read `words=100` or `none`.

        Raises:
            RecipeError: If it is neither.
        """
        if text == "none":
            return cls(None)
        name, _, number = text.partition("=")
        if name == "words" and number.isascii() and number.isdigit() and int(number) >= 10:
            return cls(int(number))
        raise RecipeError(f"no splitter {text!r}. Use 'words=100' (10 words or more) or 'none'.")

    def __str__(self) -> str:
        return "none" if self.words is None else f"words={self.words}"

    def split(self, article: Passage) -> list[Passage]:
        """The passages of one article, each with its title; none if it has no text."""
        text = article.text.strip()
        if self.words is None:
            return [article] if text else []
        return [
            Passage(f"{article.id}-{number}", article.title, piece)
            for number, piece in enumerate(self._pieces(text, self.words))
        ]

    @staticmethod
    def _pieces(text: str, size: int) -> list[str]:
        pieces: list[list[str]] = []
        count = 0  # words of the last piece
        for sentence in _sentences(text):
            words = sentence.split()
            parts = [sentence.strip()] if words else []
            if cut := len(words) > 1.5 * size:
                parts = [" ".join(words[at : at + size]) for at in range(0, len(words), size)]
            for n, part in enumerate(parts):
                more = min(len(words) - n * size, size) if cut else len(words)
                # stopping here leaves `size - count` words missing; going on leaves
                # `count + more - size` too many
                if not pieces or (cut and not n) or (count and count + more - size > size - count):
                    pieces.append([])
                    count = 0
                pieces[-1].append(part)
                count += more
        if len(pieces) > 1 and count < size / 3:
            pieces[-2:] = [[*pieces[-2], *pieces[-1]]]
        return [" ".join(piece) for piece in pieces]


def _sentences(text: str) -> Iterator[str]:
    start = 0
    for match in _SENTENCE_END.finditer(text):
        if match[1] is None:  # the end of a line
            yield text[start : match.start()]
        else:
            word = text[text.rfind(" ", start, match.start()) + 1 : match.start()].lstrip("\"'“‘([")
            # "Dr.", or an initial, alone or as in "U.S."
            if match[1] == "." and (
                word in _ABBREVIATIONS or (word[-1:].isupper() and word[-2:-1] in ("", "."))
            ):
                continue
            yield text[start : match.end(1)]
        start = match.end()
    yield text[start:]


class Source(ABC):
    """A corpus that is read as a stream of articles and can be taken up again at a position.

    If it cannot, it is read again from its beginning. The digest of what is skipped tells whether
    it is still the same.

    Attributes:
        name: The source in the words of `--source`.
        identity: Tells this state of this source from another one; JSON.
        splitter: How its articles are split unless the user says otherwise.
        resumes: False if it can be read from its beginning alone.
    """

    name: str
    identity: Mapping[str, Any]
    splitter: Splitter = Splitter(None)
    resumes = True

    @abstractmethod
    def read(self, position: Any = None) -> Iterator[Passage]:
        """Every article, or every one after a position that `position` gave.

        Raises:
            DataError: Naming the source, the row and what is wrong with it.
        """

    @abstractmethod
    def position(self) -> Any:
        """Where `read` stands, as JSON."""

    def fraction(self) -> float | None:
        """Share that has been read, from 0 to 1; None if the size is not known."""
        return None


class _Rows(Source):
    """A source made of rows with fields; its position is a count of rows."""

    _row = 0

    @abstractmethod
    def _rows(self, skip: int) -> Iterator[Mapping[str, Any]]: ...

    def read(self, position: Any = None) -> Iterator[Passage]:
        self._row = position or 0
        for row in self._rows(self._row):
            self._row += 1
            yield _article(row, self.name, self._row)

    def position(self) -> Any:
        return self._row


class _File(_Rows):
    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(
                f"no file {str(path)!r} to read passages from (looked in {Path.cwd()})."
            )
        state = path.stat()
        self.name = str(path)
        self.identity = {
            "file": path.name,
            "bytes": state.st_size,
            "modified_ns": state.st_mtime_ns,
        }
        self._path = path
        self._fraction = 0.0

    def fraction(self) -> float | None:
        return self._fraction

    def _rows(self, skip: int) -> Iterator[Mapping[str, Any]]:
        if self._path.suffix == ".parquet":
            return self._parquet(skip)
        return self._text(skip)

    def _text(self, skip: int) -> Iterator[Mapping[str, Any]]:
        size = max(self._path.stat().st_size, 1)
        with self._path.open("rb") as raw:
            plain = gzip.open(raw) if self._path.suffix == ".gz" else raw  # noqa: SIM115
            lines = (line.decode("utf-8-sig", "replace") for line in plain)
            if self._path.suffix == ".csv":
                csv.field_size_limit(sys.maxsize)  # by default 128 kB, less than an article
                rows: Iterator[Mapping[str, Any]] = islice(csv.DictReader(lines), skip, None)
            else:
                rows = json_rows(lines, self.name, skip)
            for number, row in enumerate(rows):
                if number % 256 == 0:
                    self._fraction = min(raw.tell() / size, 1.0)
                yield row

    def _parquet(self, skip: int) -> Iterator[Mapping[str, Any]]:
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(self._path)
        except pyarrow.ArrowException as error:
            raise DataError(
                f"{self.name} is not a Parquet file that can be read ({error})."
            ) from error
        with file:
            total, done = max(file.metadata.num_rows, 1), 0
            columns = [
                n for n in ("id", "title", "text", "contents") if n in file.schema_arrow.names
            ]
            for batch in file.iter_batches(batch_size=1000, columns=columns or None):
                rows = batch.num_rows
                if done + rows > skip:
                    yield from batch.slice(max(skip - done, 0)).to_pylist()
                done += rows
                self._fraction = done / total


class _Installed(_Rows):
    """The corpus of a `QuestionSource` that a plugin brings, which is always read from its
    beginning."""

    resumes = False

    def __init__(self, source: QuestionSource) -> None:
        cls = type(source)
        self.name = source_name(source)
        self.identity = {
            "class": f"{cls.__module__}.{cls.__qualname__}",
            "settings": _settings(source),
        }
        self._source = source
        self._passages: Iterator[Passage] = iter(())

    @property
    def at_hand(self) -> bool:
        """True if its passages can be read without downloading them."""
        splits = self._source.default_splits.values()
        return all(self._source.at_hand(split) for split in splits if split is not None)

    def _rows(self, skip: int) -> Iterator[Mapping[str, Any]]:
        self._passages = iter(self._source.passages())
        for passage in self._passages:
            yield {"id": passage.id, "title": passage.title, "text": passage.text}

    def fraction(self) -> float | None:
        left = operator.length_hint(self._passages, -1)
        return None if left < 0 else self._row / max(self._row + left, 1)


class _Hub(Source):
    """A data set of the Hugging Face hub, or a folder with the files of one, read by streaming."""

    splitter = Splitter(100)

    def __init__(self, name: str) -> None:
        path, config, split = [*name.split(":"), "", ""][:3]
        config, split = config or HUB_CONFIGS.get(path, ""), split or "train"
        self.name = name
        self.identity = {"dataset": path, "config": config, "split": split}
        with hub_errors(path, config or None, split, _HUB_ADVICE):
            import datasets

            self._data = datasets.load_dataset(path, config or None, split=split, streaming=True)
        splits = self._data.info.splits or {}
        self._total: int | None = splits[split].num_examples if split in splits else None
        self._row = 0
        self._beginning = self._data.state_dict()

    def read(self, position: Any = None) -> Iterator[Passage]:
        position = position or {"row": 0, "state": self._beginning}
        self._row = position["row"]
        self._data.load_state_dict(position["state"])
        for row in self._data:
            self._row += 1
            yield _article(row, self.name, self._row)

    def position(self) -> Any:
        return {"row": self._row, "state": self._data.state_dict()}

    def fraction(self) -> float | None:
        return min(self._row / self._total, 1.0) if self._total else None


def source_name(source: str | QuestionSource) -> str:
    """A source in the words of `--source`, which an index records.

    Args:
        source: Such words already, or an installed source. One with settings becomes
            `{class_path: HotpotParagraphs, init_args: {limit: 5000}}`.
    Raises:
        RecipeError: If the source does not keep its settings.
    """
    if isinstance(source, str):
        return source
    name, settings = type(source).__name__, _settings(source)
    if not settings:
        return name
    import yaml

    parts = {"class_path": name, "init_args": settings}
    return yaml.safe_dump(parts, default_flow_style=True, width=10**9, allow_unicode=True).strip()


def _settings(source: QuestionSource) -> dict[str, Any]:
    """The arguments that a source was made with, as JSON, but for those with their default."""
    settings: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(source)).parameters.items():
        try:
            value = getattr(source, name)
        except AttributeError as error:
            raise RecipeError(
                f"an index made from {type(source).__name__} cannot record its setting {name!r}, "
                f"which the source does not keep in an attribute {name!r}. Keep it there."
            ) from error
        if value != parameter.default:
            settings[name] = dataclasses.asdict(value) if is_dataclass(value) else value  # type: ignore[arg-type]
    return settings


def open_source(source: str | QuestionSource) -> Source:
    """The source that `--source` and `build_from` name.

    Args:
        source: A `.jsonl`, `.jsonl.gz`, `.parquet` or `.csv` file with `id`, `title` and `text`;
            the short name of an installed question source that has a corpus, the words that
            `source_name` has for it, or itself; or a hub data set, `NAME[:CONFIG[:SPLIT]]`.
    Raises:
        DataError: If there is no such source; the message lists those installed.
        RecipeError: If its settings are none that it takes.
    """
    if isinstance(source, QuestionSource):
        return _Installed(source)
    classes = {
        k: v for k, v in installed("turnrl_datasets").items() if issubclass(v, QuestionSource)
    }
    if source.lstrip().startswith("{"):
        return _Installed(_made(source))
    if source in classes:
        return _Installed(classes[source]())
    if source.endswith(_SUFFIXES):
        return _File(Path(source))
    if "/" in source or Path(source).is_dir():
        return _Hub(source)
    corpora = [k for k, v in classes.items() if v.passages is not QuestionSource.passages]
    raise DataError(
        f"no source {source!r}.{did_you_mean(source, corpora)} It can be a file (*"
        f"{', *'.join(_SUFFIXES)}), a hub data set such as wikimedia/wikipedia:20231101.en, or an "
        f"installed corpus (found: {', '.join(corpora) or 'none'})."
    )


class _Sample(_Rows):
    """Some passages."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.name, self.identity = "a sample", {}
        self._passages = passages

    def _rows(self, skip: int) -> Iterator[Mapping[str, Any]]:
        return (vars(passage) for passage in self._passages[skip:])


def sample_of(source: str | QuestionSource | None) -> Source:
    """The first passages of a source; a made-up one if they are not on this machine, or if there is
    no source.

    Raises:
        DataError: If there is no such source, or it has no passages.
    """
    words = source if isinstance(source, str) else ""
    local = words.lstrip().startswith("{") or words.endswith(_SUFFIXES) or Path(words).is_dir()
    opened = None
    if source is not None and (local or "/" not in words):
        opened = open_source(source)
        if isinstance(opened, _Installed) and not opened.at_hand:
            opened = None
    if opened is None:
        return _Sample([Passage("1", "Utrecht", "Utrecht is a city in the Netherlands.")])
    return _Sample(list(islice(opened.read(), _SAMPLE)))


def _made(text: str) -> QuestionSource:
    """The source that a class and its settings in braces stand for."""
    import jsonargparse
    import yaml

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--source", type=QuestionSource)
    parts: Any = None
    try:
        parts = yaml.safe_load(text)
        checked = parser.parse_object({"source": parts})
    except (yaml.YAMLError, jsonargparse.ArgumentError, TypeError) as error:
        from turnrl.recipe.explain import explain  # which loads torch

        fault = parts and explain(parts, QuestionSource, "source")
        told = (fault or " ".join(str(error).split())).rstrip(".")
        raise RecipeError(
            f"no source {text!r} ({told}). One with settings is written "
            "{class_path: HotpotParagraphs, init_args: {limit: 5000}}."
        ) from error
    return parser.instantiate_classes(checked).source  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Mark:
    """A place in a corpus where building can be taken up.

    Args:
        passages: Passages before it.
        position: The source's own position.
        digest: Digest of the passages before it.
    """

    passages: int = 0
    position: Any = None
    digest: str = ""


class Corpus:
    """The passages of a source, in chunks that end at marks.

    Args:
        source: Where articles come from.
        splitter: How they are split; the source's own way if None.
        chunk: Passages in a chunk; it ends with the article in which that number is reached. The
            digest of a mark, and so the version of an index, depends on it.
    """

    def __init__(self, source: Source, splitter: Splitter | None = None, chunk: int = 2000) -> None:
        self.source = source
        self.splitter = splitter or source.splitter
        self.chunk = chunk

    @property
    def identity(self) -> dict[str, Any]:
        """Equal for two builds that would read the same passages."""
        return {
            "source": dict(self.source.identity),
            "splitter": str(self.splitter),
            "chunk": self.chunk,
        }

    def chunks(self, start: Mark | None = None) -> Iterator[tuple[list[Passage], Mark]]:
        """Lists of `chunk` or a few more passages, each with the mark that follows it.

        Args:
            start: A mark of an earlier, interrupted pass.
        Raises:
            DataError: If the source is broken, or has no passage at all.
        """
        start = start or Mark()
        mark = start if self.source.resumes else Mark()
        reached = self.source.resumes or not start.passages
        for chunk in self._chunks(mark.position):
            mark = self._next(mark, chunk)
            if reached:
                yield chunk, mark
            elif mark.passages >= start.passages:
                if mark.digest != start.digest:
                    break
                reached = True
        if not reached:
            raise DataError(
                f"{self.source.name}: its first {start.passages:,} passages are others than when "
                "this build was interrupted. Delete the unfinished build, the folder that ends in "
                "'.building', and build again."
            )
        if not mark.passages:
            raise DataError(
                f"source {self.source.name!r} has no passages: every text is empty, or there are "
                "no rows."
            )

    def _chunks(self, position: Any) -> Iterator[list[Passage]]:
        chunk: list[Passage] = []
        for article in self.source.read(position):
            chunk += self.splitter.split(article)
            if len(chunk) >= self.chunk:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def _next(self, mark: Mark, chunk: list[Passage]) -> Mark:
        # chained by chunk, because the state of a running digest cannot be saved
        digest = hashlib.blake2b(mark.digest.encode(), digest_size=16)
        digest.update("\x1e".join(f"{p.id}\x1f{p.title}\x1f{p.text}" for p in chunk).encode())
        return Mark(mark.passages + len(chunk), self.source.position(), digest.hexdigest())


def _article(row: Mapping[str, Any], source: str, number: int) -> Passage:
    text, title = row.get("text"), row.get("title")
    if text is None and isinstance(
        row.get("contents"), str
    ):  # the published wiki-18 corpus: '"title"\ntext'
        title, _, text = row["contents"].partition("\n")
        title = title.strip('"')
    missing = [n for n, value in (("id", row.get("id")), ("text", text)) if value is None]
    if missing:
        raise DataError(
            f"{source}, row {number}: no field {missing[0]!r} (found: "
            f"{', '.join(map(str, row)) or 'none'}). Passages need the fields id, title and text."
        )
    return Passage(
        _clean(str(row["id"])), " ".join(_clean(str(title or "")).split()), _clean(str(text))
    )


def _clean(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
