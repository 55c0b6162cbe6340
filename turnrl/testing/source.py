"""Check of a source of questions."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from turnrl.plugin.errors import DataError
from turnrl.rewards.answers import usable_answers
from turnrl.testing.contract import reporting_breaches, require
from turnrl.types.contracts import QuestionSource
from turnrl.types.questions import Question
from turnrl.types.trajectory import Passage


def check_source(source: QuestionSource) -> None:
    """Check a source: that its default splits have questions, the same ones each time, that it
    refuses other splits and lists its own, and that it either has a corpus or raises a DataError.

    All questions of its default splits are read twice. Of the corpus, which may be larger than
    memory, the first 3,000 passages are read. Splits may share questions.

    Args:
        source: The source.
    Raises:
        AssertionError: If a rule is broken, with the rule and the input.
    """
    name, splits, uses = type(source).__name__, source.default_splits, source.uses
    fits = isinstance(uses, tuple) and {*uses} <= {"fields", "config"}
    require(fits, f"{name}.uses is {uses!r}: give a tuple that may hold 'fields' and 'config'")
    named = [*dict.fromkeys(split for split in splits.values() if split is not None)]
    fits = {*splits} == {"train", "val"} and all(isinstance(split, str) for split in named)
    rule = f"{name}.default_splits is {splits!r}: name one for 'train' and for 'val', or None"
    require(fits and named, rule)
    for split in named:
        with reporting_breaches(f"{name}.questions({split!r})"):
            questions = list(source.questions(split))
            _check_texts(questions, Question)
            usable = not source.needs_answers or any(map(usable_answers, questions))
            require(usable, f"gives {questions[0]!r}, and none that has an answer to match")
            for pair in itertools.zip_longest(questions, source.questions(split)):
                first, again = (q and (q.id, q.text, q.answers) for q in pair)
                require(first == again, f"gives {first}, and the second time {again}")
    with reporting_breaches(f"{name}.questions('no-such-split')"):
        try:
            require(False, f"gives {len([*source.questions('no-such-split')])}, and no DataError")
        except DataError as error:
            listed = all(split in str(error) for split in named)
            require(listed, f"raises {error!r}, which does not list the splits there are: {named}")
    with reporting_breaches(f"{name}.passages()"), contextlib.suppress(DataError):
        _check_texts(list(itertools.islice(source.passages(), 3000)), Passage)


def _check_texts(items: Sequence[Any], kind: type) -> None:
    """Check that there are questions or passages, each with a text and a unique id."""
    require(items, "gives nothing")
    seen: dict[str, object] = {}
    for item in items:
        rule = f"gives {item!r}: a {kind.__name__} has an id and a text"
        require(isinstance(item, kind), rule)
        texts = (item.id, item.text)
        require(all(isinstance(text, str) and text.strip() for text in texts), rule)
        require(item.id not in seen, f"gives one id to {seen.get(item.id)!r} and to {item!r}")
        seen[item.id] = item
