"""The program `turnrl`, and `python -m turnrl`: Ctrl-C stops its imports too."""

import os
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one command; see `turnrl.cli.main`."""
    # torch reads these when it first takes memory of a GPU. Minibatches differ in size, and blocks
    # that cannot grow leave gaps between them. On Windows torch has no such segments and says so.
    # A program that imports turnrl has its own environment, which only its user changes
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if sys.platform == "linux" and not any(name in os.environ for name in names):
        os.environ[names[0]] = "expandable_segments:True"
    try:
        from turnrl.cli import main
    except KeyboardInterrupt:
        print("\nturnrl: stopped by Ctrl-C", file=sys.stderr)
        return 130
    return main(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
