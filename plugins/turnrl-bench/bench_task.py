"""The task that both sides of a comparison work on: a search agent of two turns.

Its model has random weights, so its tokens are forced: a script says what each trajectory samples.
Prompts share most of their tokens, a system message and a tool's description, as real prompts do.
The first turn ends in a call of the tool.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import platform
import random
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from turnrl import (
    MTGRPO,
    ClippedSurrogate,
    OutcomeOnly,
    OutcomeReward,
    Policy,
    Question,
    QuestionData,
    Rollout,
    Sampling,
    Tool,
    ToolCall,
    ToolResult,
    Trajectory,
)
from turnrl.engines import Completion, Engine, EngineSettings, SampledPolicy, Session
from turnrl_segmenters import ReAct

STARTER = "package://turnrl_atlas/starter"
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


def qwen2(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool = True
) -> dict[str, Any]:
    """Settings of a Qwen2 of these dimensions."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 4096,
    }


TINY = qwen2(1024, 192, 512, layers=4, heads=4, kv_heads=2)
"""A Qwen2 with 1.8 million parameters."""


# ------------------------------------------------------------------------------------ the task


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

    def as_questions(self) -> list[Question]:
        """The questions as turnrl's."""
        return [Question(str(n), text, ("none",)) for n, text in enumerate(self.questions)]


def reward(text: str) -> float:
    """Reward of an answer, in [0, 1]: any number that differs from answer to answer will do."""
    return zlib.crc32(text.strip().encode()) % 1000 / 1000


