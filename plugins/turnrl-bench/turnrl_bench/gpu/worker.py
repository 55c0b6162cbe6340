"""The process that measures one part: `python -m turnrl_bench.gpu.worker SETTINGS`, with the
arguments of `measure` as JSON. Its results go to the file.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import pkgutil
import sys
import time
import warnings
from pathlib import Path

from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.results import Cases, Results, error_of


def measure(file: str, folder: str, name: str, function: str, tiny: bool, seconds: float) -> None:
    """Measure a part.

    Args:
        file: File of the results.
        folder: Folder for models.
        name: Name of the part.
        function: `module:function`.
        tiny: True for a small shape, on any device.
        seconds: Seconds after which no case begins.
    """
    # a case may begin at the last moment; if it takes longer still, it hangs, as the log shows
    faulthandler.dump_traceback_later(2 * seconds)
    results, began = Results(Path(file)), time.monotonic()
    cases = Cases(results, name, began + seconds)
    try:
        pkgutil.resolve_name(function)(Bench(Path(folder), tiny, results), cases)
    except (Exception, KeyboardInterrupt) as error:
        results.note(name, **error_of(error))
    else:
        results.end(name)
    finally:
        faulthandler.cancel_dump_traceback_later()
    results.note(name, seconds=time.monotonic() - began)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # Lightning's remarks about workers, loggers and the like
    measure(*json.loads(sys.argv[1]))
