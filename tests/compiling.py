"""The engine's Triton kernels, compiled for cards that are not there: `ptxas` needs no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from turnrl_slots import triton_pages

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
