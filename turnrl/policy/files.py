"""Where a model lies: its folder or hub name, its parts as transformers loads them, its digest."""

import contextlib
import hashlib
import importlib.util
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from turnrl.agent.chat import DECLARED_ENDS
from turnrl.agent.templates import read_template
from turnrl.plugin.errors import RecipeError, suggest_name, summarize_error
from turnrl.plugin.hub import check_hub
from turnrl.plugin.text import format_count
from turnrl.policy.adapter import read_adapter
from turnrl.policy.device import is_device_error

PACKAGE_PREFIX = "package://"


def locate_model(model: str) -> str:
    """The folder or hub name that transformers loads a model from.

    Args:
        model: As a recipe names it. `package://NAME/FOLDER` is a folder inside a package.
    Raises:
        RecipeError: If it names a folder that is not there.
    """
    if model.startswith(PACKAGE_PREFIX):
        package, _, inside = model.removeprefix(PACKAGE_PREFIX).partition("/")
        is_name = package.isidentifier()  # to find a package in another one, Python imports it
        spec = importlib.util.find_spec(package) if is_name else None
        if spec is None or not spec.submodule_search_locations:
            raise RecipeError(
                f"no package {package!r} for model.policy.model {model!r}. Install it."
            )
        folder = Path(next(iter(spec.submodule_search_locations)), inside)
        if not folder.is_dir():
            raise RecipeError(f"no folder {inside!r} in package {package!r} (model.policy.model)")
        return str(folder)
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path)
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        there = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise RecipeError(
            f"no model folder at {model!r}.{suggest_name(path.name, there)} Set "
            "model.policy.model to a folder with config.json, or to a hub name such as "
            "'Qwen/Qwen2.5-7B'."
        )
    return model


class Origin(NamedTuple):
    """The model that a policy starts from.

    Args:
        model: The base, as a recipe would name it.
        revision: Its revision on the hub.
        adapter: The folder of an adapter to continue training; None for a fresh one.
    """

    model: str
    revision: str | None
    adapter: Path | None = None


def refuse_other_kind(folder: Path, adapter: bool) -> None:
    """Refuse to write a policy into a folder that holds one of the other kind: afterwards nobody
    could tell which of the two is meant.

    Args:
        folder: Where an adapter or a whole model will be written.
        adapter: True for an adapter, False for a whole model.
    Raises:
        RecipeError: If the folder holds the other kind.
    """
    if (folder / ("config.json" if adapter else "adapter_config.json")).is_file():
        held = "a whole model, and what is trained is an adapter"
        held = held if adapter else "an adapter, and what is trained is a whole model"
        raise RecipeError(f"{str(folder)!r} holds {held}. Choose another folder.")


def find_origin(model: str, revision: str | None, shape: dict[str, int] | None) -> Origin:
    """The base and the adapter that a recipe's `policy.model` means.

    Args:
        model: As a recipe names it.
        revision: The base's revision on the hub, if the recipe gives one.
        shape: See `Lora.shape`; None without an adapter.
    Raises:
        RecipeError: If there is no such folder, an adapter's base is not where it says, or the
            adapter is of another shape.
    """
    folder = Path(locate_model(model))
    if (adapter := read_adapter(folder)) is None:
        return Origin(model, revision)
    if (folder / "config.json").is_file():
        raise RecipeError(
            f"model.policy.model {model!r} holds a whole model and an adapter. Move one of them "
            "into a folder of its own."
        )
    base, beside = adapter.base, folder / adapter.base
    if "://" not in base and beside.is_dir():
        base = str(beside.resolve())
    try:
        locate_model(base)
    except RecipeError as error:
        raise RecipeError(
            f"model.policy.model {model!r} is an adapter of {adapter.base!r}, which is not there. "
            "Write where its base lies into base_model_name_or_path of its adapter_config.json."
        ) from error
    if adapter.shape != shape:
        raise RecipeError(
            f"model.policy.model {model!r} is an adapter of {_yaml(adapter.shape)}, and the "
            f"recipe's model.policy.lora is {_yaml(shape)}. Set model.policy.lora: "
            f"{_yaml(adapter.shape)}."
        )
    return Origin(base, adapter.revision if revision is None else revision, folder)


