"""The rise of a process's peak resident memory while it loads a model, samples and learns, beside
the plan. Run by test_plan.py, in a process of its own for each shape.

    python plan_script.py HIDDEN INNER LAYERS HEADS KV VOCABULARY QUANTIZATION RANK TOKENS AGAIN
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import peft  # noqa: F401  as all imports, before the count begins
import torch
import transformers
from bitsandbytes import functional  # noqa: F401

from turnrl import Policy
from turnrl.policy.memory import peak_bytes
from turnrl.policy.settings import Lora
from turnrl_doctor.counts import learning, memory, resident
from turnrl_doctor.work import Choice, Work, decoder_of

LENGTH, PROMPT = 512, 64


def main(*words: str) -> None:
    h, f, layers, heads, kv, vocab, quantization, rank, tokens, again = words
    config = transformers.Qwen2Config(
        hidden_size=int(h),
        intermediate_size=int(f),
        num_hidden_layers=int(layers),
        num_attention_heads=int(heads),
        num_key_value_heads=int(kv),
        vocab_size=int(vocab),
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    )
    with tempfile.TemporaryDirectory() as folder:
        write(config, Path(folder))
        lora = Lora(r=int(rank)) if int(rank) else None
        policy = Policy(
            folder, quantization, lora, "float32", gradient_checkpointing=int(again) or None
        ).build()
        policy.files.__dict__["config"] = config
        draw = np.random.default_rng(0)
        begin = draw.integers(0, 500, PROMPT).tolist()
        asked = [n >= LENGTH // 2 for n in range(LENGTH)]
        rest = LENGTH - PROMPT
        texts = [draw.integers(0, 500, rest).tolist() for _ in range(int(tokens) // rest)]
        rows = [(begin + text, asked) for text in texts]
        # a first pass of everything, small, so that libraries have their memory
        tiny = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(tiny.parameters())
        tiny(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        before = peak_bytes(torch.device("cpu"))
        policy.load()
        loaded = peak_bytes(torch.device("cpu"))
        _, layout = next(policy.forward_passes(rows, int(tokens)))
        optimizer = torch.optim.AdamW(policy.trainable_parameters().values())
        for _ in range(2):  # gradients and moments are there at the second
            logprobs, *_ = policy(layout)
            logprobs.sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del logprobs
        shape = decoder_of(config)
        work = Work(
            shape, quantization == "nf4", 4, int(rank), None, 8, LENGTH, 256, 1, sampled=False
        )
        count = layout.input_ids.shape[1]
        parts = memory(work, Choice(minibatch_tokens=count, gradient_checkpointing=int(again)))
        keys = sum(segment.keys.numel() for segment in layout.segments)
        minibatch = learning(work, count, int(again), keys, len(layout.targets))
        always = sum(resident(work).values())
        trained = 4 * work.trained
        learned = always + sum(minibatch.values()) + trained * (1 + 2)
        step = always + trained * (1 + 2) + parts["step"]["updates"]
        print(
            json.dumps(
                {
                    "planned": max(learned, step),
                    "rise": peak_bytes(torch.device("cpu")) - before,
                    "loaded": loaded - before,
                    "always": always,
                    "minibatch": minibatch,
                    "trained": trained,
                }
            )
        )


def write(config: transformers.PretrainedConfig, folder: Path) -> None:
    """A model on disk, written by another process, so that its memory is not counted."""
    config.save_pretrained(folder)
    code = (
        "import sys, torch, transformers\n"
        "config = transformers.AutoConfig.from_pretrained(sys.argv[1])\n"
        "with torch.device('meta'):\n"
        "    network = transformers.AutoModelForCausalLM.from_config(config)\n"
        "network.to_empty(device='cpu')\n"
        "with torch.no_grad():\n"
        "    for weight in network.parameters():\n"
        "        weight.fill_(0.01)\n"
        "network.save_pretrained(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
