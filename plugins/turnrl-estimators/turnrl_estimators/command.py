"""`turnrl credit-check`: the effect of each installed estimator on the gradient.

It tries every estimator, with its defaults and unscaled with a leave-one-out baseline, on a process
of three turns that is small enough to sum over all groups. It prints the bias of the expected
estimate and the part of the bias along the true gradient, both relative to the length of the true
gradient (the learning rate can absorb a factor along it); the angle between the expected estimate
and the true gradient, in degrees; the variance per trajectory of a group; and the noise, which is
the variance over the squared length of the expected estimate, so it does not depend on the
estimator's scale. `--toy costs` takes a process in which every search costs something, and also
compares `CostsAmongRight` with the gradient that it estimates.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from turnrl.plugin.hooks import load_classes
from turnrl.plugin.text import say

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_TOY_COLUMNS = (
    "bias      error of the expected gradient, relative to the true one's length",
    "along     its part along the true one, which another learning rate undoes",
    "angle     between both, in degrees: no learning rate undoes it",
    "variance  of the estimate, for each trajectory of a group",
    "noise     variance over the squared length of the expected estimate",
)


def add_credit_command(commands: Commands) -> None:
    """Add `credit-check` to argparse's sub-parsers."""
    parser = commands.add_parser(
        "credit-check",
        help="measure the bias and variance of every estimator",
        description=__doc__,
    )
    parser.add_argument(
        "--toy",
        choices=("searches", "costs"),
        default="searches",
        help="the process to sum over (default: searches)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    from turnrl_estimators.exact import ALL_REWARDS, Skipped, measure_all
    from turnrl_estimators.toy import TOYS

    rows = measure_all(load_classes("turnrl_estimators"), TOYS[args.toy])
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
