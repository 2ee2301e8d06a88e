"""`python -m heedful` and the `heedful` command."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from heedful.cli.main import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules load; later typer turns it into 130 itself
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    main()
