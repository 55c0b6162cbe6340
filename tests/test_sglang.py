"""What `SGLang` alone does, against a fake server, and, where there is one, SGLang itself. What it
shares with other engines is tried in `test_server_engines`.

The slow tests need a server that serves the Atlas starter, with adapters of rank 16:
`TURNRL_TEST_SGLANG_URL=http://localhost:30000`.
"""

from __future__ import annotations

import math
import os

import pytest

from serving import (
    IGNORE_PEFT_WARNING,
    PROMPT,
    SGLANG_KIND,
    STARTER,
    check_turn,
    perturb,
    start_server,
    trained_policy,
    turn,
)
from turnrl import Policy, RecipeError, Sampling
from turnrl.agent.running import on_loop
from turnrl.plugin.errors import EngineError
from turnrl.plugin.patience import Unavailable
from turnrl.policy.settings import Lora
from turnrl.testing import check_engine
from turnrl_sglang import SGLang
from turnrl_sglang.server import SGLangServer

__all__ = ["start_server"]  # fixtures
pytestmark = IGNORE_PEFT_WARNING
REAL = os.environ.get("TURNRL_TEST_SGLANG_URL")


@pytest.fixture
def kind():
    return SGLANG_KIND


def test_two_runs_share_a_server_if_each_trains_an_adapter(start_server, tiny_model):
    server = start_server()
    policies = [trained_policy(tiny_model) for _ in range(2)]
    engines = [SGLang(url=server.url).build() for _ in policies]
    for engine, policy in zip(engines, policies, strict=True):
        engine.check(policy, 64)
        engine.start(policy, 64)
    for version in range(2):
        for engine, policy in zip(engines, policies, strict=True):
            perturb(policy)
            engine.sync(version)
        for engine, policy in zip(engines, policies, strict=True):
            check_turn(policy, on_loop(turn(engine.open(PROMPT))))
    for engine in engines:
        engine.close()


def test_an_end_token_of_the_models_own_ends_a_turn():
    server = SGLangServer("http://localhost:30000", "", 5)
    meta = {
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 2, None]],
    }
    sampling = Sampling(6, 1.0, end_ids=(3,))
    done = server.completion({"output_ids": [7, 2], "meta_info": meta}, sampling, 4)
    assert (done.token_ids, done.reason, done.version) == ((7, 2), "end", 4)
    assert server.turn_request([5], sampling)["sampling_params"]["ignore_eos"] is False
    short = meta | {"finish_reason": {"type": "length", "length": 2}}
    with pytest.raises(Unavailable, match="returned only 2 of 6 tokens"):
        server.completion({"output_ids": [7, 8], "meta_info": short}, sampling, 4)
    broken = meta | {"output_token_logprobs": [[-0.5, 7, None], [math.nan, 2, None]]}
    with pytest.raises(EngineError, match="log-probability that is not finite"):
        server.completion({"output_ids": [7, 2], "meta_info": broken}, sampling, 4)
    # without end tokens nothing but the limit ends it
    assert server.turn_request([5], Sampling(6, 1.0))["sampling_params"]["ignore_eos"] is True


def test_an_engine_without_an_address_is_refused():
    with pytest.raises(RecipeError, match=r"engine\.url is missing: SGLang samples with servers"):
        SGLang()


def test_a_request_leaves_nothing_to_the_defaults_of_a_models_folder():
    server = SGLangServer("http://localhost:30000", "", 5)
    body = server.turn_request([5, 9], Sampling(6, 0.7, 2**31 + 3, stop=("</a>",)))
    assert body["input_ids"] == [5, 9]
    assert body["sampling_params"] == {
        "max_new_tokens": 6,
        "temperature": 0.7,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stop": ["</a>"],
        "no_stop_trim": True,
        "sampling_seed": 3,
    }


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="TURNRL_TEST_SGLANG_URL names no server")
class TestReal:
    """SGLang itself. The case that trains all weights comes last: it leaves them at the server."""

    def test_it_samples_each_of_many_versions(self, tmp_path):
        policy = Policy(STARTER, lora=Lora(r=16)).build()
        perturb(policy)
        engine = SGLang(url=REAL, folder=str(tmp_path)).build()
        engine.start(policy, 256)
        for version in range(30):
            perturb(policy, 0.02)
            engine.sync(version)
            check_turn(policy, on_loop(turn(engine.open(PROMPT))), within=2e-3)
        engine.close()
        assert not [*tmp_path.iterdir()]

    @pytest.mark.parametrize("whole", [False, True])
    def test_it_keeps_the_contract(self, tmp_path, whole):
        policy = Policy(STARTER, lora=None if whole else Lora(r=16)).build()
        perturb(policy)
        engine = SGLang(url=REAL, folder=str(tmp_path)).build()
        engine.check(policy, 256)
        check_engine(engine, policy)
        assert engine.active_choices["log-probabilities"].endswith("from the learner's on average")
