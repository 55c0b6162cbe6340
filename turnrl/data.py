"""Questions: where they come from, who is asked which when, and the loader that collects answers.

A source is a file, a preset, the data set of an installed package, or one on the Hugging Face hub;
see `load_questions`. What an iteration asks is a pure function of (seed, iteration); an evaluation
asks the same questions whatever the seed.
"""

from __future__ import annotations

import csv
import difflib
import functools
import importlib
import inspect
import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, final

import lightning as L
import torch
from torch import Tensor

from turnrl.errors import DataError, RecipeError
from turnrl.experience import Experience, Minibatch, pack
from turnrl.objective import ClippedSurrogate, loss_weights
from turnrl.plugins import installed
from turnrl.text import normalize_answer
from turnrl.types import Question, QuestionSource, Trajectory

if TYPE_CHECKING:
    from turnrl.module import MTGRPO

_logger = logging.getLogger(__name__)

Role = Literal["train", "val"]


@dataclass(frozen=True)
class Fields:
    """Where the rows of a file or hub data set keep what turnrl needs.

    A dotted path such as `answer.aliases` reaches into nested fields.

    Args:
        id: Field of the question's id; null numbers the rows.
        question: Field of the question's text.
        answers: Field, or fields, of accepted answers: a text, a list, or a JSON list in a text.
    """

    id: str | None = "id"
    question: str = "question"
    answers: str | list[str] = "answers"

    @property
    def answer_paths(self) -> list[str]:
        """`answers` as a list."""
        return [self.answers] if isinstance(self.answers, str) else list(self.answers)


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

_FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv")


def load_questions(
    source: str,
    split: str | None = None,
    fields: Fields | None = None,
    config: str | None = None,
    role: Role = "val",
) -> list[Question]:
    """All usable questions of a source, in its own order.

    Answers that normalise to nothing are dropped, and so are questions without any answer left and
    repetitions; a warning counts them. Questions that share an id get suffixes: `7`, `7#2`.

    Args:
        source: In this order: an existing file, or any name ending in .jsonl, .json, .parquet or
            .csv; a preset (`PRESETS`); the class of an installed package, or the dotted path of any
            `QuestionSource`; the name of a data set on the hub, `owner/name`.
        split: The split to load. By default the one that the source has for `role`: `train`, and
            `validation` on the hub or `val` in a package. A file is one split.
        fields: Where rows keep what is needed, for files and the hub.
        config: The configuration on the hub.
        role: What the questions are for, where `split` is not given.
    Raises:
        DataError: If the source or split does not exist, lacks a field, or has no usable question.
    """
    kind = _kind(source)
    questions: Iterable[Question]
    if kind == "source":
        where = f"{source} ({split or role})"
        questions = _find_source(source).questions(split or role)
    else:
        if kind == "file":
            rows, where = _read_file(source, split), source
        else:
            preset = PRESETS.get(source)
            if preset:
                fields, config = fields or preset.fields, config or preset.config
                split = split or (preset.val if role == "val" else preset.train)
                if split is None:
                    raise DataError(
                        f"{source!r} has no split to train on, only {preset.val!r}. "
                        "Set data.train to another source, or data.train_split to what it has."
                    )
            split = split or ("validation" if role == "val" else "train")
            rows, where = (
                _read_hub(preset.path if preset else source, config, split),
                f"{source} ({split})",
            )
        questions = _map_rows(rows, fields or Fields(), where)
    return _usable(questions, where)


def _kind(source: str) -> Literal["file", "preset", "source", "hub"]:
    """What a source's name refers to, in the order that `load_questions` states."""
    path = Path(source)
    if path.is_file() or path.suffix.lower() in _FILE_KINDS:
        return "file"
    if source in PRESETS:
        return "preset"
    if source in installed("turnrl_datasets") or ("." in source and "/" not in source):
        return "source"
    if path.is_dir():
        found = [p.name for p in sorted(path.iterdir()) if p.suffix.lower() in _FILE_KINDS]
        raise DataError(
            f"{source!r} is a folder. Name a file in it ({', '.join(found) or 'it has none'})."
        )
    if source.count("/") == 1:
        return "hub"
    known = [*PRESETS, *installed("turnrl_datasets")]
    near = difflib.get_close_matches(source, known, 2)
    hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise DataError(
        f"no data set {source!r}. {hint}Known names: {', '.join(known)}. Or name a file "
        f"({', '.join(_FILE_KINDS)}) or a data set on the hub, 'owner/name'."
    )


