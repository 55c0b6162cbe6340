"""A real vLLM beside the learner on one GPU: `pytest -m gpu`. Without a GPU, or an interpreter with
vLLM in `TURNRL_TEST_VLLM_PYTHON`, it is skipped.
"""

from __future__ import annotations

import pytest
import torch

from serving import PROMPT, STARTER, VLLM_PYTHON, learner_logprobs, needs_vllm, perturb, turns
from turnrl import Policy
from turnrl.agent.running import on_loop
from turnrl.policy.settings import Lora
from turnrl_vllm import VLLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    needs_vllm,
]
WHOLE = pytest.mark.parametrize("whole", [False, True], ids=["adapter", "all weights"])
SHARE = 0.3
"""Of the GPU's memory, for vLLM."""


def on_gpu(whole: bool) -> Policy:
    """The starter on the GPU, with weights that are not its own."""
    policy = Policy(STARTER, lora=None if whole else Lora(r=16), dtype="bfloat16").build()
    with torch.device("cuda"):
        policy.load(torch.device("cuda"))
    policy.to("cuda")
    perturb(policy)
    return policy


def engine_in(folder) -> VLLM:
    return VLLM(
        python=str(VLLM_PYTHON),
        arguments=["--enforce-eager", "--gpu-memory-utilization", str(SHARE)],
        folder=str(folder),
    ).build()


def free_bytes() -> int:
    """Bytes of the GPU's memory that no process holds."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@WHOLE
def test_it_gives_its_memory_back_while_the_policy_learns(tmp_path, whole):
    policy, before = on_gpu(whole), free_bytes()
    engine = engine_in(tmp_path)
    engine.check(policy, 256)
    engine.start(policy, 256)
    taken, kept, gaps = [], [], []
    for version in range(3):
        engine.sync(version)
        taken.append(before - free_bytes())
        for done in on_loop(turns([engine.open(PROMPT) for _ in range(8)])):
            assert done.version == version
            wanted = learner_logprobs(policy, PROMPT, done.token_ids)
            gaps += [abs(a - b) for a, b in zip(done.logprobs, wanted, strict=True)]
        engine.release_memory()
        kept.append(before - free_bytes())
        perturb(policy)
    engine.close()
    print(f"gap {sum(gaps) / len(gaps):.3f}, most {max(gaps):.3f}")
    print(f"GB awake {[x / 1e9 for x in taken]}, asleep {[x / 1e9 for x in kept]}")
    assert sum(gaps) / len(gaps) < 0.1
    assert min(taken) > 0.6 * SHARE * torch.cuda.mem_get_info()[1]
    assert max(kept) < 0.15 * min(taken)
    assert before - free_bytes() < 0.1e9
