"""Rows of the record as an inspect_ai log, for its viewer."""

from __future__ import annotations

import datetime
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from turnrl.plugin.errors import DataError, PluginError
from turnrl.plugin.text import say
from turnrl.runs import record
from turnrl.runs.config import load_yaml

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample, EvalScore
    from inspect_ai.model import ChatMessage

_KINDS = (".eval", ".json")


def export(run: str, file: str, split: str | None = None) -> None:
    """Write the trajectories of a run's newest evaluation as an inspect_ai log.

    Args:
        run: See `turnrl.record.files`.
        file: The log to write, .eval or .json.
        split: Take the newest trajectories of this split; None for the split of an evaluation.
    Raises:
        PluginError: If inspect_ai is not installed.
        DataError: If there is no record or a choice of evaluations, or if the file has another
            ending or cannot be written.
    """
    if importlib.util.find_spec("inspect_ai") is None:
        raise PluginError(
            "'turnrl export' writes a log of inspect_ai, which is not installed. Install it: pip "
            "install inspect_ai."
        )
    if Path(file).suffix not in _KINDS:
        raise DataError(f"{file!r} must end in {' or '.join(_KINDS)}. Rename it.")
    from inspect_ai.log import write_eval_log

    files = _newest(run, split)
    rows = [row for part in files for row in record.read_checked(part)]
    try:
        write_eval_log(_log(rows, files[0]), file)
    except OSError as error:
        raise DataError(f"cannot write {file!r}: {error.strerror}. Name another file.") from error
    say(f"written {len(rows)} trajectories of {rows[0]['split']!r} to {file}")
    print("look at them: inspect view --log-dir " + str(Path(file).absolute().parent))


def _newest(run: str, split: str | None) -> list[Path]:
    """The files of the newest collection of a split."""
    files = record.files(run, split)
    names = {file: record.FileName.of(file) for file in files}
    splits = list(dict.fromkeys(name.split for name in names.values()))
    if split is None and len(splits) > 1:
        splits = [name for name in splits if name != "train"]
        if len(splits) > 1:
            raise DataError(
                f"the record of {run!r} has {', '.join(splits)}. Choose one with --split."
            )
    of_split = [file for file in files if names[file].split == splits[0]]
    last = max(names[file].policy_version for file in of_split)
    return [file for file in of_split if names[file].policy_version == last]


def _log(rows: Sequence[record.Row], file: Path) -> EvalLog:
    from inspect_ai import log

    name = rows[0]["split"]
    changed = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC)
    model = _model(file)
    spec = log.EvalSpec(
        created=changed.isoformat(),
        task=f"{file.parent.parent.parent.name or 'turnrl'}/{name}",
        dataset=log.EvalDataset(name=name, samples=len({row["question_id"] for row in rows})),
        model=model,
        config=log.EvalConfig(epochs=max(row["member"] for row in rows) + 1),
        metadata={"iteration": rows[0]["iteration"], "policy_version": rows[0]["policy_version"]},
    )
    count = len(rows)
    results = log.EvalResults(
        total_samples=count, completed_samples=count, scores=[*_results(rows)]
    )
    samples = [_sample(row, model) for row in rows]
    return log.EvalLog(status="success", eval=spec, results=results, samples=samples)


def _model(file: Path) -> str:
    """The name of the model that acted, by the recipe beside a record."""
    try:
        recipe = load_yaml((file.parent.parent / "config.yaml").read_text("utf-8"))
        server = recipe.get("endpoint")
        return str(server["model"] if server else recipe["model"]["policy"]["model"])
    except (OSError, yaml.YAMLError, LookupError, TypeError, AttributeError):
        return "turnrl"  # made from Python, or moved without its recipe


def _results(rows: Sequence[record.Row]) -> Iterator[EvalScore]:
    from inspect_ai.log import EvalMetric, EvalScore

    for name, figure in record.figures(rows).items():
        values = {"mean": figure.mean, "low": figure.low, "high": figure.high}
        metrics = {k: EvalMetric(name=k, value=v) for k, v in values.items() if v is not None}
        if metrics:
            yield EvalScore(name=name, scorer=name, metrics=metrics)


def _sample(row: record.Row, model: str) -> EvalSample:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ModelOutput
    from inspect_ai.scorer import Score

    values = {name: value for name, value in record.scores(row).items() if value is not None}
    return EvalSample(
        id=row["question_id"],
        epoch=row["member"] + 1,
        input=row["question"],
        target=row["answers"],
        messages=[*_messages(row)],
        output=ModelOutput.from_content(model, row["answer"] or ""),
        scores={name: Score(value=value, answer=row["answer"]) for name, value in values.items()},
        metadata={"ended_by": row["ended_by"]},
    )


def _messages(row: record.Row) -> Iterator[ChatMessage]:
    from inspect_ai.model import ChatMessageAssistant, ChatMessageTool, ChatMessageUser
    from inspect_ai.tool import ToolCall, ToolCallError

    yield ChatMessageUser(content="\n\n".join(filter(None, (row["question"], row["opening"]))))
    for k, turn in enumerate(row["turns"]):
        made = map(record.call, turn["calls"])
        calls = [
            ToolCall(f"{k}.{i}", call.name, dict(call.arguments), call.error)
            for i, call in enumerate(made)
        ]
        yield ChatMessageAssistant(content=turn["text"], tool_calls=calls or None)
        for call, result in zip(
            calls, turn["results"], strict=False
        ):  # perhaps no call was answered
            failed = None if result["ok"] else ToolCallError("unknown", result["content"])
            yield ChatMessageTool(
                content=result["content"],
                tool_call_id=call.id,
                function=call.function,
                error=failed,
            )
