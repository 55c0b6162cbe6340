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
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, final
from urllib.parse import unquote

from turnrl.data.fields import Fields, make_questions
from turnrl.data.files import file_kind, read_questions
from turnrl.data.rows import Row, is_cached, open_hub, read_hub
from turnrl.plugin.errors import DataError, RecipeError, check_at_least
from turnrl.types.contracts import QuestionSource
from turnrl.types.questions import Question
from turnrl.types.trajectory import Passage


class _Paragraphs(QuestionSource, ABC):
    """Questions that come with paragraphs, and the distinct paragraphs as a corpus. The classes
    below define the layout of a row."""

    hub: ClassVar[str]
    hub_config: ClassVar[str | None] = None
    answers: ClassVar[str]
    layout: ClassVar[str]

    def __init__(
        self,
        path: str | None = None,
        config: str | None = None,
        splits: list[str] | None = None,
        limit: int | None = None,
        fields: Fields | None = None,
    ) -> None:
        name = type(self).__name__
        if splits is not None and not splits:
            raise RecipeError(f"{name}.splits is empty. Name one, or leave it out.")
        self.path = path
        self.config = config
        self.splits = splits
        self.limit = limit
        check_at_least(1, f"{name}.", self, "limit", whole=True)
        self.fields = fields
        self._path = path or self.hub
        self._config = config or (self.hub_config if path in (None, self.hub) else None)
        self._fields = fields or Fields(answers=self.answers)
        self._is_file = file_kind(self._path) is not None
        train, val = ("", "") if self._is_file else ("train", "validation")
        self.default_splits = {"train": train, "val": val}

    def questions(self, split: str) -> Iterator[Question]:
        rows = (self._with_support(row, place) for row, place in self._rows(split))
        return make_questions(rows, self._fields, self._where(split))

    def at_hand(self, split: str) -> bool:
        return self._is_file or is_cached(self._path, self._config, split)

    def passages(self) -> Iterator[Passage]:
        """The distinct paragraphs, in the order in which they first appear.

        Rows are read one at a time, and memory holds one number per paragraph.

        Raises:
            DataError: If a row has no paragraphs, or has another layout.
        """
        seen = set[int]()  # 8 bytes of each id: half a million take some 50 MB
        splits = self.splits or [split or "" for split in self.default_splits.values()]
        for split in dict.fromkeys(splits):
            for row, place in self._rows(split):
                for passage in self._read(row, place):
                    if (key := int(passage.id, 16)) not in seen:
                        seen.add(key)
                        yield passage

    @abstractmethod
    def _paragraphs(self, row: Row) -> Iterable[Passage]:
        """The paragraphs of a row.

        Raises:
            ValueError: If the row has another layout; `LookupError` or `TypeError` too.
        """

    @abstractmethod
    def _with_support(self, row: Row, place: str) -> Row:
        """A row with `supporting_ids` in place of its paragraphs."""

    def _read(self, row: Row, place: str) -> list[Passage]:
        """The paragraphs of a row, in a place that messages name."""
        try:
            return [*self._paragraphs(row)]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._misfit(row, place, error) from error

    def _misfit(self, row: Row, place: str, error: Exception) -> DataError:
        name = type(self).__name__
        return DataError(
            f"{place} does not fit {name}, which reads {self.layout} ({type(error).__name__}: "
            f"{error}; the row has {', '.join(map(str, row)) or 'no field'}). For questions "
            "without paragraphs, name their file or data set itself in data.train, and build the "
            "index from a corpus."
        )

    def _rows(self, split: str) -> Iterator[tuple[Row, str]]:
        """The rows of a split, each with its place for messages."""
        if not self._is_file:
            rows = read_hub(open_hub(self._path, self._config, split))
        elif split:
            raise DataError(
                f"the file {self._path!r} is one split; leave out the split {split!r}, or name "
                "another file"
            )
        else:
            rows = read_questions(self._path, self._fields.all_fields, self._fields.answer_fields)
        for number, row in enumerate(islice(rows, self.limit), 1):
            yield row, f"{self._where(split)}, row {number}"

    def _where(self, split: str) -> str:
        return f"{self._path} ({split})" if split else self._path


