"""A byte-level BPE with ChatML's tokens, trained on texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def learned_tokenizer(
    texts: Iterable[str], vocabulary: int, template: str, tags: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Train a tokenizer; digits stay single.

    Args:
        texts: The training texts.
        vocabulary: The most tokens, in all.
        template: Its chat template.
        tags: Tags that get one token each.
    """
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
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
