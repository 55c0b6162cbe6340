"""How many questions a search finds an answer to, and which have an answer in the index at all.

A search is not exact: the rule of answers takes "U.S." and "us" for the same word, and the terms of
an index do not. So a search comes first and settles most questions. Then one pass over all passages
settles the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnrl import Passage, Phrase, Question, can_be_found, contains_answer, normalize_answer
from turnrl_wiki_search.index import SearchIndex, clean_query

_BATCH = 64
_REPORT_EVERY = 1000
_RANKS = (1, 3, 5)

Report = Callable[[int], None]


@dataclass(frozen=True)
class Coverage:
    """The questions that have an answer in an index, and those that have none.

    Args:
        held: Questions with an accepted answer in a passage.
        missing: Questions without one; if `whole` is false, without one in the passages found.
        unchecked: Questions for which a passage with the answer would prove nothing, because the
            answer is yes or no, or occurs in the question, or the rule does not look in texts.
        whole: True if every passage was considered. If not, `held` may lack questions.
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
    unsettled = _Unsettled(checked)
    for start in range(0, len(checked), _BATCH):
        batch = checked[start : start + _BATCH]
        left = [question for question in batch if question.id in unsettled.left]
        for text in _best_passages(index, left, k):
            unsettled.see(text, batch)
        searched(start + len(batch))
    scanned, whole = 0, True
    if unsettled.left:
        passages = index.passages()
        whole = passages is not None
        for scanned, passage in enumerate(passages or (), 1):
            unsettled.see(_text(passage))
            if scanned % _REPORT_EVERY == 0:
                read(scanned)
            if not unsettled.left:
                break
    return Coverage(
        held=[question for question in checked if question.id not in unsettled.left],
        missing=[*unsettled.left.values()],
        unchecked=[question for question in questions if not can_be_found(question)],
        whole=whole,
        scanned=scanned,
    )


def score_retrieval(index: SearchIndex, questions: Sequence[Question], k: int) -> dict[str, float]:
    """Search for each question's text, and compute the share with an answer in the best passages.

    An accepted answer counts if its words stand, whole and in order, in the title and text of a
    passage, both normalised as SQuAD does.

    Args:
        index: The index to search.
        questions: The questions; their texts are the queries.
        k: Passages per question.
    Returns:
        `answer@n` for n of 1, 3, 5 and k, up to k; `queries_per_s`, in batches of 64, without the
        time for scoring; and `questions`.
    """
    ranks = sorted({n for n in (*_RANKS, k) if n <= k})
    answered = dict.fromkeys(ranks, 0)
    index.search(["warm"], 1)
    seconds = 0.0
    for start in range(0, len(questions), _BATCH):
        batch = questions[start : start + _BATCH]
        begin = time.perf_counter()
        answers = index.search([clean_query(question.text) for question in batch], k)
        seconds += time.perf_counter() - begin
        for question, hits in zip(batch, answers, strict=True):
            texts = enumerate((_text(hit.passage) for hit in hits), 1)
            rank = next((i for i, text in texts if contains_answer(text, question)), None)
            for n in ranks:
                answered[n] += rank is not None and rank <= n
    total = len(questions)
    scores = {f"answer@{n}": answered[n] / total for n in ranks}
    return {**scores, "queries_per_s": total / seconds, "questions": total}


def _text(passage: Passage) -> str:
    return f"{passage.title}\n{passage.text}"


def _best_passages(index: SearchIndex, questions: Sequence[Question], k: int) -> set[str]:
    """The best passages for the texts of questions and for their answers."""
    texts = (text for question in questions for text in (question.text, *question.answers))
    queries = [*dict.fromkeys(query for text in texts if (query := clean_query(text)))]
    answers = index.search(queries, k) if queries else []
    return {_text(hit.passage) for hits in answers for hit in hits}


class _Unsettled:
    """Questions without an answer in any text so far.

    A text is normalised once. Each phrase is filed under its longest word, which is usually its
    rarest, so a text is compared only with the phrases whose word it has.

    Args:
        questions: The questions, whose ids differ.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        self.left = {question.id: question for question in questions}
        # a rule that extends `Phrase` may compare in another way
        self._by_rule = {q.id: q for q in questions if type(q.rule) is not Phrase}
        self._by_word: dict[str, set[tuple[str, str]]] = {}
        for question in questions:
            if question.id not in self._by_rule:
                for phrase in _phrases(question):
                    self._by_word.setdefault(_key(phrase), set()).add((phrase, question.id))

    def see(self, text: str, likely: Sequence[Question] | None = None) -> None:
        """Drop the questions that have an answer in a text.

        Args:
            text: The text.
            likely: The only questions to compare by rules other than `Phrase`, which are slow;
                None for all.
        """
        if self._by_word:
            normal = normalize_answer(text)
            padded = f" {normal} "
            for word in self._by_word.keys() & set(normal.split()):
                for phrase, name in self._by_word[word]:
                    if name in self.left and f" {phrase} " in padded:
                        del self.left[name]
        if self._by_rule:
            names = [*self._by_rule] if likely is None else [question.id for question in likely]
            for name in names:
                if (question := self._by_rule.get(name)) and contains_answer(text, question):
                    del self._by_rule[name], self.left[name]


def _phrases(question: Question) -> set[str]:
    return {normal for answer in question.answers if (normal := normalize_answer(answer))}


def _key(phrase: str) -> str:
    return max(phrase.split(), key=len)
