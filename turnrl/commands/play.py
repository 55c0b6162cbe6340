"""`turnrl play RUN_OR_RECIPE ["QUESTION"]`: talk to an agent in a terminal.

    turnrl play runs/quickstart/version_0 "What country is Utrecht in?"
    turnrl play runs/quickstart                  the newest run; questions one by one
    turnrl play quickstart                       the bundled recipe's policy before training
    turnrl play RECIPE --checkpoint RUN          a run made from Python, by a recipe that acts so
    turnrl play RUN "QUESTION" --answer Netherlands --estimators

It prints turns, calls and results. With --estimators the agent takes several attempts,
and it prints the credit of their turns by the agent's own estimator, then by each installed one.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from string import ascii_uppercase
from typing import TYPE_CHECKING

from turnrl.plugin.errors import RecipeError
from turnrl.plugin.hooks import Commands
from turnrl.plugin.text import Style, labelled, painted, say, visible
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
    parser.add_argument(
        "--estimators",
        action="store_true",
        help="print the credit of several attempts by each estimator (default: 8 attempts)",
    )
    text = "run the code that a stranger's run or recipe names"
    parser.add_argument(TRUST, action="store_true", help=text)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    if args.estimators and not (args.question and args.answer):
        raise RecipeError("--estimators scores attempts. Give a QUESTION and its --answer.")
    if args.answer and not args.question:
        raise RecipeError("--answer belongs to one question. Give the QUESTION too.")
    if args.estimators and args.samples is None:
        args.samples = 8
    agent = find_agent(args.agent, args.checkpoint)
    file = agent.weights()  # so that a mistake shows before torch is loaded
    agent.needs_recipe()
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
    for number, text in enumerate(_lines(), 1):
        _play(module, Question(str(number), text), args)


def _lines() -> Iterator[str]:
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
    say(f"question   {visible(question.text)}", indent=" " * 11)
    if args.samples is None:
        (trajectory,) = module.ask(question, temperature=args.temperature)
        _show(module, trajectory)
        say(_end(trajectory), indent=" " * 11)
        return
    attempts = module.ask(question, args.samples, temperature=args.temperature)
    for number, attempt in enumerate(attempts, 1):
        print(f"\n== attempt {number}")
        _show(module, attempt)
        say(_end(attempt), indent=" " * 11)
    if args.estimators:
        say("\n".join(_credit(module, attempts)), indent="   ")


def _show(module: MTGRPO, trajectory: Trajectory) -> None:
    """Print the opening of tool sessions, the turns, and the messages that a player sent before
    each turn."""
    if trajectory.opening:
        say(visible(labelled("opening", trajectory.opening)), indent="")
    sent = module.rollout.driver.sent(trajectory, module.chat)
    for k, turn in enumerate(trajectory.turns, 1):
        text = visible(turn.text)
        lines = [f"-- turn {k}", *map(visible, sent[k - 1 : k]), in_colours(text)]
        say("\n".join(lines), indent="")
        if more := str(turn).removeprefix(text).removeprefix("\n"):
            say(more, indent="", style="dim")


_ELEMENT = re.compile(r"<(\w+)>.*?</\1>", re.DOTALL)
_STYLES: Mapping[str, Style] = {
    **dict.fromkeys(("think", "thinking", "thought", "reasoning"), "dim"),
    "answer": "strong",
}


def in_colours(text: str) -> str:
    """The text of a turn, with thoughts, the answer and calls in different colours."""
    return _ELEMENT.sub(lambda match: painted(match[0], _STYLES.get(match[1], "call")), text)


def _end(trajectory: Trajectory) -> str:
    answer = "none" if trajectory.answer is None else repr(trajectory.answer)
    right = ""
    if trajectory.question.answers:
        from turnrl.rewards.answers import exact_match

        right = ", right" if exact_match(trajectory.answer, trajectory.question) else ", wrong"
    return f"answer     {answer}{right}; ended by {trajectory.ended_by}"


# ------------------------------------------------------------------------------ credit


def _credit(module: MTGRPO, attempts: Sequence[Trajectory]) -> Iterator[str]:
    """A table of attempts by turns: the reward of each turn, and the credit by each estimator."""
    from turnrl.credit.applied import applied
    from turnrl.rewards.scoring import score_group

    group = score_group(attempts, module.rewards, None, module.policy)
    own = module.estimator
    every = applied(group, own, repr(own) if is_dataclass(own) else type(own).__name__)
    columns = [result for result in every if not result.reason]
    yield ""
    letters = [*ascii_uppercase, *map(str, range(len(columns)))][: len(columns)]
    for letter, result in zip(letters, columns, strict=True):
        yield visible(f"{letter}  {result.name}{', this run' if result.own else ''}")
    yield from (visible(f"-  {result.name}: {result.reason}") for result in every if result.reason)
    yield "\nThe advantages of each turn by these estimators:"
    heads = "".join(f"{letter:>6}" for letter in letters)
    yield f"try  outcome  turn  reward{heads}"
    credit = [result.advantages for result in columns]
    for i, attempt in enumerate(attempts):
        begin = f"{i + 1:3}  {float(group.outcome[i]):7.2f}"
        for k in range(len(attempt.turns)):
            cells = "".join(
                f"{round(of[i][k], 2) + 0.0:+6.2f}" if i in of else f"{'-':>6}" for of in credit
            )
            yield f"{begin:12}  {k + 1:4}  {float(group.turn_rewards[i, k]):6.2f}{cells}"
            begin = ""
