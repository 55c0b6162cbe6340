"""`turnrl credit-check`: the effect of each installed estimator on the gradient.

It tries every estimator, with its defaults and unscaled with a leave-one-out baseline, on a process
of three turns that is small enough to sum over all groups. It prints the bias of the expected
estimate and the part of the bias along the true gradient, both relative to the length of the true
gradient (the learning rate can absorb a factor along it); the angle between the expected estimate
and the true gradient, in degrees; the variance per trajectory of a group; and the noise, which is
the variance over the squared length of the expected estimate, so it does not depend on the
estimator's scale. `--toy costs` takes a process in which every search costs something, and also
compares `CostsAmongRight` with the gradient that it estimates.

Given a recipe, its policy then plays two groups for each of N questions, and the command prints the
signal-to-noise ratio of the advantages of its turns. It pairs trajectories of the two groups that
did the same up to and including a turn: same form, same successful calls, same passages, same
answer. With a and b the turn's advantages minus the mean over the members of their group that did
the same before the turn, SNR = mean(a b) / mean((a - b)^2 / 2): the repeatable part of an advantage
over the rest. It does not measure bias.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

from turnrl import Question, RecipeError, TurnRLError, counted, installed, say

if TYPE_CHECKING:
    from turnrl import MTGRPO

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_USAGE = "turnrl credit-check [--toy NAME] [--json] [RECIPE ... [--questions N] [--key value ...]]"
_ALONE = ("accelerator=cpu", "devices=1", "strategy=auto", "logger=false")
"""Options of the trainer: no run begins, so it needs no GPU, other process or logger."""


_TOY_COLUMNS = (
    "bias      error of the expected gradient, in lengths of the true one",
    "along     its part along the true one, which another learning rate undoes",
    "angle     between both, in degrees: no learning rate undoes it",
    "variance  of the estimate, for each trajectory of a group",
    "noise     variance over the squared length of the expected estimate",
)
_SIGNAL = "SNR       how well a turn's advantage repeats in another group; 0 is chance"


def add_credit_command(commands: Commands) -> None:
    """Add `credit-check` to argparse's sub-parsers."""
    options = argparse.ArgumentParser("turnrl credit-check", add_help=False, allow_abbrev=False)
    options.add_argument(
        "--ckpt_path",
        metavar="FILE",
        help="a checkpoint whose policy, with the recipe inside it, plays RECIPE's questions",
    )
    options.add_argument(
        "--questions",
        type=int,
        metavar="N",
        help="play the first N questions of data.train (default: 8)",
    )
    options.add_argument("--device", help="device of the policy (default: cpu)")
    options.add_argument(
        "--toy",
        choices=("searches", "costs"),
        default="searches",
        help="the process to sum over (default: searches)",
    )
    options.add_argument("--json", action="store_true", help="print JSON, one object a line")
    parser = commands.add_parser(
        "credit-check",
        usage=_USAGE,
        help="measure the bias and variance of every estimator",
        description=__doc__,
        parents=[options],
    )
    words = "recipes whose policy plays as well, and their settings, as for 'turnrl fit'"
    parser.add_argument("recipe", nargs=argparse.REMAINDER, metavar="RECIPE", help=words)

    def run(args: argparse.Namespace) -> None:
        args, words = options.parse_known_args(args.recipe, args)
        if {"-h", "--help"} & {*words}:
            parser.print_help()
        else:
            _run(args, words)

    parser.set_defaults(run=run)


def _run(args: argparse.Namespace, words: list[str]) -> None:
    for option in ("ckpt_path", "questions", "device"):
        if getattr(args, option) is not None and not words:
            raise RecipeError(f"--{option} needs a recipe, whose data.train has the questions.")
    args.questions = 8 if args.questions is None else args.questions
    args.device = args.device or "cpu"
    if args.questions < 1:
        raise RecipeError(f"--questions is {args.questions}; it must be 1 or more.")
    # mistakes show before anything is computed
    played = _opened(args, words) if words else None
    classes = installed("turnrl_estimators")
    _print_toy(classes, args.toy, args.json)
    if played is not None:
        _print_rollouts(classes, *played, args.json)


# ------------------------------------------------------------------------------------------ the toy


