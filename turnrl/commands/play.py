"""`turnrl play RUN_OR_RECIPE ["QUESTION"]`: talk to an agent in a terminal.

    turnrl play runs/quickstart/version_0 "What country is Utrecht in?"
    turnrl play runs/quickstart                  the newest run; questions one by one
    turnrl play quickstart                       the bundled recipe's policy before training
    turnrl play RECIPE --checkpoint RUN          a run made from Python, by a recipe that acts so

It prints turns, calls and results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from turnrl.plugin.errors import RecipeError
from turnrl.plugin.hooks import Commands
from turnrl.plugin.text import format_labelled, make_visible, say
from turnrl.recipe.agents import find_agent
from turnrl.recipe.invocation import read_invocation
from turnrl.recipe.trust import TRUST
from turnrl.types.questions import Question
from turnrl.types.trajectory import Trajectory

if TYPE_CHECKING:
    from turnrl.training.module import MTGRPO


def add_play_command(commands: Commands) -> None:
    """Add `play` to argparse's sub-parsers."""
    parser = commands.add_parser(
        "play",
        help="talk to an agent in a terminal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "a run or a checkpoint; or a recipe, for its policy before training"
    parser.add_argument("agent", metavar="RUN_OR_RECIPE", help=text)
    parser.add_argument("question", nargs="?", metavar="QUESTION", help="(default: from the input)")
    parser.add_argument(
        "--answer", action="append", default=[], help="an answer that counts as right; repeatable"
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="attempts to sample (default: one, greedy)"
    )
    parser.add_argument(
        "--temperature", type=float, help="temperature of the samples (default: the recipe's)"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="CHECKPOINT",
        help="best or last of the run (default: best, or else last); after a recipe, the run or "
        "checkpoint to load weights from",
    )
    parser.add_argument("--device", default="cpu", help="device to play on (default: %(default)s)")
    text = "run the code that a stranger's run or recipe names"
    parser.add_argument(TRUST, action="store_true", help=text)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    if args.answer and not args.question:
        raise RecipeError("--answer belongs to one question. Give the QUESTION too.")
    agent = find_agent(args.agent, args.checkpoint)
    file = agent.weights()  # so that a mistake shows before torch is loaded
    if agent.is_recipe:
        trusts = [TRUST] if args.trust else []
        read_invocation("fit", ["--config", str(agent.recipe), *trusts])
    say(f"turnrl play: {agent}", sys.stderr)
    from turnrl.recipe.loading import load

    word, weights = (agent.recipe, file) if agent.is_recipe else (file or agent.recipe, None)
    module = load(word, args.device, weights, trust=args.trust)
    if args.question:
        question = Question("1", args.question)
        if args.answer:
            question = replace(question, answers=tuple(args.answer))
        _play(module, question, args)
        return
    for number, text in enumerate(_read_questions(), 1):
        _play(module, Question(str(number), text), args)


def _read_questions() -> Iterator[str]:
    """Questions from the input, until it ends."""
    if sys.stdin.isatty():
        print("Ask a question, then press Enter. Ctrl-D ends this.")
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text:
            yield text


def _play(module: MTGRPO, question: Question, args: argparse.Namespace) -> None:
    """Let the agent answer a question, and print what it does."""
    say(f"question   {make_visible(question.text)}", indent=" " * 11)
    if args.samples is None:
        (trajectory,) = module.ask(question, temperature=args.temperature)
        _show(module, trajectory)
        say(_format_end(trajectory), indent=" " * 11)
        return
    attempts = module.ask(question, args.samples, temperature=args.temperature)
    for number, attempt in enumerate(attempts, 1):
        print(f"\n== attempt {number}")
        _show(module, attempt)
        say(_format_end(attempt), indent=" " * 11)


def _show(module: MTGRPO, trajectory: Trajectory) -> None:
    """Print the opening of tool sessions, the turns, and the messages that a player sent before
    each turn."""
    if trajectory.opening:
        say(make_visible(format_labelled("opening", trajectory.opening)), indent="")
    sent = module.rollout.loop.text_before_turns(trajectory, module.chat)
    for k, turn in enumerate(trajectory.turns, 1):
        text = make_visible(turn.text)
        lines = [f"-- turn {k}", *map(make_visible, sent[k - 1 : k]), text]
        say("\n".join(lines), indent="")
        if more := str(turn).removeprefix(text).removeprefix("\n"):
            say(more, indent="", style="dim")


def _format_end(trajectory: Trajectory) -> str:
    answer = "none" if trajectory.answer is None else repr(trajectory.answer)
    right = ""
    if trajectory.question.answers:
        from turnrl.rewards.answers import exact_match

        right = ", right" if exact_match(trajectory.answer, trajectory.question) else ", wrong"
    return f"answer     {answer}{right}; ended by {trajectory.ended_by}"
