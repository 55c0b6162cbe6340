"""Checks of `turnrl doctor`. Each examines one thing, reports it, and names the next step."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from huggingface_hub import constants, get_session, hf_hub_url, try_to_load_from_cache
from packaging.requirements import Requirement
from safetensors import SafetensorError, safe_open

from turnrl import MTGRPO, Check, Finding, RecipeError
from turnrl.plugin.text import counted
from turnrl.policy.sizes import sizes_of
from turnrl.runs.claim import writable_part
from turnrl.testing import check_turns
from turnrl.types import Start, Status
from turnrl_doctor.command import of_error
from turnrl_doctor.memory import work_of
from turnrl_doctor.plan import gigabytes

_SHOWN = ("torch", "lightning", "transformers", "peft", "bitsandbytes")
_DRIVER = Path("/proc/driver/nvidia/version")


_TEXTS = 200
"""Random texts that a turn scheme has to read."""


def driver_version() -> str | None:
    """Version of the GPU's driver, such as 580.159.04; None if the system does not report it."""
    words = _DRIVER.read_text("utf-8").partition("\n")[0].split() if _DRIVER.exists() else []
    return next((word for word in words if word[:1].isdigit()), None)


def recipe_of(start: Start) -> MTGRPO | None:
    """The recipe's module, if it is one that the checks know."""
    return start.module if isinstance(start.module, MTGRPO) else None


class Versions(Check):
    """Installed libraries against the versions that turnrl was tried with."""

    def run(self, start: Start) -> Iterable[Finding]:
        untried, tried = [], []
        missing = False
        for line in importlib.metadata.requires("turnrl") or ():
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            requirement = f"{wanted.name}{wanted.specifier}"
            try:
                version = importlib.metadata.version(wanted.name)
            except importlib.metadata.PackageNotFoundError:
                missing = True
                text = f"{wanted.name} is not installed; turnrl needs {requirement}"
                yield Finding("fail", "versions", text, f"pip install '{requirement}'", "machine")
                continue
            if not wanted.specifier.contains(version, prereleases=True):
                untried.append(f"{wanted.name} {version}")
                tried.append(f"'{requirement}'")
        if untried:
            text = f"turnrl was not tried with {', '.join(untried)}"
            advice = f"If something fails, run pip install {' '.join(tried)}"
            yield Finding("warn", "versions", text, advice)
        elif not missing:
            shown = (f"{name} {importlib.metadata.version(name)}" for name in _SHOWN)
            yield Finding("pass", "versions", ", ".join(shown))


class Gpu(Check):
    """The GPU that a run would use: its driver, its compute capability, its free memory."""

    def run(self, start: Start) -> Iterable[Finding]:
        if start.device.type == "cuda":
            yield from self._examine(start)
        elif torch.cuda.is_available():
            name = torch.cuda.get_device_name(0)
            text = f"there is {name}, but the run is on the CPU (trainer.accelerator)"
            yield Finding("warn", "GPU", text, "Leave trainer.accelerator out, or set it to auto.")
        else:
            yield self._none(start)

    def _none(self, start: Start) -> Finding:
        module = recipe_of(start)
        unseen = "so driver, kernels, graphs and a GPU's attention are not examined"
        if _DRIVER.exists() and torch.version.cuda is None:
            text = f"there is a driver, but torch {torch.__version__} is a build for CPUs"
            return Finding("fail", "GPU", text, "Install a CUDA build of torch.", "machine")
        if module is not None and module.policy.settings.quantization == "none":
            return Finding("pass", "GPU", f"none; the run is on the CPU, {unseen}")
        advice = "Run the doctor on the machine with the GPU; --card 24GB plans its memory here."
        return Finding("warn", "GPU", f"none on this machine, {unseen}", advice)

    def _examine(self, start: Start) -> Iterator[Finding]:
        device, module = start.device, recipe_of(start)
        card = torch.cuda.get_device_properties(device)
        capability = f"{card.major}.{card.minor}"
        driver = f"driver {driver_version() or 'not known'}"
        free, total = torch.cuda.mem_get_info(device)
        size = f"{gigabytes(free)} of {gigabytes(total)} GB free"
        seen = f"{card.name}, {driver}, CUDA {torch.version.cuda}, capability {capability}, {size}"
        half = module is not None and module.policy.files.dtype_on("cuda") == torch.bfloat16
        if half and card.major < 8:
            advice = "Set model.policy.dtype to float32, or use a card from Ampere on."
            text = f"{card.name} has compute capability {capability}; bfloat16 needs 8.0"
            yield Finding("fail", "GPU", text, advice, "machine")
        elif free < 0.9 * total:
            advice = "End the other process (nvidia-smi names it), or the plan has less memory."
            yield Finding("warn", "GPU", seen, advice)
        else:
            yield Finding("pass", "GPU", seen)


