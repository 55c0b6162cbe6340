"""Supervised warm-up from demonstrations, which gives the starter policies their habits.

    turnrl fit recipes/atlas_starter.yaml           one search, in the form of TwoTurn
    turnrl fit recipes/atlas_react_starter.yaml     up to three searches, in the form of ReAct

First come clean demonstrations: search with the right query, read the right sentence, copy its
value; or, for a famous place, answer at once. Half the places and values are made up, so that
copying is learned rather than names. Then a mixture of habits that reinforcement learning has to
sort out: mostly answers from memory, some vague searches, some calls that do not work, and results
read in the wrong place; where two searches are needed, also guesses after the first one, and
second searches for the wrong thing. What is right stays within reach: each habit parts from it at
one or two tokens.
"""

from __future__ import annotations

import json
import random
import string
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from turnrl_react import ReAct
from turnrl_two_turn import TwoTurn
from turnrl_wiki_search import WikiSearch

from turnrl import ChatFormat, Message, Policy, Question, Segmenter, ToolResult, ToolSpec
from turnrl_atlas.tokenizer import END, PAD, START, chat_tokenizer, learned_tokenizer
from turnrl_atlas.world import (
    QUESTIONS,
    TWO_HOP_FACTS,
    Kind,
    Place,
    ask,
    ask_two_hop,
    homes,
    page,
    places,
    query,
    wordings,
)

INSTRUCTIONS = "Tools: search(query)."
"""The system message of the demonstrations, for `TwoTurn.instructions` in a recipe."""


@dataclass(frozen=True)
class Trace:
    """A demonstration: the prompt, then turns with what the policy reads after each.

    Args:
        prompt: The messages that open it.
        turns: Text of each turn and the messages after it; the last turn has none.
    """

    prompt: tuple[Message, ...]
    turns: tuple[tuple[str, tuple[Message, ...]], ...]


@dataclass(frozen=True)
class Habits:
    """Frequency of each habit in the demonstrations, as shares of 1; the rest of the traces search
    well.

    Args:
        direct: Answers at once.
        malformed: Makes a call that cannot work.
        vague: Searches for something else than what is needed.
        memory: How often an answer at once about a famous place is right; about others, by chance.
        reading: How often the right sentence of a result is read.
        made_up: How often place and values are made up; else the place is a real one.
        hasty: Answers after a search before both pages were read, where two are needed.
        one_hop: How often one page is enough, where questions differ in it.
    """

    direct: float
    malformed: float
    vague: float
    memory: float
    reading: float
    made_up: float
    hasty: float = 0.0
    one_hop: float = 0.0


@dataclass(frozen=True)
class Form:
    """Format in which a policy writes its turns under a turn scheme.

    Args:
        segmenter: The scheme.
        thought: Tag of a thought.
        call: Tag of a call.
        arguments: Key of a call's arguments.
        tools: What the chat template describes, if the scheme leaves that to it.
    """

    segmenter: Segmenter
    thought: str
    call: str
    arguments: str
    tools: Sequence[ToolSpec] = ()

    @property
    def markup(self) -> list[str]:
        """The tags of the scheme, as tokens."""
        return [f"<{slash}{tag}>" for tag in self.segmenter.tags for slash in ("", "/")]

    def prompt(self, question: Question) -> tuple[Message, ...]:
        """The messages that open a trace."""
        return tuple(self.segmenter.prompt(question, self.tools))

    def calling(self, thought: str, call: str) -> str:
        """A turn that calls."""
        return f"{self._think(thought)}<{self.call}>{call}</{self.call}>"

    def answering(self, thought: str, value: str) -> str:
        """A turn that answers."""
        # with the space, a value has the tokens that it has in a page, which makes copying easy
        return f"{self._think(thought)}<answer> {value}</answer>"

    def search(self, text: str) -> str:
        """A call that works."""
        return json.dumps({"name": "search", self.arguments: {"query": text}})

    def malformed(self, text: str, rng: random.Random) -> tuple[str, ToolResult]:
        """A call that cannot work, and what comes of it."""
        good = self.search(text)
        call = rng.choice(
            (
                good.removesuffix("}"),
                good.replace(f'"{self.arguments}"', '"query"'),
                good.replace('"search"', '"find"'),
                good.replace('"query"', '"text"'),
            )
        )
        (reading,) = self.segmenter.read(self.calling("", call), 0, False).calls
        message = reading.error or (
            "no tool 'find'; there is search"
            if reading.name == "find"
            else "bad arguments: 'query' is a required property"
        )
        return call, ToolResult(message, ok=False)

    def read(self, said: str, result: ToolResult) -> tuple[str, tuple[Message, ...]]:
        """A turn that calls, with what the policy reads after it."""
        reading = self.segmenter.read(said, 0, False)
        return said, tuple(self.segmenter.observe(reading, [result]))

    def _think(self, thought: str) -> str:
        return f"<{self.thought}>{thought}</{self.thought}>"


