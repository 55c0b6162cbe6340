"""How the starter policy got its habits: supervised warm-up from demonstrations.

    turnrl fit recipes/atlas_starter.yaml

First come clean demonstrations: search with the right query, read the right sentence, copy its
value; or, for a famous place, answer at once. Half the places and values are made up, so that
copying is learnt rather than names. Then a mixture of habits that reinforcement learning has to
sort out: mostly answers from memory, some vague searches, some calls that do not work, and results
read in the wrong place. What is right stays within reach: each habit parts from it at one or two
tokens.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from turnrl_two_turn import TwoTurn

from turnrl import Message, ToolResult
from turnrl_atlas.world import QUESTIONS, Kind, Place, ask, page, places, query

INSTRUCTIONS = "Tools: search(query)."
"""The system message of the demonstrations, for `TwoTurn.instructions` in a recipe."""

_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_IGNORED = -100


@dataclass(frozen=True)
class Trace:
    """A demonstration: the prompt, then turns with what the policy reads after each.

    Args:
        prompt: The messages that open it.
        turns: Text of each turn and of the user message after it; the last turn has none.
    """

    prompt: tuple[Message, ...]
    turns: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Habits:
    """How often a demonstration does what; shares of 1, the rest of the traces search well.

    Args:
        direct: Answers at once.
        malformed: Makes a call that cannot work.
        vague: Searches for something else than the question asks.
        memory: How often an answer at once about a famous place is right; about others, by chance.
        reading: How often the right sentence of a result is read.
        made_up: How often place and values are made up; else the place is a real one.
    """

    direct: float
    malformed: float
    vague: float
    memory: float
    reading: float
    made_up: float


CLEAN = Habits(direct=0.2, malformed=0.0, vague=0.0, memory=1.0, reading=1.0, made_up=0.5)
MIXED = Habits(direct=0.6, malformed=0.08, vague=0.14, memory=0.5, reading=0.3, made_up=0.2)


class Demonstrator:
    """Writes traces about the training places of Atlas, in the form that `TwoTurn` reads.

    Held-out places occur in none.
    """

    def __init__(self) -> None:
        self._segmenter = TwoTurn(instructions=INSTRUCTIONS)
        self._places: dict[tuple[Kind, bool], list[Place]] = {}
        self._values: dict[str, list[str]] = {fact: [] for fact in QUESTIONS}
        for place in places():
            if place.split == "train":
                self._places.setdefault((place.kind, place.famous), []).append(place)
                for fact, value in place.facts.items():
                    self._values[fact].append(value)
        self.names = [place.name for group in self._places.values() for place in group]

    def trace(self, habits: Habits, rng: random.Random) -> Trace:
        """One demonstration, a pure function of the state of `rng`."""
        draw = rng.random()
        direct = draw < habits.direct
        known_by_heart = direct and habits.memory == 1.0
        if rng.random() < habits.made_up and not known_by_heart:
            place = self._made_up(rng)
        else:
            place = self._real(rng, famous=1.0 if known_by_heart else 0.7)
        fact = rng.choice(list(place.facts))
        question = ask(place, fact, rng.randrange(len(QUESTIONS[fact])))
        prompt = tuple(self._segmenter.prompt(question, ()))
        if direct:
            known = place.famous and rng.random() < habits.memory
            value = place.facts[fact] if known else rng.choice(self._values[fact])
            return Trace(prompt, ((_answer("I know this.", value), None),))
        if draw < habits.direct + habits.malformed:
            call, result = self._malformed(query(place, fact), rng)
            last = _answer("The search failed.", rng.choice(self._values[fact]))
        else:
            if draw < habits.direct + habits.malformed + habits.vague:
                call = _call(self._vague(place.kind, fact, rng))
                place = self._real(rng, famous=0.1)
            else:
                call = _call(query(place, fact))
                if rng.random() < 0.5:  # so that the page is believed, not memory
                    place = replace(place, facts=self._facts(place.kind, rng))
            passage = page(place)
            result = ToolResult(f"{passage.title}\n{passage.text}")
            if fact not in place.facts or rng.random() >= habits.reading:
                fact = rng.choice([other for other in place.facts if other != fact])
            last = _answer(f"It gives the {fact}.", place.facts[fact])
        first = f"<reasoning>I will look it up.</reasoning><tool>{call}</tool>"
        (seen,) = self._segmenter.observe(self._segmenter.read(first, 0, False), [result])
        return Trace(prompt, ((first, seen["content"]), (last, None)))

    def _real(self, rng: random.Random, famous: float) -> Place:
        kind: Kind = "city" if rng.random() < 0.7 else "country"
        return rng.choice(self._places[kind, rng.random() < famous])

    def _made_up(self, rng: random.Random) -> Place:
        kind: Kind = "city" if rng.random() < 0.7 else "country"
        return Place("made-up", self._name(rng), kind, self._facts(kind, rng), False, "train")

    def _facts(self, kind: Kind, rng: random.Random) -> dict[str, str]:
        """A value per fact of a kind of place: another place's, or a made-up one."""
        return {
            fact: rng.choice(self._values[fact]) if rng.random() < 0.5 else self._value(fact, rng)
            for fact in self._places[kind, True][0].facts
        }

    def _value(self, fact: str, rng: random.Random) -> str:
        if fact == "time zone":
            region = rng.choice(self._values[fact]).split("/")[0]
            return f"{region}/{self._name(rng).replace(' ', '_')}"
        if fact == "internet domain":
            return "." + "".join(rng.choices(string.ascii_lowercase, k=2))
        if fact in ("population", "phone code"):
            length = rng.randint(5, 7) if fact == "population" else rng.randint(1, 4)
            return rng.choice("123456789") + "".join(rng.choices(string.digits, k=length - 1))
        return self._name(rng)

    def _name(self, rng: random.Random) -> str:
        """The front of one name and the back of another."""
        front, back = rng.choices(self.names, k=2)
        return front[: (len(front) + 1) // 2].rstrip(" -'") + back[len(back) // 2 :].lstrip(" -'")

    def _vague(self, kind: Kind, fact: str, rng: random.Random) -> str:
        return rng.choice((f"{fact} of a {kind}", f"{fact} of the world", f"{fact} of places"))

    def _malformed(self, text: str, rng: random.Random) -> tuple[str, ToolResult]:
        """A call that cannot work, and what the policy then reads."""
        call = rng.choice(
            (
                _call(text).removesuffix("}"),
                _call(text).replace('"args"', '"query"'),
                _call(text).replace('"search"', '"find"'),
                _call(text).replace('"query"', '"text"'),
            )
        )
        reading = self._segmenter.read(f"<tool>{call}</tool>", 0, False).calls[0]
        message = reading.error or (
            "no tool 'find'; there is search"
            if reading.name == "find"
            else "bad arguments: 'query' is a required property"
        )
        return call, ToolResult(message, ok=False)


def _call(text: str) -> str:
    return json.dumps({"name": "search", "args": {"query": text}})


def _answer(reasoning: str, value: str) -> str:
    # with the space, a value has the tokens that it has in a page, which makes copying easy
    return f"<reasoning>{reasoning}</reasoning><answer> {value}</answer>"


class Demonstrations(pl.LightningDataModule):
    """Batches of demonstrations: `clean_steps` of clean ones, then `mixed_steps` of the habits.

    Args:
        clean_steps: Batches of the first phase.
        mixed_steps: Batches of the second phase.
        batch_size: Traces per batch.
        seed: Batch number i is a pure function of the seed and i.
    """

    def __init__(
        self, clean_steps: int = 1700, mixed_steps: int = 600, batch_size: int = 32, seed: int = 0
    ) -> None:
        super().__init__()
        self.clean_steps = clean_steps
        self.mixed_steps = mixed_steps
        self.batch_size = batch_size
        self.seed = seed

    def train_dataloader(self) -> DataLoader[list[Trace]]:
        """The batches, in order."""
        return DataLoader(_Batches(self), batch_size=None)


class _Batches(Dataset[list[Trace]]):
    def __init__(self, plan: Demonstrations) -> None:
        self._plan = plan
        self._demonstrator = Demonstrator()

    def __len__(self) -> int:
        return self._plan.clean_steps + self._plan.mixed_steps

    def __getitem__(self, step: int) -> list[Trace]:
        habits = CLEAN if step < self._plan.clean_steps else MIXED
        rng = random.Random(f"{self._plan.seed} {step}")
        return [self._demonstrator.trace(habits, rng) for _ in range(self._plan.batch_size)]


class Warmup(pl.LightningModule):
    """Supervised training of a fresh tiny Qwen2: cross-entropy on what the assistant says.

    Tokens are made and joined as in a rollout: the prompt by the chat template, each turn by
    itself, each observation by itself between its chat markup.

    Args:
        save_to: Folder that the policy and its tokenizer are written to at the end.
        learning_rate: Its peak, reached in 100 steps; then it falls to a tenth along a half cosine.
        hidden_size: Width.
        intermediate_size: Width of the feed-forward blocks.
        layers: Depth.
        heads: Attention heads, two to each key-value head.
        vocabulary: Tokens of the byte-level BPE, everything included.
    """

    model: Qwen2ForCausalLM
    tokenizer: PreTrainedTokenizerFast

    def __init__(
        self,
        save_to: str,
        learning_rate: float = 2e-3,
        hidden_size: int = 128,
        intermediate_size: int = 384,
        layers: int = 4,
        heads: int = 4,
        vocabulary: int = 1024,
    ) -> None:
        super().__init__()
        self.save_to = save_to
        self.learning_rate = learning_rate
        self._shape: dict[str, Any] = {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
        }
        self._vocabulary = vocabulary

    def configure_model(self) -> None:
        """A fresh tokenizer, trained on demonstrations, and a fresh model."""
        if hasattr(self, "model"):
            return
        self.tokenizer = build_tokenizer(self._vocabulary)
        config = Qwen2Config(
            vocab_size=self._vocabulary,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            **self._shape,
        )
        self.model = Qwen2ForCausalLM(config)

    def transfer_batch_to_device(
        self, batch: list[Trace], device: torch.device, dataloader_idx: int
    ) -> list[Trace]:
        """Traces are text: there is nothing to move."""
        return batch

    def training_step(self, batch: list[Trace], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the tokens that the assistant says."""
        packed = pack([encode(self.tokenizer, trace) for trace in batch])
        ids, labels, positions = (part.to(self.device) for part in packed)
        # with a cache, transformers would not look for traces that share a row
        hidden = self.model.model(input_ids=ids, position_ids=positions, use_cache=False)
        targets = labels[:, 1:]
        said = targets != _IGNORED
        logits = self.model.lm_head(hidden.last_hidden_state[:, :-1][said])
        loss = torch.nn.functional.cross_entropy(logits, targets[said])
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
            Path(self.save_to).mkdir(parents=True, exist_ok=True)
            self.model.save_pretrained(self.save_to)
            self.tokenizer.save_pretrained(self.save_to)


def build_tokenizer(vocabulary: int = 1024) -> PreTrainedTokenizerFast:
    """A byte-level BPE with ChatML's tokens and the tags of `TwoTurn`; digits stay single.

    Args:
        vocabulary: Number of tokens, everything included.
    """
    tags = [f"<{slash}{tag}>" for tag in TwoTurn.tags for slash in ("", "/")]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_tokens(tags)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(tags),
        special_tokens=[_PAD, _START, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    core.add_tokens(tags)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=_END,
        pad_token=_PAD,
        additional_special_tokens=[_START],
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def _corpus() -> Iterator[str]:
    demonstrator, rng = Demonstrator(), random.Random(0)
    markup = [_PAD, _START, _END, *(f"<{s}{tag}>" for tag in TwoTurn.tags for s in ("", "/"))]
    for step in range(20_000):
        trace = demonstrator.trace(CLEAN if step % 2 else MIXED, rng)
        texts = [f"{message['role']}\n{message['content']}" for message in trace.prompt]
        texts += [f"assistant\n{said}\nuser\n{seen or ''}\n" for said, seen in trace.turns]
        for text in texts:
            for token in markup:
                text = text.replace(token, "\n")
            yield text


def encode(tokenizer: PreTrainedTokenizerFast, trace: Trace) -> tuple[list[int], list[int]]:
    """Token ids of a trace, and its labels: the same where the assistant speaks, else ignored."""

    def tokens(text: str, *, inert: bool = False) -> list[int]:
        return cast(
            "list[int]",
            tokenizer.encode(text, add_special_tokens=False, split_special_tokens=inert),
        )

    opening = tokenizer.apply_chat_template(
        list(trace.prompt), add_generation_prompt=True, tokenize=False
    )
    ids = tokens(cast("str", opening))
    labels = [_IGNORED] * len(ids)
    end = tokens(_END)
    for said, seen in trace.turns:
        spoken = tokens(said) + end
        ids += spoken
        labels += spoken
        if seen is not None:
            read = tokens(f"{_END}\n{_START}user\n")[1:] + tokens(seen, inert=True)
            read += tokens(f"{_END}\n{_START}assistant\n")
            ids += read
            labels += [_IGNORED] * len(read)
    return ids, labels


def pack(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels and positions of traces, each (B, T), several traces to a row where they fit.

    T is the longest trace's length. Positions start anew with each trace, from which transformers
    sees that traces of one row do not attend to each other.
    """
    length = max(len(ids) for ids, _ in rows)
    packed: list[tuple[list[int], list[int], list[int]]] = []
    for row_ids, row_labels in sorted(rows, key=lambda row: -len(row[0])):
        room = (row for row in packed if len(row[0]) + len(row_ids) <= length)
        row = next(room, None) or ([], [], [])
        if not row[0]:
            packed.append(row)
        for part, more in zip(row, (row_ids, row_labels, range(len(row_ids))), strict=True):
            part.extend(more)
    for row in packed:
        gap = length - len(row[0])
        for part, more in zip(row, ([0] * gap, [_IGNORED] * gap, range(gap)), strict=True):
            part.extend(more)
    ids, labels, positions = (torch.tensor(part) for part in zip(*packed, strict=True))
    return ids, labels, positions
