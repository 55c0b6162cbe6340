"""Questions with the paragraphs that answer them, in the layouts of HotpotQA and SQuAD.

HotpotQA:

    context           {"title": [t, ...], "sentences": [[s, ...], ...]}, or [[t, [s, ...]], ...]
    supporting_facts  {"title": [t, ...], "sent_id": [n, ...]}, or [[t, n], ...]; may be missing

The first form is the hub's, the second that of HotpotQA's own files. 2WikiMultihopQA has the same
fields. SQuAD:

    title, context    the title of an article, and one of its paragraphs
    answers           {"text": [a, ...]}

The paragraphs of all questions together form a corpus, from which a search index can be built
without a dump of Wikipedia and without a server.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, final
from urllib.parse import unquote

from turnrl.data.fields import Fields, questions_of
from turnrl.data.files import file_here, file_kind, read_questions, refuse_split
from turnrl.data.rows import Names, Row, cached_hub, open_hub, read_hub
from turnrl.errors import DataError, RecipeError, at_least
from turnrl.types.contracts import QuestionSource
from turnrl.types.questions import Question
from turnrl.types.trajectory import Passage

HOTPOTQA = "hotpotqa/hotpot_qa"
"""HotpotQA on the hub (Yang et al. 2018, https://arxiv.org/abs/1809.09600, CC BY-SA 4.0)."""

SQUAD = "rajpurkar/squad"
"""SQuAD 1.1 on the hub (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250, CC BY-SA 4.0)."""

_LAYOUT = "context: {title: [...], sentences: [[...], ...]}"
_SQUAD_LAYOUT = "title and context, two texts"


class _Paragraphs(QuestionSource, ABC):
    """Questions that come with paragraphs, and the distinct paragraphs as a corpus. The classes
    below define the layout of a row."""

    hub: ClassVar[str]
    hub_config: ClassVar[str | None] = None
    answers: ClassVar[str]

    def __init__(
        self,
        path: str,
        config: str | None = None,
        splits: list[str] | None = None,
        limit: int | None = None,
        fields: Fields | None = None,
    ) -> None:
        name = type(self).__name__
        if splits is not None and not splits:
            raise RecipeError(f"{name}: splits is empty. Name one, or leave it out.")
        self.path = path
        self.config = config
        self._config = config or (self.hub_config if path == self.hub else None)
        self.splits = splits
        self.limit = limit
        at_least(1, f"{name}.", self, "limit", whole=True)
        self.fields = fields
        self._named = fields or Fields(answers=self.answers)
        self._names = Names((f"{name}.path",), (), f"{name}.config", f"{name}.fields")
        self._is_file = file_kind(path) is not None
        train, val = ("", "") if self._is_file else ("train", "validation")
        self.default_splits = {"train": train, "val": val}
        self._of_corpus = list(dict.fromkeys(splits or (train, val)))

    def questions(self, split: str) -> Iterator[Question]:
        rows, _ = self._open(split)
        named = (self._with_support(row, f"{self._where(split)}, row {n}") for n, row in rows)
        return questions_of(named, self._named, self._where(split), self._names, needs_id=True)

    def at_hand(self, split: str) -> bool:
        if self._is_file:
            return file_here(self.path, self._names)
        return cached_hub(self.path, self._config, split, self._names)

    def passages(self) -> Iterator[Passage]:
        """The distinct paragraphs, in the order in which they first appear.

        Rows are read one at a time, and memory holds one number per paragraph. If rows can be
        counted, the iterator estimates how many are left (`operator.length_hint`).

        Raises:
            DataError: If a row has no paragraphs, or has another layout.
        """
        splits = [(self._where(split), *self._open(split)) for split in self._of_corpus]
        return _Passages(splits, self._paragraphs)

    @staticmethod
    @abstractmethod
    def _paragraphs(row: Row, where: str) -> Iterable[Passage]:
        """The paragraphs of a row.

        Args:
            row: The row.
            where: The data set and the row's number, for messages.
        Raises:
            DataError: If the row has another layout.
        """

    @staticmethod
    @abstractmethod
    def _with_support(row: Row, where: str) -> Row:
        """A row with `supporting_ids` in place of its paragraphs."""

    def _open(self, split: str) -> tuple[Iterator[tuple[int, Row]], int | None]:
        """The rows of a split, numbered from 1, and their number if it is known."""
        if self._is_file:
            refuse_split(self.path, split)
            fields = self._named
            read = read_questions(self.path, fields.words, fields.of_answers, self._names)
            return enumerate(itertools.islice(read, self.limit), 1), None
        data = open_hub(self.path, self._config, split, self._names)
        if self.limit is not None and self.limit < len(data):
            data = data.select(range(self.limit))
        return enumerate(read_hub(data), 1), len(data)

    def _where(self, split: str) -> str:
        return f"{self.path} ({split})" if split else self.path


@final
class HotpotParagraphs(_Paragraphs):
    """HotpotQA's questions, and the paragraphs they come with as the corpus to search.

    Each question has ten Wikipedia paragraphs: two support the answer, and eight were chosen to
    distract. The corpus contains every distinct paragraph of every question, so each search covers
    all of them. A question's `supporting_ids` name the passages that support it, which
    `SupportSeen` rewards. A passage's id is a digest of its title and text, so it is the same
    everywhere.

    Args:
        path: A data set on the hub, a folder with the files of one, or a file (.jsonl, .json,
            .parquet). Its rows have HotpotQA's fields.
        config: Configuration on the hub; `distractor` for HotpotQA.
        splits: Splits whose paragraphs make the corpus; by default those to train on and to
            evaluate with. A file is one split without a name.
        limit: Take the first `limit` questions of each split, and only their paragraphs.
        fields: The fields of id, question and answers in the rows; by default as in HotpotQA.
    """

    hub, hub_config, answers = HOTPOTQA, "distractor", "answer"

    def __init__(
        self,
        path: str = HOTPOTQA,
        config: str | None = None,
        splits: list[str] | None = None,
        limit: int | None = None,
        fields: Fields | None = None,
    ) -> None:
        super().__init__(path, config, splits, limit, fields)

    @staticmethod
    def _paragraphs(row: Row, where: str) -> Iterable[Passage]:
        return paragraphs_of(row, where)

    @staticmethod
    def _with_support(row: Row, where: str) -> Row:
        wanted = set(_supporting_titles(row.get("supporting_facts"), where))
        support = list(dict.fromkeys(p.id for p in paragraphs_of(row, where, wanted)))
        plain = {k: v for k, v in row.items() if k not in ("context", "supporting_facts")}
        named = row.get("supporting_facts") is not None
        return {**plain, "supporting_ids": support} if named else plain


@final
class SquadParagraphs(_Paragraphs):
    """SQuAD's questions, and their paragraphs as the corpus to search.

    Each question was written about one Wikipedia paragraph of about 110 words, and each paragraph
    has about five questions. The corpus contains every distinct paragraph, under the title of its
    article, with spaces in place of SQuAD's underscores. A question's `supporting_ids` name its
    paragraph, which `SupportSeen` rewards. The authors of the questions saw the paragraph, so some
    questions say too little to be found without it.

    Args:
        path: A data set on the hub, a folder with the files of one, or a file (.jsonl, .json,
            .parquet). Its rows have SQuAD's fields as on the hub.
        config: Configuration on the hub.
        splits: Splits whose paragraphs make the corpus; by default those to train on and to
            evaluate with. A file is one split without a name.
        limit: Take the first `limit` questions of each split, and only their paragraphs.
        fields: The fields of id, question and answers in the rows; by default as in SQuAD.
    """

    hub, answers = SQUAD, "answers.text"

    def __init__(
        self,
        path: str = SQUAD,
        config: str | None = None,
        splits: list[str] | None = None,
        limit: int | None = None,
        fields: Fields | None = None,
    ) -> None:
        super().__init__(path, config, splits, limit, fields)

    @staticmethod
    def _paragraphs(row: Row, where: str) -> Iterable[Passage]:
        title, text = row.get("title", ""), row.get("context")
        if not isinstance(title, str) or not isinstance(text, str) or not text.strip():
            raise DataError(
                f"{where}: title is {title!r:.40} and context is {text!r:.40}. SquadParagraphs "
                f"reads rows with {_SQUAD_LAYOUT}. For questions without paragraphs, name their "
                "file or data set itself in data.train, and build the index from a corpus."
            )
        title, text = _one_line(unquote(title).replace("_", " ")), _one_line(text)
        return [Passage(_digest(title, text), title, text)]

    @staticmethod
    def _with_support(row: Row, where: str) -> Row:
        (passage,) = SquadParagraphs._paragraphs(row, where)
        plain = {name: value for name, value in row.items() if name != "context"}
        return {**plain, "supporting_ids": [passage.id]}


_Split: TypeAlias = tuple[str, Iterable[tuple[int, Row]], int | None]
"""A split's name for messages, its numbered rows, and their number if it is known."""


class _Passages(Iterator[Passage]):
    """The distinct passages of several splits."""

    def __init__(
        self, splits: Sequence[_Split], paragraphs: Callable[[Row, str], Iterable[Passage]]
    ) -> None:
        self._paragraphs = paragraphs
        sizes = [size for _, _, size in splits if size is not None]
        self._rows = sum(sizes) if len(sizes) == len(splits) else None
        self._rows_read = 0
        self._given = 0
        self._passages = self._read(splits)

    def __next__(self) -> Passage:
        return next(self._passages)

    def __length_hint__(self) -> object:
        if self._rows is None or not self._rows_read:
            return NotImplemented
        return round(self._given / self._rows_read * (self._rows - self._rows_read))

    def _read(self, splits: Sequence[_Split]) -> Iterator[Passage]:
        seen = set[int]()  # 8 bytes of each id: half a million take some 50 MB
        for where, rows, _ in splits:
            for number, row in rows:
                for passage in self._paragraphs(row, f"{where}, row {number}"):
                    key = int(passage.id, 16)
                    if key not in seen:
                        seen.add(key)
                        self._given += 1
                        yield passage
                self._rows_read += 1


def paragraphs_of(row: Row, where: str, titles: Container[str] | None = None) -> Iterator[Passage]:
    """The paragraphs of a row that have text, each with an id made from its title and text.

    Args:
        row: A row in HotpotQA's layout.
        where: The data set and the row's number, for messages.
        titles: Leave out paragraphs under other titles.
    Raises:
        DataError: If the row has no `context`, or another layout.
    """
    context = row.get("context")
    if context is None:
        raise DataError(
            f"{where}: no paragraphs in a field 'context' (found: "
            f"{', '.join(map(str, row)) or 'none'}). HotpotParagraphs reads rows with {_LAYOUT}. "
            "For questions without paragraphs, name their file or data set itself in data.train, "
            "and build the index from a corpus."
        )
    try:
        if isinstance(context, Mapping):
            pairs: Iterable[Any] = zip(context["title"], context["sentences"], strict=True)
        else:
            pairs = context
        for title, sentences in pairs:
            title = _one_line(title)
            text = _one_line(sentences) if titles is None or title in titles else ""
            if text:
                yield Passage(_digest(title, text), title, text)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: its context is not laid out as HotpotQA's ({type(error).__name__}: {error})."
            f" HotpotParagraphs reads {_LAYOUT}, with as many lists of sentences as titles."
        ) from error


def _supporting_titles(facts: Any, where: str) -> Iterator[str]:
    if facts is None:
        return
    try:
        titles = facts["title"] if isinstance(facts, Mapping) else [title for title, _ in facts]
        for title in titles:
            yield _one_line(title)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: its supporting_facts are not laid out as HotpotQA's "
            f"({type(error).__name__}: {error}). HotpotParagraphs reads supporting_facts: "
            "{title: [...], sent_id: [...]}, or no such field."
        ) from error


def _one_line(text: str | Sequence[str]) -> str:
    """A text, or several texts joined, with single spaces."""
    return " ".join((text if isinstance(text, str) else " ".join(text)).split())


def _digest(title: str, text: str) -> str:
    return hashlib.blake2b(f"{title}\n{text}".encode("utf-8", "replace"), digest_size=8).hexdigest()
