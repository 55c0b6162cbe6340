"""The paths of the in-process engine that a GPU takes, as far as a CPU can compute them: its Triton
kernel by Triton's interpreter, its memory, its copies, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import turnrl_slots.engine
import turnrl_slots.memory
import turnrl_slots.pages
import turnrl_slots.sampling
import turnrl_slots.transfer
from conftest import greedy_reference
from engines import (
    GREEDY,
    PAGE_BYTES,
    PROMPTS,
    Recorder,
    Watched,
    converse_by_steps,
    kernel,
    rows_in_loops,
    run,
    started,
    together,
)
from turnrl import Policy, RecipeError, Sampling
from turnrl.policy.settings import Lora
from turnrl_slots import Slots, triton_pages
from turnrl_slots.kernel_trial import has_kernel
from turnrl_slots.memory import auto_memory, empty_cache
from turnrl_slots.sampling import draw
from turnrl_slots.trial import fill_memory
from turnrl_slots.triton_pages import count_parts

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""The most KB of shared memory that a program may have, by compute capability (CUDA C++ Programming
Guide, table of technical specifications)."""

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Code(NamedTuple):
    """What a compiled kernel takes of a card, and what it is made of."""

    shared: int
    registers: int
    spilled: int
    ptx: str


def compiled(
    capability: int, asking: int, heads: int, size: int, dtype: torch.dtype, parts: int
) -> tuple[Code, Code | None]:
    """`_attend` as `attend_rows` would launch it on such a card, and `_weigh` where it would."""
    group, kind = asking // heads, "*" + TYPES[dtype]
    constants, options = triton_pages.settings(group, size, dtype, parts)
    partial = kind if parts == 1 else "*fp32"
    types = dict.fromkeys(("query", "keys", "values", "out"), kind)
    types |= {"parts": partial, "sums": partial, "table": "*i32", "used": "*i32", "scale": "fp32"}
    # numbers that 16 divides are known to be so; 1 is a constant
    known = {"query_row": asking * size, "query_head": size, "page_stride": 32 * heads * size}
    known |= {"token_stride": heads * size, "head_stride": size, "heads": asking, "count": parts}
    attend = _code(capability, triton_pages._attend, types, known, constants, options)
    if parts == 1:
        return attend, None
    constants = {"COUNT": parts, "SIZE": size, "SIZE_PAD": constants["SIZE_PAD"]}
    return attend, _code(
        capability, triton_pages._weigh, types, {}, constants, {"num_warps": options["num_warps"]}
    )


def _code(capability, kernel, types, known, constants, options) -> Code:
    names = kernel.arg_names
    ones = {name: 1 for name, value in known.items() if value == 1}
    constants = constants | ones
    signature = {name: types.get(name, "i32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    whole = [name for name in names if signature[name].startswith("*")]
    whole += [name for name, value in known.items() if value % 16 == 0]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in whole},
    )
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = built.asm["ptx"]
    return Code(built.metadata.shared, *_used(capability, ptx), ptx)


