"""Fixtures of all tests, such as a random Qwen2 with a ChatML tokenizer, and the order of their
files.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

# models this small are slower on more threads, and far slower where other work wants the cores
os.environ["OMP_NUM_THREADS"] = "1"
# Lightning 2.6 calls jsonargparse by names that it will drop
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

import lightning  # noqa: F401  its log handler keeps the stderr of its first import: pytest's own
import pytest
from filelock import FileLock

from nodes import LOCKED, Node, Proxy
from nursery import Nursery

# pytest before 9 sees only what reaches the root logger
for _name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(_name).propagate = True

T = TypeVar("T")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    "system user assistant <reasoning> </reasoning> <tool> </tool> <answer> </answer> "
    "<result> </result> "
    '{"name": "look", "args": {"query": "Paris"}} What is the capital of France? '
    "I know. Paris London Rome"
)


def pytest_collection_finish() -> None:
    """What the tests import stays, and no collection of garbage looks through it; and what they
    make is looked through seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a quarter of the time the tests wait, for a server, say."""
    return (os.cpu_count() or 1) + 1


LONGEST = (
    *("docs", "report", "vllm_own_server", "outages", "mistakes"),
    *("sweep", "doctor", "server_engines", "rehearsal", "cli", "training", "run_files", "eval"),
    *("warmup", "estimators", "study", "console", "ask", "elasticsearch", "server_processes"),
    *("testing", "scaffold", "alarms", "exploration", "engine_contract", "react"),
    *("environments", "environment_limits", "judge", "plan"),
)
"""The files that take the longest, which begin first: else one worker is left alone with them."""


def pytest_configure(config: pytest.Config) -> None:
    """Files begin in the order of the collection, not with those of the most tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests may take an hour, and the longest files begin first."""
    ranks = {f"test_{name}": rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen2 of some 100 k parameters (widths that 4-bit blocks divide) and a
    byte-level tokenizer with ChatML."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHATML
    folder = tmp_path_factory.mktemp("tiny") / "model"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    # a wide spread of logits, so that greedy tokens are not near ties
    config.initializer_range = 0.5
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def random_model(tiny_model: Path, tmp_path: Path):
    """Makes a folder with a model of random weights of any architecture, and the tiny tokenizer."""
    import torch
    import transformers

    def make(name: str, **options) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        settings = {
            "vocab_size": 351,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        }
        config = getattr(transformers, f"{name}Config")(**(settings | options))
        torch.manual_seed(0)
        causal = f"{name.removesuffix('Text')}ForCausalLM"
        getattr(transformers, causal)(config).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_policy(tiny_model: Path):
    """A loaded policy that tests only read."""
    from turnrl import Policy

    policy = Policy(str(tiny_model)).build()
    policy.load()
    return policy


@pytest.fixture
def chat(tiny_model: Path):
    """The tiny tokenizer's chat format."""
    from turnrl import Policy
    from turnrl.agent.chat import ChatFormat

    return ChatFormat(Policy(str(tiny_model)).build().tokenizer)


def greedy_reference(policy, ids: Sequence[int], count: int) -> list[int]:
    """Greedy tokens by the plainest means: a full forward pass over the whole history
    for each token."""
    import torch

    history = list(ids)
    for _ in range(count):
        with torch.no_grad():
            logits = policy.load()(input_ids=torch.tensor([history])).logits[0, -1]
        history.append(int(logits.argmax()))
    return history[len(ids) :]


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A recipe that runs, in a folder of its own, as `recipe.yaml`."""
    import json

    from commands import RECIPE, save

    contents = json.loads(json.dumps(RECIPE).replace("MODEL", str(tiny_model)))
    monkeypatch.chdir(tmp_path)
    save(contents)
    return contents


@pytest.fixture(scope="session")
def _trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import json

    from commands import RECIPE, save
    from turnrl.cli import main

    with contextlib.chdir(tmp_path_factory.mktemp("trained")):
        save(json.loads(json.dumps(RECIPE).replace("MODEL", str(tiny_model))))
        assert main(["fit", "recipe.yaml", "--trainer.max_epochs", "1"]) == 0
        return Path("runs").absolute()


@pytest.fixture
def trained(recipe: dict, _trained: Path) -> Path:
    """A run of one iteration of the recipe, for tests that begin with one: a copy."""
    return Path(shutil.copytree(_trained, "runs")) / "recipe" / "version_0"


def _shared(factory: pytest.TempPathFactory, name: str, kind: Callable[..., T], *options: str) -> T:
    """What all workers share: the first that asks makes it, and it ends with the test run."""
    folder, owner = factory.getbasetemp(), os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder, owner = folder.parent, os.getppid()
    with FileLock(folder / f"{name}.lock"):
        return kind(folder / name, owner, *options)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Nursery:
    """Where commands start without waiting for what they import."""
    return _shared(tmp_path_factory, "nursery", Nursery)


@pytest.fixture(scope="session")
def locked_node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    """A search server with a password and a certificate, which nobody kills or stops."""
    return _shared(tmp_path_factory, "locked-node", Node, *LOCKED)


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of an Elasticsearch server in which tests build indices."""
    if address := os.environ.get("TURNRL_TEST_ES_URL"):
        yield address
        return
    node = request.getfixturevalue("locked_node")
    proxy = Proxy(node.url, node)
    yield proxy.url
    proxy.close()


@pytest.fixture(scope="session", autouse=True)
def _start_early(request: pytest.FixtureRequest) -> None:
    """Begin what takes half a minute in the background: the file that needs it comes late."""
    names = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    if "locked_node" in names or ("url" in names and "TURNRL_TEST_ES_URL" not in os.environ):
        with contextlib.suppress(pytest.skip.Exception):  # which those tests will say again
            request.getfixturevalue("locked_node")


@pytest.fixture
def ctrl_c():
    """Ctrl-C interrupts, also where a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def one_thread():
    """Threads that share so small a model wait for each other, and the longer the busier it is."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