def _find_source(name: str) -> QuestionSource:
    """The `QuestionSource` of an installed package, or at a dotted path."""
    cls: Any = installed("turnrl_datasets").get(name)
    if cls is None:
        module, _, attribute = name.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise DataError(
                f"cannot import the data set {name!r} ({error}). Check data.train and data.val."
            ) from error
        if not (inspect.isclass(cls) and issubclass(cls, QuestionSource)):
            raise DataError(f"{name!r} is not a subclass of turnrl.QuestionSource")
    return cast(QuestionSource, cls())


# JSON and CSV are read here, not by `datasets`: its readers guess types, so that the answer
# "1999-05-04" comes back as a timestamp, the id "007" as 7 and Namibia's code "NA" as nothing.
def _read_file(source: str, split: str | None) -> list[Mapping[str, Any]]:
    path, kind = Path(source), Path(source).suffix.lower()
    if not path.is_file():
        raise DataError(
            f"no file {source!r} in {path.absolute().parent}. Check data.train and data.val."
        )
    if kind not in _FILE_KINDS:
        raise DataError(f"cannot tell the format of {source!r}. Name it {', '.join(_FILE_KINDS)}.")
    if split is not None:
        raise DataError(
            f"the file {source!r} is one split; leave out the split {split!r}, or name another file"
        )
    try:
        if kind == ".parquet":
            import pyarrow.parquet

            return cast(list[Mapping[str, Any]], pyarrow.parquet.read_table(path).to_pylist())
        with path.open(encoding="utf-8-sig", newline="" if kind == ".csv" else None) as file:
            if kind == ".csv":
                return list(csv.DictReader(file, strict=True))
            rows = json.load(file) if kind == ".json" else list(_json_lines(file))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"cannot read {source!r}: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{source!r} is not a list of objects. Give one JSON object per question.")
    return rows


def _json_lines(lines: Iterable[str]) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is not JSON ({error.msg})") from error


def _read_hub(path: str, config: str | None, split: str) -> list[Mapping[str, Any]]:
    import datasets

    try:
        rows = datasets.load_dataset(path, config, split=split)
    except Exception as error:  # the hub's client raises what its transport raises
        cause = str(error).strip().split("\n")[0]
        raise DataError(
            f"cannot load {path!r} (configuration {config}, split {split!r}) from the hub: {cause} "
            "Check data.train and data.val, data.config and the splits, or name a local file."
        ) from error
    return cast(list[Mapping[str, Any]], rows.to_list())


_ABSENT = object()


def _at(row: Any, path: str) -> Any:
    """The value at a dotted path, through lists too; `_ABSENT` if there is no such field."""
    if isinstance(row, list):
        found = [_at(item, path) for item in row]
        return [value for value in found if value is not _ABSENT] or (_ABSENT if found else [])
    if row is None:
        return None
    if not isinstance(row, Mapping):
        return _ABSENT
    if path in row:
        return row[path]
    head, _, rest = path.partition(".")
    return _at(row[head], rest) if rest and head in row else _ABSENT


def _texts(value: Any) -> Iterator[str]:
    """The answers in a value: a text, a number, a list of them, or a JSON list in a text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            yield value
            return
    if isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif value is not None:
        yield str(value)


def _map_rows(rows: Sequence[Mapping[str, Any]], fields: Fields, where: str) -> Iterator[Question]:
    """Rows as questions; what no field names and is a plain value becomes metadata."""
    paths = [("id", [fields.id] if fields.id else []), ("question", [fields.question])]
    paths.append(("answers", fields.answer_paths))
    for name, candidates in paths:
        for path in candidates:
            if rows and all(_at(row, path) is _ABSENT for row in rows):
                found = sorted({name for row in rows[:100] for name in _names(row)})
                numbered = ", or to null to number the rows" if name == "id" else ""
                raise DataError(
                    f"{where} has no field {path!r}. It has: {', '.join(found)}. "
                    f"Set data.fields.{name} to the one that holds it{numbered}."
                )
    used = {path.split(".")[0] for _, candidates in paths for path in candidates}
    for number, row in enumerate(rows):
        answers = [_at(row, path) for path in fields.answer_paths]
        nested = next((a for a in answers if isinstance(a, Mapping)), None)
        if nested is not None:
            raise DataError(
                f"the answers of {where} are nested. Set data.fields.answers to a path such as "
                f"{fields.answer_paths[0]}.{next(iter(nested), 'text')!s}."
            )
        yield Question(
            id=str(number if fields.id is None else _known(_at(row, fields.id), number)),
            text=str(_known(_at(row, fields.question), "")).strip(),
            answers=tuple(t for answer in answers if answer is not _ABSENT for t in _texts(answer)),
            metadata={
                name: value
                for name, value in row.items()
                if name not in used and isinstance(value, str | int | float)
            },
        )


def _known(value: Any, default: Any) -> Any:
    return default if value is _ABSENT or value is None else value


def _names(row: Mapping[str, Any]) -> Iterator[str]:
    """A row's field names, nested ones dotted."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _names(value))
        else:
            yield name


