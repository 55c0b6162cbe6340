"""The bench: a model with random weights, its policies, and trajectories to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from turnrl_bench.gpu import device, floors
from turnrl_bench.gpu.floors import Network, Work, model_bytes
from turnrl_bench.gpu.results import Found, Results
from turnrl_bench.gpu.shapes import RANK, SMALL, WHOLE
from turnrl_bench.task import Shape, Task, make
from turnrl_doctor import plan

if TYPE_CHECKING:  # seconds of importing, which the first part does not need
    from turnrl import Policy, Trajectory

Kind = Literal["nf4", "dense"]
"""Weights of a policy's base: 4 bits, or 16 (32 on a CPU). Each has an adapter."""


class Bench:
    """Makes what the parts need when one needs it first, and keeps it.

    Args:
        folder: For the models.
        tiny: A small shape.
        results: What was measured so far.
    """

    def __init__(self, folder: Path, tiny: bool, results: Results) -> None:
        self.folder, self.tiny, self.results = folder, tiny, results
        self.model = folder / "model"
        """The folder of the model, which `task` makes."""
        self.setting = SMALL if tiny else WHOLE
        self.device = device.device()
        self.on_gpu = self.device.type == "cuda"
        self.net = Network(self.setting.network, size=2 if self.on_gpu else 4, rank=RANK)
        self._policies: dict[Kind, Policy] = {}
        self._played: list[Trajectory] = []

    def task(self) -> Task:
        """The questions and the script. The first call also makes the model."""
        return self.made(self.model, self.setting.network, self.setting.shape)

    def made(self, folder: Path, network: plan.Shape, shape: Shape) -> Task:
        """A task and a model with random weights, drawn on the device."""
        if not (folder / "task.json").exists():  # written last: a model that was cut off has none
            dtype = "bfloat16" if self.on_gpu else "float32"
            make(folder, shape, network=network, device=str(self.device), dtype=dtype)
            device.free()
        return Task.read(folder)

    def policy(self, kind: Kind) -> Policy:
        """A policy on the device, loaded as Lightning does: inside its device's context."""
        from turnrl_bench.agent import policy_of

        if kind not in self._policies:
            self.task()
            # a 16-bit base beside one in 4 bits, and room to sample, take some 40 GB at most
            room = device.free_bytes()
            if room is not None and room < 3 * model_bytes(self.net):
                self.drop()
            options = {"quantization": "nf4"} if kind == "nf4" else {}
            policy = policy_of(str(self.model), RANK, **options)
            with self.device:
                policy.load(self.device)
            self._policies[kind] = policy.to(self.device)
        policy = self._policies[kind]
        if next(policy.parameters()).device != self.device:  # Lightning leaves it on the CPU
            policy.to(self.device)
        return policy

    def keep(self, kind: Kind, policy: Policy, played: Sequence[Trajectory]) -> None:
        """Take a policy that somebody else has loaded, and the task's trajectories."""
        self._policies[kind], self._played = policy, list(played)

    def drop(self) -> None:
        """Let all policies go."""
        self._policies.clear()
        device.free()

    def played(self) -> list[Trajectory]:
        """The trajectories of the task, from the script, without an engine."""
        from turnrl_bench.agent import played

        if not self._played:
            self._played = played(str(self.model), self.policy("nf4"))
        return self._played

    def floor(self, *works: Work) -> float | None:
        """The floor of some work by the ceilings of part `machine`. None without these."""
        copy, matmul = (self.results.case("machine", name) for name in ("copy", "matmul"))
        return floors.seconds(works, copy["rate"], matmul["rate"]) if copy and matmul else None

    def against(self, seconds: float, works: list[Work]) -> Found:
        """A time beside its floor."""
        floor = self.floor(*works)
        return {"floor_s": floor, "ratio": None if floor is None else seconds / floor}
