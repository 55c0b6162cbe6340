"""Makes the starter policy of Atlas, and the study's variants of it:

    python docs/does-turn-credit-help/atlas_starter.py FOLDER

The demonstrations come in phases: first skills (search with the right query, read the right
sentence, copy its value, call any tool), then facts of famous places, then habits for reinforcement
learning to correct: mostly answers from memory, some vague searches, some calls that fail, and
results that are read in the wrong place. `demonstrations` writes them. Training takes 20 minutes on
one core.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import lightning.pytorch as pl
import torch
from demonstrations.forms import Trace, encode, markup
from demonstrations.made_up_tools import MadeUpTools
from demonstrations.trace_writers import Habits, OneHop, Recall, TraceWriter, TwoHop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from turnrl import Policy
from turnrl.agent.chat import ChatFormat
from turnrl.sft.supervised import Supervised
from turnrl.types import TokenRow
from turnrl_atlas import STARTER

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
WRITERS: dict[str, TraceWriter] = {
    "recall": Recall(),
    "one_hop": OneHop(),
    "two_hop": TwoHop(),
    "made_up_tools": MadeUpTools(),
}
"""The writers of traces that a phase can name."""


@dataclass(frozen=True)
class Phase:
    """A part of the training.

    Args:
        steps: Its number of batches.
        batch_size: Traces per batch.
        shares: Relative frequency of each kind of trace, by the names of `WRITERS`.
        habits: Habits of the demonstrations.
    """

    steps: int
    batch_size: int
    shares: dict[str, float]
    habits: Habits

    def trace(self, rng: random.Random) -> Trace:
        """One demonstration, a pure function of the state of `rng`."""
        (kind,) = rng.choices([*self.shares], [*self.shares.values()])
        return WRITERS[kind].trace(self.habits, rng)


SKILLS = Phase(
    2200,
    16,
    {"recall": 0.2, "one_hop": 0.3, "two_hop": 0.2, "made_up_tools": 0.3},
    Habits(),
)
FACTS = (
    Phase(
        400,
        64,
        {"recall": 0.8, "one_hop": 0.04, "two_hop": 0.04, "made_up_tools": 0.12},
        Habits(),
    ),
    Phase(
        500,
        112,
        {"recall": 0.86, "one_hop": 0.03, "two_hop": 0.03, "made_up_tools": 0.08},
        Habits(),
    ),
)
"""Facts of famous places, and more of them."""
HABITS = Phase(
    600,
    32,
    {"one_hop": 0.45, "two_hop": 0.35, "made_up_tools": 0.2},
    Habits(direct=0.7, malformed=0.03, vague=0.2, hasty=0.5, reading=0.35, made_up=0.15),
)


def phases_with(facts: float = 1.0, **habits: float) -> list[Phase]:
    """The phases of the bundled starter, with something changed for another starter.

    Args:
        facts: Factor of the number of batches with facts.
        **habits: Habits of the last phase that differ.
    """
    known = (replace(phase, steps=round(phase.steps * facts)) for phase in FACTS)
    return [SKILLS, *known, replace(HABITS, habits=replace(HABITS.habits, **habits))]


class Batches(Dataset[list[Trace]]):
    """Batches of demonstrations, phase after phase. Batch i depends on the phases and i alone."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = phases

    def __len__(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def __getitem__(self, step: int) -> list[Trace]:
        rng, first = random.Random(f"0 {step}"), 0
        for phase in self.phases:
            first += phase.steps
            if step < first:
                return [phase.trace(rng) for _ in range(phase.batch_size)]
        raise IndexError(step)


class Training(Supervised):
    """Supervised training of a tiny Qwen2, with the cross-entropy of the assistant's tokens."""

    budget = sys.maxsize

    def __init__(self, phase: Phase) -> None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = _fresh_start(folder, phase)
            policy = Policy(folder).build()
            policy.load()
        super().__init__(2e-3, policy)
        self.policy.tokenizer = tokenizer
        self.chat = ChatFormat(tokenizer)

    def rows(self, batch: Sequence[Trace]) -> list[TokenRow]:
        """The traces as tokens."""
        return [encode(self.chat, trace) for trace in batch]


def make(folder: str, phases: Sequence[Phase], batches: int | None = None) -> None:
    """Train a starter policy, and write it with its tokenizer to a folder.

    Two trainings on one machine give the same weights: sums round differently with another number
    of threads, so there is one.

    Args:
        folder: The folder.
        phases: The phases.
        batches: End after this many batches.
    """
    torch.set_num_threads(1)
    pl.seed_everything(0)
    training = Training(phases[0])
    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=batches,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(training, DataLoader(Batches(phases), batch_size=None))
    training.policy.export(folder)


def _fresh_start(folder: str, phase: Phase) -> PreTrainedTokenizerFast:
    """Write a fresh model to a folder, and return a tokenizer trained on a phase's traces."""
    vocabulary = 1024
    tokenizer = _train_tokenizer(_corpus(phase), vocabulary, markup())
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


def _train_tokenizer(
    texts: Iterable[str], vocabulary: int, tags: Sequence[str]
) -> PreTrainedTokenizerFast:
    """A byte-level BPE with ChatML's tokens and a token for each tag; digits stay single."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_tokens([*tags])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(tags),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([*tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=(STARTER / "chat_template.jinja").read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def _corpus(phase: Phase) -> Iterator[str]:
    """The texts of demonstrations, without markup."""
    rng = random.Random(0)
    control = [PAD, START, END, *markup()]
    for _ in range(20_000):
        trace = phase.trace(rng)
        texts = [f"{message['role']}\n{message['content']}" for message in trace.prompt]
        for written, seen in trace.turns:
            read = "".join(str(message["content"]) for message in seen)
            texts.append(f"assistant\n{written}\nuser\n{read}\n")
        for text in texts:
            for token in control:
                text = text.replace(token, "\n")
            yield text


if __name__ == "__main__":
    make(sys.argv[1], phases_with())
