"""Which questions an index holds an answer to, wherever in the index that answer is.

A search is not exact: the rule of answers takes "U.S." and "us" for the same word, and the terms of
an index do not. So a search comes first, because it settles most questions, and then one pass over
all passages settles the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from turnrl import Phrase, Question, can_be_found, contains_answer, normalize_answer
from turnrl_wiki_search.index import SearchIndex, clean_query

_BATCH = 64
_REPORT_EVERY = 1000

Report = Callable[[int], None]


@dataclass(frozen=True)
class Coverage:
    """What an index holds of the answers to some questions.

    Args:
        held: Questions with an accepted answer in a passage.
        missing: Questions without one; if `whole` is false, without one in what was found.
        unchecked: Questions for which a passage with the answer would say nothing, because the
            answer is yes or no, or stands in the question, or the rule seeks none in texts.
        whole: Whether every passage was considered. If not, `held` may lack questions.
        scanned: Passages read one by one, after the searches.
    """

    held: list[Question]
    missing: list[Question]
    unchecked: list[Question]
    whole: bool
    scanned: int


def coverage(
    index: SearchIndex, questions: Sequence[Question], k: int, searched: Report, read: Report
) -> Coverage:
    """Look for an accepted answer to each question in the titles and texts of an index.

    Args:
        index: The index.
        questions: The questions, which carry the rule of their answers.
        k: Passages per search. The result depends on it only if the index cannot be read whole.
        searched: Called with the number of questions that were searched for.
        read: Called with the number of passages that were read.
    Raises:
        ToolError: If the index cannot answer, or cannot be read to its end.
    """
    checked = [question for question in questions if can_be_found(question)]
    left: list[Question] = []
    for start in range(0, len(checked), _BATCH):
        left += _unsettled(index, checked[start : start + _BATCH], k)
        searched(min(start + _BATCH, len(checked)))
    scanned, whole = 0, True
    if left:
        passages = index.passages()
        whole = passages is not None
        texts = (f"{one.title}\n{one.text}" for one in passages or ())
        left, scanned = _scan(texts, left, read)
    lacking = {question.id for question in left}
    return Coverage(
        held=[question for question in checked if question.id not in lacking],
        missing=left,
        unchecked=[question for question in questions if not can_be_found(question)],
        whole=whole,
        scanned=scanned,
    )


def _unsettled(index: SearchIndex, questions: Sequence[Question], k: int) -> list[Question]:
    """The questions without an answer in the best passages for their texts and their answers."""
    asked: dict[str, list[str]] = {
        question.id: [
            query for text in (question.text, *question.answers) if (query := clean_query(text))
        ]
        for question in questions
    }
    queries = [*dict.fromkeys(query for some in asked.values() for query in some)]
    found = dict(zip(queries, index.search(queries, k), strict=True)) if queries else {}
    return [
        question
        for question in questions
        if not any(
            contains_answer(f"{hit.passage.title}\n{hit.passage.text}", question)
            for query in asked[question.id]
            for hit in found[query]
        )
    ]


def _scan(
    texts: Iterable[str], questions: Sequence[Question], read: Report
) -> tuple[list[Question], int]:
    """Read texts until every question is settled, and return the unsettled questions.

    A text is normalised once. Each phrase is filed under its longest word, which is usually its
    rarest, so a text is compared only with the phrases whose word it has.
    """
    left = {question.id: question for question in questions}
    # a rule that extends `Phrase` may compare in another way
    phrases = {one.id: _phrases(one) for one in questions if type(one.rule) is Phrase}
    others = {one.id: one for one in questions if one.id not in phrases}
    by_word: dict[str, set[tuple[str, str]]] = {}
    for name, some in phrases.items():
        for phrase in some:
            by_word.setdefault(_key(phrase), set()).add((f" {phrase} ", name))
    words = by_word.keys()
    scanned = 0
    for scanned, text in enumerate(texts, 1):
        normal = normalize_answer(text)
        padded = f" {normal} "
        for word in words & set(normal.split()):
            for name in [name for phrase, name in by_word.get(word, ()) if phrase in padded]:
                left.pop(name, None)
                for phrase in phrases.pop(name, ()):
                    _drop(by_word, phrase, name)
        for name in [name for name, one in others.items() if contains_answer(text, one)]:
            del others[name], left[name]
        if scanned % _REPORT_EVERY == 0:
            read(scanned)
        if not left:
            break
    return [*left.values()], scanned


def _phrases(question: Question) -> set[str]:
    return {normal for one in question.answers if (normal := normalize_answer(one))}


def _key(phrase: str) -> str:
    return max(phrase.split(), key=len)


def _drop(by_word: dict[str, set[tuple[str, str]]], phrase: str, name: str) -> None:
    filed = by_word[_key(phrase)]
    filed.discard((f" {phrase} ", name))
    if not filed:
        del by_word[_key(phrase)]
