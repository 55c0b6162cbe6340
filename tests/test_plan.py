"""The memory plan, beside the bytes that the real code asks for, and as it is applied."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lightning.fabric.utilities import move_data_to_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GemmaConfig, Qwen2Config

import foreign  # noqa: F401 - its device is to be there
import turnrl
from commands import RECIPE, save
from runs import data, make_module
from turnrl import Policy, RecipeError
from turnrl.cli import main
from turnrl.engines import ServerMemory
from turnrl.plugin.errors import parse_bytes
from turnrl.plugin.text import format_gigabytes
from turnrl.policy.compute import find_adapted_layers
from turnrl.policy.settings import Lora
from turnrl.policy.trials import ForwardMethod
from turnrl.testing import ScriptedEngine
from turnrl.types import Start
from turnrl_doctor.counts import (
    ENGINE,
    PHASES,
    decode_bytes,
    learning_bytes,
    memory_by_phase,
    prefill_bytes,
    resident_bytes,
)
from turnrl_doctor.memory import MemoryPlan
from turnrl_doctor.plan import Card, choose, table
from turnrl_doctor.planning import given_settings, work_of
from turnrl_doctor.work import NAMES, Choice, Decoder, Work, read_decoder
from turnrl_vllm import VLLM

META = torch.device("meta")


class Bytes(TorchDispatchMode):
    """Counts the bytes of storages on a device: `now`, and the `peak` so far."""

    def __init__(self, kind: str = "meta") -> None:
        super().__init__()
        self.kind, self.now, self.peak, self.at = kind, 0, 0, ""
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.kind:
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self._known:
                    self._known.add(key)
                    self.now += (size := storage.nbytes())
                    weakref.finalize(storage, self._drop, key, size)
                    if self.now > self.peak:
                        self.peak, self.at = self.now, str(func)
        return out

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    @contextlib.contextmanager
    def above(self) -> Iterator[list[int]]:
        """Within it counts; then gives the peak above what was there, and what is kept of it."""
        bytes_above: list[int] = []
        with self:
            before = self.peak = self.now
            yield bytes_above
            bytes_above += [self.peak - before, self.now - before]


def _four_bit(linear: torch.nn.Linear, dtype: torch.dtype) -> Any:
    """The 4-bit layer that bitsandbytes makes of one: double quantisation, blocks of 64."""
    # imported here: it brings a second optimiser called SGD, which recipes know by that name
    import bitsandbytes
    from bitsandbytes.functional import QuantState

    rows, columns = linear.out_features, linear.in_features
    layer: Any = bitsandbytes.nn.Linear4bit.__new__(bitsandbytes.nn.Linear4bit)
    torch.nn.Module.__init__(layer)
    layer.in_features, layer.out_features = columns, rows
    packed = torch.empty((rows * columns // 2, 1), dtype=torch.uint8, device=META)
    weight: Any = torch.nn.Parameter(packed, requires_grad=False)
    blocks = rows * columns // 64
    of_scales = QuantState(
        absmax=torch.empty(-(-blocks // 256), device=META),
        blocksize=256,
        code=torch.empty(256, device=META),
        dtype=torch.float32,
    )
    weight.quant_state = QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8, device=META),
        shape=torch.Size((rows, columns)),
        code=torch.empty(16, device=META),
        blocksize=64,
        quant_type="nf4",
        dtype=dtype,
        offset=torch.empty((), device=META),
        state2=of_scales,
    )
    weight.bnb_quantized, weight.compress_statistics, weight.quant_type = True, True, "nf4"
    layer.weight, layer.bias, layer.quant_state = weight, linear.bias, weight.quant_state
    layer.compute_dtype, layer.compute_type_is_set = dtype, True
    layer.quant_storage, layer.support_avx512bf16_for_cpu = torch.uint8, False
    return layer


def _wide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product in float32, as a GPU makes it: without copies of what is multiplied."""
    return torch.mm(left, right, out_dtype=torch.float32)