def _print_toy(classes: Mapping[str, type], toy: str, as_json: bool) -> None:
    from turnrl_estimators.exact import ALL_REWARDS, Skipped, check
    from turnrl_estimators.toy import TOYS

    rows = check(classes, TOYS[toy])
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    print(f"{'estimator':37} {'bias':>7} {'along':>7} {'angle':>7} {'variance':>9} {'noise':>7}")
    notes = []
    for row in rows:
        if isinstance(row, Skipped):
            notes.append(f"{row.estimator}: not tried: {row.reason}")
            continue
        angle = "-" if row.angle is None else f"{row.angle:.1f}"
        noise = "-" if row.noise is None else f"{row.noise:.1f}"
        # `+ 0.0` leaves no minus before a zero
        bias, along = (round(value, 3) + 0.0 for value in (row.bias, row.along))
        figures = f"{bias:7.3f} {along:+7.3f} {angle:>7} {row.variance:9.3f} {noise:>7}"
        objective = "" if row.objective == ALL_REWARDS else f"for {row.objective}"
        print(f"{f'  {objective}' if objective else row.estimator:37} {figures}")
        if objective:
            notes.append(f"{objective}: compared with an objective of the estimator's own")
        if row.note:
            notes.append(f"{row.estimator}: {row.note}, groups of {row.group_size}")
    for note in dict.fromkeys(notes):
        say(note)
    print()
    for line in _TOY_COLUMNS:
        say(line, indent="          ")


# ------------------------------------------------------------------------------------ real rollouts


def _opened(args: argparse.Namespace, words: Sequence[str]) -> tuple[MTGRPO, list[Question]]:
    """The module that plays, and the questions. Weights are loaded last."""
    from turnrl import build, load

    checkpoint = [] if args.ckpt_path is None else [f"--ckpt_path={args.ckpt_path}"]
    if checkpoint and (settings := [word for word in words if word.startswith("--model.")]):
        raise RecipeError(
            f"{settings[0]} is set, but a checkpoint plays with the recipe of its run. Leave out "
            f"one of {settings[0].partition('=')[0]} and --ckpt_path."
        )
    built = build([*words, *checkpoint, *(f"--trainer.{option}" for option in _ALONE)])
    module, data = built.agent("turnrl credit-check")
    iterations = (data.iteration_questions(k, 0, 1) for k in range(args.questions))
    # each question once, even if the run would repeat it
    distinct = {question.id: question for question in chain.from_iterable(iterations)}
    questions = [*distinct.values()][: args.questions]
    try:
        if built.checkpoint is not None:
            return load(built.checkpoint, args.device), questions
        module.policy.load(args.device)
        return module.to(args.device), questions
    except (RuntimeError, AssertionError) as error:  # from torch, about a device
        why = str(error).splitlines()[0]
        raise RecipeError(f"--device is {args.device!r}: {why}. Take cpu or cuda.") from error


def _print_rollouts(
    classes: Mapping[str, type], module: MTGRPO, questions: list[Question], as_json: bool
) -> None:
    from turnrl.applied import one_line, usable
    from turnrl_estimators.exact import variants
    from turnrl_estimators.rollouts import signals

    size = module.group_size
    attempts = module.ask(questions, samples=2 * size)
    groups = module.collector.score([attempts[i : i + size] for i in range(0, len(attempts), size)])
    pairs = list(zip(groups[::2], groups[1::2], strict=True))
    if not as_json:
        print(
            f"\n{counted(len(questions), 'question')}, two groups of {size} each; signal to noise "
            "of the advantages of turns"
        )
        print(f"{'estimator':37} {'turn':>4} {'mean |A|':>9} {'SNR':>9} {'pairs':>7}")
    notes = []
    for name, estimator in [("model.estimator", module.estimator), *variants(classes)]:
        try:
            rows = signals(name, usable(estimator, size), pairs)
        except TurnRLError as error:
            notes.append((name, one_line(error)))
            continue
        for row in rows:
            if as_json:
                print(json.dumps(asdict(row)))
                continue
            snr = "-" if row.snr is None else f"{row.snr:.2f}"
            print(f"{name:37} {row.turn + 1:4} {row.advantage:9.3f} {snr:>9} {row.pairs:7}")
    if not as_json:
        print()
        say(_SIGNAL, indent="          ")
    for name, reason in notes:
        skipped = {"estimator": name, "reason": reason}
        say(json.dumps(skipped) if as_json else f"{name}: not tried: {reason}")