class FourBit(Check):
    """bitsandbytes' kernels, tried in a small 4-bit layer on the device that the run would use."""

    quick = False

    def run(self, start: Start) -> Iterable[Finding]:
        module = recipe_of(start)
        if module is not None and module.policy.settings.quantization != "nf4":
            return
        from bitsandbytes.nn.modules import Linear4bit

        where = start.device
        half = torch.bfloat16 if where.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)
        plain = torch.nn.Linear(128, 64, bias=False)
        with torch.no_grad():
            plain.weight.copy_(torch.randn(64, 128, generator=generator) / 8)
        layer = Linear4bit(  # type: ignore[no-untyped-call]
            128, 64, bias=False, compute_dtype=half, compress_statistics=True, quant_type="nf4"
        )
        layer.load_state_dict(plain.state_dict())
        layer.to(where)
        gap = 0.0
        with torch.no_grad():
            for rows in (1, 200):  # one row has a kernel of its own
                x = torch.randn(rows, 128, generator=generator)
                wanted, computed = plain(x), layer(x.to(where, half)).float().cpu()
                gap = max(gap, float((computed - wanted).norm() / wanted.norm()))
        version = importlib.metadata.version("bitsandbytes")
        if not gap < 0.2:  # 4 bits alone make about 0.1
            text = f"bitsandbytes {version} on {where}: a 4-bit product is off by {gap:.2g}"
            advice = "Install another version of bitsandbytes, or set quantization to none."
            yield Finding("fail", "4 bit", text, advice, "machine")
        else:
            text = f"bitsandbytes {version} quantises and multiplies on {where}"
            yield Finding("pass", "4 bit", text)


class RunFolder(Check):
    """Check that the run may write to its folder."""

    def run(self, start: Start) -> Iterable[Finding]:
        if start.folder is not None:
            try:
                writable_part(start.folder)
            except RecipeError as error:
                yield of_error("run folder", error, about="machine")
            else:
                yield Finding("pass", "run folder", f"{start.folder} can be written")


_RECORD = 30_000
"""Approximate bytes of a trajectory in the record: its text, ids and results, compressed."""


class Disk(Check):
    """Room for checkpoints and for the record."""

    def run(self, start: Start) -> Iterable[Finding]:
        module = recipe_of(start)
        if start.folder is None or module is None:
            return
        try:
            work, folder = work_of(start), writable_part(start.folder)
        except (LookupError, RecipeError):  # of a model or a folder; other checks report it
            return
        # three checkpoints of weights and optimiser state (the last, its successor, the best), and
        # the exported policy
        checkpoint = int(4 * work.trained * (1 + work.moments))
        iterations = start.iterations or -1
        iterations = iterations if iterations > 0 else 100
        recorded = work.trajectories if start.recorded is None else start.recorded
        record = _RECORD * recorded * iterations
        needed = 3 * checkpoint + 4 * work.trained + record
        free = shutil.disk_usage(folder).free
        text = (
            f"{gigabytes(free)} GB free, about {gigabytes(needed)} needed: checkpoints of "
            f"{gigabytes(checkpoint)} GB, the record after iteration {iterations} "
            f"{gigabytes(record)}"
        )
        advice = "Free disk space, or set trainer.logger.init_args.save_dir to a larger disk."
        status: Status = "fail" if free < needed else "warn" if free < 2 * needed else "pass"
        yield Finding(status, "disk", text, "" if status == "pass" else advice, "machine")