@final
class HotpotParagraphs(_Paragraphs):
    """HotpotQA's questions, and the paragraphs they come with as the corpus to search.

    Each question has ten Wikipedia paragraphs: two support the answer, and eight were chosen to
    distract. The corpus contains every distinct paragraph of every question, so each search covers
    all of them. A question's `supporting_ids` name the passages that support it, which
    `SupportSeen` rewards. A passage's id is a digest of its title and text, so it is the same
    everywhere. (Yang et al. 2018, https://arxiv.org/abs/1809.09600, CC BY-SA 4.0.)

    Args:
        path: A data set on the hub, a folder with the files of one, or a file (.jsonl, .json,
            .parquet), whose rows have HotpotQA's fields; by default HotpotQA on the hub.
        config: Configuration on the hub; `distractor` for HotpotQA.
        splits: Splits whose paragraphs make the corpus; by default those to train on and to
            evaluate with. A file is one split without a name.
        limit: Take the first `limit` questions of each split, and only their paragraphs.
        fields: The fields of id, question and answers in the rows; by default as in HotpotQA.
    """

    hub, hub_config, answers = "hotpotqa/hotpot_qa", "distractor", "answer"
    layout = (
        "context: {title: [...], sentences: [[...], ...]}, with as many lists of sentences as "
        "titles, and supporting_facts: {title: [...], sent_id: [...]} or none"
    )

    def _paragraphs(self, row: Row, titles: Container[str] | None = None) -> Iterator[Passage]:
        """See the base class; without paragraphs under other titles, if some are given."""
        context = row["context"]
        if isinstance(context, Mapping):
            context = zip(context["title"], context["sentences"], strict=True)
        for title, sentences in context:
            title, text = _one_line(title), _one_line(sentences)
            if text and (titles is None or title in titles):
                yield Passage(_digest(title, text), title, text)

    def _with_support(self, row: Row, place: str) -> Row:
        plain = {k: v for k, v in row.items() if k not in ("context", "supporting_facts")}
        facts: Any = row.get("supporting_facts")
        try:
            if facts is None:
                return plain
            titles = facts["title"] if isinstance(facts, Mapping) else [title for title, _ in facts]
            support = self._paragraphs(row, {_one_line(title) for title in titles})
            return {**plain, "supporting_ids": list(dict.fromkeys(p.id for p in support))}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._misfit(row, place, error) from error


@final
class SquadParagraphs(_Paragraphs):
    """SQuAD's questions, and their paragraphs as the corpus to search.

    Each question was written about one Wikipedia paragraph of about 110 words, and each paragraph
    has about five questions. The corpus contains every distinct paragraph, under the title of its
    article, with spaces in place of SQuAD's underscores. A question's `supporting_ids` name its
    paragraph, which `SupportSeen` rewards. The authors of the questions saw the paragraph, so some
    questions say too little to be found without it. (Rajpurkar et al. 2016,
    https://arxiv.org/abs/1606.05250, CC BY-SA 4.0.)

    Args:
        path: A data set on the hub, a folder with the files of one, or a file (.jsonl, .json,
            .parquet), whose rows have SQuAD's fields as on the hub; by default SQuAD 1.1 there.
        config: Configuration on the hub.
        splits: Splits whose paragraphs make the corpus; by default those to train on and to
            evaluate with. A file is one split without a name.
        limit: Take the first `limit` questions of each split, and only their paragraphs.
        fields: The fields of id, question and answers in the rows; by default as in SQuAD.
    """

    hub, answers = "rajpurkar/squad", "answers.text"
    layout = "title and context, two texts"

    def _paragraphs(self, row: Row) -> list[Passage]:
        title, text = row.get("title", ""), row["context"]
        if not isinstance(title, str) or not isinstance(text, str) or not text.strip():
            raise ValueError(f"title is {title!r:.40}, and context is {text!r:.40}")
        title, text = _one_line(unquote(title).replace("_", " ")), _one_line(text)
        return [Passage(_digest(title, text), title, text)]

    def _with_support(self, row: Row, place: str) -> Row:
        plain = {name: value for name, value in row.items() if name != "context"}
        return {**plain, "supporting_ids": [p.id for p in self._read(row, place)]}


def _one_line(text: str | Sequence[str]) -> str:
    """A text, or several texts joined, with single spaces."""
    return " ".join((text if isinstance(text, str) else " ".join(text)).split())


def _digest(title: str, text: str) -> str:
    return hashlib.blake2b(f"{title}\n{text}".encode("utf-8", "replace"), digest_size=8).hexdigest()