@dataclass
class Counted:
    """A policy on `meta`, and what counts.

    Args:
        policy: Loaded, its network in train mode.
        bytes: The count.
    """

    policy: Policy
    bytes: Bytes

    def layout(self, tokens: int, prompt: int, turn: int, total: int) -> Any:
        """The first minibatch of sequences that begin with one prompt and ask for two turns."""
        draw = np.random.default_rng(0)
        begin = draw.integers(0, 1000, prompt)
        result = total - prompt - 2 * turn
        asked = [False] * prompt + [True] * turn + [False] * result + [True] * turn
        members = 2 + tokens // (total - prompt)
        own = (draw.integers(0, 1000, total - prompt) for _ in range(members))
        rows = [(np.concatenate([begin, attempt]).tolist(), asked) for attempt in own]
        _, layout = next(self.policy.forward_passes(rows, tokens))
        return layout, move_data_to_device(layout, META)


def counted(
    patch: pytest.MonkeyPatch, config: transformers.PretrainedConfig, **settings: Any
) -> Counted:
    """Load a policy of random weights on `meta`.

    Args:
        patch: Replaces what needs files or numbers (finding weights, comparing log-probabilities),
            and says of `meta` that a GPU's kernels are there.
        config: The model's.
        settings: Of `Policy`.
    """
    count, policy = Bytes(), Policy(".", **settings).build()
    policy.files.__dict__["config"] = config

    def network(*named: str | None, **options: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(options["dtype"])
        try:
            with torch.device("meta"):
                made: Any = transformers.AutoModelForCausalLM.from_config(config)
        finally:
            torch.set_default_dtype(before)
        if policy.settings.quantization == "nf4":
            for parent in list(made.modules()):
                for name, child in list(parent.named_children()):
                    head = child is made.get_output_embeddings()
                    if type(child) is torch.nn.Linear and not head:
                        setattr(parent, name, _four_bit(child, options["dtype"]))
            made.is_loaded_in_4bit = True
        whole = dict.fromkeys(("missing_keys", "mismatched_keys", "unexpected_keys"), ())
        return made, whole

    patch.setattr("turnrl.policy.files.load_part", network)
    patch.setattr("turnrl.policy.loading.fingerprint", lambda *args: "")
    patch.setattr("turnrl.policy.model.check_head", lambda policy: None)
    patch.setattr(
        "turnrl.policy.model.choose_method",
        lambda policy: ForwardMethod(
            policy.settings.share_prefixes, policy.compute_dtype == torch.bfloat16, "as on a GPU"
        ),
    )
    patch.setattr("turnrl.policy.compute.wide_mm", _wide)
    with count, META:  # where peft makes its weights
        policy.load(META)
    return Counted(policy, count)


SEVEN = Decoder(3584, 18_944, 28, 28, 4, 128, 152_064, False)
TRIVIA = Work(SEVEN, True, 2, 16, None, 336, 2048, 512, 2, 512)
"""The TriviaQA recipe: 16 questions x 21, two turns, two passes."""


def seven(layers=28):
    return Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=layers,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        max_position_embeddings=32_768,
    )


def card(gigabytes):
    return Card(f"{gigabytes}GB", gigabytes * 10**9)


def near(planned, measured, share=0.05):
    assert abs(planned - measured) <= share * measured, f"planned {planned:,}, counted {measured:,}"


# ------------------------------------------------------------------- dimensions


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(
            vocab_size=900, hidden_size=96, intermediate_size=200, num_hidden_layers=3,
            num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True,
        ),
        GemmaConfig(
            vocab_size=900, hidden_size=96, intermediate_size=200, num_hidden_layers=3,
            num_attention_heads=6, num_key_value_heads=1, head_dim=32,
        ),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_the_weights_of_a_model_are_counted_from_its_configuration(config):
    import transformers

    with META:
        network = transformers.AutoModelForCausalLM.from_config(config)
    shape = read_decoder(config)
    whole = sum(p.numel() for p in network.parameters())
    near(shape.dense + shape.embedding_weights + shape.rest, whole, 0.005)


def test_an_unknown_architecture_is_refused_with_a_reason():
    experts = SimpleNamespace(model_type="mixed", num_local_experts=8)
    experts.get_text_config = lambda: experts
    with pytest.raises(LookupError, match="mixed routes tokens among experts"):
        read_decoder(experts)


