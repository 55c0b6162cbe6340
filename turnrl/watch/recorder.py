"""Recording: a callback turns scored groups into rows of the record, and writes them into files of
a run's folder.

`turnrl.runs.columns` has the columns, and `turnrl.runs.record` reads them.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from turnrl.credit.estimators import Credit
from turnrl.plugin.errors import check_at_least
from turnrl.policy.scoring import score_trajectories
from turnrl.rewards.answers import f1
from turnrl.rewards.scoring import compute_curves
from turnrl.runs.columns import (
    SCHEMA,
    TOKENS,
    NamedValue,
    NamedValues,
    RecordedAttempt,
    RecordedTokens,
    RecordedTurn,
    plain,
)
from turnrl.runs.files import whole_file
from turnrl.runs.record import FileName, Row, format_transcript
from turnrl.types import TokenRow
from turnrl.types.contracts import AdvantageEstimator
from turnrl.types.engine import TokenScores
from turnrl.types.group import Group
from turnrl.types.trajectory import Trajectory
from turnrl.watch.trainer import writing

Learner = Callable[[Sequence[TokenRow]], Sequence[TokenScores]]
"""Scores of sampled tokens by the learner; see `LanguageModel.score_tokens`."""
Texts = Callable[[Sequence[int]], Sequence[str]]
"""The text that each token of a history adds; see `ChatFormat.token_texts`."""


class Recorder(L.Callback):
    """Keep the record of a run of `MTGRPO`: each iteration before the policy learns from it, and
    each evaluation at its end. Without a folder nothing is written.

    Args:
        per_iteration: Number of trajectories of each iteration to keep in the run's record; null
            keeps all. Groups stay whole, so at least one group is kept. An evaluation keeps all of
            its trajectories.
        tokens: Also record token ids, log-probabilities and entropies. This takes one pass of the
            learner over the kept trajectories.
        transcripts: Number of kept trajectories to write out as text.
    """

    def __init__(
        self, per_iteration: int | None = 64, tokens: bool = False, transcripts: int = 4
    ) -> None:
        self.per_iteration = per_iteration
        self.tokens = tokens
        self.transcripts = transcripts
        check_at_least(0, "record.", self, "per_iteration", whole=True)
        check_at_least(0, "record.", self, "transcripts", whole=True, optional=False)
        self._kept: object = None
        self._evaluated: list[Group] = []
        self._greedy = True

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: object, batch_idx: int
    ) -> None:
        experience = pl_module.experience
        if experience is self._kept or pl_module.folder is None:
            return
        self._kept = experience
        place = (trainer.global_rank, trainer.world_size)
        count = count_recorded_groups(experience.groups, self.per_iteration, *place)
        recorded = record_rows(
            experience.groups[:count],
            experience.credit[:count],
            "train",
            trainer.current_epoch + 1,
            trainer.global_step,
            *place,
            pl_module.estimator,
            pl_module.score_tokens if self.tokens else None,
            pl_module.chat.token_texts,
        )
        self._write(list(recorded), experience.groups, trainer, pl_module)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._evaluated = []

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, *args: object, **kwargs: object
    ) -> None:
        if pl_module.folder is not None:
            self._evaluated += outputs.groups
            self._greedy = outputs.greedy

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        groups, (iteration, version) = self._evaluated, pl_module.position
        learner = (
            partial(pl_module.score_tokens, temperature=1.0)
            if self._greedy
            else pl_module.score_tokens
        )
        recorded = record_rows(
            groups,
            [None] * len(groups),
            pl_module.split,
            iteration,
            version,
            trainer.global_rank,
            trainer.world_size,
            learner=learner if self.tokens else None,
            texts=pl_module.chat.token_texts,
        )
        self._write(list(recorded), groups, trainer, pl_module)
        self._evaluated = []

    def _write(
        self, recorded: Sequence[Row], groups: Sequence[Group], trainer: L.Trainer, module: Any
    ) -> None:
        """Write the rows of one collection in this process into a run's folder, and some of the
        sampled ones as text to read."""
        if not recorded or (folder := module.folder) is None:
            return
        first, rank = recorded[0], trainer.global_rank
        name = FileName(first["split"], first["policy_version"], rank)
        kept = folder / "record" / str(name)
        with writing(trainer, kept):
            write_rows(recorded, kept)
        if first["split"] == "train" and rank == 0 and self.transcripts:
            file = folder / "transcripts" / f"iteration_{first['iteration']:04d}.txt"
            texts = []
            for row in _extremes(recorded, self.transcripts):
                group = groups[row["group"] // trainer.world_size]
                trajectory = group.trajectories[row["member"]]
                sent = module.rollout.loop.text_before_turns(trajectory, module.chat)
                texts.append(format_transcript(row, sent))
            whole = ("\n" + "=" * 80 + "\n").join(texts)
            with writing(trainer, file), whole_file(file) as new:
                new.write_text(whole + "\n", encoding="utf-8")


def count_recorded_groups(
    groups: Sequence[Group], most: int | None, rank: int = 0, ranks: int = 1
) -> int:
    """Number of groups that one process records, from its first on: as many whole groups as fit
    into its share of the trajectories to keep. The first process keeps at least one.

    Args:
        groups: The groups of this process.
        most: Trajectories to keep over all processes; None keeps all, and 0 none.
        rank: Number of the process.
        ranks: Number of processes.
    """
    if not most:
        return 0 if most == 0 else len(groups)
    sizes = itertools.accumulate(len(group.trajectories) for group in groups)
    return sum(size <= most // ranks for size in sizes) or int(rank == 0)


def record_rows(
    groups: Sequence[Group],
    credit: Iterable[Credit | None],
    split: str,
    iteration: int,
    policy_version: int,
    first: int = 0,
    step: int = 1,
    estimator: AdvantageEstimator | None = None,
    learner: Learner | None = None,
    texts: Texts | None = None,
) -> Iterator[Row]:
    """The record of scored groups.

    Args:
        groups: The groups.
        credit: Each group's credit, or None if nothing is learned.
        split: The split that the questions are from.
        iteration: See `RecordedAttempt`.
        policy_version: See `RecordedAttempt`.
        first: Number of the first group.
        step: Step from one group's number to the next, because processes number theirs in turn.
        estimator: The estimator that gave the credit; None if nothing is learned.
        learner: Called once for all groups; None to record no tokens.
        texts: Gives the texts of the recorded tokens; None to record tokens without texts.
    """
    every = [trajectory for group in groups for trajectory in group.trajectories]
    rule = None if estimator is None else _describe_estimator(estimator)
    tokens: Iterator[RecordedTokens] = itertools.repeat(RecordedTokens())
    if learner is not None:
        scores = score_trajectories(every, learner)
        tokens = map(partial(_tokens, texts=texts), every, scores)
    scored = zip(groups, credit, strict=True)
    for number, (group, group_credit) in zip(itertools.count(first, step), scored):
        for i in range(len(group.trajectories)):
            shared = {
                "iteration": iteration,
                "policy_version": policy_version,
                "split": split,
                "group": number,
                "estimator": rule,
            }
            yield plain(RecordedAttempt, _recorded(group, group_credit, i, shared, next(tokens)))


def _recorded(
    group: Group, credit: Credit | None, i: int, shared: Mapping[str, Any], tokens: RecordedTokens
) -> RecordedAttempt:
    """One trajectory of a group, with the columns that a whole collection shares."""
    question, trajectory = group.question, group.trajectories[i]
    samples, totals = trajectory.samples, group.totals[group.trunks]
    right_at = {name: part.right_at for name, part in group.components.items()}
    more: dict[str, Any] = {**shared, **compute_curves(trajectory)}
    return RecordedAttempt(
        **more,
        tokens=tokens,
        question_id=question.id,
        question=question.text,
        answers=question.answers,
        opening=trajectory.opening,
        member=i,
        begins=trajectory.begins,
        parent=None if i in group.trunks else group.parents[i],
        ended_by=trajectory.ended_by,
        answer=trajectory.answer,
        f1=f1(trajectory.answer, question),
        prompt_tokens=len(samples[0].prompt_ids) if samples else None,
        sample_tokens=tuple(map(len, samples)),
        outcome=float(group.outcome[i]),
        rewards=_named({name: part[i] for name, part in group.component_totals.items()}),
        costs=group.cost_names,
        right_at=_named({name: least for name, least in right_at.items() if least is not None}),
        figures=tuple(
            NamedValues(name, tuple(value) if isinstance(value, Sequence) else (value,))
            for name, value in trajectory.figures.items()
        ),
        group_mean=float(totals.mean()) if len(totals) > 1 else None,
        group_std=float(totals.std()) if len(totals) > 1 else None,
        turns=tuple(_turn_row(group, credit, i, k) for k in range(len(trajectory.turns))),
    )


def _turn_row(group: Group, credit: Credit | None, i: int, k: int) -> RecordedTurn:
    trajectory = group.trajectories[i]
    turn, own = trajectory.turns[k], k >= trajectory.begins
    sampled = [sample.turn_index.count(k) for sample in trajectory.samples]
    parts = {name: p.values[i, k] for name, p in group.components.items() if p.by_turn}
    return RecordedTurn(
        turn=turn,
        tokens=sum(sampled),
        sample=sampled.index(max(sampled)) if sampled else None,
        turn_reward=float(group.turn_rewards[i, k]),
        rewards=_named(parts),
        advantage=float(credit.turns[i, k]) if credit is not None and own else None,
    )


def _named(values: Mapping[str, Tensor] | Mapping[str, float]) -> tuple[NamedValue, ...]:
    return tuple(NamedValue(name, float(value)) for name, value in values.items())


def _tokens(
    trajectory: Trajectory, learner: TokenScores, texts: Texts | None = None
) -> RecordedTokens:
    """The tokens of a trajectory, with the learner's scores of the N sampled ones."""
    logprobs, entropies = iter(learner.logprobs.tolist()), iter(learner.entropy.tolist())
    every = []
    for sample in trajectory.samples:
        for token, k, logprob, version in zip(
            sample.token_ids,
            sample.turn_index,
            sample.sampler_logprobs,
            sample.versions,
            strict=True,
        ):
            own = k >= trajectory.begins
            numbers = (logprob, next(logprobs), next(entropies), version) if own else (None,) * 4
            every.append((token, k if own else -1, *numbers))
    columns = dict(zip(TOKENS, zip(*every, strict=True), strict=False))
    if texts is not None:
        pieces = (text for sample in trajectory.samples for text in texts(sample.token_ids))
        columns["token_texts"] = tuple(pieces)
    return RecordedTokens(**columns)


def _describe_estimator(estimator: AdvantageEstimator) -> dict[str, object]:
    """An estimator's name, the path of its class, and the arguments that it keeps in attributes."""
    kind = type(estimator)
    names = (name for name in inspect.signature(kind).parameters if hasattr(estimator, name))
    arguments = {name: getattr(estimator, name) for name in names}
    path = f"{kind.__module__}.{kind.__qualname__}"
    return {"name": kind.__name__, "class": path, "arguments": arguments}


def write_rows(rows: Sequence[Row], file: Path) -> None:
    """Write rows as one Parquet file, replacing it in one move when it is complete."""
    with whole_file(file) as written:
        pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), written, compression="zstd")


def _extremes(rows: Iterable[Row], count: int) -> list[Row]:
    """From each of the first groups one trajectory, alternately the best and the worst."""

    def total(row: Row) -> float:
        return float(row["outcome"] + sum(turn["turn_reward"] for turn in row["turns"]))

    groups = [list(members) for _, members in itertools.groupby(rows, lambda row: row["group"])]
    return [(min if n % 2 else max)(g, key=total) for n, g in enumerate(groups[:count])]
