"""Two processes of one run, however they are started: the metrics are the same."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nodes import free_port

pytestmark = pytest.mark.slow
FIT = ["-m", "turnrl", "fit", "quickstart", "small.yaml", "--trainer.strategy", "ddp"]
TWO_NODES = ["--trainer.num_nodes", "2", "--trainer.devices", "1"]


def ran(folder: Path, commands: list[list[str]], more: list[dict[str, str]]) -> list[dict]:
    """Start commands at the same time; rows of the metrics of the run that they are."""
    folder.mkdir()
    small = {
        "model": {"group_size": 4},
        "data": {"questions_per_iteration": 4, "val_limit": 8},
        "trainer": {"max_epochs": 2, "check_val_every_n_epoch": 1, "callbacks": []},
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(small))
    processes = [
        subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, variables in zip(commands, more, strict=True)
    ]
    for process in processes:
        printed = process.communicate(timeout=300)[0]
        assert process.returncode == 0, printed
    (file,) = folder.glob("runs/small/version_*/metrics.csv")
    with file.open() as rows:
        return list(csv.DictReader(rows))


def test_devices_torchrun_and_slurm_are_the_same_run(tmp_path):
    devices = ran(tmp_path / "devices", [[sys.executable, *FIT, "--trainer.devices", "2"]], [{}])
    port = str(free_port())
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"),
        *("--master_addr", "127.0.0.1", "--master_port", port),
    ]
    nodes = ran(
        tmp_path / "torchrun",
        [[*torchrun, "--node_rank", str(rank), *FIT, *TWO_NODES] for rank in range(2)],
        [{}, {}],
    )
    slurm = {
        "SLURM_JOB_ID": str(10_000 + os.getpid() % 10_000),
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_LOCALID": "0",
    }
    numbers = [{"SLURM_NODEID": str(rank), "SLURM_PROCID": str(rank)} for rank in range(2)]
    tasks = ran(
        tmp_path / "slurm",
        [[sys.executable, *FIT, *TWO_NODES]] * 2,
        [slurm | number for number in numbers],
    )
    clock = ("seconds", "per_s", "memory")
    for rows in (nodes, tasks):
        assert len(rows) == len(devices) > 2
        for wanted, row in zip(devices, rows, strict=True):
            assert wanted.keys() == row.keys()
            apart = {name for name in row if wanted[name] != row[name]}
            assert [name for name in apart if not any(word in name for word in clock)] == []
