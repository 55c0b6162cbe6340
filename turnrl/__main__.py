"""The program `turnrl`, and `python -m turnrl`: Ctrl-C stops its imports too."""

import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one command; see `turnrl.cli.main`."""
    try:
        from turnrl.cli import main
    except KeyboardInterrupt:
        print("\nturnrl: stopped by Ctrl-C", file=sys.stderr)
        return 130
    return main(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
