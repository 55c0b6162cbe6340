"""Corpora: passages from files, installed data sets and the hub, in chunks from which a build can
resume. `turnrl.data` reads the rows; here they become passages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import islice
from pathlib import Path
from typing import TypedDict, TypeVar, cast

from turnrl import DataError, QuestionSource, RecipeError
from turnrl.data.files import FILE_KINDS, file_kind, read_file
from turnrl.data.rows import hub_errors, is_missing, written
from turnrl.plugin.errors import did_you_mean
from turnrl.plugin.hooks import installed
from turnrl.recipe.explain import explain
from turnrl.types import Passage
from turnrl_wiki_search.changes import Ids
from turnrl_wiki_search.splitting import Splitter

T = TypeVar("T")

HUB_CONFIGS = {"wikimedia/wikipedia": "20231101.en"}
"""The default configuration of a hub data set."""
_SAMPLE = 200
"""Passages in the small index of a rehearsal."""
_COLUMNS = ("id", "title", "text", "contents")

_Row = Mapping[str, object]


class Source(ABC):
    """A corpus, read as a stream of articles. An interrupted build resumes at a position.

    Attributes:
        name: The source as `--source` names it.
        identity: Distinguishes this state of this source from any other, as JSON.
        splitter: How its articles are split by default.
        files: The files on this machine that it reads.
    """

    splitter = Splitter(None)

    def __init__(self, name: str, identity: _Row, files: Sequence[Path] = ()) -> None:
        self.name, self.files = name, files
        states = [(file.name, file.stat()) for file in files]
        times = [[name, state.st_size, state.st_mtime_ns] for name, state in states]
        self.identity = {**identity, "files": times}
        self._row = 0

    def read(self, position: object = None) -> Iterator[Passage]:
        """Every article, or every article after a position that `position` returned.

        Raises:
            DataError: Naming the source, the row and its fault.
        """
        for row in self._rows(position):
            self._row += 1
            yield _article(row, self.name, self._row)

    def position(self) -> object:
        """The place that `read` has reached, as JSON: by default the number of rows."""
        return self._row

    def fraction(self) -> float | None:
        """The share that has been read, from 0 to 1; None if the size is unknown."""
        return None

    @abstractmethod
    def _rows(self, position: object) -> Iterator[_Row]:
        """The rows after a position; sets `_row` to their number before it."""


class _File(Source):
    def __init__(self, path: Path) -> None:
        super().__init__(str(path), {}, files_of(str(path)))
        self._fraction = 0.0

    def fraction(self) -> float | None:
        return self._fraction

    def _rows(self, position: object) -> Iterator[_Row]:
        self._row = cast("int", position) or 0
        return read_file(self.name, self._row, _COLUMNS, self._reached)

    def _reached(self, fraction: float) -> None:
        self._fraction = fraction


class _Installed(Source):
    """The corpus of a plugin's `QuestionSource`."""

    def __init__(self, source: QuestionSource) -> None:
        identity = {"class": type(source).__qualname__, "settings": _settings(source)}
        super().__init__(source_name(source), identity, files_of(source))
        self._source = source

    def _rows(self, position: object) -> Iterator[_Row]:
        self._row = cast("int", position) or 0
        return map(vars, islice(self._source.passages(), self._row, None))


class _Sample(Source):
    def __init__(self, passages: Iterable[Passage]) -> None:
        super().__init__("a sample", {})
        self._passages = [*passages]

    def _rows(self, position: object) -> Iterator[_Row]:
        return map(vars, self._passages)


class _Reached(TypedDict):
    row: int
    state: dict[str, object]


class _Hub(Source):
    """A data set of the Hugging Face hub, or a folder with its files, read by streaming."""

    splitter = Splitter(100)

    def __init__(self, name: str) -> None:
        path, config, split = [*name.split(":"), "", ""][:3]
        config, split = config or HUB_CONFIGS.get(path, ""), split or "train"
        super().__init__(name, {"dataset": path, "config": config, "split": split}, files_of(name))
        with hub_errors(path, config or None, split):
            import datasets

            self._data = datasets.load_dataset(path, config or None, split=split, streaming=True)
        splits = self._data.info.splits or {}
        self._total: int | None = splits[split].num_examples if split in splits else None
        self._beginning = self._data.state_dict()

    def _rows(self, position: object) -> Iterator[_Row]:
        reached = cast("_Reached", position or {"row": 0, "state": self._beginning})
        self._row = reached["row"]
        self._data.load_state_dict(reached["state"])
        return iter(self._data)

    def position(self) -> object:
        return {"row": self._row, "state": self._data.state_dict()}

    def fraction(self) -> float | None:
        return min(self._row / self._total, 1.0) if self._total else None


