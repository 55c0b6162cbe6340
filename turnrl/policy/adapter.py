"""A low-rank adapter, and the base that it is added to."""

import contextlib
import copy
import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from turnrl.plugin.errors import RecipeError, summarize_error
from turnrl.policy.compute import adapt_in_place
from turnrl.policy.settings import Lora

_PLAIN = {
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out"),
    *("base_model_name_or_path", "revision", "peft_type", "peft_version", "task_type", "bias"),
    *("auto_mapping", "inference_mode", "runtime_config", "init_lora_weights", "megatron_core"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "qalora_group_size"),
}
"""Settings of peft under which an adapter still computes what `Lora` does, those of its
initialisation included. Any other one that is set makes it another kind of adapter."""
_ADDED = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations of peft that leave the base as it is. Under the others (PiSSA, OLoRA, CorDA,
LoftQ, ...) the adapter is the difference to a changed base."""


def _is_no_remark(record: logging.LogRecord) -> bool:
    """False for a remark of bitsandbytes that a CPU lacks a kernel of the package `kernels`. No
    policy uses that kernel; see `with_adapter`."""
    return "gemm_4bit_forward from kernels-community" not in record.getMessage()


logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_no_remark)


def with_adapter(network: Any, lora: Lora) -> object:
    """The network with a low-rank adapter, and only the adapter trained.

    Args:
        network: The base.
        lora: The adapter's settings.
    Raises:
        RecipeError: If the settings do not fit the model.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        exclude_modules=_unsupported_layers(network) or None,
        task_type="CAUSAL_LM",
    )
    _refuse_unmatched(network, config)
    try:
        # peft uses a name of transformers 5.23 that transformers 6 will drop
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            # not with peft's own preparation of 4-bit layers, which would put norms and head, and
            # so all activations, in float32
            network.requires_grad_(False)
            for layer in network.modules():
                if hasattr(layer, "support_avx512bf16_for_cpu"):  # of bitsandbytes, in 4 bits
                    # it would repack the weights at the first forward pass in eval mode, and from
                    # then on no gradient would pass through them
                    layer.support_avx512bf16_for_cpu = False
            network = get_peft_model(network, config)
    except ValueError as error:
        raise RecipeError(f"model.policy.lora does not fit the model: {error}") from error
    adapt_in_place(network)
    return network


class ExportedAdapter(NamedTuple):
    """An adapter that lies in a folder.

    Args:
        base: The model that it belongs to: a hub name, `package://...`, or a path, which may be
            relative to the folder.
        revision: The base's revision on the hub.
        shape: See `Lora.shape`.
    """

    base: str
    revision: str | None
    shape: dict[str, int]


def read_adapter(folder: Path) -> ExportedAdapter | None:
    """The adapter that was exported into a folder; None if it holds none.

    Raises:
        RecipeError: If it is a kind of adapter other than `Lora`.
    """
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text("utf-8"))
        shape = {"r": config["r"], "alpha": config["lora_alpha"]}
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(
            f"{str(file)!r} is not the configuration of an adapter of peft "
            f"({summarize_error(error)}). "
            "Copy the adapter's folder again, whole."
        ) from error
    odd = [key for key, value in config.items() if value and key not in _PLAIN]
    odd += [] if config.get("init_lora_weights") in _ADDED else ["init_lora_weights"]
    odd += [] if config.get("bias", "none") == "none" else ["bias"]
    odd += [] if config.get("peft_type") == "LORA" else ["peft_type"]
    odd += [] if config.get("task_type") in (None, "CAUSAL_LM") else ["task_type"]
    if odd:
        named = ", ".join(f"{key}: {json.dumps(config.get(key))}" for key in odd)
        raise RecipeError(
            f"the adapter in {str(folder)!r} has {named}, which model.policy.lora "
            "cannot go on with. Merge it into its base, and set model.policy.model to the merged "
            "model."
        )
    base = str(config.get("base_model_name_or_path"))
    return ExportedAdapter(base, config.get("revision"), shape)


