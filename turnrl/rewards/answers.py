"""Comparison of answers, the same for rewards, curves, checkpoints and reports.

Every question carries its rule (`Question.rule`), which `exact_match` and the other functions use.
A recipe sets the rule of a question set in `data.answers`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from turnrl.plugin.errors import PluginError
from turnrl.plugin.text import has_content, normalize_answer
from turnrl.types import AnswerRule, Phrase, Question, ToolResult, Trajectory

CURVES = ("exact_match", "tool_execution", "answer_in_results", "format")
"""The paper's four curves, whatever the rewards are; see
`turnrl.rewards.scoring.compute_curves`."""


def _rule(question: Question, function: str) -> AnswerRule:
    """The question's rule. Refuses anything else, because plugins may pass the answers by
    mistake."""
    if not isinstance(question, Question):
        raise PluginError(
            f"{function} takes the question, which knows how its answers compare, and was given "
            f"{question!r}. Call {function}(text, trajectory.question)."
        )
    return question.rule


def exact_match(answer: str | None, question: Question) -> bool:
    """True if the question accepts an answer, by the question's rule.

    Args:
        answer: The policy's answer; None, which never matches, if it gave none.
        question: The question.
    """
    rule = _rule(question, "exact_match")
    return answer is not None and any(rule.same(answer, gold) for gold in usable_answers(question))


def f1(answer: str | None, question: Question) -> float | None:
    """F1 of an answer's words (the harmonic mean of precision and recall) against the accepted
    answer that matches best; 0 without an answer.

    Words are counted as in SQuAD's evaluation script (Rajpurkar et al. 2016, arXiv 1606.05250).
    Unlike there, an answer that normalisation makes empty scores 0, as in `exact_match`.

    Returns:
        From 0 to 1; None if the question has no accepted answer, or compares its answers by a rule
        other than `Phrase`.
    """
    if not isinstance(_rule(question, "f1"), Phrase) or not question.answers:
        return None
    words = Counter(normalize_answer(answer or "").split())
    accepted = [Counter(normalize_answer(text).split()) for text in question.answers]
    return max(
        (2 * (words & other).total() / max(words.total() + other.total(), 1) for other in accepted),
        default=0.0,
    )


def contains_answer(text: str, question: Question) -> bool:
    """True if an accepted answer occurs in a text, by the question's rule. An answer that the rule
    cannot read occurs nowhere."""
    rule = _rule(question, "contains_answer")
    return rule.seeks and any(rule.occurs_in(text, gold) for gold in usable_answers(question))


def usable_answers(question: Question) -> tuple[str, ...]:
    """The accepted answers that the question's rule can read."""
    rule = _rule(question, "usable_answers")
    return tuple(accepted for accepted in question.answers if rule.read(accepted) is not None)


def is_empty_answer(answer: str | None, question: Question) -> bool:
    """True if there is no answer, or nothing is left of it by the question's rule and by SQuAD's
    normalisation. Nothing is left of punctuation and of characters that nobody sees."""
    rule = _rule(question, "is_empty_answer")
    if answer is None:
        return True
    if not has_content(answer):
        return not exact_match(answer, question)
    return rule.read(answer) is None and not normalize_answer(answer)


_VERDICTS = {"yes", "no", "true", "false"}


def is_searchable(question: Question) -> bool:
    """True if finding an accepted answer in a text is meaningful.

    It is meaningless if an accepted answer is yes, no, true or false, which occur in many texts, or
    if the question itself contains the answer ("Which is older, Radio City or Ashoka?"), because
    then every search result would contain it. Rules that do not look for answers in texts
    (`Choice`, `Math`, a function) find none, and no rule finds an answer that it cannot read.
    """
    rule = _rule(question, "is_searchable")
    usable = usable_answers(question)
    return bool(rule.seeks and usable) and not any(
        normalize_answer(accepted) in _VERDICTS or rule.occurs_in(question.text, accepted)
        for accepted in usable
    )


def answer_in_results(results: Iterable[ToolResult], question: Question) -> bool:
    """True if an accepted answer occurs in a successful result, and the question's answers
    `is_searchable` at all.

    Args:
        results: Tool results of a turn, or of a trajectory.
        question: The question.
    """
    texts = [result.content for result in results if result.ok]
    return (
        bool(texts) and is_searchable(question) and any(contains_answer(t, question) for t in texts)
    )


def finds_answer(trajectory: Trajectory, turn: int) -> bool:
    """True if a successful result of a turn contains an accepted answer that the policy had not
    written into a call until then, and the question's answers `is_searchable` at all.

    A tool may repeat what it was asked ("no page about Paris"), so words of a call are nothing
    found.

    Args:
        trajectory: The trajectory.
        turn: Number of the turn, from 0.
    """
    question = trajectory.question
    texts = [result.content for result in trajectory.turns[turn].results if result.ok]
    if not texts or not is_searchable(question):
        return False
    occurs_in = _rule(question, "finds_answer").occurs_in
    found = [a for a in usable_answers(question) if any(occurs_in(text, a) for text in texts)]
    if not found:
        return False
    calls = (call for taken in trajectory.turns[: turn + 1] for call in taken.reading.calls)
    asked = "\n".join(part for call in calls for part in _leaves(call.arguments))
    return not all(occurs_in(asked, answer) for answer in found)


def _leaves(value: object) -> Iterator[str]:
    """The texts in the arguments of a call, and its names and other values as text."""
    if isinstance(value, Mapping):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield str(value)