def _usable(questions: Iterable[Question], where: str) -> list[Question]:
    """Questions with a text and an answer that can be matched, each once, with ids of their own."""
    kept: list[Question] = []
    seen: dict[str, list[str]] = {}
    unanswered = repeated = 0
    for question in questions:
        answers = tuple(dict.fromkeys(a for a in question.answers if normalize_answer(a)))
        texts = seen.setdefault(question.id, [])
        if not question.text or not answers:
            unanswered += 1
        elif question.text in texts:
            repeated += 1
        else:
            texts.append(question.text)
            name = question.id if len(texts) == 1 else f"{question.id}#{len(texts)}"
            kept.append(Question(name, question.text, answers, question.metadata))
    total = len(kept) + unanswered + repeated
    if not kept:
        why = f"none of its {total} rows has a question and an answer" if total else "it is empty"
        raise DataError(
            f"{where} has no usable question: {why}. Check data.fields, or name another source."
        )
    if unanswered or repeated:
        _logger.warning(
            "%s: left out %d of %d rows (%d without a question or a usable answer, %d repeated)",
            where,
            unanswered + repeated,
            total,
            unanswered,
            repeated,
        )
    return kept


_SELECTION_SEED = 2505_11821
"""Fixed, so that a limit means the same questions in every run and under every seed."""


def _limited(questions: list[Question], limit: int | None) -> list[Question]:
    """A fixed choice of `limit` questions, in order; a greater limit adds to a smaller one."""
    if limit is None or limit >= len(questions):
        return questions
    order = list(range(len(questions)))
    random.Random(_SELECTION_SEED).shuffle(order)
    return [questions[i] for i in sorted(order[:limit])]


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)