def _is_same_weight(base: Tensor | None, weight: Tensor) -> bool:
    if base is None or base.shape != weight.shape:
        return False
    return base.is_meta or torch.equal(base.cpu(), weight.to(base.dtype))


def adapter_digest(folder: Path | None) -> str | None:
    """A digest of the weights of an exported adapter; None without one."""
    if folder is None:
        return None
    files = sorted(folder.glob("adapter_model.*"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def load_adapter_weights(network: nn.Module, folder: Path) -> None:
    """Load the weights of an exported adapter into a network's adapter.

    Raises:
        RecipeError: If they cannot be read, or hold changed weights of the base.
        RuntimeError: If they do not fit.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    try:
        weights = load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # of safetensors, of pickle, or of the hub, if there is no file
        raise RecipeError(
            f"the weights of the adapter in {str(folder)!r} cannot be read "
            f"({summarize_error(error)}). "
            "Copy its folder again, whole, adapter_model.safetensors included."
        ) from error
    own = network.state_dict()
    for name, weight in weights.items():
        # under an adapter of the embeddings or the head, peft saves their base as well
        if ".lora_" not in name and not _is_same_weight(own.get(name), weight):
            raise RecipeError(
                f"the adapter in {str(folder)!r} also holds {name}, and the base has other weights "
                "there. Merge it into its base, and set model.policy.model to the merged model."
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*to a meta parameter in the current model")
        keys: Any = set_peft_model_state_dict(network, weights)
    missing = [name for name in keys.missing_keys if ".lora_" in name]
    if odd := [*keys.unexpected_keys, *missing]:
        raise RuntimeError(f"{odd[0]} is only in one of them")


def start_adapter(network: Any, folder: Path) -> dict[nn.Parameter, Tensor]:
    """Start training from the weights of an exported adapter.

    Returns:
        The trained parameters, each with a copy of its initial weights.
    Raises:
        RecipeError: If the weights do not fit the network's adapter.
    """
    try:
        load_adapter_weights(network, folder)
    except RuntimeError as error:
        raise RecipeError(
            f"the adapter in {str(folder)!r} does not fit model.policy.lora: "
            f"{summarize_error(error)}. "
            "Set model.policy.lora.target_modules as in its adapter_config.json."
        ) from error
    trained = (p for p in network.parameters() if p.requires_grad)
    return {parameter: parameter.detach().clone() for parameter in trained}


@contextlib.contextmanager
def exchange_weights(weights: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """A block in which parameters have other weights, written in place, because the parts of a
    divided policy are read from their storage. No gradient may be computed in it."""
    own = {parameter: parameter.detach().clone() for parameter in weights}
    try:
        for parameter, weight in weights.items():
            parameter.data.copy_(weight)
        yield
    finally:
        for parameter, before in own.items():
            parameter.data.copy_(before)


def _refuse_unmatched(network: nn.Module, config: Any) -> None:
    """Refuse names of layers that match none: peft ignores them if another name matches."""
    from peft.tuners.tuners_utils import check_target_module_exists

    targets = config.target_modules
    layers = [name for name, _ in network.named_modules() if name]
    for target in [] if isinstance(targets, str) else sorted(targets):
        alone = copy.copy(config)
        alone.target_modules = {target}
        if not any(check_target_module_exists(alone, name) is True for name in layers):
            kinds = {
                n.rpartition(".")[2] for n, p in network.named_modules() if isinstance(p, nn.Linear)
            }
            raise RecipeError(
                f"model.policy.lora.target_modules has {target!r}, and the model has no layer of "
                f"this name that an adapter fits. Its linear layers are {', '.join(sorted(kinds))}."
            )


def _unsupported_layers(network: nn.Module) -> list[str]:
    """Names of linear layers of the model's own classes, such as routers, whose output is more than
    a product, so that no adapter can be added to it."""
    return [
        name
        for name, part in network.named_modules()
        if isinstance(part, nn.Linear)
        and type(part).forward is not nn.Linear.forward
        and type(part).__module__.startswith("transformers.models.")
    ]
