"""`python -m turnrl`."""

from turnrl.cli import main

raise SystemExit(main())