@final
class QuestionData(L.LightningDataModule):
    """The questions to train on and to evaluate with.

    A source is a local .jsonl, .json, .parquet or .csv file; a preset (triviaqa, nq_open, hotpotqa,
    2wikimultihopqa, musique, popqa, bamboogle); the data set of an installed package, by its class;
    or the name of a data set on the Hugging Face hub, owner/name.

    Args:
        train: Source of the questions to train on.
        val: Source of the questions to evaluate with; none by default.
        train_split: Split of `train`; the source's own by default.
        val_split: Split of `val`; the source's own by default.
        fields: Where the rows of files and hub data sets keep id, question and answers.
        config: Configuration of hub data sets.
        questions_per_iteration: Questions that one policy iteration asks, over all processes.
        train_limit: Train on a fixed choice of at most this many questions.
        val_limit: Evaluate with a fixed choice of at most this many questions, whatever the seed.
        val_batch_size: Questions that are evaluated together.
        seed: Decides the order of the training questions.
    """

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        train_split: str | None = None,
        val_split: str | None = None,
        fields: Fields | None = None,
        config: str | None = None,
        questions_per_iteration: int = 16,
        train_limit: int | None = None,
        val_limit: int | None = 500,
        val_batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        counts = {
            "questions_per_iteration": questions_per_iteration,
            "train_limit": train_limit,
            "val_limit": val_limit,
            "val_batch_size": val_batch_size,
        }
        for name, count in counts.items():
            if count is not None and count < 1:
                raise RecipeError(f"data.{name} is {count}. Set it to 1 or more.")
        for name, source, split in (("train", train, train_split), ("val", val, val_split)):
            if split is not None and source is None:
                raise RecipeError(
                    f"data.{name}_split is {split!r}, but data.{name} is not set. Set it."
                )
        self.sources: dict[Role, str | None] = {"train": train, "val": val}
        self.splits: dict[Role, str | None] = {"train": train_split, "val": val_split}
        self.fields = fields
        self.config = config
        self.questions_per_iteration = questions_per_iteration
        self.limits: dict[Role, int | None] = {"train": train_limit, "val": val_limit}
        self.val_batch_size = val_batch_size
        self.seed = seed
        self.split = "val"
        """What `val_dataloader` evaluates: `val`, `train`, or another split of the `val` source."""
        self._loaded: dict[tuple[Role, str | None], list[Question]] = {}

    def setup(self, stage: str | None = None) -> None:
        """Load what a stage needs, so that whatever is wrong with a source shows at once."""
        self._check_use()
        if stage in (None, "fit"):
            self._questions("train")
        if stage != "fit" or self.sources["val"] is not None:
            self.eval_questions()

    def iteration_questions(self, iteration: int, rank: int, world_size: int) -> list[Question]:
        """What one process asks in one iteration.

        The training questions are walked in one seeded permutation after the other, so each is
        asked once before any is asked again. The processes share out an iteration's questions.

        Raises:
            RecipeError: If `questions_per_iteration` cannot be divided among the processes.
        """
        if self.questions_per_iteration % world_size:
            raise RecipeError(
                f"data.questions_per_iteration {self.questions_per_iteration} cannot be shared by "
                f"{world_size} processes. Set it to a multiple of {world_size}."
            )
        questions = self._questions("train")
        share = self.questions_per_iteration // world_size
        first = iteration * self.questions_per_iteration + rank * share
        places = (divmod(position, len(questions)) for position in range(first, first + share))
        return [questions[_permutation(self.seed, epoch, len(questions))[i]] for epoch, i in places]

    def eval_questions(self, split: str | None = None) -> list[Question]:
        """The questions to evaluate with, the same ones every time: at most `val_limit`.

        Args:
            split: `val`, `train`, or another split of the `val` source; `self.split` if None.
        """
        split = split or self.split
        if split == "train":
            questions = self._questions("train")
        else:
            questions = self._questions("val", None if split == "val" else split)
        return _limited(questions, self.limits["val"])

    def train_dataloader(self) -> ExperienceLoader:
        """The loader that collects each iteration's experience."""
        if self.trainer is None:
            raise RuntimeError(
                "the training loader collects with the trainer's policy: give this to a Trainer"
            )
        return ExperienceLoader(self, self.trainer)

    def val_dataloader(self) -> Iterable[list[Question]]:
        """Batches of the questions to evaluate with; none if there are none.

        Processes share them out without repeating any, which a padded sampler would.
        """
        if self.sources["val"] is None and self.split == "val":
            return []
        questions = self.eval_questions()
        rank, ranks = 0, 1
        if self.trainer is not None:
            rank, ranks = self.trainer.global_rank, self.trainer.world_size
        if len(questions) < ranks:
            raise RecipeError(
                f"{len(questions)} questions to evaluate with cannot be shared by {ranks} "
                "processes. Give more, or use fewer processes."
            )
        return _Batches(questions[rank::ranks], self.val_batch_size)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Minibatches move to the device; questions stay, frozen as they are."""
        if isinstance(batch, list):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _questions(self, role: Role, split: str | None = None) -> list[Question]:
        source, split = self.sources[role], split or self.splits[role]
        if source is None:
            raise DataError(f"data.{role} is not set. Name a file, a preset or a data set.")
        if (role, split) not in self._loaded:
            questions = load_questions(
                source, split, self._fields_of(source), self._config_of(source), role
            )
            limit = self.limits["train"] if role == "train" else None
            self._loaded[role, split] = _limited(questions, limit)
        return self._loaded[role, split]

    def _fields_of(self, source: str) -> Fields | None:
        return None if _kind(source) == "source" else self.fields

    def _config_of(self, source: str) -> str | None:
        return self.config if _kind(source) in ("preset", "hub") else None

    def _check_use(self) -> None:
        """An option that no source uses is a mistake."""
        sources = [s for s in self.sources.values() if s is not None]
        if self.fields is not None and not any(map(self._fields_of, sources)):
            raise RecipeError(
                "data.fields is set, but no source is a file or on the hub. Leave it out."
            )
        if self.config is not None and not any(map(self._config_of, sources)):
            raise RecipeError(
                f"data.config is {self.config!r}, but no source is on the hub. Leave it out."
            )


class _Batches:
    """Questions in batches. Not a torch loader, which would want workers to read a list."""

    def __init__(self, questions: Sequence[Question], size: int) -> None:
        self._batches = [list(questions[i : i + size]) for i in range(0, len(questions), size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Question]]:
        return iter(self._batches)


class ExperienceLoader:
    """One policy iteration as a data loader: collects when the first minibatch is asked for.

    It has a fixed length and no state. What an iteration asks and how it samples are functions of
    (seed, iteration, rank), so a run resumed inside an iteration collects anew under the restored
    weights.

    Args:
        data: Gives each iteration's questions.
        trainer: The running trainer, with an `MTGRPO` module.
    Raises:
        RecipeError: If the iteration's trajectories cannot be divided into equal minibatches, or
            these into equal accumulation windows.
    """

    def __init__(self, data: QuestionData, trainer: L.Trainer) -> None:
        module = trainer.lightning_module
        if not hasattr(module, "collect"):
            raise RecipeError(
                "QuestionData needs a module that collects experience, such as MTGRPO, and "
                f"{type(module).__name__} does not. Set model to MTGRPO, or data to what it "
                "trains on."
            )
        self._data = data
        self._trainer = trainer
        self._module: MTGRPO = cast("MTGRPO", module)
        data.iteration_questions(0, 0, trainer.world_size)  # raises if they cannot be shared out
        per_rank = data.questions_per_iteration // trainer.world_size
        self._trajectories = per_rank * self._module.group_size
        self._minibatch = min(self._module.minibatch_size, self._trajectories)
        self._updates = self._module.updates_per_iteration
        if self._trajectories % self._minibatch:
            raise RecipeError(
                f"an iteration collects {per_rank} questions x {self._module.group_size} = "
                f"{self._trajectories} trajectories per process, which minibatch_size "
                f"{self._minibatch} does not divide. Change one of the three."
            )
        window = trainer.accumulate_grad_batches
        if (self._trajectories // self._minibatch) % window:
            raise RecipeError(
                f"an iteration has {self._trajectories // self._minibatch} minibatches per "
                f"update, which is no multiple of trainer.accumulate_grad_batches {window}: a "
                "step would span two updates. Change minibatch_size."
            )

    def __len__(self) -> int:
        return self._updates * self._trajectories // self._minibatch

    def __iter__(self) -> Iterator[Minibatch]:
        iteration = self._trainer.current_epoch
        questions: list[Question] = self._data.iteration_questions(
            iteration, self._trainer.global_rank, self._trainer.world_size
        )
        experience = self._module.collect(questions, iteration)
        metrics = dict(experience.metrics)
        for number, minibatch in enumerate(self._minibatches(experience, iteration)):
            if number == 0:
                minibatch.metrics = metrics
            yield minibatch

    def state_dict(self) -> dict[str, int]:
        """Empty: tells Lightning that a run may be resumed inside an iteration all the same."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Nothing to restore."""

    def _minibatches(self, experience: Experience, iteration: int) -> Iterator[Minibatch]:
        trajectories = [t for group in experience.groups for t in group.trajectories]
        advantages = torch.cat(experience.advantages)
        counts = torch.tensor([sum(len(turn.token_ids) for turn in t.turns) for t in trajectories])
        window = self._trainer.accumulate_grad_batches
        step = self._minibatch * window
        objective: ClippedSurrogate = self._module.objective
        shuffle = torch.Generator().manual_seed(self._module.stream(iteration))
        torch.manual_seed(self._module.stream(iteration))  # of dropout, so that resuming is exact
        first = True
        for _ in range(self._updates):
            order = torch.randperm(len(trajectories), generator=shuffle)
            for rows in order.split(step):
                tokens = torch.tensor(float(counts[rows].sum()), device=self._module.device)
                mean_tokens = self._trainer.strategy.reduce(tokens, reduce_op="mean")
                weights = loss_weights(
                    counts[rows],
                    objective.aggregation,
                    window,
                    objective.constant_tokens,
                    float(mean_tokens),
                )
                # rows of like length together, so that there is little padding to compute
                rows, weights = _by_length(rows, weights, trajectories)
                for some, weight in zip(
                    rows.split(self._minibatch), weights.split(self._minibatch), strict=True
                ):
                    chosen = [trajectories[i] for i in some.tolist()]
                    yield pack(chosen, advantages[some], weight, fresh=first)
                first = False


def _by_length(
    rows: Tensor, weights: Tensor, trajectories: Sequence[Trajectory]
) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(trajectories[i].token_ids) for i in rows.tolist()])
    order = lengths.argsort(stable=True)
    return rows[order], weights[order]
