"""The program of every stand-in. It is imported, or run as `python -I -S start.py PATH_OF_THE_STAND_IN WORDS…`."""

from __future__ import annotations

import os
import sys


def run(argv: list[str]) -> None:
    """Runs the stand-in whose path is the first word, and exits."""
    try:
        sys.exit(main(argv))
    except BrokenPipeError:
        os._exit(141)
    except Exception as error:
        os.write(2, f"get-training-info: {os.path.basename(argv[0])}: {type(error).__name__}: {error}\n".encode(errors="replace"))
        sys.exit(1)


def main(argv: list[str]) -> int:
    """Runs the stand-in whose path is the first word, and returns its exit status."""
    package = type(sys)("analyzer")  # the package without its __init__, which imports the analysis
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
    sys.modules["analyzer"] = package
    from analyzer.script.stand_ins.dispatch import run_stand_in

    name = os.path.basename(argv[0])
    written = os.environ.pop("INFO_SCRIPT_REAL", name)
    return run_stand_in(written if os.path.basename(written) == name else name, argv[1:])


if __name__ == "__main__":
    run(sys.argv[1:])