def _yaml(shape: dict[str, int] | None) -> str:
    rows = [f"{name}: {value}" for name, value in (shape or {}).items()]
    return f"{{{', '.join(rows)}}}" if rows else "not set"


def load_part(kind: str, model: str, revision: str | None, **options: object) -> Any:
    """Load a part of a model with one of transformers' `Auto` classes.

    Args:
        kind: The class, such as `AutoConfig`.
        model: As a recipe names it.
        revision: Revision of a hub model: a branch, a tag or a commit.
        options: Further arguments of `from_pretrained`.
    Raises:
        RecipeError: If it cannot be loaded.
    """
    folder = locate_model(model)
    if not Path(folder).is_dir():
        check_hub()
    try:
        auto = getattr(transformers, kind)
        options["trust_remote_code"] = False  # by default, transformers asks whether to run it
        return auto.from_pretrained(folder, revision=revision, **options)
    except Exception as error:  # a folder that somebody brings may be broken in any way
        if is_device_error(error):
            raise
        cause = " ".join(str(error).split()) or type(error).__name__
        if cause.startswith("Weights only load failed"):
            cause = f"{summarize_error(error)}."
        if "trust_remote_code" in cause:
            raise RecipeError(
                f"model.policy.model {model!r} brings its own code (auto_map in its config.json), "
                "and turnrl runs no code of a model. Take a model whose architecture is a part of "
                "transformers."
            ) from None
        raise RecipeError(
            f"model.policy.model {model!r} cannot be loaded: {cause:.300} Give a "
            "folder with config.json and a tokenizer, or a hub model that this machine can "
            "reach or has in its cache."
        ) from error


def load_network(
    origin: Origin,
    config: transformers.PretrainedConfig,
    dtype: torch.dtype,
    four_bit: bool,
    device: torch.device,
) -> Any:
    """Load a base's weights.

    Args:
        origin: Where the base lies.
        config: Its configuration.
        dtype: Type of the weights; if they are in 4 bits, of the computations with them.
        four_bit: Keep linear layers in NF4.
        device: Where to load them. A GPU gets them without a copy on the host.
    Raises:
        RecipeError: If they cannot be loaded, or are not all there: transformers would draw the
            others at random.
    """
    plain: dict[str, object] = {"dtype": dtype, "attn_implementation": "sdpa", "config": config}
    options = dict(plain)
    if four_bit or device.type != "cpu":
        options["device_map"] = {"": device}
    if four_bit and detect_quantization(config) is None:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        # a model that is quantised while it loads does not notice other shapes
        load_language_model(origin.model, origin.revision, **plain, device_map={"": "meta"})
    return load_language_model(origin.model, origin.revision, **options)


def load_language_model(model: str, revision: str | None, **options: object) -> Any:
    """Load a language model; see `load_part`. Its weights are all in its files.

    Raises:
        RecipeError: If it cannot be loaded, or weights are missing or have other shapes.
    """
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its table of names that do not match
    try:
        network, names = load_part("AutoModelForCausalLM", model, revision, **options)
    finally:
        transformers_logging.set_verbosity(verbosity)
    other = [f"{n} {[*saved]} instead of {[*own]}" for n, saved, own in names["mismatched_keys"]]
    missing, unused = sorted(names["missing_keys"]), sorted(names["unexpected_keys"])
    if missing or other:
        lacks = (
            f"lacks {format_count(len(missing), 'tensor')} ({_format_first(missing)})"
            if missing
            else ""
        )
        shapes = f"has other shapes than its config.json says ({_format_first(sorted(other))})"
        holds = (
            f" It holds others that the architecture has no place for ({_format_first(unused)})."
        )
        raise RecipeError(
            f"model.policy.model {model!r} {lacks or shapes}, so these weights would be random."
            f"{holds if unused else ''} Copy its folder again, whole, or correct the names in its "
            "files and the sizes in its config.json."
        )
    return network


