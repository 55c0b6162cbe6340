"""Corpora: the passages of files, installed data sets and the hub, made of rows that `turnrl.data`
reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast, final

from tqdm.auto import tqdm

from turnrl import DataError, QuestionSource, RecipeError
from turnrl.data.files import FILE_KINDS, file_kind, read_file, require_file
from turnrl.data.rows import field_text, hub_errors, is_missing
from turnrl.plugin.errors import suggest_name
from turnrl.plugin.hooks import load_class, load_classes
from turnrl.types import Passage
from turnrl_wiki_search.splitting import Splitter

T = TypeVar("T")
Row = Mapping[str, object]

HUB_CONFIGS = {"wikimedia/wikipedia": "20231101.en"}
"""The default configuration of a hub data set."""
_COLUMNS = ("id", "title", "text", "contents")


@final
class Corpus:
    """The passages of a source.

    Args:
        name: The source as `--source` names it.
        rows: Returns its rows, from the first, each time it is called.
        splitter: How its articles are split.
        files: The files on this machine that it reads.
    Attributes:
        count: Number of passages that `passages` has given.
        digest: Digest of these passages, in order.
    """

    def __init__(
        self,
        name: str,
        rows: Callable[[], Iterable[Row]],
        splitter: Splitter,
        files: Sequence[Path] = (),
    ) -> None:
        self.name, self.splitter, self.files = name, splitter, files
        self._rows = rows
        self._digest = hashlib.blake2b(digest_size=16)
        self.count = 0

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def passages(self) -> Iterator[Passage]:
        """Every passage, in order. A bar on a terminal shows how many there are so far.

        Raises:
            DataError: If the source is broken, has no passage at all, or gives two passages the
                same id.
        """
        self.count, self._digest = 0, hashlib.blake2b(digest_size=16)
        hashes = array("q")  # 8 bytes for each id: Wikipedia has some 40 million
        shown = tqdm(self._split(), unit=" passages", leave=False, delay=0.5, disable=None)
        for passage in shown:
            self.count += 1
            content = f"{passage.id}\x1f{passage.title}\x1f{passage.text}\x1e"
            self._digest.update(content.encode())
            hashes.append(hash(passage.id))
            yield passage
        if not self.count:
            raise DataError(
                f"source {self.name!r} has no passages: every text is empty, or there are no rows."
            )
        self._check_ids(hashes)

    def _split(self) -> Iterator[Passage]:
        for number, row in enumerate(self._rows(), 1):
            yield from self.splitter.split(_make_article(row, self.name, number))

    def _check_ids(self, hashes: array[int]) -> None:
        """Read the source again if two ids look equal, and refuse the first that is."""
        import numpy as np

        ordered = np.sort(np.frombuffer(hashes, dtype=np.int64))
        repeated = {*ordered[1:][ordered[1:] == ordered[:-1]].tolist()}
        first = dict[str, int]()
        for number, passage in enumerate(self._split() if repeated else (), 1):
            if hash(passage.id) in repeated and number != first.setdefault(passage.id, number):
                raise DataError(
                    f"{self.name}: passages {first[passage.id]:,} and {number:,} have the same id "
                    f"{passage.id!r}. Give each passage its own id."
                )


def open_corpus(source: str | QuestionSource, splitter: Splitter | None = None) -> Corpus:
    """Open the corpus that `--source` or `build_from` names. Nothing is read yet.

    Args:
        source: A file with `id`, `title` and `text`, of a kind that questions can come in; an
            installed question source with a corpus, its short name, or its `source_name`; or a hub
            data set, `NAME[:CONFIG[:SPLIT]]`.
        splitter: How articles are split; by default into passages of 100 words for a hub data set,
            and not at all otherwise.
    Raises:
        DataError: If there is no such source; the message lists the installed ones.
        RecipeError: If the source does not take its settings.
    """
    name, files, whole = source_name(source), source_files(source), splitter or Splitter(None)
    source = _parse_source(source)
    if isinstance(source, QuestionSource):
        corpus = source
        return Corpus(name, lambda: map(vars, corpus.passages()), whole, files)
    if file_kind(source) and not Path(source).is_dir():
        require_file(source)
        return Corpus(name, partial(read_file, source, _COLUMNS), whole, files)
    if "/" in source or Path(source).is_dir():
        return Corpus(name, partial(_stream_hub, source), splitter or Splitter(100), files)
    corpora = [k for k, v in _classes().items() if v.passages is not QuestionSource.passages]
    raise DataError(
        f"no source {source!r}.{suggest_name(source, corpora)} It can be a file (*"
        f"{', *'.join(FILE_KINDS)}), a hub data set such as wikimedia/wikipedia:20231101.en, or an "
        f"installed corpus (found: {', '.join(corpora) or 'none'})."
    )


def _stream_hub(name: str) -> Iterable[Row]:
    """The rows of a data set of the Hugging Face hub, or of a folder with its files."""
    path, config, split = [*name.split(":"), "", ""][:3]
    config, split = config or HUB_CONFIGS.get(path, ""), split or "train"
    with hub_errors(path, config or None, split):
        import datasets

        rows: Iterable[Row] = datasets.load_dataset(
            path, config or None, split=split, streaming=True
        )
    return rows


def _parse_source(source: str | QuestionSource) -> str | QuestionSource:
    """The installed source that a text names; the text itself if it names a file or a data set."""
    if isinstance(source, QuestionSource):
        return source
    if source.lstrip().startswith("{"):
        example = "{class_path: HotpotParagraphs, init_args: {limit: 5000}}"
        return make_object(source, QuestionSource, example)  # type: ignore[type-abstract]
    named = load_class("turnrl_datasets", source)
    return named() if named is not None and issubclass(named, QuestionSource) else source


def _classes() -> dict[str, type[QuestionSource]]:
    found = load_classes("turnrl_datasets")
    return {name: cls for name, cls in found.items() if issubclass(cls, QuestionSource)}


def source_name(source: str | QuestionSource) -> str:
    """The source as `--source` names it, which is how an index records it.

    Args:
        source: A name, or an installed source. A source with settings becomes
            `{class_path: HotpotParagraphs, init_args: {limit: 5000}}`.
    Raises:
        RecipeError: If the source does not keep its settings.
    """
    if isinstance(source := _parse_source(source), str):
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


def source_files(source: str | QuestionSource) -> list[Path]:
    """The files on this machine that a source reads: itself, or the `path` of an installed one."""
    source = _parse_source(source)
    path = source if isinstance(source, str) else _settings(source).get("path")
    if not isinstance(path, str):
        return []
    found = Path(path)
    files = sorted(found.rglob("*")) if found.is_dir() else [found]
    return [file for file in files if file.is_file()]


def digests_of(files: Sequence[Path]) -> dict[str, str]:
    """A digest of each file's content, by its name."""
    digests: dict[str, str] = {}
    for file in files:
        with file.open("rb") as opened:
            digests[str(file)] = hashlib.file_digest(opened, "blake2b").hexdigest()[:32]
    return digests


