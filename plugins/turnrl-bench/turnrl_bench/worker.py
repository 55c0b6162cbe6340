"""One block of a measurement, in a process of its own: `python -m turnrl_bench.worker FILE`.

FILE is JSON: the function to call, its settings, and how many threads torch may use. What the
function returns replaces it. A process of its own begins without the caches, the fragmented memory
and the threads of whatever was measured before.
"""

from __future__ import annotations

import json
import logging
import pkgutil
import sys
import warnings
from pathlib import Path


def main(name: str) -> None:
    """Do what a file asks for, and put what came of it into its place."""
    import torch

    warnings.filterwarnings("ignore")  # of Lightning and TRL, about workers, loggers and the like
    for noisy in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    file = Path(name)
    request = json.loads(file.read_text("utf-8"))
    torch.set_num_threads(request["threads"])
    result = pkgutil.resolve_name(request["function"])(**request["settings"])
    file.write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
