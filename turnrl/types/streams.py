"""Random streams: a key's first number is its purpose, so that no two purposes share a stream."""

TRAIN, EVALUATE, ASK, ALSO = range(4)
DEMONSTRATE = 3
"""The same number as `ALSO`. Their keys still differ: `ALSO`'s have two more numbers, batch and
process."""


def stream_seed(*key: int) -> int:
    """The number of a random stream, from its key. Different keys give independent streams, except
    that a key of less than four numbers counts as padded with zeros."""
    import numpy as np  # here, because `turnrl.testing` does without it

    return int(np.random.SeedSequence([k % 2**32 for k in key]).generate_state(1, np.uint64)[0])
