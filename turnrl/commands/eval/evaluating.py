"""Evaluating: the questions of each data set put to the policy or to a server, and the resulting
rows of the record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import lightning as L
import torch
from lightning.pytorch.cli import SaveConfigCallback

from turnrl.commands.eval.figures import Figures, compute_report, format_lines, to_json
from turnrl.data.sources import open_source
from turnrl.plugin.errors import RecipeError
from turnrl.plugin.text import say
from turnrl.recipe.build import Built
from turnrl.rewards.scoring import score_group
from turnrl.runs import record
from turnrl.training.module import MTGRPO
from turnrl.training.questions import QuestionData
from turnrl.watch import recorder as recording
from turnrl_openai import Endpoint, EndpointServer


def evaluate(built: Built, out: TextIO) -> None:
    """Score the questions of one data set or of several, and print figures.

    Args:
        built: The objects of the recipe. Without a checkpoint, the policy is scored as the recipe
            names it.
        out: The stream for JSON, if it is asked for.
    Raises:
        RecipeError: If it is not an `MTGRPO` on `QuestionData`, or there is nothing to score.
    """
    (module, sets), trainer = _build_parts(built), built.trainer
    server: EndpointServer | None = built.settings["endpoint"]
    samples: int | None = built.settings["samples"]
    for data in sets.values():  # all, so that a mistake in the last shows before the first is asked
        data.setup("validate")
    if server is None:
        rows = _score_policy(module, sets, trainer, samples, built.checkpoint)
    else:
        rows = _score_server(
            module, sets, trainer, samples, server, built.invocation.location.folder
        )
    if not any(rows.values()):
        raise RecipeError("nothing to score. Set data.val; leave out limit_val_batches 0.")
    if not trainer.is_global_zero:
        return
    if _is_optimistic(built):
        say(
            "best.ckpt was chosen by a validation: on the same questions its figures are optimistic"
        )
        say("use other --questions, or score the last checkpoint with --ckpt_path last")
    figures = compute_report(rows, samples is not None)
    if built.settings["json"]:
        asked = {
            "recipe": built.invocation.files,
            "checkpoint": built.checkpoint,
            "endpoint": server and {"base_url": server.base_url, "model": server.model},
            "samples": samples,
            "folder": built.invocation.location.folder and str(built.invocation.location.folder),
        }
        print(to_json(asked, figures), file=out)
        return
    print(
        "\n".join(
            format_lines(figures, "greedy" if samples is None else f"{samples} sampled of each")
        )
    )
    if folder := built.invocation.location.folder:
        say(f"written to {folder / 'metrics.csv'}; every trajectory in record/")


def _is_optimistic(built: Built) -> bool:
    """True if the best checkpoint of a run is scored on a validation, which may have chosen it."""
    settings, best = built.settings, Path(built.checkpoint or "").name == "best.ckpt"
    return best and settings["split"] == "val" and settings["questions"] is None


def _build_parts(built: Built) -> tuple[MTGRPO, dict[str, QuestionData]]:
    """The module and the data sets by name, checked before any weights are loaded."""
    (module, data), settings = built.agent("turnrl eval"), built.settings
    samples, server = settings["samples"], settings["endpoint"]
    if samples is not None and samples < 1:
        raise RecipeError(
            f"samples is {samples}; it must be 1 or more. Leave it out for one greedy trajectory."
        )
    if server is not None and built.checkpoint is not None:
        raise RecipeError(
            f"ckpt_path is {built.checkpoint!r}, and the endpoint {server.model!r} acts instead of "
            "the policy. Leave one of them out."
        )
    return module, _data_sets(data, settings)


def _data_sets(data: QuestionData, settings: Mapping[str, Any]) -> dict[str, QuestionData]:
    """The data sets to score, by their names in the record: those that the user named, or the
    recipe's own."""
    split, sources = settings["split"], settings["questions"]
    if sources is None:
        if split == "val" and data.sources["val"] is None:
            raise RecipeError(
                "data.val is not set, so there are no questions to score. Set it, or name some: "
                "--questions FILE."
            )
        data.split = split
        return {split: data}
    sets: dict[str, QuestionData] = {}
    for source in sources if isinstance(sources, list) else [sources]:
        opened = open_source(source, data.fields, data.config)
        questions = QuestionData(
            val=source,
            val_split=None if split == "val" else split,
            fields=data.fields if "fields" in opened.uses else None,
            config=data.config if "config" in opened.uses else None,
            answers=data.rule,
            questions_per_iteration=data.questions_per_iteration,
            val_limit=data.val_limit,
            val_batch_size=data.val_batch_size,
        )
        name = _name(source, type(opened).__name__)
        sets[f"{name}-{len(sets) + 1}" if name in sets else name] = questions
    return sets