def _used(capability: int, ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, as Triton's own ptxas reports them."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    tool = tools / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    card = f"sm_{capability}{'a' if capability >= 90 else ''}"
    command = [tool, "-v", f"--gpu-name={card}", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    return int(registers), sum(map(int, spilled))


__all__ = ["kernel"]  # fixtures

TESTS = Path(__file__).parent


# ------------------------------------------------------------------- the Triton kernel


def by_triton(*jobs, **environment):
    triton = pytest.importorskip("triton")
    if Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.5"):
        pytest.skip("the interpreter of Triton 3.6 does not work with NumPy 2.5")
    done = subprocess.run(
        [sys.executable, TESTS / "triton_script.py", *map(str, jobs)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_triton_kernel_attends_to_pages_in_place(tiny_model):
    # the interpreter computes no products in bfloat16, so these are float16 and float32
    results = by_triton("correct", f"sampled={tiny_model}", TRITON_INTERPRET="1")
    for name, gap in results["correct"].items():
        assert gap < (2e-3 if "28/4" in name else 2e-6), name
    sampled = results["sampled"]
    assert sampled["right"] == [True] * 3
    assert sampled["replayed"]
    assert sampled["attention while sampling"].startswith("Triton kernel, pages read in place")


@pytest.mark.slow
def test_a_mistake_in_the_triton_kernel_is_seen(tmp_path):
    gaps = by_triton(f"mutants={tmp_path}", TRITON_INTERPRET="1")["mutants"]
    assert gaps
    for name, gap in gaps.items():
        assert gap > 0.01, name


HEADS = [(28, 4, 128), (28, 4, 64), (32, 8, 96), (16, 16, 80), (32, 8, 256), (34, 2, 128)]
HEADS += [(4, 2, 8)]
"""Query heads, key-value heads and the size of a head: groups of 1 to 17, some padded."""


@pytest.mark.parametrize(
    ("capabilities", "heads", "dtypes", "parts"),
    [
        ((80, 90), HEADS[:1], ("bfloat16",), (8,)),
        pytest.param(
            (80, 86, 89, 90, 120), HEADS, ("bfloat16", "float16"), (1, 8), marks=pytest.mark.slow
        ),
    ],
    ids=["two", "all"],
)
def test_the_triton_kernels_compile_for_cards_that_are_not_here(
    capabilities, heads, dtypes, parts, tmp_path, monkeypatch
):
    pytest.importorskip("triton")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lines = []
    for capability, dtype, shape, count in product(capabilities, dtypes, heads, parts):
        attend, weigh = compiled(capability, *shape, getattr(torch, dtype), count)
        name = f"sm_{capability}, {dtype}, heads {shape}, {count} parts"
        lines.append(f"{name}: {attend.shared / 1024:.0f} KB shared, {attend.registers} registers")
        assert attend.shared <= SHARED[capability] * 1024, name
        assert attend.registers <= 168, name  # three programs of 128 threads to a processor
        assert attend.spilled == 0, name
        assert "mma.sync" in attend.ptx or "wgmma" in attend.ptx, f"{name}: no tensor cores"
        assert shape[2] < 16 or "cp.async" in attend.ptx, f"{name}: no loads ahead"
        assert (weigh is None) == (count == 1)
        assert weigh is None or weigh.spilled == 0, name
    print("\n".join(lines))  # `pytest -rP` shows them, to compare a change with


def test_few_long_rows_are_divided_until_they_fill_a_card():
    # 528 programs at once, 4 key-value heads, room for 2,048 tokens
    assert {rows: count_parts(rows, 4, 64, 528) for rows in (1, 8, 64, 132, 256)} == {
        # 2,048 tokens are 16 parts of 128 at most; 8 x 4 x 16 = 512; 64 x 4 x 2 = 512
        **{1: 16, 8: 16, 64: 2, 132: 1, 256: 1}
    }
    assert count_parts(1, 4, 1, 528) == 1
    assert count_parts(1, 1, 10_000, 528) == 64


# ------------------------------------------------------------------- the trial of the kernels


DEVICES = RuntimeError(
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
)
MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
ACCESS = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("error", [DEVICES, MEMORY, ACCESS])
@pytest.mark.parametrize("when", ["a kernel is tried", "two tokens are read", "pages are tried"])
def test_memory_and_device_errors_are_raised_from_a_trial(tiny_policy, monkeypatch, error, when):
    def fails(*_, **__):
        raise error

    policy = Watched(tiny_policy)
    if when == "a kernel is tried":
        monkeypatch.setattr(turnrl_slots.kernel_trial, "supports_ragged", lambda *_: True)
        monkeypatch.setattr(turnrl_slots.triton_pages, "attend_rows", fails)
    elif when == "two tokens are read":
        policy.hidden = fails
    else:
        policy.logits = fails
    with pytest.raises(type(error)) as raised:
        started(policy)
    assert raised.value is error


@pytest.mark.parametrize("error", [DEVICES, MEMORY])
def test_memory_that_runs_out_while_a_step_is_recorded_stops_the_run(tiny_policy, kernel, error):
    class Fails(Recorder):
        def record(self, compute):
            raise error

    with pytest.raises(type(error)):
        converse_by_steps(tiny_policy, Fails())


def test_float32_on_a_gpu_logs_advice_to_use_bfloat16(caplog):
    assert not has_kernel(SimpleNamespace(dtype=torch.float32), torch.device("cuda"))
    assert "policy.dtype to 'bfloat16'" in caplog.text


@pytest.mark.parametrize("fault", ["wrong", "refused"])
def test_a_kernel_that_is_wrong_or_refuses_is_not_used(
    tiny_policy, kernel, fault, monkeypatch, caplog
):
    def broken(query, keys, values, table, used, scale, parts=None):
        if fault == "refused":
            raise TypeError("no such argument")
        return rows_in_loops(query, keys, values, table, used - 1, scale)

    assert started(tiny_policy, attention="plain").pool.kernel is False
    assert not caplog.records
    monkeypatch.setattr(turnrl_slots.triton_pages, "attend_rows", broken)
    before = torch.get_rng_state()
    engine = started(tiny_policy)
    assert torch.equal(torch.get_rng_state(), before)
    assert engine.active_choices["attention while sampling"].startswith("products of matrices")
    (warning,) = (record.message for record in caplog.records)
    assert "no such argument" in warning or "it is off by" in warning
    completion = run(engine.open(PROMPTS[0]).generate([], GREEDY))
    assert list(completion.token_ids) == greedy_reference(tiny_policy, PROMPTS[0], 12)


# ------------------------------------------------------------------- options that a plan fills in


def test_in_force_tells_what_was_given_and_what_was_left_open(tiny_model):
    policy = Policy(str(tiny_model), lora=Lora(r=4)).build()
    policy.load()
    engine = Slots().build()
    assert engine.active_choices == {}
    engine.start(policy, 64)
    assert engine.active_choices["turns at once"] == "256"  # on a CPU, as ever
    assert engine.active_choices["weights while sampling"] == "base and adapter"
    memory = f"{20 * PAGE_BYTES / 1e3}KB"
    engine = Slots(3, 40, memory, decode_weights="dense").build()
    engine.start(policy, 64)
    assert dict(engine.active_choices) == {
        "attention while sampling": "products of matrices, pages gathered in every layer",
        "CUDA graphs": "off",
        "weights while sampling": "base, dense, and adapter",
        "keys and values": "0.00 GB, 640 tokens, at least 10 sessions",
        "turns at once": "3",
    }


def test_every_turn_that_has_memory_is_sampled_at_once_where_slots_are_open():
    open_, closed = Slots().build(), Slots(slots=7).build()
    assert (open_._rows(False, 900), open_._rows(True, 900)) == (900, 256)
    assert (closed._rows(False, 900), closed._rows(True, 900)) == (7, 7)


def test_a_model_is_refused_by_its_configuration_alone(random_model, tiny_model):
    def policy(name, **options):
        return Policy(str(random_model(name, **options))).build()

    for name in ("Mistral", "Phi3", "Starcoder2"):
        slides = policy(name, sliding_window=16)
        Slots().build().check(slides, 16)
        with pytest.raises(RecipeError, match=rf"{name}ForCausalLM cannot .*sees 16.*has 17"):
            Slots().build().check(slides, 17)
        assert slides.network is None
    # it says itself that it does not use it
    Slots().build().check(policy("Qwen2", sliding_window=16), 256)
    recurrent = policy("Qwen3Next", layer_types=["linear_attention", "full_attention"])
    with pytest.raises(RecipeError, match=r"'linear_attention'.*choose another model"):
        Slots().build().check(recurrent, 64)


def test_free_memory_is_asked_for_after_the_cache_was_emptied(monkeypatch):
    events = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: events.append("emptied"))

    def info(device):
        events.append(str(device))
        return 10_000, 20_000

    monkeypatch.setattr(torch.accelerator, "get_memory_info", info)
    assert auto_memory(torch.device("cuda", 1), 2_000) == 5_600  # 0.7 of what is left of 10,000
    assert events == ["emptied", "cuda:1"]
    assert auto_memory(torch.device("xpu"), 20_000) == 0

    def unknown(device):
        raise RuntimeError("not implemented there")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", unknown)
    with pytest.raises(RecipeError, match=r"'auto' on xpu, which does not report.*as '4GB'"):
        auto_memory(torch.device("xpu"), 0)


def test_an_engine_gives_memory_back_before_and_after_it_samples(tiny_policy, monkeypatch):
    engine = started(tiny_policy, 64)
    engine.pool.reset()  # of what it tried at its start
    emptied = []
    monkeypatch.setattr(turnrl_slots.pages, "empty_cache", emptied.append)
    assert engine.pool.store is engine.pool.store
    assert emptied == [torch.device("cpu")]
    engine.pool.reset()
    assert len(emptied) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_host_memory_is_returned_to_the_system():
    resident = Path("/proc/self/statm")

    def taken() -> float:
        return int(resident.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    torch.ones(7 * 2**20)  # glibc learns from it to keep blocks below 28 MB
    blocks = [torch.ones(2**18) for _ in range(300)]
    last = torch.ones(2**18)  # above them, so that they are not the end of the heap
    held = taken()
    del blocks
    kept = taken()
    empty_cache(torch.device("cpu"))
    assert kept > held - 50
    assert taken() < held - 200
    assert last.sum() == 2**18


# ------------------------------------------------------------------- the largest passes


def trial(policy, prefill_tokens, rows, **options):
    """What `fill_memory` reads of an engine's pages."""
    watched = Watched(policy)
    engine = started(watched, 64, **options)
    watched.read.clear()
    pool = engine.pool
    fill_memory(watched, pool, engine.passes.compute, 64, prefill_tokens, rows)
    assert pool.available == pool.count
    return watched


def test_a_full_prefill_and_a_full_step_are_tried(tiny_policy, kernel):
    # 250 tokens at once, in texts of 64; then a token in each of five turns, padded to 8
    assert trial(tiny_policy, 250, 5).read == [(1, 250), (1, 8)]
    # 6 pages are room for 192 tokens, and for three turns of 64
    small = f"{7 * PAGE_BYTES / 1e3}KB"
    assert trial(tiny_policy, 250, 5, kv_memory=small).read == [(1, 192), (1, 4)]


@pytest.mark.parametrize(("most", "part"), [(100, "a prefill of that many"), (4, "a step of 5")])
def test_running_out_of_memory_reports_which_settings_to_lower(tiny_policy, most, part):
    engine = started(tiny_policy)
    policy = Watched(tiny_policy)

    def hidden(ids, *rest, **options):
        if most < ids.shape[1] and (most == 100 or ids.shape[1] < 100):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.")
        return tiny_policy.hidden(ids, *rest, **options)

    policy.hidden = hidden
    engine.passes.policy = policy
    message = (
        rf"{part}.* does not fit .*Tried to allocate 3 GiB.*prefill_tokens = 128.*to 64.*kv_mem"
    )
    with pytest.raises(RecipeError, match=message):
        fill_memory(policy, engine.pool, engine.passes.compute, 64, 128, 5)


# ------------------------------------------------------------------- copies and memory of a step


class Waits(TorchDispatchMode):
    """Counts operations whose result a host would have to wait for, or that would be copied there
    from Python's numbers: items, places of what is true, and tensors of arrays and lists."""

    NAMES = (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "equal",
        "lift_fresh",
        "unique",
    )

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in self.NAMES:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(20, 0.9),
        Sampling(20, 0),
        Sampling(20, forced_ids=tuple(range(40, 50))),
    ],
)
def test_a_step_makes_few_copies_and_none_for_a_row(tiny_policy, kernel, sampling, monkeypatch):
    counts = {"up": 0, "down": 0, "steps": 0}
    seen = []

    def counted(module, name, which):
        real = getattr(module, name)

        def count(*arguments):
            counts[which] += 1
            return real(*arguments)

        monkeypatch.setattr(module, name, count)

    counted(turnrl_slots.transfer, "upload", "up")
    counted(turnrl_slots.decode, "fill", "up")
    counted(turnrl_slots.sampling, "download", "down")
    attends = turnrl_slots.triton_pages.attend_rows

    def unseen(*arguments, **options):  # the stand-in of a kernel asks for numbers as it likes
        with _disable_current_modes():
            return attends(*arguments, **options)

    monkeypatch.setattr(turnrl_slots.triton_pages, "attend_rows", unseen)
    engine = started(tiny_policy)
    advance = engine._pass

    def watched(several):
        before = dict(counts)
        with Waits() as waits:
            ended = advance(several)
        if not several and engine._scheduler.active and counts["steps"]:
            seen.append(({k: counts[k] - before[k] for k in ("up", "down")}, waits.seen))
        counts["steps"] += not several
        return ended

    engine._pass = watched

    async def scenario():
        requests = [replace(sampling, seed=n) for n in range(7)]
        return await together(
            *(engine.open([n + 1] * 9).generate([], request) for n, request in enumerate(requests))
        )

    run(scenario())
    assert len(seen) > 10
    # tokens and positions in one copy, what they are drawn by in another; one comes back. Each copy
    # there is of one array, and no tensor is made of a list besides
    assert seen == [({"up": 2, "down": 1}, ["lift_fresh"] * 2)] * len(seen)


@pytest.fixture
def far_policy(tiny_model):
    """A policy with an adapter on a device that is not the CPU."""
    import foreign

    policy = Policy(str(tiny_model), lora=Lora(r=4)).build()
    policy.load("far")
    policy.to("far")
    yield policy
    foreign.LEDGER.limit = None


@pytest.mark.parametrize("decode_weights", ["adapter", "dense"])
def test_each_pass_on_another_device_is_copied_back_once(far_policy, decode_weights, monkeypatch):
    from foreign import LEDGER

    monkeypatch.setattr(turnrl_slots.sampling, "ROWS", 4)
    engine = Slots(kv_memory="2MB", prefill_tokens=100, decode_weights=decode_weights).build()
    engine.start(far_policy, 64)
    copies, advance = [], engine._pass

    def watched(several):
        before = LEDGER.to_host
        ended = advance(several)
        copies.append(LEDGER.to_host - before)
        return ended

    engine._pass = watched
    samplings = [Sampling(9 + n, 0.7, forced_ids=(4, 5)[: n % 3], seed=n) for n in range(7)]

    async def scenario(engine):
        completions = await together(
            *(
                engine.open([n + 1] * 9).generate([], sampling)
                for n, sampling in enumerate(samplings)
            )
        )
        await engine.drain()
        return completions

    afar = run(scenario(engine))
    assert copies == [1] * 15  # the longest turn has 15 tokens
    far_policy.to("cpu")
    near = run(scenario(started(far_policy, decode_weights=decode_weights)))
    for distant, local in zip(afar, near, strict=True):
        assert distant.token_ids == local.token_ids
        assert distant.logprobs == pytest.approx(local.logprobs, abs=1e-5)


def test_memory_that_is_too_small_for_a_prefill_is_missed_at_the_start(far_policy):
    from foreign import LEDGER

    def start(prefill_tokens):
        Slots(kv_memory="2MB", prefill_tokens=prefill_tokens).build().start(far_policy, 64)

    LEDGER.limit = LEDGER.now + 4_000_000  # two of them for pages
    start(200)
    with pytest.raises(RecipeError, match=r"does not fit beside 0\.0 GB.*_tokens = 3000.*to 1500"):
        start(3000)


def test_drawing_takes_the_memory_of_two_distributions():
    # operations that make a whole (R, V) anew, while the logits' own memory is there: one
    rows, tokens = 64, 1000
    logits = torch.randn(rows, tokens, generator=torch.Generator().manual_seed(0))

    class Big(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor) and output.numel() == rows * tokens:
                places = {x.data_ptr() for x in (*args, *(kwargs or {}).values()) if
                          isinstance(x, torch.Tensor)}  # fmt: skip
                self.made += output.data_ptr() not in places
            return output

    samplings = [Sampling(1, 0.9 if n % 3 else 0) for n in range(rows)]
    with Big() as big:
        draw(logits, samplings, [0.5] * rows, [None] * rows)
    assert big.made == 1


def test_rows_sampled_in_slices_match_rows_sampled_at_once(monkeypatch):
    rng = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(9, 8, generator=rng), torch.randn(50, 8, generator=rng)
    samplings = [Sampling(1, 0.8)] * 9
    uniforms = np.random.default_rng(0).random(9).tolist()
    forced = [None, 3] * 4 + [None]
    calls = []

    def logits_of(part):
        calls.append(len(part))
        return part.as_subclass(torch.Tensor) @ head.T

    def sample(states):
        calls.clear()
        return turnrl_slots.sampling.sample(logits_of, states, samplings, uniforms, forced)

    whole = sample(hidden)
    assert calls == [9]

    class Far(torch.Tensor):
        """Hidden states that say they are not on a CPU."""

        device = torch.device("cuda")

    monkeypatch.setattr(turnrl_slots.sampling, "ROWS", 4)
    tokens, logprobs = sample(hidden.as_subclass(Far))
    assert calls == [4, 4, 1]
    assert tokens == whole[0]
    assert logprobs == pytest.approx(whole[1], abs=1e-6)


def test_arrays_of_several_types_survive_being_packed_for_one_copy():
    arrays = [
        np.array([[1, -2, 3]], np.int32),
        np.array([0.25, 1e-30], np.float32),
        np.zeros(0, np.int32),
        np.array([7], np.int32),
    ]
    packed = turnrl_slots.transfer.pack(arrays, torch.device("cpu"))
    for array, tensor in zip(arrays, packed, strict=True):
        assert np.array_equal(array, tensor.numpy())
        assert array.dtype == tensor.numpy().dtype
        assert tensor.storage_offset() % 4 == 0
    tokens, logprobs = torch.tensor([5, 151_000]), torch.tensor([-0.1, -1e-20])
    assert turnrl_slots.transfer.download(tokens, logprobs) == ([5, 151_000], logprobs.tolist())


# ------------------------------------------------------------------- on a GPU


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("parts", [1, 8, None])
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_triton_kernel_attends_on_a_gpu(dtype, size, parts):
    import turnrl_slots.triton_pages
    from triton_script import gap

    used = [1, 31, 32, 33, 64, 65, 700, 2048, *range(100, 164)]
    for heads in ((28, 4), (4, 4)):
        largest = gap(turnrl_slots.triton_pages, *heads, size, dtype, parts, used, "cuda")
        assert largest < 0.02  # of weighed sums of numbers near 1, rounded to half precision
        assert gap(turnrl_slots.triton_pages, *heads, size, dtype, parts, [3], "cuda") < 0.02
