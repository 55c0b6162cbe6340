"""How long an iteration takes on several cards, worked out before you have them.

    python docs/scale_out.py                                 # the tables of the page
    python docs/scale_out.py --size 7B --set server.step_s=0.010 --set network.bytes_s=1.2e8
    python docs/scale_out.py --help                          # every rate that can be set

It plays whole iterations, event by event: attempts wait for a place on their server, servers read
and sample a step at a time, learners share the groups, adapters travel. Lengths are random, by a
fixed seed. It needs the package simpy.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import simpy


@dataclass(frozen=True)
class Work:
    """What an iteration has to do."""

    questions: int = 24
    group: int = 16  # attempts at each
    prompt: int = 350  # tokens, read once for a group
    sampled: tuple[int, ...] = (150, 100)  # tokens of each turn, on average
    result: int = 500  # tokens that are read before each turn but the first
    spread: float = 0.5  # a turn has between (1 - spread) and (1 + spread) times its tokens
    tool_s: float = 0.05  # seconds of a call
    passes: int = 2  # passes over what was collected
    steps: int = 4  # of the optimiser in a pass


@dataclass(frozen=True)
class Server:
    """What samples: one or several cards."""

    cards: int = 1
    step_s: float = 0.0148  # a step, and ...
    row_s: float = 0.000072  # ... more of it for each turn that is sampled
    read_s: float = 0.0000271  # for each token that is read
    rows: int = 336  # turns sampled at a time
    chunk: int = 8192  # tokens read in a step, at most


@dataclass(frozen=True)
class Learner:
    """What learns: one card, of one or several that share the groups."""

    token_s: float = 0.0000538  # for each token, in each pass


@dataclass(frozen=True)
class Network:
    """Between cards and servers, and what travels there."""

    bytes_s: float = 3.1e9  # 25 Gbit/s
    adapter: float = 161.5e6  # bytes of a version; gradients have as many
    load_s: float = 0.2  # a server's own seconds for a new version


@dataclass(frozen=True)
class Rates:
    """All of it."""

    work: Work = field(default_factory=Work)
    server: Server = field(default_factory=Server)
    learner: Learner = field(default_factory=Learner)
    network: Network = field(default_factory=Network)


SIZES = {
    # two rollouts and a pass of learning, measured on an H100 with turnrl's own engine
    "7B": Rates(),
    # computed from these: 4.3 times the weights and 4.6 times the keys and values; a server has two
    # cards, for its weights in 16 bits, which are taken to be 1.7 times as fast as one; what a turn
    # adds to a step is partly of the one and partly of the other, 4.5
    "32B": Rates(
        server=Server(2, 0.0148 * 4.3 / 1.7, 0.000072 * 4.5 / 1.7, 0.0000271 * 4.3 / 1.7, 192),
        learner=Learner(0.0000538 * 4.3),
        network=Network(adapter=536.9e6),
    ),
}


class Sampler:
    """A server, step by step: it reads what is new, and gives each turn a token.

    Args:
        env: The clock.
        rates: How fast it is.
    """

    def __init__(self, env: simpy.Environment, rates: Server) -> None:
        self._env, self._rates = env, rates
        self._waiting: list[list[Any]] = []  # tokens to read, tokens to sample, event
        self._came = env.event()
        self.held = 0
        """Attempts that are its own."""
        self.busy_s = 0.0
        """Seconds of its steps."""
        env.process(self._serve())

    def turn(self, read: int, sampled: int) -> simpy.Event:
        """Begin a turn. The event comes when it has all its tokens."""
        done = self._env.event()
        self._waiting.append([read, sampled, done])
        if not self._came.triggered:
            self._came.succeed()
        return done

    def _serve(self) -> Generator[simpy.Event]:
        rates = self._rates
        rows: list[list[Any]] = []
        while True:
            while self._waiting and len(rows) < rates.rows:
                rows.append(self._waiting.pop(0))
            if not rows:
                self._came = self._env.event()
                yield self._came
                continue
            room = rates.chunk
            for row in rows:
                part = min(room, row[0])
                row[0] -= part
                room -= part
            # the turns that have read everything get a token
            ready = [row for row in rows if not row[0]]
            step_s = rates.step_s + rates.row_s * len(ready) + rates.read_s * (rates.chunk - room)
            yield self._env.timeout(step_s)
            self.busy_s += step_s
            for row in ready:
                row[1] -= 1
                if not row[1]:
                    row[2].succeed()
            rows = [row for row in rows if row[1]]


@dataclass
class Found:
    """Seconds of an iteration, once it has settled."""

    iteration: float
    collecting: float
    learning: float
    giving: float  # the adapter to the servers

    @property
    def longest(self) -> str:
        """What takes the longest."""
        parts = {"collecting": self.collecting, "learning": self.learning, "giving": self.giving}
        return max(parts, key=parts.__getitem__)


class Run:
    """Iterations of some cards.

    Args:
        rates: How fast everything is.
        servers: How many servers.
        learners: How many learners. None lets the servers' cards learn, in turn with sampling.
        staleness: Iterations that may be collected ahead.
        iterations: How many are played; the first and the last are left out of the figures.
    """

    def __init__(
        self,
        rates: Rates,
        servers: int,
        learners: int | None,
        staleness: int = 0,
        iterations: int = 4,
    ) -> None:
        self.env = simpy.Environment()
        self._rates, self._draw = rates, random.Random(0)
        self._servers = [Sampler(self.env, rates.server) for _ in range(servers)]
        self._learners = learners or servers * rates.server.cards
        self._staleness, self._iterations = staleness, iterations
        self._version, self._newer = 0, self.env.event()
        self._collected = simpy.Store(self.env)
        self._spent: dict[str, list[float]] = {"collecting": [], "learning": [], "giving": []}
        self._ended: list[float] = []

    def play(self) -> Found:
        """Play it."""
        self.env.process(self._collect())
        self.env.run(self.env.process(self._learn()))
        middle = slice(1, -1)
        spent = {name: _mean(times[middle]) for name, times in self._spent.items()}
        whole = (self._ended[-2] - self._ended[0]) / (len(self._ended) - 2)
        return Found(whole, **spent)

    def _collect(self) -> Generator[simpy.Event]:
        for number in range(self._iterations):
            while self._version < number - self._staleness:
                yield self._newer
            began = self.env.now
            work = self._rates.work
            yield self.env.all_of(
                [
                    self.env.process(self._attempt(reads_prompt=member == 0))
                    for _ in range(work.questions)
                    for member in range(work.group)
                ]
            )
            self._spent["collecting"].append(self.env.now - began)
            yield self._collected.put(number)

    def _attempt(self, reads_prompt: bool) -> Generator[simpy.Event]:
        work = self._rates.work
        server = min(self._servers, key=lambda one: one.held)
        server.held += 1
        read = work.prompt if reads_prompt else 1
        for number, mean in enumerate(work.sampled):
            if number:
                yield self.env.timeout(work.tool_s)
                read = work.result
            share = self._draw.uniform(1 - work.spread, 1 + work.spread)
            yield server.turn(read, max(1, round(mean * share)))
        server.held -= 1

    def _learn(self) -> Generator[simpy.Event]:
        work, network, count = self._rates.work, self._rates.network, self._learners
        tokens = work.prompt + sum(work.sampled) + work.result * (len(work.sampled) - 1)
        # a group stays on one learner
        most = math.ceil(work.questions / count) * work.group * tokens
        reduce_s = 2 * (count - 1) / count * network.adapter / network.bytes_s
        learn_s = work.passes * (most * self._rates.learner.token_s + work.steps * reduce_s)
        give_s = len(self._servers) * network.adapter / network.bytes_s + network.load_s
        for _ in range(self._iterations):
            yield self._collected.get()
            yield self.env.timeout(learn_s)
            yield self.env.timeout(give_s)
            self._spent["learning"].append(learn_s)
            self._spent["giving"].append(give_s)
            self._version += 1
            self._ended.append(self.env.now)
            newer, self._newer = self._newer, self.env.event()
            newer.succeed()


def _mean(numbers: Iterable[float]) -> float:
    every = [*numbers]
    return sum(every) / len(every)


def splits(rates: Rates, cards: int) -> Iterator[tuple[int, int | None]]:
    """Ways to divide some cards: servers, and learners beside them. None lets the cards of the
    servers learn too. As many groups have to go to each learner."""
    each, questions = rates.server.cards, rates.work.questions
    if cards % each == 0 and questions % cards == 0:
        yield cards // each, None
    for servers in range(1, cards):
        learners = cards - servers * each
        if learners > 0 and questions % learners == 0:
            yield servers, learners


def best(rates: Rates, cards: int, staleness: int) -> tuple[Found, int, int | None] | None:
    """The fastest way to divide some cards; None if there is none."""
    tried = [
        (Run(rates, servers, learners, staleness).play(), servers, learners)
        for servers, learners in splits(rates, cards)
        if learners is not None or not staleness  # in turn there is nothing to collect ahead
    ]
    return min(tried, key=lambda one: one[0].iteration, default=None)


def table(rates: Rates, cards: Sequence[int], staleness: int) -> str:
    """A table of the fastest way for each number of cards."""
    rows = [
        "| cards | servers + learners | iteration | collecting | learning | giving weights | "
        "speed | speed per card | the longest |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    alone = Run(rates, 1, None).play()
    for number in cards:
        found = best(rates, number, staleness)
        if found is None:
            continue
        it, servers, learners = found
        speed = alone.iteration / it.iteration
        per = speed * rates.server.cards / number
        divided = f"{servers} + {learners}" if learners else f"{servers}, in turn"
        rows.append(
            f"| {number} | {divided} | {it.iteration:.1f} s | {it.collecting:.1f} s | "
            f"{it.learning:.1f} s | {it.giving:.1f} s | {speed:.1f} | {per:.2f} | {it.longest} |"
        )
    return "\n".join(rows)


def _set(rates: Rates, words: Sequence[str]) -> Rates:
    """Rates with some of them replaced, each given as part.name=number."""
    for word in words:
        path, _, text = word.partition("=")
        part, _, name = path.partition(".")
        known = {one.name for one in dataclasses.fields(getattr(rates, part, Work))}
        if part not in Rates.__dataclass_fields__ or name not in known or name == "sampled":
            raise SystemExit(f"scale_out.py: there is no rate {path!r}; see --help")
        kind = type(getattr(getattr(rates, part), name))
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        least = 0 if name in ("spread", "tool_s", "load_s") else 1e-12
        if not least <= number < math.inf:
            whole = "whole " * (kind is int)
            raise SystemExit(f"scale_out.py: {word!r} gives no {whole}number above 0")
        rates = replace(rates, **{part: replace(getattr(rates, part), **{name: number})})
    return rates


def main() -> None:
    """Print the tables."""
    lines = [
        f"  {part}.{name} = {getattr(value, name)}"
        for part, value in ((p, getattr(Rates(), p)) for p in Rates.__dataclass_fields__)
        for name in value.__dataclass_fields__
        if name != "sampled"
    ]
    parser = argparse.ArgumentParser(
        description="How long an iteration takes on several cards.",
        epilog="rates, here of 7B:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--set", action="append", default=[], metavar="PART.NAME=NUMBER")
    parser.add_argument("--size", choices=SIZES, help="one of them; what --set gives is for all")
    parser.add_argument("--cards", default="1,2,3,4,6,8,12", help="numbers of cards")
    options = parser.parse_args()
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", options.cards):
        parser.error(f"--cards is {options.cards!r}; give numbers such as 1,2,4")
    numbers = [int(one) for one in options.cards.split(",")]
    for size, rates in SIZES.items():
        if options.size not in (None, size):
            continue
        for staleness in (0, 1):
            title = "in turn" if not staleness else "collecting one iteration ahead"
            print(f"{size}, {title}\n\n{table(_set(rates, options.set), numbers, staleness)}\n")


if __name__ == "__main__":
    main()