def open_source(source: str | QuestionSource) -> Source:
    """Open the corpus that `--source` or `build_from` names.

    Args:
        source: A file with `id`, `title` and `text`, of a kind that questions can come in; an
            installed question source with a corpus, its short name, or its `source_name`; or a hub
            data set, `NAME[:CONFIG[:SPLIT]]`.
    Raises:
        DataError: If there is no such source; the message lists the installed ones.
        RecipeError: If the source does not take its settings.
    """
    if isinstance(source := _instance(source), QuestionSource):
        return _Installed(source)
    if file_kind(source) and not Path(source).is_dir():
        return _File(Path(source))
    if "/" in source or Path(source).is_dir():
        return _Hub(source)
    corpora = [k for k, v in _classes().items() if v.passages is not QuestionSource.passages]
    raise DataError(
        f"no source {source!r}.{did_you_mean(source, corpora)} It can be a file (*"
        f"{', *'.join(FILE_KINDS)}), a hub data set such as wikimedia/wikipedia:20231101.en, or an "
        f"installed corpus (found: {', '.join(corpora) or 'none'})."
    )


def open_sample(source: str | QuestionSource | None) -> Source:
    """The first passages of a source; a made-up passage if there is no source, or if reading it
    would download it.

    Raises:
        DataError: If there is no such source, or it has no passages.
    """
    opened = None if source is None or _is_on_hub(source) else open_source(source)
    made_up = Passage("1", "Utrecht", "Utrecht is a city in the Netherlands.")
    return _Sample([made_up] if opened is None else islice(opened.read(), _SAMPLE))


def _is_on_hub(source: str | QuestionSource) -> bool:
    """True if reading a source would download it."""
    source = _instance(source)
    if isinstance(source, QuestionSource):
        splits = filter(None, source.default_splits.values())
        return not all(map(source.at_hand, splits))
    return "/" in source and not file_kind(source) and not Path(source).is_dir()


def _instance(source: str | QuestionSource) -> str | QuestionSource:
    """The installed source that a text names; the text itself if it names a file or a data set."""
    if isinstance(source, QuestionSource):
        return source
    classes = _classes()
    if source.lstrip().startswith("{"):
        example = "{class_path: HotpotParagraphs, init_args: {limit: 5000}}"
        return make(source, QuestionSource, example)  # type: ignore[type-abstract]
    return classes[source]() if source in classes else source


def _classes() -> dict[str, type[QuestionSource]]:
    found = installed("turnrl_datasets")
    return {name: cls for name, cls in found.items() if issubclass(cls, QuestionSource)}