class ModelFiles(Check):
    """The model's files, without loading them: a whole folder, or the hub's cache."""

    quick = False

    def run(self, start: Start) -> Iterable[Finding]:
        if (module := recipe_of(start)) is None:
            return
        name, revision = module.policy.folder, module.policy.files.origin.revision
        folder = Path(name)
        if is_folder := folder.is_dir():
            name = folder.name
        elif isinstance(
            cached := try_to_load_from_cache(name, "config.json", revision=revision), str
        ):
            folder = Path(cached).parent
        files, lacks = weights_in(folder)
        if lacks and not is_folder:
            yield self._hub(name, revision)
            return
        try:
            for file in files:
                if not lacks and file.suffix == ".safetensors":
                    with safe_open(file, "pt"):  # compares its header with its size
                        pass
        except (SafetensorError, OSError) as error:
            lacks = f"has a broken file, {file}: {error}"
        if lacks:
            advice = "Copy the model's folder again, whole."
            yield Finding("fail", "model", f"{folder} {lacks}", advice, "machine")
        else:
            try:
                module.policy.files.check_files()
            except RecipeError as error:
                yield of_error("model", error)
                return
            size = gigabytes(sum(file.stat().st_size for file in files))
            text = f"{name}: {counted(len(files), 'file')} of weights, {size} GB, complete"
            yield Finding("pass", "model", text)

    def _hub(self, name: str, revision: str | None) -> Finding:
        advice = "Run once with the hub in reach, or set model.policy.model to a folder."
        if constants.HF_HUB_OFFLINE:
            text = f"{name} is not in the cache, and the hub is switched off or out of reach"
            return Finding("fail", "model", text, advice, "machine")
        try:
            answer = get_session().head(
                hf_hub_url(name, "config.json", revision=revision), timeout=5
            )
        except Exception as error:  # whatever its transport raises
            text = f"{name} is not cached, the hub not in reach ({type(error).__name__})"
            return Finding("fail", "model", text, advice, "machine")
        if answer.status_code >= 400:
            text = f"{name} is not in the cache, and the hub answers {answer.status_code}"
            advice = "Check model.policy.model, and your access (hf auth login)."
            return Finding("fail", "model", text, advice, "machine")
        return Finding("pass", "model", f"{name} is on the hub, and will be downloaded")


def weights_in(folder: Path) -> tuple[list[Path], str]:
    """The files of a model's weights, and the fault of its folder in words; empty without one."""
    if not (folder / "config.json").is_file():
        return [], "has no config.json"
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = [*sorted(folder.glob("*model*.safetensors")), *sorted(folder.glob("*model*.bin"))]
        return files, "" if files else "has no model.safetensors"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    files = [folder / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    lacks = (
        f"lacks {len(missing)} of {len(names)} files of weights: {missing[0]}" if missing else ""
    )
    return files, lacks


class Window(Check):
    """The length of trajectories against the model's positions."""

    quick = False

    def run(self, start: Start) -> Iterable[Finding]:
        if (module := recipe_of(start)) is None:
            return
        policy, tokens = module.policy, module.rollout.max_tokens
        policy.files.check(tokens)
        positions = sizes_of(policy.config).positions
        limit = f"positions for {positions}" if positions else "no limit in its configuration"
        yield Finding("pass", "window", f"max_tokens {tokens}, {limit}")


class Sampler(Check):
    """Everything that the engine can check before weights load: a window, its servers, its
    packages."""

    quick = False

    def run(self, start: Start) -> Iterable[Finding]:
        if (module := recipe_of(start)) is None:
            return
        engine = module.engine
        module.collector.check_engine(start.surroundings, start.learns)
        servers = engine.in_force.get("sampler", "")
        text = f"{engine.name} can sample this model"
        yield Finding("pass", "sampler", f"{text} ({servers})" if servers else text)


class Template(Check):
    """The chat template, with the segmenter's messages."""

    quick = False

    def run(self, start: Start) -> Iterable[Finding]:
        if (module := recipe_of(start)) is None:
            return
        # the rehearsal reports each tool in a line of its own
        module.rollout.check(module.chat, tools=False)
        rollout, name = module.rollout, module.rollout.driver.name
        yield Finding("pass", "chat template", f"takes the messages of {name}")
        if rollout.segmenter is not None:
            try:
                check_turns(copy.deepcopy(rollout.segmenter), [[*rollout.specs]], _TEXTS)
            except AssertionError as breach:
                text = " ".join(str(breach).split())
                text = text if len(text) < 400 else f"{text[:150]} ... {text[-240:]}"
                step = f"Fix {name}; turnrl.testing.check_segmenter shows the rule and its input."
                yield Finding("fail", "turn scheme", text, step)


class Rehearsal(Check):
    """The recipe, run on a small scale: real questions, the recipe's tools, rewards, estimator and
    engine, and a miniature of its model (two layers of its kind, with random weights). It writes
    nothing, keeps nothing that it trains, and leaves random states as they were."""

    quick = False

    def run(self, start: Start) -> Iterable[Finding]:
        from turnrl_doctor.rehearsal import rehearse  # which a run does not need

        return rehearse(start)