# ------------------------------------------------------------ beside counted bytes


def engine_bytes(policy, count, tokens, rows):
    """Counted bytes of reading so many tokens beside so many rows, of a step of these rows, and of
    drawing a token for each."""
    from turnrl import Sampling
    from turnrl_slots import sampling
    from turnrl_slots.attention import Feed
    from turnrl_slots.decode import StepBuffers
    from turnrl_slots.kernel import Tables
    from turnrl_slots.pages import Pool, Shapes
    from turnrl_slots.sizes import ROWS, count_pages

    shapes = Shapes()
    with torch.inference_mode():
        at = torch.arange(2, device=META)[None]
        policy.hidden(torch.zeros_like(at), None, at, attend=shapes)
        pool = Pool(rows * 64 + 4096, shapes, META, kernel=True)
        with count:
            _ = pool.store
        turns = tokens // 512
        tables = [list(range(n, n + 64)) for n in range(turns)]
        feeds = [Feed(table, 600, [1] * 512) for table in tables]
        asking = Tables([list(range(64))] * rows, pool)
        attend = asking.attend_to(np.full(rows, 1500), feeds)
        read = torch.zeros(1, rows + 512 * turns, dtype=torch.long, device=META)
        with count.above() as prefill:
            policy.hidden(read, None, attend.positions[None], attend=attend)

        def hidden(ids, positions, attend):
            return policy.hidden(ids[None], None, positions[None], attend=attend)[0]

        step = StepBuffers(pool, hidden, rows, count_pages(2048))
        with count.above() as stepped:
            states = step.compute()
        plain = [Sampling(8, temperature=0.9)] * rows
        with count.above() as drawn:
            for n in range(0, rows, ROWS):
                rows_at_once = slice(n, n + ROWS)
                logits = policy.logits(states[rows_at_once])
                size = len(logits)
                sampling.draw(logits, plain[rows_at_once], [0.5] * size, [None] * size)
                del logits
    return prefill[0], max(stepped[0], stepped[1] + drawn[0])