def _name(source: object, kind: str) -> str:
    """A short name of a data set, for columns and files: `dev` for `data/dev.jsonl`.

    Args:
        source: The source, as the user named it.
        kind: The name of its class.
    """
    if not isinstance(source, str) or source.rpartition(".")[2] == kind:
        return kind
    file = Path(source)
    return re.sub(r"\W+", "_", file.stem if file.is_file() else file.name) or "questions"


def _score_policy(
    module: MTGRPO,
    sets: Mapping[str, QuestionData],
    trainer: L.Trainer,
    samples: int | None,
    checkpoint: str | None,
) -> dict[str, list[record.Row]]:
    """The rows of each data set, by the policy, over all processes."""
    if checkpoint is None and trainer.is_global_zero:
        say("no --ckpt_path: this scores the policy as the recipe names it, before any training")
    rows: dict[str, list[record.Row]] = {}
    for name, data in sets.items():
        data.label = name
        groups = module.evaluate(trainer, data, samples, checkpoint)
        checkpoint = None  # its weights are loaded
        place = (*module.position, trainer.global_rank, trainer.world_size)
        own = list(recording.record_rows(groups, [None] * len(groups), name, *place))
        shares = [own] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(shares, own)
        rows[name] = [row for share in shares for row in share]
    return rows


def _score_server(
    module: MTGRPO,
    sets: Mapping[str, QuestionData],
    trainer: L.Trainer,
    samples: int | None,
    server: EndpointServer,
    folder: Path | None,
) -> dict[str, list[record.Row]]:
    """The rows of each data set, by a model behind a server. No weights are loaded."""
    sampler = Endpoint(server)
    size, greedy = samples or 1, samples is None
    # a server's replies cannot be reproduced, so no trajectory waits for another's turn
    rollout = replace(module.rollout, lockstep=False)
    rows: dict[str, list[record.Row]] = {}
    with rollout.running_tools():
        rollout.check(module.chat)
        for data in sets.values():
            module.collector.check_data(data)
        say(f"asking {server.model!r} at {server.base_url}")
        for name, data in sets.items():
            questions = data.eval_questions()
            attempts = rollout.play(
                sampler, module.chat, questions, size, (0,), greedy, "evaluating"
            )
            turns = rollout.max_turns
            groups = [score_group(group, module.rewards, turns) for group in attempts]
            rows[name] = list(recording.record_rows(groups, [None] * len(groups), name, 0, 0))
            if folder is not None:  # before anything else can fail, because replies are paid for
                for logger in trainer.loggers:
                    # makes its folder: it warns if that has files already
                    _ = getattr(logger, "experiment", None)
                recording.write_rows(rows[name], folder / "record" / str(record.FileName(name, 0)))
            _save_evaluation(trainer, module, compute_report({name: rows[name]}, not greedy))
    return rows


def _save_evaluation(trainer: L.Trainer, module: MTGRPO, figures: Figures) -> None:
    """Write the recipe and the metrics of an evaluation that no trainer ran."""
    row = {"iteration": 0, "epoch": 0} | {
        f"{name}/{key}": figure.mean
        for name, of_set in figures.items()
        for key, figure in of_set.items()
        if figure.mean is not None
    }
    for logger in trainer.loggers:
        logger.log_metrics(row, 0)
        logger.save()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SaveConfigCallback):
            callback.setup(trainer, module, "validate")
