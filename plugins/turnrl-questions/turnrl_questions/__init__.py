"""Question sets by name: files, known data sets, and the Hugging Face hub.

rows            rows of files and of the hub, and the questions made of them
paragraphs      `HotpotParagraphs`: questions with the paragraphs that answer them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from turnrl import DataError, Fields, Question, QuestionSource, SourceOpener, hookimpl
from turnrl_questions.paragraphs import HotpotParagraphs
from turnrl_questions.rows import (
    FILE_KINDS,
    cached_hub,
    open_hub,
    questions_of,
    read_file,
    read_hub,
)

__all__ = ["PRESETS", "HotpotParagraphs", "HubDataset", "Preset", "QuestionFile"]


@dataclass(frozen=True)
class Preset:
    """A data set on the hub that is known by a short name.

    Args:
        path: Its name on the hub.
        config: Its configuration there, if it has several.
        train: Split to train on, or None.
        val: Split with public answers to evaluate on.
        fields: Where its rows keep what is needed.
    """

    path: str
    config: str | None
    train: str | None
    val: str
    fields: Fields


PRESETS: Mapping[str, Preset] = {
    # the open-domain set: `rc` has each question once for the web and once for Wikipedia
    "triviaqa": Preset(
        "mandarjoshi/trivia_qa",
        "unfiltered.nocontext",
        "train",
        "validation",
        Fields(
            "question_id", answers=["answer.value", "answer.aliases", "answer.normalized_aliases"]
        ),
    ),
    "nq_open": Preset(
        "google-research-datasets/nq_open",
        None,
        "train",
        "validation",
        Fields(None, answers="answer"),
    ),
    "hotpotqa": Preset(
        "hotpotqa/hotpot_qa", "distractor", "train", "validation", Fields(answers="answer")
    ),
    # a copy in Parquet: `datasets` no longer runs the loading script of the original
    "2wikimultihopqa": Preset(
        "framolfese/2WikiMultihopQA", None, "train", "validation", Fields(answers="answer")
    ),
    "musique": Preset(
        "dgslibisey/MuSiQue",
        None,
        "train",
        "validation",
        Fields(answers=["answer", "answer_aliases"]),
    ),
    "popqa": Preset("akariasai/PopQA", None, None, "test", Fields(answers="possible_answers")),
    "bamboogle": Preset(
        "chiayewken/bamboogle", None, None, "test", Fields(None, "Question", "Answer")
    ),
}
"""Data sets by short name."""


@final
class QuestionFile(QuestionSource):
    """The questions of a file, which is one split without a name.

    Args:
        path: The file: one JSON object a line, a JSON list, Parquet or CSV.
        fields: Where its rows keep what is needed.
    """

    default_splits = {"train": "", "val": ""}
    uses = ("fields",)

    def __init__(self, path: str, fields: Fields | None = None) -> None:
        self._path = path
        self._fields = fields or Fields()

    def questions(self, split: str) -> Iterable[Question]:
        if split:
            raise DataError(
                f"the file {self._path!r} is one split; leave out the split {split!r}, or name "
                "another file"
            )
        return questions_of(read_file(self._path), self._fields, self._path)


@final
class HubDataset(QuestionSource):
    """The questions of a data set on the hub, read with the `datasets` library.

    Args:
        preset: What is known of it.
    """

    uses = ("fields", "config")

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        self.default_splits = {"train": preset.train, "val": preset.val}

    def questions(self, split: str) -> Iterable[Question]:
        preset = self._preset
        rows = read_hub(open_hub(preset.path, preset.config, split))
        return questions_of(rows, preset.fields, f"{preset.path} ({split})")

    def at_hand(self, split: str) -> bool:
        return cached_hub(self._preset.path, self._preset.config, split)


class _ByName:
    """See `turnrl.SourceOpener`."""

    names: Sequence[str] = tuple(PRESETS)
    takes = f"a file ({', '.join(FILE_KINDS)}), or a data set on the hub, 'owner/name'"

    def __call__(
        self, name: str, fields: Fields | None, config: str | None
    ) -> QuestionSource | None:
        path = Path(name)
        if path.is_file() or path.suffix.lower() in FILE_KINDS:
            return QuestionFile(name, fields)
        if path.is_dir():
            found = [p.name for p in sorted(path.iterdir()) if p.suffix.lower() in FILE_KINDS]
            raise DataError(
                f"{name!r} is a folder. Name a file in it ({', '.join(found) or 'it has none'})."
            )
        known = PRESETS.get(name)
        if known is None and name.count("/") != 1:
            return None
        known = known or Preset(name, None, "train", "validation", Fields())
        return HubDataset(
            replace(known, config=config or known.config, fields=fields or known.fields)
        )


@hookimpl
def turnrl_openers() -> Iterable[SourceOpener]:
    """Files, presets and the hub."""
    return [_ByName()]


@hookimpl
def turnrl_datasets() -> Iterable[type[QuestionSource]]:
    """The data sets that are components, with settings and a corpus."""
    return [HotpotParagraphs]
