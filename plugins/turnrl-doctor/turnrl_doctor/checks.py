"""Checks of `turnrl doctor`. Each looks at one thing, reports it, and names the next step."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from huggingface_hub import file_exists, try_to_load_from_cache
from packaging.requirements import Requirement
from safetensors import SafetensorError, safe_open

from turnrl import MTGRPO, Check, Finding, RecipeError
from turnrl.plugin.errors import summarize_error
from turnrl.plugin.text import format_gigabytes
from turnrl.policy.sizes import read_sizes
from turnrl.runs.claim import find_writable
from turnrl.types import Start, Status

_DRIVER = Path("/proc/driver/nvidia/version")
_TEXTS = 200
"""Random texts that a segmenter has to read."""


class RecipeCheck(Check):
    """A check of a recipe's parts, which says nothing if there is no recipe."""

    def run(self, start: Start) -> Iterable[Finding]:
        if isinstance(start.module, MTGRPO):
            yield from self.examine(start, start.module)

    @abstractmethod
    def examine(self, start: Start, module: MTGRPO) -> Iterator[Finding]:
        """Examine the recipe's parts."""


class Versions(Check):
    """Installed libraries against the versions that turnrl was tried with."""

    def run(self, start: Start) -> Iterable[Finding]:
        untried, advice = [], []
        for line in importlib.metadata.requires("turnrl") or ():
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            version = _version(wanted.name)
            if version is None or not wanted.specifier.contains(version, prereleases=True):
                untried.append(f"{wanted.name} {version or '(not installed)'}")
                advice.append(f"'{wanted.name}{wanted.specifier}'")
        if untried:
            text = f"turnrl was not tried with {', '.join(untried)}"
            step = f"If something fails, run pip install {' '.join(advice)}"
            yield Finding("warn", "versions", text, step)
        else:
            yield Finding("pass", "versions", f"torch {torch.__version__}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


class Gpu(Check):
    """The GPU that a run would use: its compute capability and its free memory."""

    def run(self, start: Start) -> Iterable[Finding]:
        if start.device.type == "cuda":
            yield self._present(start)
        elif torch.cuda.is_available():
            name = torch.cuda.get_device_name(0)
            text = f"there is {name}, but the run is on the CPU (trainer.accelerator)"
            yield Finding("warn", "GPU", text, "Leave trainer.accelerator out, or set it to auto.")
        elif _DRIVER.exists() and torch.version.cuda is None:
            text = f"there is a driver, but torch {torch.__version__} is a build for CPUs"
            yield Finding("fail", "GPU", text, "Install a CUDA build of torch.")
        else:
            yield Finding("pass", "GPU", "none on this machine; a GPU's kernels are not tried")

    def _present(self, start: Start) -> Finding:
        card = torch.cuda.get_device_properties(start.device)
        free, total = torch.cuda.mem_get_info(start.device)
        module = start.module
        half = isinstance(module, MTGRPO) and module.policy.files.dtype_on("cuda")
        if half == torch.bfloat16 and card.major < 8:
            text = f"{card.name} has compute capability {card.major}.{card.minor}; bfloat16 needs 8"
            advice = "Set model.policy.dtype to float32, or use a card from Ampere on."
            return Finding("fail", "GPU", text, advice)
        text = f"{card.name}, {format_gigabytes(free)} of {format_gigabytes(total)} GB free"
        if free < 0.9 * total:
            advice = "End the other process (nvidia-smi names it), or the plan has less memory."
            return Finding("warn", "GPU", text, advice)
        return Finding("pass", "GPU", text)


class RunFolder(Check):
    """Check that the run may write to its folder."""

    def run(self, start: Start) -> Iterable[Finding]:
        if start.folder is not None:
            find_writable(start.folder)
            yield Finding("pass", "run folder", str(start.folder))


_RECORD = 30_000
"""Approximate bytes of a trajectory in the record: its text, ids and results, compressed."""


class Disk(RecipeCheck):
    """Room for checkpoints and for the record."""

    quick = False

    def examine(self, start: Start, module: MTGRPO) -> Iterator[Finding]:
        from turnrl_doctor.planning import work_of

        if start.folder is None:
            return
        try:
            work, folder = work_of(start), find_writable(start.folder)
        except (LookupError, RecipeError):  # of a model or a folder; other checks report it
            return
        # three checkpoints of weights and optimiser state (the last, its successor, the best), and
        # the exported policy
        checkpoints = int(4 * work.trained_weights * (1 + 3 * (1 + work.moments)))
        iterations = start.iterations if start.iterations and start.iterations > 0 else 100
        recorded = work.trajectories if start.recorded is None else start.recorded
        record = _RECORD * recorded * iterations
        needed, free = checkpoints + record, shutil.disk_usage(folder).free
        text = (
            f"{format_gigabytes(free)} GB free; checkpoints need about "
            f"{format_gigabytes(checkpoints)} GB, and "
            f"the record {format_gigabytes(record)} GB by iteration {iterations}"
        )
        advice = "Free disk space, or set trainer.logger.init_args.save_dir to a larger disk."
        status: Status = "fail" if free < needed else "warn" if free < 2 * needed else "pass"
        yield Finding(status, "disk", text, "" if status == "pass" else advice)


class ModelFiles(RecipeCheck):
    """The model's files, without loading them: a whole folder, or the hub's cache."""

    quick = False

    def examine(self, start: Start, module: MTGRPO) -> Iterator[Finding]:
        name, revision = module.policy.folder, module.policy.files.origin.revision
        folder = Path(name)
        if not (is_folder := folder.is_dir()):
            cached = try_to_load_from_cache(name, "config.json", revision=revision)
            folder = Path(cached).parent if isinstance(cached, str) else folder
        try:
            size = check_weights(folder)
        except (SafetensorError, OSError) as error:
            if is_folder:
                text = f"{folder} is not a whole model: {error}"
                yield Finding("fail", "model files", text, "Copy the model's folder again, whole.")
            else:
                yield self._on_hub(name, revision)
        else:
            yield Finding("pass", "model files", f"{format_gigabytes(size)} GB of weights")

    def _on_hub(self, name: str, revision: str | None) -> Finding:
        why = "it has no config.json there"
        try:
            if file_exists(name, "config.json", revision=revision):
                return Finding("pass", "model files", f"{name} is on the hub, to be downloaded")
        except Exception as error:  # of its transport, or because access is restricted
            why = summarize_error(error)
        text = f"{name} is not in the hub's cache, and cannot be downloaded: {why}"
        advice = "Check model.policy.model, your network, and your access (hf auth login)."
        return Finding("fail", "model files", text, advice)


def check_weights(folder: Path) -> int:
    """The bytes of a model's weights on disk.

    Raises:
        OSError: If a file is missing.
        SafetensorError: If a file is cut short.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    else:
        files = [*folder.glob("*model*.safetensors"), *folder.glob("*model*.bin")]
    if not files:
        raise FileNotFoundError("it has no model.safetensors")
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt"):  # compares its header with its size
                pass
    return sum(file.stat().st_size for file in [folder / "config.json", *files])


class Window(RecipeCheck):
    """The length of trajectories against the model's positions."""

    quick = False

    def examine(self, start: Start, module: MTGRPO) -> Iterator[Finding]:
        tokens = module.rollout.max_tokens
        module.policy.files.check(tokens)
        positions = read_sizes(module.policy.config).positions
        yield Finding("pass", "window", f"{tokens} of {positions or 'any number of'} positions")


class Sampler(RecipeCheck):
    """Everything that the engine can check before weights load: a window, its servers, its
    packages."""

    quick = False

    def examine(self, start: Start, module: MTGRPO) -> Iterator[Finding]:
        module.collector.check_engine(start.surroundings, start.learns)
        yield Finding(
            "pass", "sampler", module.engine.active_choices.get("sampler", module.engine.name)
        )


class ChatTemplate(RecipeCheck):
    """The chat template, with the segmenter's messages."""

    quick = False

    def examine(self, start: Start, module: MTGRPO) -> Iterator[Finding]:
        rollout, name = module.rollout, module.rollout.loop.name
        rollout.check(module.chat, tools=False)  # the rehearsal tries the tools
        yield Finding("pass", "chat template", f"takes the messages of {name}")
        if rollout.segmenter is None:
            return
        from turnrl.testing import check_turns

        try:
            check_turns(copy.deepcopy(rollout.segmenter), [[*rollout.specs]], _TEXTS)
        except AssertionError as breach:
            text = " ".join(str(breach).split())
            text = text if len(text) < 400 else f"{text[:150]} ... {text[-240:]}"
            step = f"Fix {name}; turnrl.testing.check_segmenter shows the rule and its input."
            yield Finding("fail", "segmenter", text, step)


class Rehearsal(RecipeCheck):
    """The recipe, run on a small scale: real questions, the recipe's tools, rewards, estimator and
    engine, and a miniature of its model (two layers of its kind, with random weights). It writes
    nothing, keeps nothing that it trains, and leaves random states as they were."""

    quick = False

    def examine(self, start: Start, module: MTGRPO) -> Iterator[Finding]:
        from turnrl_doctor.rehearsal import rehearse  # which a run does not need

        return rehearse(start, module)
