"""`python -m heedful.train`, as torchrun starts it: `heedful train`, in each of the processes."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr

from heedful.cli.main import run

BAD_USAGE = 2


def main() -> int:
    """What is wrong with the command is the same in every process: the first one alone says it."""
    arguments = ["train", *sys.argv[1:]]
    if os.environ.get("RANK", "0") == "0":
        return run(arguments)
    said = io.StringIO()
    with redirect_stderr(said):
        status = run(arguments)
    if status != BAD_USAGE:
        sys.stderr.write(said.getvalue())
    return status


if __name__ == "__main__":
    sys.exit(main())
