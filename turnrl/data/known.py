"""Question sets by name: a file, a known data set, any data set on the Hugging Face hub."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import final

from turnrl.data.fields import Fields, make_questions
from turnrl.data.files import file_kind, parse_quoted_list, read_questions, require_file
from turnrl.data.functions import FunctionQuestions, import_function
from turnrl.data.rows import Row, is_cached, is_saved, open_hub, open_saved, read_hub
from turnrl.plugin.errors import DataError
from turnrl.types.contracts import QuestionSource
from turnrl.types.questions import Question, answer_rule


@dataclass(frozen=True)
class Preset:
    """A data set on the hub with a short name.

    Args:
        path: Its name on the hub.
        fields: The fields of id, question and answers in its rows.
        config: Its configuration on the hub, if it has several.
        train: Split to train on, or None.
        val: Split with public answers to evaluate on.
        rule: The name of the rule that compares its answers.
        without: Columns that are left out of its questions' metadata: the accepted answers, and
            the pages and paragraphs, which are most of a row.
        spelt: Columns whose texts spell out lists, in JSON.
    """

    path: str
    fields: Fields
    config: str | None = None
    train: str | None = "train"
    val: str = "validation"
    rule: str = "phrase"
    without: Sequence[str] = ()
    spelt: Sequence[str] = ()


PRESETS: Mapping[str, Preset] = {
    # the open-domain set: `rc` has each question once for the web and once for Wikipedia
    "triviaqa": Preset(
        "mandarjoshi/trivia_qa",
        Fields(
            "question_id", answers=["answer.value", "answer.aliases", "answer.normalized_aliases"]
        ),
        config="unfiltered.nocontext",
        without=("answer", "entity_pages", "search_results"),
    ),
    "nq_open": Preset("google-research-datasets/nq_open", Fields(None, answers="answer")),
    "hotpotqa": Preset(
        "hotpotqa/hotpot_qa", Fields(answers="answer"), config="distractor", without=("context",)
    ),
    # a copy in Parquet: `datasets` no longer runs the loading script of the original
    "2wikimultihopqa": Preset(
        "framolfese/2WikiMultihopQA", Fields(answers="answer"), without=("context",)
    ),
    "musique": Preset(
        "dgslibisey/MuSiQue", Fields(answers=["answer", "answer_aliases"]), without=("paragraphs",)
    ),
    "gsm8k": Preset(
        "openai/gsm8k",
        Fields(None, answers="answer", answer_pattern="#### (.*)"),
        config="main",
        val="test",
        rule="number",
    ),
    "popqa": Preset(
        "akariasai/PopQA",
        Fields(answers="possible_answers"),
        train=None,
        val="test",
        spelt=("possible_answers",),
    ),
    "bamboogle": Preset(
        "chiayewken/bamboogle", Fields(None, "Question", "Answer"), train=None, val="test"
    ),
}
"""Data sets by short name."""


@final
class RowQuestions(QuestionSource):
    """The questions of rows: of a file, a data set of the `datasets` library, or a list.

    Args:
        splits: Opens the rows of each split; a single split may be called "".
        fields: The fields of id, question and answers in the rows.
        where: A name for the rows, for messages.
    """

    uses = ("fields",)

    def __init__(
        self, splits: Mapping[str, Callable[[], Iterable[Row]]], fields: Fields, where: str
    ) -> None:
        self._splits, self._fields, self._where = splits, fields, where
        train, val = ("", "") if "" in splits else ("train", "validation")
        self.default_splits = {"train": train, "val": val}

    def questions(self, split: str) -> Iterable[Question]:
        if split not in self._splits:
            has = ", ".join(filter(None, self._splits)) or "one without a name: leave the split out"
            raise DataError(f"{self._where} has no split {split!r}. It has {has}.")
        where = f"{self._where} ({split})" if split else self._where
        return make_questions(self._splits[split](), self._fields, where)


def _file_questions(path: str, fields: Fields) -> RowQuestions:
    rows = partial(read_questions, path, fields.all_fields, fields.answer_fields)
    return RowQuestions({"": rows}, fields, path)


def _in_memory(data: object, fields: Fields, where: str | None = None) -> RowQuestions | None:
    """The questions of a data set in memory; None if the object is not one."""
    hub = sys.modules.get("datasets")  # imported, if an object of its classes exists
    where = where or f"the {type(data).__name__}"
    if hub is not None and isinstance(data, hub.DatasetDict | hub.IterableDatasetDict):
        return RowQuestions({k: partial(read_hub, v) for k, v in data.items()}, fields, where)
    if hub is not None and isinstance(data, hub.Dataset | hub.IterableDataset):
        return RowQuestions({"": partial(read_hub, data)}, fields, where)
    if isinstance(data, list) and all(isinstance(row, Mapping) for row in data):
        return RowQuestions({"": lambda: data}, fields, "the list of rows")
    return None


@final
class HubDataset(QuestionSource):
    """The questions of a data set on the hub, read with the `datasets` library.

    Args:
        preset: The data set.
    """

    uses = ("fields", "config")

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        self.default_splits = {"train": preset.train, "val": preset.val}

    def questions(self, split: str) -> Iterable[Question]:
        preset, rule = self._preset, answer_rule(self._preset.rule)
        rows = read_hub(open_hub(preset.path, preset.config, split))
        if preset.spelt:
            rows = (
                {**row, **{name: parse_quoted_list(row[name]) for name in preset.spelt}}
                for row in rows
            )
        where = f"{preset.path} ({split})"
        questions = make_questions(rows, preset.fields, where, preset.without)
        return (replace(question, rule=rule) for question in questions)

    def at_hand(self, split: str) -> bool:
        return is_cached(self._preset.path, self._preset.config, split)


def open_known(name: object, fields: Fields | None, config: str | None) -> QuestionSource | None:
    """The questions of a file, a folder, a data set in memory or on the hub, or a function; None if
    a name is none of these.

    Args:
        name: The name in the recipe; or, from Python, a function or a data set.
        fields: `data.fields` of the recipe, if set.
        config: `data.config` of the recipe, if set.
    Raises:
        DataError: If the name is one of these, but there is no such data set.
    """
    plain = fields or Fields()
    if inspect.isroutine(name):
        return FunctionQuestions(name, fields)
    if not isinstance(name, str):
        return _in_memory(name, plain)
    path = Path(name)
    if path.is_file() or file_kind(name):
        require_file(name)
        return _file_questions(name, plain)
    if is_saved(path):
        return _in_memory(open_saved(name), plain, name)
    if path.is_dir():
        files = [p.name for p in sorted(path.iterdir()) if file_kind(p.name)]
        raise DataError(
            f"{name!r} is a folder. Name a file in it ({', '.join(files) or 'it has none'}), or a "
            "folder of save_to_disk."
        )
    preset = PRESETS.get(name)
    if preset is None and re.fullmatch(r"\w+(\.\w+)+", name):
        function = import_function(name)
        return None if function is None else FunctionQuestions(function, fields)
    if preset is None and name.count("/") != 1:
        return None
    preset = preset or Preset(name, Fields())
    return HubDataset(
        replace(preset, config=config or preset.config, fields=fields or preset.fields)
    )
