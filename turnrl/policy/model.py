"""The policy: a causal language model, whole or with LoRA on a 4-bit base, and its tokenizer.

`Policy` is described by a recipe, costs nothing to make, and loads in two steps: the tokenizer
first, so that a recipe's mistakes are found in a second, and the weights when Lightning asks for
them.
"""

import contextlib
import hashlib
import importlib.util
import logging
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast, final

import torch
import transformers
from lightning.fabric.utilities import move_data_to_device
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turnrl.agent.chat import read_template
from turnrl.errors import CheckpointError, RecipeError, did_you_mean, in_short, of_the_device
from turnrl.policy.attention import no_mask, take_over
from turnrl.policy.card import base_name, write_card
from turnrl.policy.compute import InOnePass, adapt_in_place, fuse, head_logits, recompute
from turnrl.policy.layout import Layout, Pass, lay_out, passes, takes_ragged
from turnrl.sources import reach_hub
from turnrl.types import Attend, Critic, Row

_logger = logging.getLogger(__name__)

PACKAGE_PREFIX = "package://"
_LOGITS_PER_CHUNK = 2**26
"""Logits held at once when log-probabilities are taken (0.25 GB in float32, of which some five are
there at a time)."""


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter (arXiv 2106.09685), trained in place of the base's weights.

    Args:
        r: Rank.
        alpha: The update is scaled by alpha / r.
        dropout: Dropout of the adapter's input. Above 0 the learner differs from the sampler, and
            ratios carry its noise into the clip.
        target_modules: Names of the linear layers to adapt; `all-linear` takes every one but the
            head.
    """

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"


def _fingerprint(folder: str, revision: str | None) -> str:
    """A digest of a little of every weight as it lies on disk, rounded to bfloat16.

    Two models with the same one are taken for the same base, wherever they lie, and in whatever
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
                some = tensors.get_tensor(name) if rows is None else view[:rows]
                bits = some.flatten()[:4096].to(torch.bfloat16).view(torch.int16)
                digest.update(name.encode() + bits.numpy().tobytes())
    for file in sorted(Path(here).glob("pytorch_model*.bin")):  # archives, with sums of their parts
        digest.update(repr(sorted(p.CRC for p in zipfile.ZipFile(file).infolist())).encode())
    return digest.hexdigest()[:16]


def _not_products(network: nn.Module) -> list[str]:
    """Linear layers of a model's own kind, whose output is more than a product: routers, say. No
    adapter can be added to it."""
    return [
        name
        for name, part in network.named_modules()
        if isinstance(part, nn.Linear)
        and type(part).forward is not nn.Linear.forward
        and type(part).__module__.startswith("transformers.models.")
    ]