def _format_first(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{rest}"


def load_tokenizer(
    model: str, origin: Origin, chat_template: str | None
) -> transformers.PreTrainedTokenizerBase:
    """Load a model's tokenizer, with a recipe's chat template if it gives one. If an adapter's
    folder has no tokenizer, the base's is used.

    Raises:
        RecipeError: If it cannot be loaded.
    """
    if origin.adapter is None or not (origin.adapter / "tokenizer_config.json").is_file():
        model = origin.model
    tokenizer: transformers.PreTrainedTokenizerBase = load_part(
        "AutoTokenizer", model, origin.revision
    )
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:
        raise RecipeError(
            f"the tokenizer of model.policy.model {model!r} makes no tokens of a text: its "
            "vocabulary is missing. Copy the whole folder, tokenizer.json included."
        )
    ends = [token for token in _read_end_tokens(origin) if token < len(tokenizer)]
    setattr(tokenizer, DECLARED_ENDS, tuple(ends))
    return tokenizer


def _read_end_tokens(origin: Origin) -> set[int]:
    """The tokens that end a text by the model's own `generation_config.json` and `config.json`.
    Inference servers read both."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # has none, or is broken
            file = cached_file(locate_model(origin.model), name, revision=origin.revision)
            settings = json.loads(Path(str(file)).read_text(encoding="utf-8"))
            for part in (settings, settings.get("text_config") or {}):
                declared = part.get("eos_token_id")
                listed = declared if isinstance(declared, list) else [declared]
                ends |= {token for token in listed if type(token) is int and token >= 0}
    return ends


def load_config(model: str, revision: str | None) -> transformers.PretrainedConfig:
    """Load a model's configuration, with every dropout at 0.

    An active dropout would turn ratios and the KL into noise. (LoRA has its own dropout.)

    Raises:
        RecipeError: If it cannot be loaded.
    """
    config: transformers.PretrainedConfig = load_part("AutoConfig", model, revision)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)
    return config


def detect_quantization(config: transformers.PretrainedConfig) -> str | None:
    """The method by which a model's weights on disk are quantised: `nf4`, `gptq`, ...; None if they
    are not."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    settings = found if isinstance(found, dict) else found.to_dict()
    nf4 = settings.get("load_in_4bit") and settings.get("bnb_4bit_quant_type") == "nf4"
    return "nf4" if nf4 else str(settings.get("quant_method", "by an unknown method"))


def check_quantization(
    config: transformers.PretrainedConfig, model: str, wanted: str, adapter: bool
) -> None:
    """Refuse to train quantised weights, or to quantise them once more.

    Args:
        config: The model's configuration.
        model: Its name in the recipe.
        wanted: The recipe's `policy.quantization`.
        adapter: True if an adapter is trained.
    Raises:
        RecipeError: Naming the method.
    """
    method = detect_quantization(config)
    if method is not None and (not adapter or wanted not in ("none", method)):
        raise RecipeError(
            f"model.policy.model {model!r} is quantised on disk ({method}), so its weights can "
            "neither be trained nor quantised anew. Add model.policy.lora and set quantization to "
            "none, or name the model that it was quantised from."
        )


def fingerprint(folder: str, revision: str | None) -> str:
    """A digest of a small part of every weight on disk, rounded to bfloat16.

    Two models with the same digest count as the same base, wherever they lie and in whatever
    precision they are loaded.
    """
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    local = Path(folder).is_dir()
    here = folder if local else snapshot_download(folder, revision=revision, local_files_only=True)
    digest = hashlib.sha256()
    for file in sorted(Path(here).glob("model*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                view = tensors.get_slice(name)
                rows = {0: None, 1: 4096}.get(len(view.get_shape()), 2)
                part = tensors.get_tensor(name) if rows is None else view[:rows]
                bits = part.flatten()[:4096].to(torch.bfloat16).view(torch.int16)
                digest.update(name.encode() + bits.numpy().tobytes())
    for file in sorted(Path(here).glob("pytorch_model*.bin")):
        if zipfile.is_zipfile(file):  # an archive has checksums
            digest.update(repr(sorted(p.CRC for p in zipfile.ZipFile(file).infolist())).encode())
        else:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
