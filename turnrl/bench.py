"""`python -m turnrl.bench`, which is `turnrl bench`."""

import sys

from turnrl.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", *sys.argv[1:]]))
