"""The figures of a starter policy, before any reinforcement learning.

    python -m turnrl_atlas.figures [POLICY] [--questions 200] [--samples 4]

Prints the README's tables about a policy, by default the starter policy: its behaviour on famous
and held-out places in both forms, its skills, and its calls of tools that do not exist.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from statistics import mean

from turnrl import ChatFormat, Policy, QuestionSource, Rollout, Sampling, Trajectory, exact_match
from turnrl_atlas.forms import REACT, SEARCH, TWO_TURN, Form
from turnrl_atlas.made_up_tools import drawn_task
from turnrl_atlas.trace_writers import LOOK_UP, shown
from turnrl_atlas.world import Atlas, AtlasTwoHop, ask, places, query
from turnrl_slots import Slots
from turnrl_wiki_search import WikiSearch

_MAX_TOKENS = 512


class Measured:
    """A policy to measure.

    Args:
        policy: The policy.
        questions: Questions of each kind.
        samples: Attempts per question at temperature 1.
    """

    def __init__(self, policy: Policy, questions: int, samples: int) -> None:
        policy.load()
        self.chat = ChatFormat(policy.tokenizer)
        self.engine = Slots().build()
        self.engine.start(policy, _MAX_TOKENS)
        self.engine.sync(0)
        self.questions = questions
        self.samples = samples
        self.search = WikiSearch("indexes/atlas", build_from="Atlas", top_k=1)
        self.search.check()

    def acting(self, form: Form, source: QuestionSource, split: str) -> dict[str, float]:
        """The policy's figures on the first questions of a split."""
        questions = [*islice(source.questions(split), self.questions)]
        rollout = Rollout(
            form.offering([SEARCH]),
            [self.search],
            max_turn_tokens=64,
            max_result_tokens=96,
            max_tokens=_MAX_TOKENS,
        )

        def attempts(samples: int, greedy: bool) -> list[Trajectory]:
            groups = rollout.play(self.engine, self.chat, questions, samples, (0,), greedy)
            return [trajectory for group in groups for trajectory in group]

        greedy, sampled = attempts(1, True), attempts(self.samples, False)
        called = [t for t in sampled if t.turns[0].reading.calls]
        return {
            "greedy: exact match": _right(greedy),
            "greedy: answers at once": _share(_at_once(t) for t in greedy),
            "sampled: exact match": _right(sampled),
            "sampled: answers at once": _share(_at_once(t) for t in sampled),
            "answers at once: exact match": _right(t for t in sampled if _at_once(t)),
            "sampled: calls": len(called) / len(sampled),
            "calls, then exact match": _right(called),
            "calls, and finds every page needed": _share(
                _pages_read(t) >= {*t.question.metadata["supporting_ids"]} for t in called
            ),
            "calls that execute": _share(r.ok for t in called for r in t.results),
            "turns of right form": _share(
                turn.reading.format_error is None for t in sampled for turn in t.turns
            ),
        }

    def skills(self, form: Form) -> dict[str, float]:
        """How often the policy continues a begun turn rightly, on held-out places."""
        held_out = [place for place in places() if place.split == "val"]
        rng = random.Random(0)
        begun, read, pointed, calls, values = [], [], [], [], []
        for place in rng.choices(held_out, k=self.questions):
            fact = rng.choice([*place.facts])
            trace = form.trace(ask(place, fact, 0).text, [SEARCH])
            prompt = [*self.chat.prompt(trace.prompt, trace.tools)]
            calls.append(form.call(SEARCH, {"query": query(place, fact)}))
            begun.append((prompt, form.thinking(LOOK_UP)))
            text, seen = form.calling(LOOK_UP, calls[-1], shown(place))
            history = prompt + self._ids(f"{text}{self.chat.tokenizer.eos_token}")
            history += self.chat.observation(seen, self.chat.tokenizer.eos_token_id)
            read.append((history, f"<{form.thought}>"))
            pointed.append((history, form.thinking(f"It gives the {fact}.")))
            values.append(f"<answer> {place.facts[fact]}</answer>")
        return {
            "begun on a search, asks the right query": self._share_with(begun, calls),
            "given the right page, answers rightly": self._share_with(read, values),
            "and pointed to the sentence": self._share_with(pointed, values),
        }

    def tools(self, form: Form) -> dict[str, float]:
        """The policy's calls of unknown tools."""
        rng = random.Random("figures")
        tasks = [drawn_task(rng) for _ in range(self.questions)]
        traces = [form.trace(task.text, task.tools) for task in tasks]
        opened = [(self.chat.prompt(trace.prompt, trace.tools), "") for trace in traces]
        turns = self._complete([turn for turn in opened for _ in range(self.samples)], 1.0)
        calls = []
        for k, turn in enumerate(turns):
            first = form.segmenter.read(turn, 0, False).calls[:1]
            calls += [(call, tasks[k // self.samples]) for call in first]
        right = [(call, task) for call, task in calls if call.name == task.tool.name]
        return {
            "calls": len(calls) / len(turns),
            "of the calls: can be read": _share(call.error is None for call, _ in calls),
            "of the calls: a tool that is offered": _share(
                call.name in [tool.name for tool in task.tools] for call, task in calls
            ),
            "of the calls: the right tool": len(right) / len(calls),
            "of these: the right names of arguments": _share(
                {*call.arguments} == {*task.given} for call, task in right
            ),
            "of these: the right arguments": _share(
                call.arguments == task.given for call, task in right
            ),
        }

    def _share_with(
        self, begun: Sequence[tuple[Sequence[int], str]], wanted: Sequence[str]
    ) -> float:
        texts = self._complete(begun, 0.0)
        return _share(want in text for text, want in zip(texts, wanted, strict=True))

    def _ids(self, text: str) -> list[int]:
        return list(self.chat.tokenizer.encode(text, add_special_tokens=False))

    def _complete(
        self, begun: Sequence[tuple[Sequence[int], str]], temperature: float
    ) -> list[str]:
        """Complete turns, each from its history and its beginning."""
        stop = (*TWO_TURN.segmenter.stop, *REACT.segmenter.stop)

        async def complete(number: int, history: Sequence[int], beginning: str) -> str:
            ids = [*history, *self._ids(beginning)]
            sampling = Sampling(64, temperature, number, stop, self.chat.end_ids)
            session = self.engine.open(ids[:-1])
            completion = await session.generate(ids[-1:], sampling)
            session.close()
            return self.chat.text(completion.token_ids)

        async def complete_all() -> list[str]:
            texts = await asyncio.gather(*(complete(k, *turn) for k, turn in enumerate(begun)))
            await self.engine.drain()
            return texts

        return asyncio.run(complete_all())


def _right(trajectories: Iterable[Trajectory]) -> float:
    return _share(exact_match(t.answer, t.question) for t in trajectories)


def _at_once(trajectory: Trajectory) -> bool:
    return trajectory.turns[0].reading.answer is not None


def _pages_read(trajectory: Trajectory) -> set[str]:
    return {id for r in trajectory.results for id in r.passage_ids or ()}


def _share(outcomes: Iterable[bool]) -> float:
    """The share of True; 0 of nothing."""
    values = [*map(float, outcomes)]
    return mean(values) if values else 0.0


def _table(columns: Mapping[str, Mapping[str, float]]) -> str:
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    for name in next(iter(columns.values())):
        lines.append([name, *(f"{column[name]:.2f}" for column in columns.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m turnrl_atlas.figures")
    parser.add_argument("policy", nargs="?", default="package://turnrl_atlas/starter")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--samples", type=int, default=4)
    args = parser.parse_args()
    measured = Measured(Policy(args.policy), args.questions, args.samples)
    rows = (
        ("TwoTurn", TWO_TURN, Atlas()),
        ("ReAct", REACT, Atlas()),
        ("two hops", REACT, AtlasTwoHop()),
    )
    splits = ("famous", "val")
    acting = {
        f"{name}, {split}": measured.acting(form, source, split)
        for name, form, source in rows
        for split in splits
    }
    forms = {"TwoTurn": TWO_TURN, "ReAct": REACT}
    print(_table(acting))
    for take in (measured.skills, measured.tools):
        print(f"\n{_table({name: take(form) for name, form in forms.items()})}")


if __name__ == "__main__":
    main()