@pytest.mark.parametrize(
    ("layers", "again"),
    [
        (3, 0), (3, 2),
        pytest.param(28, True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_planned_bytes_match_what_a_7b_model_allocates(monkeypatch, layers, again):
    """Weights, learning, prefill and decoding of Qwen2.5-7B in 4 bits with LoRA, within 5 %."""
    # the kernel, which allocates nothing but its result (and Triton may not be there)
    kernel = SimpleNamespace(attend_rows=lambda query, *rest: torch.empty_like(query))
    monkeypatch.setitem(sys.modules, "turnrl_slots.triton_pages", kernel)
    model = counted(
        monkeypatch, seven(layers), quantization="nf4", lora=Lora(r=16), dtype="bfloat16",
        gradient_checkpointing=again,
    )  # fmt: skip
    work = replace(TRIVIA, shape=replace(SEVEN, layers=layers))
    near(sum(resident_bytes(work).values()), model.bytes.now, 0.01)

    for budget in (4096, 8192):
        host, layout = model.layout(budget, 350, 125, 1100)
        with model.bytes.above() as forward:
            logprobs, *_ = model.policy(layout, 0.9)
        with model.bytes.above() as backward:
            logprobs.sum().backward()
        peak = max(forward[0], forward[1] + backward[0])
        tokens = host.input_ids.shape[1]
        redone = layers if again is True else again
        planned = learning_bytes(work, tokens, redone, len(host.ragged.keys), len(host.targets))
        near(sum(planned.values()), peak)
        del logprobs, layout
        for weight in model.policy.parameters():
            weight.grad = None

    model.policy.network.eval()
    for tokens, rows in ((16_384, 32), (4096, 300)):
        read, stepped = engine_bytes(model.policy, model.bytes, tokens, rows)
        near(prefill_bytes(work, tokens, rows), read)
        near(decode_bytes(work, rows), stepped)


# ------------------------------------------------------------------------- choice


@pytest.mark.parametrize("size", [24, 40, 80, 141])
def test_the_trivia_recipe_fits_every_card_in_every_phase(size):
    plan = choose(TRIVIA, card(size), {})
    assert all(plan.total(phase) <= 0.9 * size * 1e9 for phase in PHASES)
    # a trajectory fits, so all of them finish, in waves
    assert plan.choice.kv_memory >= TRIVIA.max_tokens * TRIVIA.kv_bytes
    assert plan.choice.minibatch_tokens >= TRIVIA.max_tokens
    if size == 24:
        assert max(map(plan.total, PHASES)) <= 22e9


def test_a_larger_card_recomputes_less_and_samples_more_at_once():
    plans = [choose(TRIVIA, card(size), {}).choice for size in (16, 24, 40, 80, 141)]
    for smaller, larger in itertools.pairwise(plans):
        assert larger.gradient_checkpointing <= smaller.gradient_checkpointing
        assert larger.slots >= smaller.slots
    assert [plan.decode_weights for plan in plans[1:3]] == ["adapter", "dense"]


def test_settings_from_the_recipe_are_kept_and_shown_as_given():
    settings = {"slots": 48, "minibatch_tokens": 4096, "kv_memory": 3 * 10**9}
    plan = choose(TRIVIA, card(24), settings)
    assert {name: getattr(plan.choice, name) for name in settings} == settings
    lines = [line.split() for line in table(plan).splitlines()]
    for name in NAMES:
        (line,) = [words for words in lines if words[:1] == [name]]
        assert ("given" in line) == (name in settings)


def test_an_engine_in_its_own_process_has_its_share_of_each_phase():
    beside = ServerMemory(int(0.5 * 85e9), 3 * 10**9)
    plan = choose(replace(TRIVIA, sampled=False, beside=beside), card(80), {})
    alone = choose(replace(TRIVIA, sampled=False), card(80), {})
    shares = [plan.memory[phase].get(ENGINE, 0) for phase in PHASES]
    assert shares == [0, beside.sampling, beside.learning, beside.learning, beside.learning]
    assert plan.total("sampling") == alone.total("sampling") + beside.sampling
    with pytest.raises(RecipeError, match=r"is the engine's process .*--gpu-memory-utilization"):
        choose(replace(TRIVIA, sampled=False, beside=ServerMemory(78 * 10**9, 0)), card(80), {})
    # what it keeps meanwhile leaves less for minibatches
    awake = choose(
        replace(TRIVIA, sampled=False, beside=ServerMemory(50 * 10**9, 50 * 10**9)), card(80), {}
    )
    assert awake.choice.minibatch_tokens < plan.choice.minibatch_tokens


@pytest.mark.parametrize(
    ("work", "size", "settings", "step"),
    [
        (TRIVIA, 6, {}, "Take a smaller model"),
        (replace(TRIVIA, rank=0, four_bit=False, size=4), 80, {}, "model.policy.lora"),
        (TRIVIA, 24, {"kv_memory": 20 * 10**9}, "Lower model.engine.kv_memory"),
    ],
)
def test_a_plan_that_cannot_fit_is_refused_with_sizes_and_a_next_step(work, size, settings, step):
    with pytest.raises(RecipeError, match=rf"at least [\d.]+ GB.* uses [\d.]+ of .*{step}"):
        choose(work, card(size), settings)


# --------------------------------------------------------------------- applied


def started(model, gpu_memory="auto", **settings):
    return Start(torch.device("cpu"), make_module(model, **settings), data(), gpu_memory=gpu_memory)


def test_a_profile_sets_what_the_recipe_leaves_open(tiny_model, capsys):
    start = started(tiny_model, gpu_memory="24GB", policy={"minibatch_tokens": 2048})
    check = MemoryPlan()
    check.settle(start)
    made, engine = start.module, start.module.engine_settings
    assert "memory plan for 24GB" in capsys.readouterr().out
    assert made.policy.settings.minibatch_tokens == 2048  # given
    assert made.policy.settings.gradient_checkpointing is False  # a tiny model needs none
    assert parse_bytes(engine.kv_memory, "kv_memory") <= 24e9
    assert set(made.memory.planned) == {"sampling", "learning"}
    assert all(0 < size < 22e9 for size, _ in made.memory.planned.values())
    assert made.memory.planned["learning"][1] == "model.policy.minibatch_tokens"
    (line,) = check.run(start)
    assert (line.status, line.name) == ("pass", "memory plan")


@pytest.mark.parametrize(("checkpointing", "layers"), [(1, 1), (True, 2), (False, 0), (9, 2)])
def test_given_checkpointing_is_counted_in_layers(tiny_model, checkpointing, layers):
    start = started(tiny_model, policy={"gradient_checkpointing": checkpointing})
    settings = given_settings(start.module, work_of(start))
    assert settings["gradient_checkpointing"] == layers


def test_mixed_precision_is_planned_with_float32_weights(tiny_model):
    work = work_of(started(tiny_model, policy={"dtype": "bfloat16"}))
    assert (work.size, work.rank, work.mixed) == (4, 0, True)
    whole = replace(work, mixed=False)
    rounded = 2 * (work.shape.dense + work.shape.vocab * work.shape.hidden)
    for phase in ("sampling", "learning"):
        mixed_bytes, plain_bytes = (
            sum(memory_by_phase(w, Choice())[phase].values()) for w in (work, whole)
        )
        assert mixed_bytes - plain_bytes == rounded


def test_dense_weights_are_planned_at_the_size_that_they_take(tiny_model):
    module = make_module(tiny_model, policy={"dtype": "bfloat16", "lora": Lora(r=4)})
    work = work_of(Start(torch.device("cpu"), module, data()))
    layers = find_adapted_layers(module.policy.load())
    assert work.dense_copy == sum(layer.dense_bytes for layer in layers)
    sampled = memory_by_phase(work, Choice(decode_weights="dense"))["sampling"]
    assert sampled["dense weights"] == work.dense_copy


def test_a_module_is_planned_once_and_the_plan_is_printed_if_the_run_learns(tiny_model, capsys):
    start = started(tiny_model, gpu_memory="24GB")
    start.settle()
    assert "memory plan for" in capsys.readouterr().out
    planned, engine = start.module.memory.planned, start.module.engine_settings
    start.gpu_memory = "3GB"  # as if less were free when it is set up again
    check = MemoryPlan()
    check.settle(start)
    assert start.module.memory.planned == planned
    assert start.module.engine_settings == engine
    (line,) = check.run(start)
    assert (line.status, "made before" in line.text) == ("pass", True)
    far = replace(started(tiny_model, "24GB"), learns=False, device=torch.device("far"))
    far.settle()
    assert far.module.memory.planned
    assert capsys.readouterr().out == ""


def sampled_with(module):
    """What a plan may settle of a module, but for how it learns."""
    return {
        **dataclasses.asdict(module.engine_settings),
        "minibatch_tokens": module.policy.settings.minibatch_tokens,
    }


@pytest.mark.slow
def test_an_evaluation_and_a_policy_that_is_asked_sample_as_the_run_did(
    tiny_model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    contents = json.loads(json.dumps(RECIPE).replace("MODEL", str(tiny_model)))
    # 12 x 4 trajectories, and so less memory for keys and values than by default, 16 x 4
    contents["data"] |= {"questions_per_iteration": 12, "val_limit": 2}
    contents["trainer"] |= {"max_epochs": 1, "accelerator": "far", "strategy": "far"}
    contents["model"]["gpu_memory"] = "2GB"
    save(contents)
    sampled = {}

    def keep(self):
        sampled[self.trainer.state.fn.value] = sampled_with(self)

    monkeypatch.setattr(turnrl.MTGRPO, "on_validation_epoch_end", keep, raising=False)
    assert main(["fit", "recipe.yaml"]) == 0
    assert "memory plan for 2GB" in capsys.readouterr().out
    options_of_eval = ["--questions", "worlds.Numbers"]
    for options in ([], options_of_eval):
        assert main(["eval", "runs/recipe/version_0", *options]) == 0
        assert sampled.pop("validate") == sampled["fit"], options
    assert "memory plan" not in capsys.readouterr().out
    loaded = turnrl.load("runs/recipe/version_0", "far")
    assert sampled_with(loaded) == sampled["fit"]
    assert sampled["fit"]["slots"] == 48
    assert loaded.ask("Number 7?")
    # pages for a card may not fit into the memory of another machine
    assert turnrl.load("runs/recipe/version_0").engine_settings.kv_memory == "auto"


def test_a_policy_that_no_run_could_train_here_is_asked_all_the_same(tiny_model):
    start = started(tiny_model, gpu_memory="500MB")
    with pytest.raises(RecipeError, match="does not fit"):
        MemoryPlan().settle(start)
    replace(start, learns=False, device=torch.device("far")).settle()
    made = start.module
    assert (made.engine_settings.kv_memory, made.memory.planned) == ("auto", {})


def test_a_policy_that_processes_share_gets_no_plan(tiny_model):
    start = replace(started(tiny_model, "24GB"), processes=2, divided=True)
    check = MemoryPlan()
    check.settle(start)
    assert start.module.memory.planned == {}
    assert [(line.status, "share" in line.text) for line in check.run(start)] == [("pass", True)]


@pytest.mark.parametrize(
    ("staleness", "wanted"), [(0, "- +7.20 +3.00 +3.00 +3.00"), (1, "-( +7.20){4}")]
)
def test_a_vllm_server_of_the_run_is_planned(tiny_model, capsys, staleness, wanted):
    server = VLLM(python="python", arguments=["--gpu-memory-utilization", "0.3"])
    start = started(tiny_model, "24GB", engine=server, max_staleness=staleness)
    check = MemoryPlan()
    check.settle(start)
    assert re.search(f"the engine's process +{wanted}\n", capsys.readouterr().out)
    assert [line.status for line in check.run(start)] == ["pass"]


def test_an_engine_unknown_to_the_plan_is_reported_as_a_warning(tiny_model):
    start = started(tiny_model, gpu_memory="24GB", engine=ScriptedEngine(None, str))
    check = MemoryPlan()
    check.settle(start)
    assert [line.status for line in check.run(start)] == ["warn"]
    assert set(start.module.memory.planned) == {"learning"}


def test_auto_settles_nothing_on_a_cpu(tiny_model, capsys):
    start = started(tiny_model)
    MemoryPlan().settle(start)
    made = start.module
    assert (made.policy.settings.minibatch_tokens, made.policy.budget) == (None, 16_384)
    assert made.policy.settings.gradient_checkpointing is None
    assert (made.engine_settings.kv_memory, made.memory.planned) == ("auto", {})
    assert capsys.readouterr().out == ""


def test_the_work_of_a_recipe_is_read_from_its_parts(tiny_model):
    start = started(tiny_model, policy={"quantization": "nf4", "lora": Lora(r=4)})
    work = work_of(start)
    assert (work.four_bit, work.rank, work.trajectories) == (True, 4, 4 * 4)
    assert (work.shape.hidden, work.shape.layers, work.moments) == (64, 2, 2)
    start.module.policy.load()
    weights = start.module.policy.trainable_parameters().values()
    assert work.trained_weights == sum(p.numel() for p in weights)


def test_a_full_model_is_planned_with_all_its_weights(tiny_model):
    start = started(tiny_model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    work = work_of(start)
    start.module.policy.load()
    whole = sum(p.numel() for p in start.module.policy.parameters())
    near(work.trained_weights, whole, 0.01)
    assert (work.size, work.moments) == (4, 0)


def test_the_tables_on_the_page_match_the_computed_plan():
    page = (Path(__file__).parents[1] / "docs" / "howto" / "gpu.md").read_text(encoding="utf-8")
    names = {
        24: "NVIDIA GeForce RTX 4090",
        40: "NVIDIA A100-SXM4-40GB",
        80: "NVIDIA H100 80GB HBM3",
    }
    for size, name in names.items():
        plan = choose(TRIVIA, Card(name, size * 10**9), {})
        if size == 24:
            assert table(plan) in page
        choice = plan.choice
        row = (
            f"| {choice.slots} | {format_gigabytes(choice.kv_memory)} GB | "
            f"{choice.prefill_tokens:,} "
            f"| {choice.minibatch_tokens:,} | {choice.gradient_checkpointing} "
            f"| {choice.decode_weights} | {format_gigabytes(max(map(plan.total, PHASES)))} GB |"
        )
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {size} GB (")]
        assert row in line
