"""One of two CPU processes that load a policy and divide it: what each has of its own memory
meanwhile. Run by test_division.py.

    python dividing_script.py RANK FOLDER
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import peft  # noqa: F401  as all imports, before the count begins
import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from turnrl import Policy
from turnrl.policy import sharding
from turnrl.policy.settings import Lora


def own_bytes() -> int:
    """Memory of this process that is neither shared nor a file's."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)[0]) * 1024


def main(rank: str, folder: str) -> None:
    """Load, and write down what was held."""
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", store, rank=int(rank), world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    policy, held = Policy(folder, lora=Lora(r=4), dtype="bfloat16").build(), list[int]()
    policy.__dict__["tokenizer"] = None
    fsdp.fully_shard(torch.nn.Linear(2, 2), mesh=mesh)  # libraries have their memory from here on
    before = own_bytes()

    def watched(part: torch.nn.Module, **options: object) -> None:
        held.append(own_bytes() - before)
        fsdp.fully_shard(part, **options)

    sharding.fully_shard = watched
    policy.load("cpu", mesh)
    parts = [p.to_local() for p in policy.parameters() if not p.requires_grad]
    account = {
        "most": max(held),
        "parts": sum(part.numel() * part.element_size() for part in parts),
        "dtypes": sorted({str(part.dtype) for part in parts}),
        "way": policy.active_choices["attention while learning"],
    }
    Path(folder, f"told-{rank}.json").write_text(json.dumps(account))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
