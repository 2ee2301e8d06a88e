"""`python -m heedful` and the `heedful` command."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    # Modules and a vocabulary are hundreds of thousands of objects, none of them garbage: looking through them every
    # 700 took 2 % of a start's instructions.
    gc.set_threshold(50_000)
    try:
        from heedful.cli.main import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules load; later typer turns it into 130 itself
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    main()
