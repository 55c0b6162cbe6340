"""A task that two programs can do in the same way: questions, a tool, a small model with a
tokenizer, and the tokens that both sample.

It is the search agent of two turns. Its prompts share most of their tokens, a system message and a
tool's description, as real prompts do. Trajectories differ in their tokens, as at temperature 1.
The first turn ends in a call of the tool.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnrl import RecipeError
from turnrl_doctor import work

TOOL, DESCRIPTION, ARGUMENT = "search", "Find the article that is about something.", "What it is."
SCHEMA = {
    "name": TOOL,
    "description": DESCRIPTION,
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string", "description": ARGUMENT}},
        "required": ["query"],
    },
}
_OPENING = '\n<tool_call>\n{"name": "search", "arguments": {"query": "'
_CLOSING = '"}}\n</tool_call>'
_SYSTEM = "Answer the question. You have two turns: call the tool, then answer."
_QUERY_TOKENS = 4

CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- if loop.first and tools %}{{ '\n\nTools, called inside <tool_call> tags:' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""A chat template that writes messages as they are, and the tools after the first."""

TINY = work.Decoder(
    hidden=192, inner=512, layers=4, heads=4, kv_heads=2, head_size=48, vocab=1024, tied=True
)
"""The dimensions of a Qwen2 with 1.8 million parameters."""


@dataclass(frozen=True)
class Shape:
    """Size of the task.

    Args:
        prompts: Questions of an iteration.
        group_size: Trajectories of each question.
        prompt_tokens: Length of each prompt.
        turn_tokens: Tokens sampled in the first turn, with the call and the end of the turn, and in
            the second.
        result_tokens: Length of the tool's result, without the markup around it.
    """

    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 281
    turn_tokens: tuple[int, int] = (40, 32)
    result_tokens: int = 48

    @property
    def tokens(self) -> int:
        """The most tokens of a trajectory, with room for markup."""
        return self.prompt_tokens + sum(self.turn_tokens) + self.result_tokens + 64


@dataclass(frozen=True)
class Task:
    """Questions, and the turns to sample in reply.

    Args:
        shape: Size of the task.
        system: The system message.
        questions: The texts of the questions.
        words: The words of the tool's articles; one token each.
        script: By question, trajectory and turn: the sampled ids.
    """

    shape: Shape
    system: str
    questions: Sequence[str]
    words: Sequence[str]
    script: Sequence[Sequence[Sequence[Sequence[int]]]]

    @classmethod
    def read(cls, folder: str | Path) -> Task:
        """Read the task that `make` wrote to a folder."""
        task = json.loads(Path(folder, "task.json").read_text("utf-8"))
        task["shape"]["turn_tokens"] = tuple(task["shape"]["turn_tokens"])
        return cls(**{**task, "shape": Shape(**task["shape"])})

    def article(self, query: str) -> str:
        """The article that the tool finds: the same for the same query."""
        draw = random.Random(zlib.crc32(query.encode()))
        return " ".join(draw.choices(self.words, k=self.shape.result_tokens))


def reward(text: str) -> float:
    """Reward of an answer, in [0, 1]: any number that differs from answer to answer will do."""
    return zlib.crc32(text.strip().encode()) % 1000 / 1000


def make(
    folder: Path,
    shape: Shape,
    template: str = CHATML,
    network: work.Decoder = TINY,
    device: str = "cpu",
    dtype: str = "float32",
) -> Task:
    """Write a model with random weights, its tokenizer, and a task for it to a folder.

    Args:
        folder: The folder; it is created.
        shape: Size of the task.
        template: The tokenizer's chat template.
        network: Dimensions of the Qwen2.
        device: The device that draws the weights.
        dtype: Type of the weights.
    Raises:
        RecipeError: If the shape leaves no room for the fixed parts of the prompt or the turns.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer(template)
    tokenizer.save_pretrained(folder)
    task = _task(shape, tokenizer)
    config = Qwen2Config(
        vocab_size=network.vocab,
        hidden_size=network.hidden,
        intermediate_size=network.inner,
        num_hidden_layers=network.layers,
        num_attention_heads=network.heads,
        num_key_value_heads=network.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=network.tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    Path(folder, "task.json").write_text(json.dumps(asdict(task)), "utf-8")
    return task


def _tokenizer(template: str) -> Any:
    """A byte-level BPE of at most 1,024 entries, learned from the texts that occur and from words
    made of two syllables."""
    from turnrl_atlas.tokenizer import learned_tokenizer

    syllables = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
    pairs = [(a, b) for a in syllables for b in syllables]
    words = [a + b for a, b in random.Random(0).sample(pairs, 300)]
    texts = [_SYSTEM, _OPENING, _CLOSING, json.dumps(SCHEMA), template, " ".join(["", *words])]
    return learned_tokenizer(texts * 8, 1024, template)


def _task(shape: Shape, tokenizer: Any) -> Task:
    draw = random.Random(1)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    plain = [n for n in range(len(tokenizer)) if _is_plain(tokenizer.decode([n]))]
    words = [w for w in (tokenizer.decode([n])[1:] for n in plain) if w and len(ids(f" {w}")) == 1]
    drawn = {tuple(draw.sample(words, 8)) for _ in range(4 * shape.prompts)}
    questions = ["Question: " + " ".join(picked) for picked in sorted(drawn)[: shape.prompts]]

    def rendered(system: str, question: str) -> int:
        opening = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        tools = [{"type": "function", "function": SCHEMA}]
        options = {"tools": tools, "add_generation_prompt": True, "return_dict": False}
        return len(tokenizer.apply_chat_template(opening, tokenize=True, **options))

    needed = rendered(_SYSTEM, questions[0])
    if needed > shape.prompt_tokens:
        raise RecipeError(
            f"the prompt is to have {shape.prompt_tokens} tokens, and the tool's description and "
            f"the question alone take {needed}. Ask for {needed} or more."
        )
    system = " ".join([_SYSTEM, *draw.choices(words, k=shape.prompt_tokens - needed)])
    opening, closing, end = ids(_OPENING), ids(_CLOSING), [tokenizer.eos_token_id]
    call = len(opening) + len(closing) + len(end) + _QUERY_TOKENS
    first, second = shape.turn_tokens
    if first <= call or second < 2:
        raise RecipeError(
            f"the turns are to have {first} and {second} sampled tokens, and the call that the "
            f"first one ends with has {call}. Ask for {2 * call + 2} tokens or more in all."
        )

    def trajectory() -> list[list[int]]:
        thought, query = (draw.choices(plain, k=k) for k in (first - call, _QUERY_TOKENS))
        answer = draw.choices(plain, k=second - 1)
        return [[*thought, *opening, *query, *closing, *end], [*answer, *end]]

    script = [[trajectory() for _ in range(shape.group_size)] for _ in questions]
    return Task(shape, system, questions, words, script)


def _is_plain(text: str) -> bool:
    """True if a token is a piece of a word, with or without a space before it."""
    return text.removeprefix(" ").isascii() and text.removeprefix(" ").isalpha()
