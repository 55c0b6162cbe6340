"""Comparison of answers to a question: one rule for rewards, curves, checkpoints and reports.

A question carries its rule (`Question.rule`), and `exact_match` asks it, so whoever compares
answers does it in the same way. A recipe sets the rule of a question set in `data.answers`.
"""

from collections.abc import Iterable

from turnrl.errors import PluginError
from turnrl.text import normalize_answer
from turnrl.types import AnswerRule, Question, ToolResult


def _rule(question: Question, function: str) -> AnswerRule:
    """A question's rule; what is given in its place is told."""
    rule = getattr(question, "rule", None)
    if not isinstance(rule, AnswerRule):
        raise PluginError(
            f"{function} takes the question, which knows how its answers compare, and was given "
            f"{question!r}. Call {function}(text, trajectory.question)."
        )
    return rule


def exact_match(answer: str | None, question: Question) -> bool:
    """True if an answer is one that the question accepts, by the question's rule.

    Args:
        answer: The policy's; None if it gave none, which is no match.
        question: The question that was answered.
    """
    rule = _rule(question, "exact_match")
    return answer is not None and any(rule.same(answer, one) for one in question.answers)


def contains_answer(text: str, question: Question) -> bool:
    """True if an answer that the question accepts stands in a text, by the question's rule."""
    rule = _rule(question, "contains_answer")
    return rule.seeks and any(rule.stands_in(text, accepted) for accepted in question.answers)


def usable_answers(question: Question) -> tuple[str, ...]:
    """The accepted answers that the question's rule can read."""
    rule = _rule(question, "usable_answers")
    return tuple(accepted for accepted in question.answers if rule.read(accepted) is not None)


def says_nothing(answer: str | None, question: Question) -> bool:
    """True if an answer is none, or so empty that neither the question's rule nor SQuAD's
    normalisation leaves anything of it."""
    rule = _rule(question, "says_nothing")
    return answer is None or (rule.read(answer) is None and not normalize_answer(answer))


_VERDICTS = {"yes", "no", "true", "false"}


def can_be_found(question: Question) -> bool:
    """True if an accepted answer in a text says anything of that text.

    It does not where an accepted answer is yes, no, true or false, which stand in many texts, or
    stands in the question itself ("Which is older, Radio City or Ashoka?"), where any search brings
    it. By rules that seek no answers in texts (`Choice`, `Math`, a function) nothing can be found.
    """
    rule = _rule(question, "can_be_found")
    if not rule.seeks or not question.answers:
        return False
    return not any(
        normalize_answer(accepted) in _VERDICTS or rule.stands_in(question.text, accepted)
        for accepted in question.answers
    )


def answer_in_results(results: Iterable[ToolResult], question: Question) -> bool:
    """True if an accepted answer was found: it stands in a successful result, and it `can_be_found`
    at all.

    Args:
        results: Tool results of a turn, or of a trajectory.
        question: The question that was asked.
    """
    texts = [result.content for result in results if result.ok]
    return (
        bool(texts) and can_be_found(question) and any(contains_answer(t, question) for t in texts)
    )