def make(
    folder: Path,
    shape: Shape,
    template: str = CHATML,
    network: dict[str, Any] = TINY,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Task:
    """Write a model with random weights, a tokenizer, and a task for it to a folder.

    Args:
        folder: The folder; it is created.
        shape: Size of the task; `prompt_tokens` and `turn_tokens` have to hold the tool's
            description and a call.
        template: The tokenizer's chat template.
        network: Settings of the Qwen2.
        device: The device that draws the weights.
        dtype: Type of the weights.
    """
    tokenizer = _train_tokenizer(template)
    tokenizer.save_pretrained(folder)
    task = _task(shape, tokenizer)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(**network, **ends)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    Path(folder, "task.json").write_text(json.dumps(asdict(task)), "utf-8")
    return task


def _train_tokenizer(template: str) -> Any:
    """A byte-level BPE of about 1,000 entries, trained on the texts that occur and on words of two
    syllables."""
    syllables = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
    pairs = [(a, b) for a in syllables for b in syllables]
    words = [a + b for a, b in random.Random(0).sample(pairs, 300)]
    texts = [_SYSTEM, _OPENING, _CLOSING, json.dumps(SCHEMA), template, " ".join(["", *words])]
    starter: Any = Policy(STARTER).build().tokenizer
    tokenizer = starter.train_new_from_iterator(texts * 8, 1000, show_progress=False)
    tokenizer.chat_template = template
    return tokenizer


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
    system = " ".join([_SYSTEM, *draw.choices(words, k=shape.prompt_tokens - needed)])
    opening, closing, end = ids(_OPENING), ids(_CLOSING), [tokenizer.eos_token_id]
    call = len(opening) + len(closing) + len(end) + _QUERY_TOKENS
    first, second = shape.turn_tokens
    assert needed <= shape.prompt_tokens, f"prompt_tokens: at least {needed}"
    assert call < first, f"turn_tokens: more than {call} in the first turn"

    def trajectory() -> list[list[int]]:
        thought, query = (draw.choices(plain, k=k) for k in (first - call, _QUERY_TOKENS))
        answer = draw.choices(plain, k=second - 1)
        return [[*thought, *opening, *query, *closing, *end], [*answer, *end]]

    script = [[trajectory() for _ in range(shape.group_size)] for _ in questions]
    return Task(shape, system, questions, words, script)


def _is_plain(text: str) -> bool:
    """True if a token is a piece of a word, with or without a space before it."""
    return text.removeprefix(" ").isascii() and text.removeprefix(" ").isalpha()


# ----------------------------------------------------------------------------------- the agent


class Search(Tool):
    """A search tool that may take its time.

    Args:
        find: Returns the page for a query.
        ms: Milliseconds of a batch of calls.
    """

    name, description, parameters = TOOL, DESCRIPTION, cast(Any, SCHEMA["parameters"])

    def __init__(self, find: Callable[[str], str], ms: float = 0) -> None:
        self.find, self.ms = find, ms

    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        if self.ms:
            await asyncio.sleep(self.ms / 1000)
        return [ToolResult(self.find(call.arguments.get("query", ""))) for call in calls]


class AnswerHash(OutcomeReward):
    """The task's reward."""

    def score(self, trajectory: Trajectory) -> float:
        return reward(trajectory.answer or "")


class Forced(Engine):
    """Samples a task with another engine and forces the tokens of the task's script; that engine
    still computes everything. It notes when a collection begins and ends.

    Args:
        engine: The engine that samples; None computes nothing and gives log-probabilities of zero,
            to measure learning alone.
        folder: The task's folder.
    """

    def __init__(self, engine: Engine | None, folder: str) -> None:
        self.engine, self.task = engine, Task.read(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.seeded = engine is None or engine.seeded
        self.version = 0
        self.began = self.ended = 0.0

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        if self.engine is not None:
            self.engine.start(policy, max_tokens)

    def sync(self, version: int) -> None:
        self.version, self.began = version, time.perf_counter()
        if self.engine is not None:
            self.engine.sync(version)

    def open(self, prompt_ids: Sequence[int]) -> Session:
        session = None if self.engine is None else self.engine.open(prompt_ids)
        text = self.tokenizer.decode(list(prompt_ids))
        texts = self.task.questions
        members = next(s for s, q in zip(self.task.script, texts, strict=True) if q in text)
        return _Forced(self, session, iter(members))

    async def drain(self) -> None:
        if self.engine is not None:
            await self.engine.drain()
        self.ended = time.perf_counter()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


@dataclass(frozen=True)
class _Forcing(EngineSettings):
    """Settings of `Forced`: those of the engine inside, and the task's folder."""

    inside: EngineSettings | None
    folder: str

    def build(self) -> Forced:
        return Forced(None if self.inside is None else self.inside.build(), self.folder)


@dataclass(eq=False)
class _Forced(Session):
    """A prompt, or one trajectory of it with what is left of its script."""

    engine: Forced
    session: Session | None
    members: Iterator[Sequence[Sequence[int]]]
    turns: Iterator[Sequence[int]] | None = None

    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        forced = tuple(next(cast(Iterator[Sequence[int]], self.turns)))
        if self.session is not None:
            return await self.session.generate(new_ids, replace(sampling, forced_ids=forced))
        reason: Literal["end", "length"] = "end" if forced[-1] in sampling.end_ids else "length"
        return Completion(forced, (0.0,) * len(forced), reason, self.engine.version)

    def fork(self) -> Session:
        session = None if self.session is None else self.session.fork()
        return replace(self, session=session, turns=iter(next(self.members)))

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def make_module(
    folder: str,
    policy: Policy,
    engine: EngineSettings | None,
    passes: int = 1,
    search: Tool | None = None,
) -> MTGRPO:
    """The agent of a task, which calls a tool and answers, and whose turns are forced.

    Args:
        folder: The task's folder.
        policy: The policy that learns.
        engine: The engine that samples; see `Forced` for None.
        passes: Passes over each iteration's trajectories.
        search: The tool; None finds the task's articles.
    """
    task = Task.read(folder)
    rollout = Rollout(
        ReAct(max_turns=2, answer="plain", instructions=task.system),
        [search or Search(task.article)],
        max_turn_tokens=max(task.shape.turn_tokens),
        max_result_tokens=2 * task.shape.result_tokens,
        max_tokens=task.shape.tokens,
    )
    return MTGRPO(
        policy,
        rollout,
        [AnswerHash()],
        OutcomeOnly(min_std=1e-4),  # TRL's floor; a group of two is likely below turnrl's
        ClippedSurrogate(aggregation="token"),
        _Forcing(engine, folder),
        group_size=task.shape.group_size,
        passes_per_iteration=passes,
    )


class Watch(L.Callback):
    """Times iterations. A step lasts from the end of the previous step to its own end, so nothing
    is left out.

    Attributes:
        times: Seconds of each iteration: `rollouts`; `before learning`, from there to the first
            batch; `learning`, which is all that is not rollouts; and the `whole step`.
        peaks: The most bytes that each iteration took on a GPU for `sampling` and for `learning`.
    """

    def __init__(self) -> None:
        self.times: list[dict[str, float]] = []
        self.peaks: list[dict[str, int]] = []
        self._first = self._ended = 0.0
        self._sampling = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        peak_bytes()
        self._ended = clock()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self._first, self._sampling = time.perf_counter(), peak_bytes()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        engine = cast(Forced, cast(MTGRPO, pl_module).engine)
        before, self._ended = self._ended, clock()
        rollouts, whole = engine.ended - engine.began, self._ended - before
        times = {"rollouts": rollouts, "before learning": self._first - engine.ended}
        self.times.append({**times, "learning": whole - rollouts, "whole step": whole})
        self.peaks.append({"sampling": self._sampling, "learning": peak_bytes()})


def clock() -> float:
    """The time in seconds, once the GPU, if there is one, has finished all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes() -> int:
    """The most bytes that tensors took on the GPU since the last call; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    size = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return int(size)


def train(
    module: MTGRPO, callbacks: list[L.Callback], folder: str, epochs: int, accelerator: str = "cpu"
) -> None:
    """Train a module on the task in a folder. Nothing is written or shown."""
    task = Task.read(folder)
    L.Trainer(
        max_epochs=epochs,
        accelerator=accelerator,
        devices=1,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    ).fit(module, QuestionData(task.as_questions(), questions_per_iteration=task.shape.prompts))


def silence() -> None:
    """Silence Lightning, transformers and TRL."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in markdown."""
    for row in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(row)} |", flush=True)


def print_machine(packages: Sequence[str]) -> None:
    """Print the processor, the GPU, and the versions of Python, torch and these packages."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        print(*{line.partition(": ")[2] for line in lines if line.startswith("model name")})
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
    held = {"python": platform.python_version()}
    for name in ("turnrl", "torch", "transformers", *packages):
        with suppress(importlib.metadata.PackageNotFoundError):
            held[name] = importlib.metadata.version(name)
    print(", ".join(f"{name} {version}" for name, version in held.items()))