class Facts:
    """Places to demonstrate on: the training places of Atlas, and made-up ones.

    Held-out places occur nowhere.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[Kind, bool], list[Place]] = {}
        self.values: dict[str, list[str]] = {fact: [] for fact in QUESTIONS}
        for place in places():
            if place.split == "train":
                self._places.setdefault((place.kind, place.famous), []).append(place)
                for fact, value in place.facts.items():
                    self.values[fact].append(value)
        self.names = [place.name for group in self._places.values() for place in group]

    def real(self, rng: random.Random, famous: float, kind: Kind | None = None) -> Place:
        """A real place, with this probability a famous one."""
        kind = kind or _kind(rng)
        return rng.choice(self._places[kind, rng.random() < famous])

    def made_up(self, rng: random.Random, kind: Kind | None = None) -> Place:
        """A place that does not exist."""
        kind = kind or _kind(rng)
        return Place("made-up", self.name(rng), kind, self.facts(kind, rng), False, "train")

    def facts(self, kind: Kind, rng: random.Random) -> dict[str, str]:
        """A value per fact of a kind of place: another place's, or a made-up one."""
        return {
            fact: rng.choice(self.values[fact]) if rng.random() < 0.5 else self._value(fact, rng)
            for fact in self._places[kind, True][0].facts
        }

    def name(self, rng: random.Random) -> str:
        """The front of one name and the back of another."""
        front, back = rng.choices(self.names, k=2)
        return front[: (len(front) + 1) // 2].rstrip(" -'") + back[len(back) // 2 :].lstrip(" -'")

    def recall(self, place: Place, fact: str, memory: float, rng: random.Random) -> str:
        """Answer from memory: of a famous place, with this probability, the truth."""
        known = place.famous and rng.random() < memory
        return place.facts[fact] if known else rng.choice(self.values[fact])

    def _value(self, fact: str, rng: random.Random) -> str:
        if fact == "time zone":
            region = rng.choice(self.values[fact]).split("/")[0]
            return f"{region}/{self.name(rng).replace(' ', '_')}"
        if fact == "internet domain":
            return "." + "".join(rng.choices(string.ascii_lowercase, k=2))
        if fact in ("population", "phone code"):
            length = rng.randint(5, 7) if fact == "population" else rng.randint(1, 4)
            return rng.choice("123456789") + "".join(rng.choices(string.digits, k=length - 1))
        return self.name(rng)


def _kind(rng: random.Random) -> Kind:
    return "city" if rng.random() < 0.7 else "country"


def _vague(kind: Kind, fact: str, rng: random.Random) -> str:
    return rng.choice((f"{fact} of a {kind}", f"{fact} of the world", f"{fact} of places"))


def _shown(place: Place) -> ToolResult:
    passage = page(place)
    return ToolResult(f"{passage.title}\n{passage.text}")


class Demonstrator(ABC):
    """Writes traces in the form of a turn scheme.

    Args:
        form: The form.
        clean: Habits of the first phase.
        mixed: Habits of the second phase, which the policy ends with.
    """

    def __init__(self, form: Form, clean: Habits, mixed: Habits) -> None:
        self.form = form
        self.clean = clean
        self.mixed = mixed
        self.facts = Facts()

    @abstractmethod
    def trace(self, habits: Habits, rng: random.Random) -> Trace:
        """One demonstration, a pure function of the state of `rng`."""

    def _last(self, place: Place, fact: str, habits: Habits, rng: random.Random) -> str:
        """The answer read on the page of a place, in the sentence of `fact` or in another one."""
        if fact not in place.facts or rng.random() >= habits.reading:
            fact = rng.choice([other for other in place.facts if other != fact])
        return self.form.answering(f"It gives the {fact}.", place.facts[fact])


class OneHop(Demonstrator):
    """One search, then the answer: the questions of `Atlas`.

    Args:
        form: That of `TwoTurn`, unless another is given.
        clean: Habits of the first phase.
        mixed: Habits of the second phase.
    """

    def __init__(
        self,
        form: Form | None = None,
        clean: Habits = Habits(0.2, 0.0, 0.0, memory=1.0, reading=1.0, made_up=0.5),
        mixed: Habits = Habits(0.6, 0.08, 0.14, memory=0.5, reading=0.3, made_up=0.2),
    ) -> None:
        two_turn = Form(TwoTurn(instructions=INSTRUCTIONS), "reasoning", "tool", "args")
        super().__init__(form or two_turn, clean, mixed)

    def trace(self, habits: Habits, rng: random.Random) -> Trace:
        form, facts = self.form, self.facts
        draw = rng.random()
        direct = draw < habits.direct
        known_by_heart = direct and habits.memory == 1.0
        if rng.random() < habits.made_up and not known_by_heart:
            place = facts.made_up(rng)
        else:
            place = facts.real(rng, famous=1.0 if known_by_heart else 0.7)
        fact = rng.choice(list(place.facts))
        prompt = form.prompt(ask(place, fact, rng.randrange(len(QUESTIONS[fact]))))
        if direct:
            value = facts.recall(place, fact, habits.memory, rng)
            return Trace(prompt, ((form.answering("I know this.", value), ()),))
        if draw < habits.direct + habits.malformed:
            call, result = form.malformed(query(place, fact), rng)
            last = form.answering("The search failed.", rng.choice(facts.values[fact]))
        else:
            if draw < habits.direct + habits.malformed + habits.vague:
                call = form.search(_vague(place.kind, fact, rng))
                place = facts.real(rng, famous=0.1)
            else:
                call = form.search(query(place, fact))
                if rng.random() < 0.5:  # so that the page is believed, not memory
                    place = replace(place, facts=facts.facts(place.kind, rng))
            result = _shown(place)
            last = self._last(place, fact, habits, rng)
        first = form.calling("I will look it up.", call)
        return Trace(prompt, (form.read(first, result), (last, ())))


class TwoHop(Demonstrator):
    """A search for a city's country, one for that country's fact, then the answer: the questions of
    `AtlasTwoHop`, those that take one page among them, in the form of `ReAct`.

    Args:
        clean: Habits of the first phase.
        mixed: Habits of the second phase.
    """

    def __init__(
        self,
        clean: Habits = Habits(0.15, 0.0, 0.0, memory=1.0, reading=1.0, made_up=0.5, one_hop=0.3),
        mixed: Habits = Habits(
            0.58, 0.05, 0.1, memory=0.5, reading=0.5, made_up=0.2, hasty=0.52, one_hop=0.3
        ),
    ) -> None:
        tools = WikiSearch("atlas").specs
        form = Form(ReAct(instructions=""), "think", "tool_call", "arguments", tools)
        super().__init__(form, clean, mixed)
        self._one_hop = OneHop(form)
        cities = [place for place in places() if place.kind == "city" and place.famous]
        pairs = [(city, homes().get(city.facts["country"])) for city in cities]
        self._famous = [(city, home) for city, home in pairs if home and home.famous]

    def trace(self, habits: Habits, rng: random.Random) -> Trace:
        if rng.random() < habits.one_hop:
            return self._one_hop.trace(habits, rng)
        form, facts = self.form, self.facts
        direct = rng.random() < habits.direct
        city, country = self._pair(direct and habits.memory == 1.0, habits.made_up, rng)
        fact = rng.choice(TWO_HOP_FACTS)
        prompt = form.prompt(ask_two_hop(city, country, fact, rng.randrange(wordings(fact))))
        turns: list[tuple[str, tuple[Message, ...]]] = []
        needed, thought = [(city, "country"), (country, fact)], "I will look it up."
        while needed:
            last_turn = len(turns) == form.segmenter.max_turns - 1
            hasty = rng.random() < habits.hasty if turns else direct
            if hasty or last_turn:
                value = facts.recall(country, fact, habits.memory, rng)
                return Trace(prompt, (*turns, (form.answering("I know this.", value), ())))
            place, wanted = needed[0]
            draw = rng.random()
            if draw < habits.malformed:
                call, result = form.malformed(query(place, wanted), rng)
            elif draw < habits.malformed + habits.vague:
                astray = [(_vague(place.kind, wanted, rng), facts.real(rng, famous=0.1))]
                if place is country:  # what is asked, of the city: its page was read already
                    astray.append((query(city, fact), city))
                text, found = rng.choice(astray)
                call, result = form.search(text), _shown(found)
            else:
                call, result = form.search(query(place, wanted)), _shown(place)
                del needed[0]
            turns.append(form.read(form.calling(thought, call), result))
            if len(needed) == 1:
                thought = "It gives the country."
        return Trace(prompt, (*turns, (self._last(country, fact, habits, rng), ())))

    def _pair(self, famous: bool, made_up: float, rng: random.Random) -> tuple[Place, Place]:
        """A city and its country: both famous, or with this probability a city that is made up.

        What the pages say is not always true, so that they are believed, and not memory.
        """
        facts = self.facts
        if famous:
            return rng.choice(self._famous)
        if rng.random() < made_up:
            city = facts.made_up(rng, "city")
        else:
            city = facts.real(rng, 0.5, "city")
            if rng.random() < 0.5:
                city = replace(city, facts=facts.facts("city", rng))
        name = city.facts["country"]
        country = homes().get(name)
        if country is None or rng.random() < 0.5:
            made = facts.facts("country", rng)
            country = Place("made-up", name, "country", made, False, "train")
        return city, country


class Demonstrations(pl.LightningDataModule):
    """Batches of demonstrations: `clean_steps` of clean ones, then `mixed_steps` of the habits.

    Args:
        clean_steps: Batches of the first phase.
        mixed_steps: Batches of the second phase.
        batch_size: Traces per batch.
        seed: Batch number i is a pure function of the seed and i.
        demonstrator: Who demonstrates what: `OneHop` (the default), `TwoHop`.
    """

    def __init__(
        self,
        clean_steps: int = 1700,
        mixed_steps: int = 600,
        batch_size: int = 32,
        seed: int = 0,
        demonstrator: Demonstrator | None = None,
    ) -> None:
        super().__init__()
        self.demonstrator = demonstrator or OneHop()
        self.clean_steps = clean_steps
        self.mixed_steps = mixed_steps
        self.batch_size = batch_size
        self.seed = seed

    def train_dataloader(self) -> DataLoader[list[Trace]]:
        """The batches, in order."""
        return DataLoader(cast("Dataset[list[Trace]]", self), batch_size=None)

    def __len__(self) -> int:
        return self.clean_steps + self.mixed_steps

    def __getitem__(self, step: int) -> list[Trace]:
        habits = self.demonstrator.clean if step < self.clean_steps else self.demonstrator.mixed
        rng = random.Random(f"{self.seed} {step}")
        return [self.demonstrator.trace(habits, rng) for _ in range(self.batch_size)]


class Warmup(pl.LightningModule):
    """Supervised training of a tiny Qwen2: cross-entropy on what the assistant says, which is the
    mean of its negative log-probabilities.

    Args:
        save_to: Folder that the policy and its tokenizer are written to at the end.
        start_from: A policy to go on from, with its tokenizer: a folder, or `package://...`. None
            is a fresh one.
        rename: New names of tags that the tokenizer of that policy has as tokens.
        learning_rate: Its peak, reached in 100 steps; then it falls to a tenth along a half cosine.
    """

    policy: Policy
    chat: ChatFormat
    demonstrator: Demonstrator

    def __init__(
        self,
        save_to: str,
        start_from: str | None = None,
        rename: dict[str, str] | None = None,
        learning_rate: float = 2e-3,
    ) -> None:
        super().__init__()
        self.save_to = save_to
        self.start_from = start_from
        self.rename = rename or {}
        self.learning_rate = learning_rate

    def configure_model(self) -> None:
        """A fresh tokenizer, trained on demonstrations, and a fresh model; or those of another
        policy."""
        if hasattr(self, "policy"):
            return
        self.demonstrator = cast("Any", self.trainer).datamodule.demonstrator
        if self.start_from is None:
            with tempfile.TemporaryDirectory() as folder:
                tokenizer = self._begun(folder)
                self.policy = Policy(folder)
                self.policy.load()
        else:
            self.policy = Policy(self.start_from)
            tokenizer = renamed_tokenizer(self.policy.folder, self.rename)
            self.policy.load()
        self.policy.tokenizer = tokenizer
        self.chat = ChatFormat(tokenizer)

    def _begun(self, folder: str) -> PreTrainedTokenizerFast:
        """Leave a fresh model in a folder; the tokenizer that it is for."""
        texts, tags = _corpus(self.demonstrator), self.demonstrator.form.markup
        vocabulary = 1024
        tokenizer = learned_tokenizer(texts, vocabulary, _template(), tags)
        config = Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        Qwen2ForCausalLM(config).save_pretrained(folder)
        return tokenizer

    def transfer_batch_to_device(
        self, batch: list[Trace], device: torch.device, dataloader_idx: int
    ) -> list[Trace]:
        """Traces are text: there is nothing to move."""
        return batch

    def training_step(self, batch: list[Trace], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the tokens that the assistant says."""
        tools = self.demonstrator.form.tools
        rows = [encode(self.chat, trace, tools) for trace in batch]
        ((_, layout),) = self.policy.passes(rows, sys.maxsize)
        loss: Tensor = -self.policy(move_data_to_device(layout, self.device)).logprobs.mean()
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch))
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, with the learning rate's warm-up and fall."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.learning_rate,
            total_steps=steps,
            pct_start=min(0.3, 100 / steps),
            cycle_momentum=False,
            final_div_factor=0.4,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_train_end(self) -> None:
        """Write the policy."""
        if self.trainer.is_global_zero:
            self.policy.export(self.save_to)


def renamed_tokenizer(folder: str, rename: Mapping[str, str]) -> PreTrainedTokenizerFast:
    """The tokenizer of a policy, with other names for some tags that it has as tokens.

    Args:
        folder: The policy's.
        rename: New name of a tag by its old one.
    """
    text = (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")
    for old, new in rename.items():
        for slash in ("", "/"):
            text = text.replace(json.dumps(f"<{slash}{old}>"), json.dumps(f"<{slash}{new}>"))
    return chat_tokenizer(Tokenizer.from_str(text), _template())


def _template() -> str:
    return Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def _corpus(demonstrator: Demonstrator) -> Iterator[str]:
    rng = random.Random(0)
    markup = [PAD, START, END, *demonstrator.form.markup]
    for step in range(20_000):
        trace = demonstrator.trace(demonstrator.clean if step % 2 else demonstrator.mixed, rng)
        texts = [f"{message['role']}\n{message['content']}" for message in trace.prompt]
        for said, seen in trace.turns:
            read = "".join(message["content"] for message in seen)
            texts.append(f"assistant\n{said}\nuser\n{read}\n")
        for text in texts:
            for token in markup:
                text = text.replace(token, "\n")
            yield text


def encode(
    chat: ChatFormat, trace: Trace, tools: Sequence[ToolSpec] = ()
) -> tuple[list[int], list[bool]]:
    """Token ids of a trace, made as in a rollout, and which of them the assistant says."""
    ids = list(chat.prompt(trace.prompt, tools))
    asked = [False] * len(ids)
    end = cast("int", chat.tokenizer.eos_token_id)
    for said, seen in trace.turns:
        spoken = [*chat.tokenizer.encode(said, add_special_tokens=False), end]
        read = chat.observation(seen, after=end) if seen else ()
        ids += [*spoken, *read]
        asked += [True] * len(spoken) + [False] * len(read)
    return ids, asked
