"""Random streams: each purpose has the first number of a key, so that no two draw the same."""

TRAIN, EVALUATE, ASK, ALSO = range(4)
DEMONSTRATE = 3
"""As `ALSO`, and yet no key is one of both: `ALSO`'s have two more numbers, batch and process."""


def stream_seed(*key: int) -> int:
    """A random stream's number from what it belongs to. Different keys give independent streams,
    but a key of less than four numbers is as if zeros stood behind it."""
    import numpy as np  # which `turnrl.testing` does without

    return int(np.random.SeedSequence([k % 2**32 for k in key]).generate_state(1, np.uint64)[0])
