"""The program of every stand-in: `python -I -S start.py PATH_OF_THE_STAND_IN WORDS…`."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Runs the stand-in whose path is the first word, and returns its exit status."""
    package = type(sys)("analyzer")  # the package without its __init__, which imports the analysis
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
    sys.modules["analyzer"] = package
    from analyzer.script.stand_ins.dispatch import run_stand_in

    name = os.path.basename(sys.argv[1])
    written = os.environ.pop("INFO_SCRIPT_REAL", name)
    return run_stand_in(written if os.path.basename(written) == name else name, sys.argv[2:])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        os._exit(141)
