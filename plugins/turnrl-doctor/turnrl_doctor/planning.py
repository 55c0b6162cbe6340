"""The memory plan of a recipe: its card, its work, and the settings that the plan chooses."""

from __future__ import annotations

from dataclasses import replace

import torch
from lightning.pytorch.utilities import rank_zero_only

from turnrl import MTGRPO, Policy
from turnrl.engines import EngineSettings
from turnrl.plugin.errors import parse_bytes
from turnrl.types import Start
from turnrl_doctor.counts import CONTEXT
from turnrl_doctor.plan import Card, CostedChoice, choose, table
from turnrl_doctor.work import Work, read_decoder
from turnrl_slots import Slots


def find_card(device: torch.device, memory: str) -> Card | None:
    """The card to plan for: a card of the size in `memory`, or the present GPU; None if the run
    has no GPU.

    Raises:
        RecipeError: If `memory` is neither `auto` nor a size.
    """
    if memory != "auto":
        return Card(memory, parse_bytes(memory, "model.gpu_memory"))
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    free, _ = torch.cuda.mem_get_info(device)
    # a context is there by now; the plan counts it as its own
    reserved = torch.cuda.memory_reserved(device)
    size = min(properties.total_memory, free + reserved + CONTEXT)
    return Card(properties.name, size)


def work_of(start: Start) -> Work:
    """A recipe's part of the plan, without its weights.

    Raises:
        LookupError: If the plan does not know the recipe's kind.
        RecipeError: If the model's configuration cannot be loaded.
    """
    module = start.module
    if not isinstance(module, MTGRPO):
        raise LookupError(f"{type(module).__name__} is not MTGRPO")
    if start.divided:
        raise LookupError("processes that share one policy are not planned")
    policy, rollout, estimator = module.policy, module.rollout, module.estimator
    lora, turns = policy.lora, rollout.max_turns
    trajectories = -(-start.questions // start.processes) * module.group_size
    half = policy.files.dtype_on("cuda") == torch.bfloat16
    targets = None
    if lora is not None and lora.target_modules != "all-linear":
        modules = lora.target_modules
        targets = (modules,) if isinstance(modules, str) else tuple(modules)
    return Work(
        shape=read_decoder(policy.config),
        four_bit=policy.settings.quantization == "nf4",
        # without an adapter weights are always float32, and activations are planned as float32,
        # which is more than mixed precision takes
        size=2 if half and lora is not None else 4,
        rank=0 if lora is None else lora.r,
        targets=targets,
        trajectories=trajectories * (1 + estimator.probes * turns),
        max_tokens=rollout.max_tokens,
        turn_tokens=rollout.max_turn_tokens,
        turns=turns,
        result_tokens=min(rollout.max_result_tokens, rollout.max_tokens),
        moments=_moments(module),
        processes=start.processes,
        mixed=half and lora is None,
        sampled=isinstance(module.engine_settings, Slots),
    )


def _moments(module: MTGRPO) -> float:
    """Numbers in float32 that the recipe's optimiser keeps per weight, tried on a small matrix."""
    weights = torch.nn.Parameter(torch.zeros(64, 64))
    weights.grad = torch.zeros_like(weights)
    try:
        optimizer = module.optimizer([weights])
        optimizer.step()
        state = [t for t in optimizer.state[weights].values() if isinstance(t, torch.Tensor)]
    except Exception:  # of any library; a run will report it. Adam keeps the usual two
        return 2.0
    return round(sum(t.numel() * t.element_size() for t in state) / (weights.numel() * 4), 2)


def given_settings(module: MTGRPO, work: Work) -> dict[str, object]:
    """The settings that the recipe gives, in the units of the plan's `Choice`."""
    policy, engine = module.policy.settings, module.engine_settings
    recomputed = policy.gradient_checkpointing
    if recomputed is None and module.policy.network is not None:
        recomputed = False  # loading has made that choice
    settings: dict[str, object] = {"minibatch_tokens": policy.minibatch_tokens}
    if recomputed is not None:
        layers = work.shape.layers
        settings["gradient_checkpointing"] = (
            layers if recomputed is True else min(int(recomputed), layers)
        )
    if isinstance(engine, Slots):
        names = ("slots", "prefill_tokens", "decode_weights")
        settings |= {name: getattr(engine, name) for name in names}
        settings["kv_memory"] = engine.kv_bytes
    return {name: value for name, value in settings.items() if value not in (None, "auto")}


def complete_policy(plan: CostedChoice, settings: Policy) -> Policy:
    """A policy's settings, with the plan's choices for those that are left open."""
    chosen, layers = plan.choice.gradient_checkpointing, plan.work.shape.layers
    recomputed: bool | int = {0: False, layers: True}.get(chosen, chosen)
    if settings.minibatch_tokens is None:
        settings = replace(settings, minibatch_tokens=plan.choice.minibatch_tokens)
    if settings.gradient_checkpointing is None:
        settings = replace(settings, gradient_checkpointing=recomputed)
    return settings


def complete_engine(plan: CostedChoice, settings: EngineSettings) -> EngineSettings:
    """An engine's settings, with the plan's choices for those that are left open."""
    if not isinstance(settings, Slots):
        return settings
    choice, given = plan.choice, plan.given
    memory = settings.kv_memory if "kv_memory" in given else f"{choice.kv_memory // 1000}KB"
    return replace(
        settings,
        slots=choice.slots,
        prefill_tokens=choice.prefill_tokens,
        kv_memory=memory,
        decode_weights=choice.decode_weights,
    )


def plan_run(start: Start, module: MTGRPO) -> CostedChoice | None:
    """Plan the memory of a run, give its module the settings that the plan chooses, and print the
    plan if the run learns. None if there is no card to plan for.

    Raises:
        LookupError: If the plan does not know the recipe's kind.
        RecipeError: If nothing fits the card.
    """
    if start.gpu_memory is None or not (card := find_card(start.device, start.gpu_memory)):
        return None
    work, beside = work_of(start), module.engine.server_memory(card.bytes)
    if beside is not None and module.max_staleness:  # it samples while the policy learns
        beside = beside._replace(learning=beside.sampling)
    work = replace(work, beside=beside)
    plan = choose(work, card, given_settings(module, work))
    phases = ("sampling", "learning") if work.sampled else ("learning",)
    module.use_settings(
        complete_policy(plan, module.policy.settings),
        complete_engine(plan, module.engine_settings),
        {phase: (plan.total(phase), plan.setting(phase)) for phase in phases},
    )
    if start.learns:
        rank_zero_only(print)(table(plan), flush=True)
    return plan
