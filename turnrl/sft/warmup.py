"""A warm-up: a policy learns the form of its turns from demonstrations, before anything else.

A policy that never calls its tools never earns the reward of a call, so it never learns to call
them. About fifty steps of supervised learning on random play are enough to make it start.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import lightning as L
from torch.utils.data import DataLoader, Dataset

from turnrl.plugin.errors import RecipeError
from turnrl.policy.model import LanguageModel
from turnrl.sft.forced_play import Demonstrator, play_demonstrations
from turnrl.sft.random_play import RandomPlay, is_unfounded
from turnrl.sft.settings import TRANSCRIPT, WarmUp
from turnrl.sft.supervised import Supervised
from turnrl.training.module import MTGRPO
from turnrl.training.questions import QuestionData
from turnrl.training.trainer_checks import check_trainer
from turnrl.types import Question, TokenRow, Trajectory
from turnrl.types.examination import Start
from turnrl.types.streams import DEMONSTRATE
from turnrl.watch.card import export

_SHOWN = 8
"""The most demonstrations that the transcript beside the policy shows."""
_ORDER = 160
"""Number of the first permutation of a warm-up's questions. A run begins with permutation 0, so it
asks in another order. The figures in the documentation depend on this number."""
_DEFAULTS: dict[str, Any] = {"accelerator": "auto", "devices": 1, "gradient_clip_val": 1.0}
_OURS: dict[str, Any] = {"max_epochs": 1, "logger": False, "enable_checkpointing": False}
_OURS |= {"enable_model_summary": False, "enable_progress_bar": sys.stderr.isatty()}
_logger = logging.getLogger(__name__)


def warm_up(
    module: MTGRPO,
    data: QuestionData,
    folder: str | Path,
    settings: WarmUp | None = None,
    trainer: Mapping[str, object] | None = None,
) -> list[float]:
    """Teach a module's policy the form of its turns, and write the policy to a folder. Set
    `policy.model` to the folder; under LoRA it holds the adapter.

    Args:
        module: The policy, with the rollout that plays the demonstrations.
        data: The questions. Demonstrations are of the training questions.
        folder: The folder that the policy is written to.
        settings: The number and size of steps, and the demonstrator.
        trainer: Arguments of Lightning's Trainer, such as `accelerator`.
    Returns:
        The mean cross-entropy of each batch. There are fewer than `steps` if demonstrations were
        left out.
    Raises:
        RecipeError: If the rollout has a player, if most demonstrations do not fit its limits, or
            if `trainer` has an argument that a warm-up sets itself.
        TurnRLError: As in a run, about a tool's world or a question.
    """
    settings = settings or WarmUp()
    _check(module, folder)
    runner = _trainer(trainer or {})
    module.collector.check()
    data.setup("fit")
    data.leave_out_overlong(module.rollout, module.chat)
    asked = list(islice(data.passes(_ORDER), settings.steps * settings.batch_size))
    at_once = data.questions_per_iteration * module.group_size
    demonstrate = settings.by or RandomPlay(module.rollout.segmenter_loop.plugin)
    shown = demonstrations(module, asked, demonstrate, at_once)
    device = runner.strategy.root_device
    Start(device, module, data).settle()
    try:
        with module.memory.phase("loading"):
            module.policy.load(device)
        rows = [row for trajectory in shown for row in trajectory.token_rows]
        with module.memory.phase("learning"):
            lesson = Supervised(settings.rate(module.policy.lora is not None), module.policy)
            _learn(runner, lesson, rows, settings.batch_size)
    finally:
        module.collector.close()
    _write(module.policy, folder, shown)
    return lesson.losses


def _write(policy: LanguageModel, folder: str | Path, shown: Sequence[Trajectory]) -> None:
    """Write the policy, and beside it a transcript of the first demonstrations."""
    written = export(policy, folder, {"warm-up": f"{len(shown)} demonstrated attempts"})
    transcript = "\n\n".join(map(str, shown[:_SHOWN]))
    (written / TRANSCRIPT).write_text(f"{transcript}\n", encoding="utf-8")


def _learn(runner: L.Trainer, lesson: Supervised, rows: Sequence[TokenRow], size: int) -> None:
    """Learn from each row once, `size` rows per step."""
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    try:
        with _quiet():
            runner.fit(lesson, DataLoader(cast("Dataset[Any]", batches), batch_size=None))
    except SystemExit as stop:  # Lightning's, for Ctrl-C
        raise stop.__context__ or stop from None


def _trainer(settings: Mapping[str, object]) -> L.Trainer:
    """A Trainer for one process. The settings override the defaults."""
    if fixed := [name for name in settings if name in _OURS]:
        raise RecipeError(f"trainer has {fixed[0]!r}, which a warm-up sets itself. Leave it out.")
    runner = L.Trainer(**(_DEFAULTS | dict(settings)), **_OURS)
    check_trainer(runner)
    if runner.world_size > 1:
        raise RecipeError("a warm-up takes one process. Add --trainer.devices 1.")
    return runner


def _check(module: MTGRPO, folder: str | Path) -> None:
    """Refuse a rollout with a player, and a folder that cannot take the policy, before anything is
    played."""
    if module.rollout.player is not None:
        raise RecipeError(
            f"model.rollout.player is {module.rollout.loop.name}, and demonstrations are turns "
            "of a segmenter. Warm up with the segmenter that writes turns in the same form."
        )
    module.policy.files.refuse_as_target(Path(folder))


def demonstrations(
    module: MTGRPO,
    questions: Sequence[Question],
    demonstrate: Demonstrator,
    at_once: int | None = None,
) -> list[Trajectory]:
    """Play one demonstrated attempt at each question. Attempts that ran out of tokens are left out,
    and so are those of random play that answer although none of their calls worked.

    Args:
        module: The module whose rollout plays the demonstrations.
        questions: What to ask.
        demonstrate: Gives the turns.
        at_once: The most attempts under way at a time; None for any number.
    Raises:
        RecipeError: If more than half of the attempts ran out of tokens, or if tools were called
            and no call worked.
    """
    rollout = module.rollout
    with rollout.running_tools():
        played = play_demonstrations(
            rollout,
            demonstrate,
            module.chat,
            questions,
            (DEMONSTRATE, module.seed),
            at_once=at_once,
            description="demonstrating",
        )
    whole = [trajectory for (trajectory,) in played if trajectory.ended_by != "length"]
    lost = len(played) - len(whole)
    if lost:
        what = f"{lost} of {len(played)} demonstrations ran out of tokens"
        what += f": model.rollout.max_tokens is {rollout.max_tokens}. Raise it."
        if 2 * lost > len(played):
            raise RecipeError(what)
        _logger.warning(f"{what} They are left out.")
    _check_calls(whole)
    # an answer that nobody read teaches guessing
    random_play = isinstance(demonstrate, RandomPlay)
    return [shown for shown in whole if not (random_play and is_unfounded(shown))]


def _check_calls(shown: Sequence[Trajectory]) -> None:
    """Refuse demonstrations whose calls all failed: a policy that learned them would call in
    vain."""
    results = [result for trajectory in shown for result in trajectory.results]
    if results and not any(result.ok for result in results):
        raise RecipeError(
            f"none of the {len(results)} calls in the demonstrations worked, so nothing was "
            f"learned. The first reply was {results[0].content!r:.200}. Mend the tool, or give "
            "'turnrl warmup' turns of your own with --by."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside this block, silence Lightning's remarks on how it counts steps and that they have
    ended. On machines with many cores, also silence its advice on data workers: the batches are
    ready before it begins."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have many workers")
            yield
    finally:
        logger.setLevel(level)
