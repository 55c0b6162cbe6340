"""What is known of a policy before its weights load: where its model lies, its configuration, its
tokenizer."""

from functools import cached_property
from pathlib import Path
from typing import cast, final

import torch
import transformers

from turnrl.plugin.errors import RecipeError
from turnrl.policy.adapter import adapter_digest
from turnrl.policy.files import (
    Origin,
    check_quantization,
    detect_quantization,
    find_origin,
    fingerprint,
    load_config,
    load_network,
    load_tokenizer,
    locate_model,
    refuse_other_kind,
)
from turnrl.policy.settings import Policy
from turnrl.policy.sizes import read_sizes


@final
class ModelFiles:
    """The files of a policy's model. Each is read when it is first needed.

    Args:
        settings: The policy's settings.
        tokenizer: A tokenizer to use in place of the model's own.
    """

    def __init__(
        self, settings: Policy, tokenizer: transformers.PreTrainedTokenizerBase | None = None
    ) -> None:
        self.settings, self.lora = settings, settings.lora
        if tokenizer is not None:
            self.tokenizer = tokenizer

    @cached_property
    def origin(self) -> Origin:
        """The base, and the adapter on it that training begins with, if `model` is one.

        Raises:
            RecipeError: If there is no such folder, or the adapter is of another shape than `lora`.
        """
        shape = None if self.lora is None else self.lora.shape
        return find_origin(self.settings.model, self.settings.revision, shape)

    @cached_property
    def folder(self) -> str:
        """Where transformers loads the base from: a folder or a hub name."""
        return locate_model(self.origin.model)

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """The model's tokenizer, with the recipe's chat template if it gives one.

        Raises:
            RecipeError: If it cannot be loaded.
        """
        return load_tokenizer(self.settings.model, self.origin, self.settings.chat_template)

    @cached_property
    def config(self) -> transformers.PretrainedConfig:
        """The model's configuration, with every dropout at 0.

        Raises:
            RecipeError: If it cannot be loaded.
        """
        return load_config(self.origin.model, self.origin.revision)

    @cached_property
    def identity(self) -> dict[str, object]:
        """Facts that a checkpoint must share to fit this policy, wherever its model lies."""
        shape = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
        return {
            **{name: getattr(self.config, name) for name in shape},
            "lora": self.lora and self.lora.shape,
            "weights": fingerprint(self.folder, self.origin.revision),
            "starting adapter": adapter_digest(self.origin.adapter),
        }

    @property
    def base_quantization(self) -> str | None:
        """The method by which the base's weights are quantised, on disk or by the recipe; None if
        they are not."""
        wanted = self.settings.quantization
        return detect_quantization(self.config) if wanted == "none" else wanted

    def check(self, tokens: int) -> None:
        """Find what cannot work, before any weights are loaded.

        Args:
            tokens: The most tokens of a trajectory.
        Raises:
            RecipeError: If the model has too few positions, or is quantised and to be trained
                whole.
        """
        model, limit = self.settings.model, read_sizes(self.config).positions
        if limit is not None and tokens > limit:
            raise RecipeError(
                f"model.rollout.max_tokens is {tokens}, and {model!r} has positions for "
                f"{limit} tokens (max_position_embeddings). Set it to {limit} or less."
            )
        adapted = self.lora is not None
        check_quantization(self.config, model, self.settings.quantization, adapted)

    def dtype_on(self, kind: str) -> torch.dtype:
        """The precision of activations on a kind of device, such as `cuda`."""
        settings = self.settings
        auto = "bfloat16" if settings.lora is not None and kind == "cuda" else "float32"
        wanted = auto if settings.dtype == "auto" else settings.dtype
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32

    def load(self, device: torch.device, mixed: bool) -> transformers.PreTrainedModel:
        """The base's network with its weights.

        Args:
            device: Where the weights go.
            mixed: True if the weights stay in float32 and activations do not.
        """
        dtype = torch.float32 if mixed else self.dtype_on(device.type)
        four_bit = self.settings.quantization == "nf4"
        network = load_network(self.origin, self.config, dtype, four_bit, device)
        return cast(transformers.PreTrainedModel, network)

    def refuse_as_target(self, folder: Path) -> None:
        """Refuse a folder that an export may not write to.

        Raises:
            RecipeError: If it holds the model that training starts from, or one of another kind.
        """
        sources = (self.folder, self.origin.adapter)
        if folder.resolve() in [Path(source).resolve() for source in sources if source]:
            raise RecipeError(
                f"{str(folder)!r} holds the model that training starts from. Choose another folder."
            )
        refuse_other_kind(folder, self.lora is not None)
