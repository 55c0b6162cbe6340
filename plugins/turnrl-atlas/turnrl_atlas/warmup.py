"""Supervised warm-up on demonstrations, which makes the starter policy.

    turnrl fit recipes/atlas_starter.yaml

The recipe sets the demonstrations, in phases: first skills (search with the right query, read the
right sentence, copy its value, call any tool), then facts of famous places, then habits for
reinforcement learning to correct: mostly answers from memory, some vague searches, some calls that
fail, and results that are read in the wrong place. trace_writers.py and made_up_tools.py write
demonstrations, and forms.py turns them into tokens.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from turnrl import ChatFormat, Policy, RecipeError, Supervised, TokenRow
from turnrl_atlas.forms import Trace, encode, markup
from turnrl_atlas.made_up_tools import MadeUpTools
from turnrl_atlas.tokenizer import END, PAD, START, learned_tokenizer
from turnrl_atlas.trace_writers import Habits, OneHop, Recall, TraceWriter, TwoHop

WRITERS: dict[str, TraceWriter] = {
    "recall": Recall(),
    "one_hop": OneHop(),
    "two_hop": TwoHop(),
    "made_up_tools": MadeUpTools(),
}
"""The writers of traces that a phase can name."""


@dataclass(frozen=True)
class Phase:
    """A part of the warm-up.

    Args:
        steps: Its number of batches.
        batch_size: Traces per batch.
        shares: Relative frequency of each kind of trace: `recall`, `one_hop`, `two_hop`,
            `made_up_tools`.
        habits: Habits of the demonstrations.
    """

    steps: int
    batch_size: int
    shares: dict[str, float]
    habits: Habits

    def __post_init__(self) -> None:
        for kind in self.shares:
            if kind not in WRITERS:
                kinds = ", ".join(WRITERS)
                raise RecipeError(f"no demonstration {kind!r} in shares (there are {kinds})")

    def trace(self, rng: random.Random) -> Trace:
        """One demonstration, a pure function of the state of `rng`."""
        (kind,) = rng.choices([*self.shares], [*self.shares.values()])
        return WRITERS[kind].trace(self.habits, rng)


class Demonstrations(pl.LightningDataModule):
    """Batches of demonstrations, phase after phase.

    Args:
        phases: The phases.
        seed: Batch number i is a pure function of the phases, the seed and i.
    """

    def __init__(self, phases: list[Phase], seed: int = 0) -> None:
        super().__init__()
        self.phases = phases
        self.seed = seed

    def train_dataloader(self) -> DataLoader[list[Trace]]:
        """The batches, in order."""
        return DataLoader(cast("Dataset[list[Trace]]", self), batch_size=None)

    def __len__(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def __getitem__(self, step: int) -> list[Trace]:
        rng, first = random.Random(f"{self.seed} {step}"), 0
        for phase in self.phases:
            first += phase.steps
            if step < first:
                return [phase.trace(rng) for _ in range(phase.batch_size)]
        raise IndexError(step)


class Warmup(Supervised):
    """Supervised training of a tiny Qwen2, with the cross-entropy of the assistant's tokens.

    Args:
        save_to: Folder for the policy and its tokenizer, written at the end.
        learning_rate: The peak learning rate; see `Supervised`.
        threads: CPU threads. With another number, sums round differently, so the weights differ.
    """

    budget = sys.maxsize
    chat: ChatFormat

    def __init__(self, save_to: str, learning_rate: float = 2e-3, threads: int = 1) -> None:
        super().__init__(learning_rate)
        self.save_to = save_to
        self.threads = threads
        self._configured = False

    def configure_model(self) -> None:
        """A fresh tokenizer, trained on demonstrations of the first phase, and a fresh model."""
        if self._configured:
            return
        self._configured = True
        torch.set_num_threads(self.threads)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = _fresh_start(folder, data.phases[0])
            self.policy = Policy(folder)
            self.policy.load()
        self.policy.tokenizer = tokenizer
        self.chat = ChatFormat(tokenizer)

    def rows(self, batch: Sequence[Trace]) -> list[TokenRow]:
        """The traces as tokens."""
        return [encode(self.chat, trace) for trace in batch]

    def on_train_end(self) -> None:
        """Write the policy."""
        if self.trainer.is_global_zero:
            self.policy.export(self.save_to)


def _fresh_start(folder: str, phase: Phase) -> PreTrainedTokenizerFast:
    """Write a fresh model to a folder, and return a tokenizer trained on a phase's traces."""
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    vocabulary = 1024
    tokenizer = learned_tokenizer(_corpus(phase), vocabulary, template, markup())
    config = Qwen2Config(
        vocab_size=vocabulary,
        initializer_range=0.08,  # about 1 / sqrt(hidden_size)
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


def _corpus(phase: Phase) -> Iterator[str]:
    """The texts of demonstrations, without markup."""
    rng = random.Random(0)
    control = [PAD, START, END, *markup()]
    for _ in range(20_000):
        trace = phase.trace(rng)
        texts = [f"{message['role']}\n{message['content']}" for message in trace.prompt]
        for written, seen in trace.turns:
            read = "".join(message["content"] for message in seen)
            texts.append(f"assistant\n{written}\nuser\n{read}\n")
        for text in texts:
            for token in control:
                text = text.replace(token, "\n")
            yield text