@final
class Policy(nn.Module):
    """A causal language model to be trained.

    Args:
        model: A local folder, a hub name such as `Qwen/Qwen2.5-7B`, or `package://NAME/FOLDER` for
            a folder inside an installed package.
        quantization: `nf4` keeps the base's linear layers in 4-bit NormalFloat with double
            quantisation (QLoRA, arXiv 2305.14314); needs `lora`.
        lora: Train a low-rank adapter. Without it every weight is trained, which suits tiny models.
        dtype: Of the base's weights and activations; `auto` is bfloat16 under LoRA on a GPU and
            float32 otherwise. What is trained is float32 in any case: an adapter, or, in bfloat16
            without one, all weights, which are then rounded for each product (mixed precision).
        gradient_checkpointing: Recompute activations in the backward pass, to save memory; a number
            does so in that many of the layers. Null leaves it to `model.profile`, or recomputes
            none.
        chat_template: A file with a Jinja chat template, or the name of one that comes with turnrl
            (`qwen3`, say), in place of the tokenizer's own.
        revision: Branch, tag or commit of a hub model.
        share_prefixes: While learning, read what trajectories begin with in common, a group's
            prompt say, once for all that are computed together. It changes time and memory, and
            nothing else (but for `Lora.dropout`, which then drops what is shared for all alike); a
            model whose code does not allow it reads each from its first token.
        fused_kernels: On a GPU, use the fused norms, rotations and activations of Liger, if
            `liger-kernel` is installed and knows the architecture.
    """

    def __init__(
        self,
        model: str,
        quantization: Literal["nf4", "none"] = "none",
        lora: Lora | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        gradient_checkpointing: bool | int | None = None,
        chat_template: str | None = None,
        revision: str | None = None,
        share_prefixes: bool = True,
        fused_kernels: bool = True,
    ) -> None:
        super().__init__()
        if quantization == "nf4" and lora is None:
            raise RecipeError(
                "policy.quantization is 'nf4', whose weights cannot be trained themselves. Add "
                "policy.lora (an empty mapping takes its defaults), or take 'none'."
            )
        self.model = model
        self.quantization = quantization
        self.lora = lora
        self.dtype = dtype
        self.gradient_checkpointing = gradient_checkpointing
        self.chat_template = chat_template
        self.revision = revision
        self.share_prefixes = share_prefixes
        self.fused_kernels = fused_kernels
        self.in_force: dict[str, str] = {}
        """The choices that loading made, for people to read."""
        self.critic: Critic | None = None
        """Adds a value head, which begins at zero, when the policy is loaded next."""
        self.value_head: nn.Linear | None = None
        self.network: transformers.PreTrainedModel | None = None
        self._fingerprint = ""
        self._attends = False
        self._kernel = False
        self._mixed = False

    @cached_property
    def folder(self) -> str:
        """Where transformers loads from: a folder or a hub name. `package://NAME/FOLDER` is a
        folder inside an installed package.

        Raises:
            RecipeError: If `model` names a folder that is not there.
        """
        model = self.model
        if model.startswith(PACKAGE_PREFIX):
            package, _, inside = model.removeprefix(PACKAGE_PREFIX).partition("/")
            spec = importlib.util.find_spec(package) if package else None
            if spec is None or not spec.submodule_search_locations:
                raise RecipeError(f"no package {package!r} for policy.model {model!r}. Install it.")
            folder = Path(next(iter(spec.submodule_search_locations)), inside)
            if not folder.is_dir():
                raise RecipeError(f"no folder {inside!r} in package {package!r} (policy.model)")
            return str(folder)
        path = Path(model).expanduser()
        if path.is_dir():
            return str(path)
        if model.startswith(("/", ".", "~")) or model.count("/") > 1:
            there = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
            found = f" (found beside it: {', '.join(there[:5])})" if there else ""
            raise RecipeError(
                f"no model folder at {model!r}{found}.{did_you_mean(path.name, there)} Set "
                "policy.model to a folder with config.json, or to a hub name such as "
                "'Qwen/Qwen2.5-7B'."
            )
        return model

    def _from_pretrained(self, kind: str, **options: Any) -> Any:
        """Load a part of the model by one of transformers' `Auto` classes."""
        folder = self.folder
        if not Path(folder).is_dir():
            reach_hub()
        try:
            auto = getattr(transformers, kind)
            return auto.from_pretrained(folder, revision=self.revision, **options)
        except (OSError, ValueError, ImportError, SafetensorError) as error:
            cause = str(error).strip() or type(error).__name__
            raise RecipeError(
                f"policy.model {self.model!r} cannot be loaded: {cause.splitlines()[0]} Give a "
                "folder with config.json and a tokenizer, or a hub model that this machine can "
                "reach or has in its cache."
            ) from error

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """The model's tokenizer, with the recipe's chat template if it gives one.

        Raises:
            RecipeError: If it cannot be loaded.
        """
        tokenizer: transformers.PreTrainedTokenizerBase = self._from_pretrained("AutoTokenizer")
        if self.chat_template is not None:
            tokenizer.chat_template = read_template(self.chat_template)
        if not tokenizer("text", add_special_tokens=False)["input_ids"]:
            raise RecipeError(
                f"the tokenizer of policy.model {self.model!r} makes no tokens of a text: its "
                "vocabulary is missing. Copy the whole folder, tokenizer.json included."
            )
        return tokenizer

    @cached_property
    def config(self) -> transformers.PretrainedConfig:
        """The model's configuration, with every dropout at 0: one that is on would make ratios and
        KL noise. (LoRA has a dropout of its own, `Lora.dropout`.)

        Raises:
            RecipeError: If it cannot be loaded.
        """
        config: transformers.PretrainedConfig = self._from_pretrained("AutoConfig")
        for part in {id(c): c for c in (config, config.get_text_config())}.values():
            for name, value in vars(part).items():
                if isinstance(value, float) and "drop" in name:
                    setattr(part, name, 0.0)
        return config

    def check_length(self, tokens: int) -> None:
        """Refuse trajectories that are longer than the model's positions.

        Raises:
            RecipeError: Naming both numbers.
        """
        most = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and tokens > most:
            raise RecipeError(
                f"rollout.max_tokens is {tokens}, and {self.model!r} has positions for {most} "
                f"tokens (max_position_embeddings). Set it to {most} or less."
            )

    def load(self, device: torch.device | str = "cpu") -> transformers.PreTrainedModel:
        """Load the weights, once. Later calls return the same network.

        Args:
            device: Where the base is put. On a CPU, Lightning moves weights that are not quantised.
        Raises:
            RecipeError: If the model cannot be loaded, or is of a kind whose log-probabilities
                would be wrong.
        """
        if self.network is None:
            # Lightning makes the GPU the default device while a module configures its model; the
            # tensors made here say themselves where they go
            with torch.device("cpu"):
                self._load(torch.device(device))
        if self.critic is None:
            self.value_head = None
        elif self.value_head is None:
            width = self.config.get_text_config().hidden_size
            self.value_head = nn.Linear(width, 1, device=self._device)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        return cast(transformers.PreTrainedModel, self.network)

    def dtype_on(self, kind: str) -> torch.dtype:
        """The precision of activations on a kind of device, such as `cuda`."""
        auto = "bfloat16" if self.lora is not None and kind == "cuda" else "float32"
        return cast(torch.dtype, getattr(torch, auto if self.dtype == "auto" else self.dtype))

    def _load(self, device: torch.device) -> None:
        dtype = self.dtype_on(device.type)
        self._mixed = self.lora is None and dtype != torch.float32
        options: dict[str, Any] = {
            "dtype": torch.float32 if self._mixed else dtype,
            "attn_implementation": "sdpa",
        }
        if self.quantization == "nf4":
            options["quantization_config"] = transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype,
            )
        if self.quantization == "nf4" or device.type != "cpu":  # without a copy on the host
            options["device_map"] = {"": device}
        network = self._from_pretrained("AutoModelForCausalLM", config=self.config, **options)
        self._attends = take_over(network)
        kernels = fuse(network, device) if self.fused_kernels else "none"
        if self.lora is not None:
            network = self._with_adapter(network, self.lora)
            adapt_in_place(network)
        if self.gradient_checkpointing:
            recompute(network, self.gradient_checkpointing)
            if self.lora is not None:
                network.enable_input_require_grads()
        self.network = network
        self._fingerprint = _fingerprint(self.folder, self.revision)
        network.train()  # transformers loads in eval mode; engines switch to it while they sample
        self._check_head()
        attention = self._choose_attention()
        self.in_force = {"attention while learning": attention, "fused kernels": kernels}

    def _with_adapter(self, network: Any, lora: Lora) -> Any:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.target_modules,
            exclude_modules=_not_products(network) or None,
            task_type="CAUSAL_LM",
        )
        try:
            # peft asks transformers 5.23 by a name that it will drop in 6
            with warnings.catch_warnings(action="ignore", category=FutureWarning):
                if self.quantization == "nf4":
                    # not peft's preparation: it would put norms and head, and so all
                    # activations, in float32
                    network.requires_grad_(False)
                    for layer in network.modules():
                        if hasattr(layer, "support_avx512bf16_for_cpu"):
                            # bitsandbytes would repack the weights at the first pass in eval mode,
                            # and from then on no gradient would pass through them
                            layer.support_avx512bf16_for_cpu = False
                return get_peft_model(network, config)
        except ValueError as error:
            raise RecipeError(f"policy.lora does not fit {self.model!r}: {error}") from error

    @property
    def _base(self) -> Any:
        """The transformers model itself, inside the adapter if there is one."""
        assert self.network is not None, "Policy.load() comes first"
        return cast(Any, self.network).get_base_model() if self.lora is not None else self.network

    @property
    def _decoder(self) -> Any:
        """The base without its head."""
        decoder = self._base.get_decoder()
        # transformers 5.23 finds none in Llama4ForCausalLM, and gives the whole model
        return self._base.model if decoder is self._base else decoder

    @property
    def _device(self) -> torch.device:
        return cast(torch.device, self._base.get_input_embeddings().weight.device)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Some architectures scale or cap logits after the head; taking them by hand would be
        silently wrong."""
        base = self._base
        ids = torch.tensor([[0, 1]], device=self._device)
        with self._precision():
            expected = base(input_ids=ids, use_cache=False).logits[0].float()
        found = self.logits(self.hidden(ids, torch.ones_like(ids), position_ids=ids)[0])
        if not torch.allclose(expected, found, rtol=2e-2, atol=2e-2):
            raise RecipeError(
                f"policy.model {self.model!r} ({type(base).__name__}) changes logits after its "
                "head, which turnrl does not reproduce. Choose another architecture."
            )

    def _choose_attention(self) -> str:
        """Find the fastest way to read sequences that works here, and say which it is: beginnings
        shared, by the kernel of a GPU or in batches; or padded rows."""
        if not self.share_prefixes:
            return "padded rows, each sequence from its first token"
        why: str | None = None
        for kernel in (True, False):
            if kernel and not takes_ragged(self._device, self.compute_dtype):
                continue
            if (why := self._check_sharing(kernel)) is None:
                self._kernel = kernel
                return "prompts once, " + ("torch's varlen kernel" if kernel else "padded batches")
            if kernel:
                _logger.warning(
                    f"the kernel for ragged batches does not work here ({why}): attention while "
                    "learning is computed in padded batches, which is slower"
                )
        self.share_prefixes = False
        _logger.warning(
            f"while learning, each trajectory is read from its first token ({why}): a group's "
            "prompt is computed once for each of its trajectories"
        )
        return f"padded rows, each sequence from its first token ({why})"

    def _check_sharing(self, kernel: bool) -> str | None:
        """Read two texts with one beginning in both ways, and back; why they cannot share it, if
        so. Errors of memory and of devices are raised: they say nothing about the model."""
        kinds = set(getattr(self.config.get_text_config(), "layer_types", None) or ())
        if other := kinds - {"full_attention", "sliding_attention"}:
            return f"it has layers of {min(other)}"
        if getattr(self.config.get_text_config(), "attn_temperature_tuning", False):
            return "its attention depends on a token's place in the row"
        rows = [([1, 2, 3, 4, *rest], [False] * 5 + [True] * 3) for rest in ([5, 6, 7, 8], [9] * 4)]
        device = self._device
        told: set[int | None] = set()

        def attend(*seen: Any) -> Tensor:
            told.add(seen[-1])
            return Layout.attend(ways[0], *seen)

        ways = [
            move_data_to_device(lay_out(rows, share, kernel), device) for share in (True, False)
        ]
        ways[0].attend = attend
        try:
            with torch.no_grad():
                padded = self.logprobs(ways[1])[0]
            shared = self.logprobs(ways[0])[0]
            trained = [p for p in self.parameters() if p.requires_grad]
            slopes = torch.autograd.grad(shared.sum(), trained, allow_unused=True)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            if of_the_device(error):
                raise
            return in_short(error)
        window = getattr(self.config.get_text_config(), "sliding_window", None)
        if window is not None and not told - {None} and kinds != {"full_attention"}:
            return f"its window of {window} tokens is not told to its attention"
        if not all(slope.isfinite().all() for slope in slopes if slope is not None):
            return "its gradient is not finite"
        gap = float((shared.detach() - padded).abs().mean())
        # rounding alone makes 1e-5 in float32, and some hundredths in bfloat16
        limit = 1e-3 if self.compute_dtype == torch.float32 else 0.25
        return None if gap < limit else f"log-probabilities were {gap:.2g} nats apart"

    def _precision(self) -> AbstractContextManager[Any]:
        """Within it the network computes in `compute_dtype`, whatever its weights are kept in."""
        if not self._mixed:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self.compute_dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of activations."""
        return torch.bfloat16 if self._mixed else cast(torch.dtype, self._base.dtype)

    def hidden(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        attend: Attend | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Last hidden states, (B, T, H).

        Args:
            input_ids: (B, T).
            attention_mask: (B, T); (B, 1, T, S) of bool; or None for the model's own, where no row
                is padded.
            position_ids: (B, T).
            attend: Computes the attention, in place of a mask.
            kwargs: Of transformers' forward pass.
        Raises:
            NotImplementedError: If the model's code takes no attention but its own.
        """
        if attend is not None:
            if not self._attends:
                raise NotImplementedError(f"{type(self._base).__name__} has attention of its own")
            kwargs["attend"] = attend
            attention_mask = no_mask(position_ids)
        with self._precision():
            output = self._decoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=False,
                **kwargs,
            )
        return cast(Tensor, output.last_hidden_state).to(self.compute_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., V), in float32."""
        head = self._base.get_output_embeddings()
        if type(head) is not nn.Linear:
            return cast(Tensor, head(hidden)).float()
        logits = head_logits(head, hidden.reshape(-1, hidden.shape[-1]))
        return logits.view(*hidden.shape[:-1], -1)

    def passes(self, rows: Sequence[Row], budget: int) -> Iterator[Pass]:
        """Divide token sequences among forward passes; see `turnrl.policy.layout.passes`."""
        return passes(rows, budget, self.share_prefixes, self._kernel)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode within; afterwards each part is in the mode that it was in."""
        modes = [(part, part.training) for part in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training

    @torch.no_grad()
    def read(
        self, rows: Sequence[Row], minibatch_tokens: int, temperature: float = 1.0
    ) -> list[tuple[Tensor, ...]]:
        """Results of `logprobs` for each of some token sequences, in eval mode and on the CPU.

        Args:
            rows: The sequences, and which of their tokens are asked for.
            minibatch_tokens: The most tokens computed at once, but one sequence at least.
            temperature: As in sampling.
        Returns:
            For each sequence three (N_i,) tensors: log-probabilities, entropies, values.
        """
        device = self._device
        found: dict[int, tuple[Tensor, ...]] = {}
        with self.evaluating():
            for some, layout in self.passes(rows, minibatch_tokens):
                asked = self.logprobs(move_data_to_device(layout, device), temperature)
                counts = [sum(rows[i][1]) for i in some]
                parts = zip(*(part.cpu().split(counts) for part in asked), strict=True)
                found |= zip(some, parts, strict=True)
        return [found[i] for i in range(len(rows))]

    def logprobs(self, layout: Layout, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of the tokens that are asked for, the entropy of the distributions they
        were drawn from, and what the critic expected before each.

        Logits exist for those tokens only, a chunk at a time. If the head is not trained, their
        gradient is taken while they are there; otherwise they are computed again for it.

        Args:
            layout: Of token sequences, on the policy's device.
            temperature: As in sampling, so that these are the sampler's own probabilities.
        Returns:
            Three (N,) tensors; the entropy carries no gradient, and the values are zero without a
            critic.
        """
        ids, mask, positions = layout.input_ids, layout.attention_mask, layout.position_ids
        if mask is None:
            hidden = self.hidden(ids, None, positions, attend=layout.attend)
        else:
            hidden = self.hidden(ids, mask.long(), positions)
        states, targets = hidden.flatten(0, 1)[layout.before], layout.targets
        values = torch.zeros(len(targets), device=states.device)
        if self.critic is not None and self.value_head is not None:
            seen = (states if self.critic.trunk else states.detach()).float()
            width = seen.shape[1:]
            values = self.value_head(nn.functional.rms_norm(seen, width) / width[0])[:, 0]
        head = self._base.get_output_embeddings()

        def of_chunk(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            log_p = torch.log_softmax(self.logits(states) / temperature, dim=-1)
            chosen = log_p.gather(-1, targets[:, None])[:, 0]
            with torch.no_grad():
                entropy = -(log_p.exp() * log_p).sum(-1)
            return chosen, entropy

        size = max(1, _LOGITS_PER_CHUNK // head.weight.shape[0])
        if torch.is_grad_enabled() and not any(p.requires_grad for p in head.parameters()):
            chosen, entropy = InOnePass.apply(states, targets, of_chunk, size)  # type: ignore[no-untyped-call]
        elif len(targets) <= size:
            chosen, entropy = of_chunk(states, targets)
        else:
            redone = partial(checkpoint, of_chunk, use_reentrant=False)
            parts = zip(*map(redone, states.split(size), targets.split(size)), strict=True)
            chosen, entropy = map(torch.cat, parts)
        return chosen[layout.asked], entropy[layout.asked], values[layout.asked]

    def try_out(self, tokens: int, longest: int) -> None:
        """Compute log-probabilities of made-up sequences and their gradient, and drop both.

        Args:
            tokens: Of the sequences together.
            longest: Of one sequence, at most.
        """
        draw = torch.Generator().manual_seed(0)  # of its own: a run's numbers do not depend on it
        vocabulary = self.config.get_text_config().vocab_size
        rows: list[Row] = []
        for begin in range(0, tokens, longest):
            size = max(min(longest, tokens - begin), 2)
            ids = torch.randint(vocabulary, (size,), generator=draw).tolist()
            rows.append((ids, [n > 0 for n in range(size)]))
        _, layout = next(self.passes(rows, tokens))
        logprobs, *_ = self.logprobs(move_data_to_device(layout, self._device))
        logprobs.sum().backward()
        for parameter in self.parameters():
            parameter.grad = None

    def reference(self) -> AbstractContextManager[None]:
        """Within it the policy is its own reference: the adapter is off."""
        assert self.lora is not None, "only a policy with an adapter has a reference"
        return cast(AbstractContextManager[None], cast(Any, self.network).disable_adapter())

    def trainable_state(self) -> dict[str, Tensor]:
        """The trained weights by name: what a checkpoint holds."""
        return {name: p.detach() for name, p in self.trainable_parameters().items()}

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name; `value_head` is the critic's."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    @property
    def identity(self) -> dict[str, Any]:
        """Facts on which a checkpoint must agree to fit this policy, wherever its model lies."""
        shape = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
        return {
            **{name: getattr(self._base.config, name) for name in shape},
            "lora": None if self.lora is None else {"r": self.lora.r, "alpha": self.lora.alpha},
            "weights": self._fingerprint,
        }

    def check_identity(self, saved: dict[str, Any], names: set[str]) -> None:
        """Refuse a checkpoint of another policy.

        Args:
            saved: `identity` of the policy that was saved.
            names: Names of the saved weights.
        Raises:
            CheckpointError: Naming the first thing that differs, and both values.
        """
        for key, mine in self.identity.items():
            if saved.get(key) != mine:
                raise CheckpointError(
                    f"the checkpoint is of another policy than {self.model!r}: its {key} is "
                    f"{saved.get(key)!r}, the recipe's {mine!r}. Give the recipe that the "
                    "checkpoint was made with (config.yaml in its run's folder)."
                )
        if odd := sorted(names ^ set(self.trainable_state())):
            where = "the checkpoint" if odd[0] in names else "the recipe"
            critic = " (of the critic of model.estimator)" if "value_head" in odd[0] else ""
            raise CheckpointError(
                f"the checkpoint holds other weights than the recipe trains: {odd[0]!r}{critic} is "
                f"only in {where}. Use the recipe that it was made with."
            )

    def export(self, folder: str | Path, facts: Mapping[str, str] | None = None) -> Path:
        """Write what was trained, for use without turnrl, with the tokenizer and a model card
        beside it.

        Under LoRA the adapter, which `peft.PeftModel.from_pretrained` loads; otherwise the whole
        model, which `AutoModelForCausalLM.from_pretrained` loads.

        Args:
            folder: Where to.
            facts: What the card says of the training, by name.
        """
        assert self.network is not None, "Policy.load() comes first"
        folder = Path(folder)
        if folder.resolve() == Path(self.folder).resolve():
            raise RecipeError(f"{str(folder)!r} holds the model trained from. Give another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        self.network.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        base = base_name(self.model, self.folder, folder)
        write_card(folder, base, self.revision, self.lora is not None, facts or {})
        return folder
