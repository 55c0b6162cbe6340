"""The program `turnrl`, and `python -m turnrl`: Ctrl-C stops its imports too."""

import os
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one command; see `turnrl.cli.main`."""
    try:
        from turnrl.plugin.signals import end_with_parent

        end_with_parent()
        from turnrl.cli import main
        from turnrl.policy.sizes import ALLOCATOR
    except KeyboardInterrupt:
        print("\nturnrl: stopped by Ctrl-C", file=sys.stderr)
        return 130
    # torch reads these when it first allocates GPU memory. Minibatches differ in size, and blocks
    # that cannot grow leave gaps. On Windows torch has no such segments and warns about them. For a
    # program that imports turnrl, only its user sets the environment
    if sys.platform == "linux" and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    return main(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
