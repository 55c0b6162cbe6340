"""Questions made of rows: the fields that hold a question and its answers, and their formats."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from turnrl.data.files import parse_list
from turnrl.data.rows import ABSENT, Row, field_text, is_chat, is_missing, to_native
from turnrl.plugin.errors import DataError, suggest_name
from turnrl.types.questions import Question

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fields:
    """The fields that turnrl needs in the rows of a file or hub data set.

    A dotted path such as `answer.aliases` reaches into nested fields.

    Args:
        id: Field of the question's id; null numbers the rows, and so does `id` if no row has it.
        question: Field of the question's text.
        answers: Field, or fields, of accepted answers: a text, which is a single answer, or a list.
            In a CSV file, a cell with a list of quoted texts is that list.
        answer_pattern: Regular expression that finds the answer within such a text: its first
            group, or all of it. GSM8K's answers end with `#### 42`, which is `'#### (.*)'`; in YAML
            it needs the quotes. By default the whole text is the answer.
    Raises:
        DataError: If the pattern is not a regular expression.
    """

    id: str | None = "id"
    question: str = "question"
    answers: str | list[str] = "answers"
    answer_pattern: str = ""

    def __post_init__(self) -> None:
        try:
            re.compile(self.answer_pattern)
        except (re.error, TypeError) as error:
            raise DataError(
                f"data.fields.answer_pattern {self.answer_pattern!r} is not a regular expression: "
                f"{error}. Fix it; '#### (.*)' is one."
            ) from error

    @property
    def answer_fields(self) -> list[str]:
        """The fields of accepted answers."""
        return [self.answers] if isinstance(self.answers, str) else list(self.answers)

    @property
    def all_fields(self) -> set[str]:
        """All the fields."""
        return {self.question, *self.answer_fields} | ({self.id} if self.id else set())


def _value_at(row: object, path: str) -> object:
    """The value at a dotted path, through lists too; `ABSENT` if there is no such field."""
    if isinstance(row, list):
        values = [_value_at(item, path) for item in row]
        return [value for value in values if value is not ABSENT] or (ABSENT if values else [])
    if row is None:
        return None
    if not isinstance(row, Mapping):
        return ABSENT
    if path in row:
        return row[path]
    head, _, rest = path.partition(".")
    return _value_at(row[head], rest) if rest and head in row else ABSENT


def _find_question(value: object, path: str, place: str) -> tuple[bool, str, str]:
    """The question of a row, which is a text or chat messages: True for messages, the system
    message, empty if there is none, and the user's text.

    Raises:
        DataError: If the value is neither, or if the messages are not a single user message,
            optionally after a system message.
    """
    if not is_chat(value := to_native(value)):
        return False, "", field_text(value, path, place)
    messages = [(str(message["role"]), _content_text(message.get("content"))) for message in value]
    roles = [role for role, _ in messages]
    if roles not in (["user"], ["system", "user"], ["developer", "user"]):
        raise DataError(
            f"{place}: {path!r} has messages of {', '.join(roles)}. turnrl takes one of the user, "
            "and before it one of the system. Write the earlier messages into one of them."
        )
    if None in (texts := [text for _, text in messages]):
        raise DataError(
            f"{place}: {path!r} has a message whose content is not text, {value!r:.60}. Write a "
            "text there; images are not supported."
        )
    system, text = ["", *cast(list[str], texts)][-2:]
    return True, system.strip(), text


def _content_text(content: object) -> str | None:
    """The text of a message's content, which may come in parts; None if it is not text."""
    parts: list[object] = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def _answers(value: object, path: str, place: str) -> Iterator[str]:
    """The answers in a field: a text, a number, or a list of them."""
    if isinstance(value := to_native(value), list):
        for item in value:
            yield from _answers(item, path, place)
    elif not is_missing(value):
        yield field_text(value, path, place)


def _answer_in(text: str, pattern: str) -> str | None:
    """The answer in a text of an answers field; None if the pattern does not match."""
    if not pattern:
        return text
    match = re.search(pattern, text)
    answer: str | None = match and match[min(1, match.re.groups)]
    return answer.strip() if answer is not None else None


def make_questions(
    rows: Iterable[Row], fields: Fields, where: str, without: Sequence[str] = ()
) -> Iterator[Question]:
    """Make questions from rows. Every other column becomes metadata unchanged: a text, a number, a
    list, a mapping. Nulls are left out, because Arrow has null where a row lacks the column.

    Args:
        rows: Rows in their order, read once.
        fields: The fields of the question, its id and its answers.
        where: The source, for messages.
        without: Columns to leave out of the metadata, because they are large.
    Raises:
        DataError: If no row has a needed field (at the end, when all rows have been read); or
            naming the row whose question or answer is not text.
    """
    paths = [("id", fields.id)] if fields.id else []
    paths += [("question", fields.question), *(("answers", path) for path in fields.answer_fields)]
    used = {*fields.all_fields, *without}
    missing, columns, first_text, matched = paths, set[str](), "", False
    like_lists, number = list[str](), -1
    for number, row in enumerate(rows):
        missing = [(name, path) for name, path in missing if _value_at(row, path) is ABSENT]
        if missing and number < 100:
            columns.update(row)
        place = f"{where}, row {number + 1}"
        texts = [
            text
            for path in fields.answer_fields
            for text in _answers(_value_at(row, path), path, place)
        ]
        in_texts = (_answer_in(text, fields.answer_pattern) for text in texts)
        answers = tuple(answer for answer in in_texts if answer is not None)
        like_lists += [text for text in answers if parse_list(text) is not text][:1]
        first_text, matched = first_text or "".join(texts[:1]), matched or bool(answers)
        own = field_text(_value_at(row, fields.id), fields.id, place) if fields.id else ""
        asked = _value_at(row, fields.question)
        in_chat, system, text = _find_question(asked, fields.question, place)
        metadata = {k: v for k, v in row.items() if k not in used and v is not None}
        rest = {k: v for k, v in row.items() if k not in metadata and k not in without}
        named = own or str(number)
        question = Question(
            named, text.strip(), metadata=metadata, system=system, row=rest, is_chat=in_chat
        )
        yield replace(question, answers=answers) if answers else question
    if missing and columns:
        _refuse_missing(missing, columns, where)
    _warn_of_lists(like_lists, number + 1, where)
    if first_text and not matched:
        raise DataError(
            f"data.fields.answer_pattern {fields.answer_pattern!r} matches no answer of {where}; "
            f"the first answer ends with {first_text[-60:]!r}. Fix the pattern, or leave it out."
        )


def _warn_of_lists(texts: Sequence[str], rows: int, where: str) -> None:
    """Warn if most answers look like lists, but are texts."""
    if 2 * len(texts) > rows:
        _logger.warning(
            f"{where}: the answers of {len(texts)} of {rows} rows are texts that look like lists, "
            f"such as {texts[0]!r:.60}. Each text counts as a single accepted answer. If it holds "
            "several, store a list."
        )


def _refuse_missing(missing: Sequence[tuple[str, str]], columns: set[str], where: str) -> None:
    """Refuse rows that lack needed fields; see `make_questions`."""
    for name, path in missing:
        if (name, path) == ("id", Fields.id):  # not named by the user, so the rows are numbered
            continue
        numbered = ", or to null to number the rows" if name == "id" else ""
        raise DataError(
            f"{where} has no field {path!r}.{suggest_name(path, columns)} It has: "
            f"{', '.join(sorted(columns))}. Set data.fields.{name} to the one that holds it"
            f"{numbered}."
        )