def make_object(text: str, kind: type[T], example: str) -> T:
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
        from turnrl.recipe.explain import explain

        fault = parts and explain(parts, kind, "it")
        reason = str(fault or " ".join(str(error).split())).rstrip(".")
        raise RecipeError(f"cannot make {text!r} ({reason}). Write it as {example}.") from error
    return cast("T", parser.instantiate_classes(checked).value)


def title_and_text(row: Row) -> tuple[object, object]:
    """The title and the text of a row, or None for either. `contents`, as in the published
    "wiki-18" corpus, is `"title"` with the text below it."""
    text, title, contents = row.get("text"), row.get("title"), row.get("contents")
    if text is None and isinstance(contents, str):
        title, _, text = contents.partition("\n")
        if len(title) > 1 and title[0] == title[-1] == '"':
            title = title[1:-1]
    return title, text


def make_passage(identity: object, title: object, text: object) -> Passage:
    """A passage of valid text, with its title on one line. Letters with marks are composed."""
    title, text = (unicodedata.normalize("NFC", _clean(part)) for part in (title or "", text))
    return Passage(_clean(identity), " ".join(title.split()), text)


def _make_article(row: Row, source: str, number: int) -> Passage:
    title, text = title_and_text(row)
    fields = {"id": row.get("id"), "title": title, "text": text}
    place = f"{source}, row {number}"
    if missing := [name for name in ("id", "text") if is_missing(fields[name])]:
        raise DataError(
            f"{place}: no value in the field {missing[0]!r} (found: "
            f"{', '.join(map(str, row)) or 'none'}). Passages need the fields id, title and text."
        )
    return make_passage(*(field_text(value, name, place) for name, value in fields.items()))


def _clean(value: object) -> str:
    text = str(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