def source_name(source: str | QuestionSource) -> str:
    """The source as `--source` names it, which is how an index records it.

    Args:
        source: A name, or an installed source. A source with settings becomes
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


def _settings(source: QuestionSource) -> dict[str, object]:
    """The arguments of a source that differ from their defaults, as JSON."""
    settings: dict[str, object] = {}
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


def files_of(source: str | QuestionSource) -> list[Path]:
    """The files on this machine that a source reads: itself, or the `path` of an installed one."""
    source = _instance(source)
    path = source if isinstance(source, str) else _settings(source).get("path")
    if not isinstance(path, str):
        return []
    found = Path(path)
    files = sorted(found.rglob("*")) if found.is_dir() else [found]
    return [file for file in files if file.is_file()]


def make(text: str, kind: type[T], example: str) -> T:
    """Make an object from text in braces with its class and settings, as a recipe writes them.

    Raises:
        RecipeError: If the class does not exist, or does not take the settings.
    """
    import jsonargparse
    import yaml

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    parts: object = None
    try:
        parts = yaml.safe_load(text)
        checked = parser.parse_object({"value": parts})
    except (yaml.YAMLError, jsonargparse.ArgumentError, TypeError) as error:
        fault = parts and explain(parts, kind, "it")
        reason = str(fault or " ".join(str(error).split())).rstrip(".")
        raise RecipeError(f"cannot make {text!r} ({reason}). Write it as {example}.") from error
    return cast("T", parser.instantiate_classes(checked).value)


@dataclass(frozen=True)
class Mark:
    """A place in a corpus where a build can resume.

    Args:
        passages: Number of passages before the mark.
        position: The source's own position.
        digest: Digest of the passages before the mark.
    """

    passages: int = 0
    position: object = None
    digest: str = ""


class Corpus:
    """The passages of a source, in chunks that end at marks.

    Args:
        source: The articles.
        splitter: How to split them; the source's own way if None.
        chunk: Passages in a chunk, which ends with the article that reaches this number. The digest
            of a mark, and so the version of an index, depends on it.
    """

    def __init__(self, source: Source, splitter: Splitter | None = None, chunk: int = 2000) -> None:
        self.source = source
        self.splitter = splitter or source.splitter
        self.chunk = chunk

    @property
    def identity(self) -> dict[str, object]:
        """Equal for two builds that would read the same passages."""
        return {
            "source": {"name": self.source.name, **self.source.identity},
            "splitter": str(self.splitter),
            "chunk": self.chunk,
        }

    def chunks(self, start: Mark | None = None) -> Iterator[tuple[list[Passage], Mark]]:
        """Lists of `chunk` or a few more passages, each list with the mark after it.

        Args:
            start: A mark of an earlier, interrupted pass.
        Raises:
            DataError: If the source is broken, has no passage at all, or gives two passages the
                same id.
        """
        ids, mark = Ids(), start or Mark()
        for chunk in self._chunks(mark.position):
            if ids.has_repeated(chunk):
                self._refuse_repeated(ids)
            # chained by chunk, because the state of a running digest cannot be saved
            digest = hashlib.blake2b(mark.digest.encode(), digest_size=16)
            digest.update("\x1e".join(f"{p.id}\x1f{p.title}\x1f{p.text}" for p in chunk).encode())
            passages = mark.passages + len(chunk)
            mark = Mark(passages, self.source.position(), digest.hexdigest())
            yield chunk, mark
        if ids.has_repeated(()):
            self._refuse_repeated(ids)
        if not mark.passages:
            raise DataError(
                f"source {self.source.name!r} has no passages: every text is empty, or there are "
                "no rows."
            )

    def _chunks(self, position: object) -> Iterator[list[Passage]]:
        chunk: list[Passage] = []
        for article in self.source.read(position):
            chunk += self.splitter.split(article)
            if len(chunk) >= self.chunk:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def _refuse_repeated(self, ids: Ids) -> None:
        """Read the source again, and refuse the first id that two passages share."""
        repeated, first = ids.repeated(), dict[str, int]()
        passages = (passage for chunk in self._chunks(None) for passage in chunk)
        for number, passage in enumerate(passages, 1):
            if hash(passage.id) in repeated and number != first.setdefault(passage.id, number):
                raise DataError(
                    f"{self.source.name}: passages {first[passage.id]:,} and {number:,} have the "
                    f"same id {passage.id!r}. Give each passage its own id."
                )


def title_and_text(row: Mapping[str, object]) -> tuple[object, object]:
    """The title and the text of a row, or None for either. `contents`, as in the published
    "wiki-18" corpus, is `"title"` with the text below it."""
    text, title, contents = row.get("text"), row.get("title"), row.get("contents")
    if text is None and isinstance(contents, str):
        title, _, text = contents.partition("\n")
        if len(title) > 1 and title[0] == title[-1] == '"':
            title = title[1:-1]
    return title, text


def passage_of(identity: object, title: object, text: object) -> Passage:
    """A passage of valid text, with its title on one line. Letters with marks are composed."""
    title, text = (unicodedata.normalize("NFC", _clean(part)) for part in (title or "", text))
    return Passage(_clean(identity), " ".join(title.split()), text)


def _article(row: _Row, source: str, number: int) -> Passage:
    title, text = title_and_text(row)
    fields = {"id": row.get("id"), "title": title, "text": text}
    place = f"{source}, row {number}"
    if missing := [name for name in ("id", "text") if is_missing(fields[name])]:
        raise DataError(
            f"{place}: no value in the field {missing[0]!r} (found: "
            f"{', '.join(map(str, row)) or 'none'}). Passages need the fields id, title and text."
        )
    return passage_of(*(written(value, name, place) for name, value in fields.items()))


def _clean(value: object) -> str:
    text = str(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
