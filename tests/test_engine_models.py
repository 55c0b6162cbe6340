"""The architectures that the engine samples, and those that it refuses."""

from __future__ import annotations

import pytest
import torch
import transformers

from conftest import greedy_reference
from engines import GREEDY, PROMPTS, model, run, started, together
from turnrl import RecipeError, Sampling
from turnrl_slots import Slots

__all__ = ["model"]  # fixtures


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 8}),
        ("Llama", {}),
        ("Mistral", {"sliding_window": 256}),
        ("Gemma", {"head_dim": 8}),
        ("Llama4Text", {"intermediate_size_mlp": 64, "num_local_experts": 2}),
    ],
)
def test_greedy_turns_match_the_models_own_generate(model, name, options):
    # ragged prompts that begin alike or not, four turns, a fork at the second
    policy = model(name, **options)
    engine = started(policy, 256, slots=5)
    alike = list(range(100, 150))
    prompts = [[*alike, 5, 6, 7], [*alike, 9], [3, 1, 4, 1, 5], [*range(200, 231)]]

    async def converse(n, prompt):
        session, history, seen = engine.open(prompt), list(prompt), []
        for turn in range(4):
            new = [(11 * n + 3 * turn + i) % 300 + 3 for i in range(turn * (n + 1))]
            if turn == 2:
                branch = session.fork()
                completion = await branch.generate([77], GREEDY)
                seen.append(([*history, 77], completion.token_ids))
            completion = await session.generate(new, GREEDY)
            seen.append(([*history, *new], completion.token_ids))
            history += [*new, *completion.token_ids]
        return seen

    turns = run(together(*(converse(n, prompt) for n, prompt in enumerate(prompts))))
    run(engine.drain())
    plain = transformers.GenerationConfig(
        max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    network = policy.load().eval()
    for history, tokens in (turn for seen in turns for turn in seen):
        ids = torch.tensor([history])
        wanted = network.generate(ids, attention_mask=ids * 0 + 1, generation_config=plain)
        assert list(tokens) == wanted[0, len(history) :].tolist()


def test_a_model_that_would_give_wrong_log_probabilities_is_refused(model):
    with pytest.raises(RecipeError, match=r"\(CohereForCausalLM\) changes logits after its head"):
        model("Cohere", logit_scale=0.06)
    with pytest.raises(RecipeError, match=r"Gemma2ForCausalLM\)? (does not|changes logits)"):
        model("Gemma2", head_dim=8, final_logit_softcapping=0.5)


@pytest.mark.parametrize("name", ["Mistral", "Phi3", "Starcoder2"])
def test_a_window_shorter_than_a_trajectory_is_refused(model, name):
    policy = model(name, sliding_window=16)
    with pytest.raises(
        RecipeError,
        match=rf"{name}ForCausalLM cannot be sampled.*Set model\.rollout\.max_tokens within",
    ):
        Slots().build().start(policy, 64)
    engine = started(policy, 15)
    completion = run(engine.open(PROMPTS[0]).generate([], Sampling(9, 0)))
    assert list(completion.token_ids) == greedy_reference(policy, PROMPTS[0], 9)


def test_padding_stands_at_no_position_beyond_its_rows_own(model):
    # rotary embeddings that are scaled by the largest position of a batch beyond the 256th: a short
    # turn after a long history, read together with much at once, must not get there by its padding
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    policy = model("Llama", rope_parameters=rope)

    async def scenario(company: bool):
        engine = started(policy, 256)
        long, wide = engine.open([7] * 235), engine.open([9])
        await together(long.generate([], Sampling(1, 0)), wide.generate([], Sampling(1, 0)))
        turns = [long.generate([5], Sampling(8, 0))]
        if company:
            turns.append(wide.generate([6] * 200, Sampling(8, 0)))
        return (await together(*turns))[0]

    alone, together_with = run(scenario(False)), run(scenario(True))
    assert alone.token_ids == together_with.token_ids
    assert alone.logprobs == pytest.approx(together_with.logprobs, abs=1e-4)
