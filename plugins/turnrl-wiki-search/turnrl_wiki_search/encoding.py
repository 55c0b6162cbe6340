"""Encoders turn texts into vectors, by a sentence-transformers model or a function of your own."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from turnrl import RecipeError, ToolError, blaming, named

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vectors = NDArray[np.float64]

Kind = Literal["query", "passage"]
Device = Literal["cpu"] | None

PROBE = "Which encoder made the vectors of this index?"
"""An index keeps the vector of this text, so that a change of encoder is noticed."""

_BATCH = 64
_DIGITS = 5
"""Decimals kept of a unit vector. An encoder's last digits depend on its batches."""
_SAME = 0.999
"""The least cosine similarity of two vectors of the probe from the same encoder, on any machine."""


class Encoder:
    """Turns texts into vectors. Safe to use from several threads; they encode one at a time.

    Args:
        name: The encoder, as a recipe names it.
        encode: Takes a list of texts and their kind, and returns an array (texts, dimensions).
    """

    def __init__(self, name: str, encode: Callable[[list[str], Kind], object]) -> None:
        self.name = name
        self._encode = encode
        self._lock = threading.Lock()
        self._dimensions: int | None = None

    def __call__(
        self, texts: Sequence[str], kind: Kind, report: Callable[[int], None] | None = None
    ) -> Vectors:
        """Encode texts, in batches of texts of similar length.

        Args:
            texts: The texts, prefixes included; at least one.
            kind: `query` or `passage`.
            report: Called with the number of texts encoded so far.
        Returns:
            Vectors (texts, dimensions), finite. A query's vector may be zero, which is similar to
            nothing, because the encoder may know none of its words.
        Raises:
            ToolError: If the encoder raises, or returns something else.
        """
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        rows: list[Vectors] = []
        with self._lock:
            for start in range(0, len(texts), _BATCH):
                batch = [texts[i] for i in order[start : start + _BATCH]]
                rows.append(self._checked(batch, kind))
                if report:
                    report(start + len(batch))
        vectors = np.concatenate(rows)
        return vectors[np.argsort(order)]

    @functools.cached_property
    def probe(self) -> Vectors:
        """The unit vector of `PROBE` (dimensions,)."""
        return cast("Vectors", unit(self([PROBE], "passage"))[0])

    def _checked(self, texts: list[str], kind: Kind) -> Vectors:
        name = f"the encoder {self.name!r}"
        with blaming(ToolError, name, "Correct it, or set encoder to another."):
            returned = self._encode(texts, kind)
        try:
            vectors = np.asarray(returned, dtype=np.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ToolError(
                f"{name} returned something that is not an array of numbers ({error}). Return an "
                "array (texts, dimensions), on the CPU."
            ) from None
        if vectors.ndim != 2 or len(vectors) != len(texts) or not vectors.shape[1]:
            raise ToolError(
                f"{name} returned an array of shape {vectors.shape} for {len(texts)} texts. Return "
                "one row for each text: (texts, dimensions)."
            )
        if self._dimensions not in (None, vectors.shape[1]):
            raise ToolError(
                f"{name} returned vectors of {vectors.shape[1]} dimensions, and of "
                f"{self._dimensions} before. Return as many for each text."
            )
        bad = ~np.isfinite(vectors).all(axis=1)
        if kind == "passage":
            bad |= ~vectors.any(axis=1)
        if bad.any():
            row = int(bad.argmax())
            fault = "of zeros" if np.isfinite(vectors[row]).all() else "with NaN or infinity"
            raise ToolError(
                f"{name} returned a vector {fault} for the text {texts[row]!r:.80}, which is "
                "similar to nothing. Correct it, or set encoder to another."
            )
        self._dimensions = vectors.shape[1]
        return vectors


def unit(vectors: Vectors) -> Vectors:
    """Vectors (texts, dimensions) of length 1, rounded to a few decimals."""
    return cast(
        "Vectors", np.round(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), _DIGITS)
    )


def likeness(a: Vectors, numbers: Sequence[float]) -> float:
    """The cosine similarity of two vectors (dimensions,); 0 if their dimensions differ."""
    b = np.asarray(numbers, dtype=np.float64)
    if a.shape != b.shape:
        return 0.0
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def agrees(encoder: Encoder, probe: Sequence[float]) -> bool:
    """True if an index's vector of `PROBE` was made by this encoder."""
    return likeness(encoder.probe, probe) >= _SAME


@functools.cache
def open_encoder(name: str, device: Device = None) -> Encoder:
    """Load an encoder once per process.

    Args:
        name: A function, `my_module.encode` or `my_module:encode`, which takes a list of texts and
            returns an array (texts, dimensions); or the name or folder of a model of
            sentence-transformers.
        device: The device of such a model; None for a GPU if there is one. A function decides for
            itself.
    Raises:
        RecipeError: If there is no such function or model, or its module or library cannot be
            imported.
    """
    module, _, attribute = name.replace(":", ".").rpartition(".")
    written = module and all(part.isidentifier() for part in (*module.split("."), attribute))
    if not Path(name).is_dir() and (written or ":" in name):
        function = _function(f"{module}.{attribute}")
        return Encoder(name, lambda texts, kind: function(texts))
    return _sentence_transformer(name, device)


def _function(path: str) -> Callable[[list[str]], object]:
    function: Callable[[list[str]], object] = named("encoder", path)
    if inspect.isclass(function):
        raise RecipeError(
            f"the encoder {path!r} is a class. Write a function that takes a list of texts and "
            "returns an array (texts, dimensions)."
        )
    return function


def _sentence_transformer(name: str, device: Device) -> Encoder:
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"the encoder {name!r} is a model of sentence-transformers, which needs {error.name}, "
            "and that is not installed. Run \"pip install '.[encoders]'\" in your clone "
            "of turnrl. Or set encoder to a function of your own, as my_module.encode."
        ) from None
    import torch

    try:
        # the initial weights, which are overwritten, must not use up the run's random numbers
        with torch.random.fork_rng(devices=[]):
            model = SentenceTransformer(name, device=device)
    except Exception as error:  # from the hub, the disk, or the model's own code
        text = " ".join(str(error).split())[:200]
        raise RecipeError(
            f"the encoder {name!r} cannot be loaded by sentence-transformers "
            f"({type(error).__name__}: {text}). Check the name and the connection, or name a "
            "folder with the model."
        ) from None

    def encode(texts: list[str], kind: Kind) -> object:
        act = model.encode_query if kind == "query" else model.encode_document
        return act(texts, batch_size=len(texts), show_progress_bar=False)

    return Encoder(name, encode)
