"""The bench: a model with random weights, its policies, and trajectories to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from turnrl_bench.gpu import device, floors
from turnrl_bench.gpu.floors import Cost
from turnrl_bench.gpu.parts import RANK, SMALL, WHOLE
from turnrl_bench.gpu.results import Found, Results
from turnrl_bench.task import make
from turnrl_doctor.work import Work

if TYPE_CHECKING:  # seconds of importing, which a process that fails or measures the machine saves
    from turnrl import Policy, Trajectory

Kind = Literal["nf4", "dense"]
"""Weights of a policy's base: 4 bits, or 16 (32 on a CPU). Each has an adapter."""


class Bench:
    """Makes the things that parts need, on first use, and keeps them.

    Args:
        folder: The folder for the model.
        tiny: True for a small shape.
        results: All results so far.
    """

    def __init__(self, folder: Path, tiny: bool, results: Results) -> None:
        self.results = results
        self.setting = SMALL if tiny else WHOLE
        self.device = device.device()
        self.on_gpu = self.device.type == "cuda"
        self.net = Work(self.setting.network, size=2 if self.on_gpu else 4, rank=RANK)
        self._model = folder / "model"
        self._loaded: tuple[Kind, Policy] | None = None
        self._played: list[Trajectory] = []

    @property
    def model(self) -> str:
        """The folder of the model and the task."""
        if not (
            self._model / "task.json"
        ).exists():  # written last, so an unfinished model has none
            dtype = "bfloat16" if self.on_gpu else "float32"
            network, shape = self.setting.network, self.setting.shape
            make(self._model, shape, network=network, device=str(self.device), dtype=dtype)
            device.free()
        return str(self._model)

    def policy(self, kind: Kind) -> Policy:
        """A policy on the device, loaded as Lightning does, inside its device's context. A policy
        of another kind is dropped first."""
        from turnrl_bench.agent import policy_of

        if self._loaded is None or self._loaded[0] != kind:
            self._loaded = None
            device.free()
            policy = policy_of(self.model, RANK, quantization="nf4" if kind == "nf4" else "none")
            with self.device:
                policy.load(self.device)
            self._loaded = kind, policy.to(self.device)
        return self._loaded[1]

    def played(self) -> list[Trajectory]:
        """The trajectories of the task, from the script, without an engine."""
        from turnrl_bench.agent import played

        if not self._played:
            self._played = played(self.model, self.policy("nf4"))
        return self._played

    def floor(self, costs: list[Cost]) -> float | None:
        """The floor of these costs by the rates of part `machine`; None without these rates."""
        copy, matmul = (self.results.case("machine", name) for name in ("copy", "matmul"))
        return floors.seconds(costs, copy["rate"], matmul["rate"]) if copy and matmul else None

    def against(self, seconds: float, costs: list[Cost]) -> Found:
        """A time beside its floor."""
        floor = self.floor(costs)
        return {"floor_s": floor, "ratio": None if floor is None else seconds / floor}
