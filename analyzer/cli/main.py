"""The command line: selects the action that the arguments request, and runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from analyzer.errors import FITS, INTERNAL_ERROR, INTERRUPTED, AnalyzerError, InputError

DEBUG: Final = "--info-debug"
DEBUG_OF_COMMAND: Final = "--debug"
OWN_FOLDER: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
"""The folder of this package."""
MAX_ERROR: Final = 300
"""Characters of the message of an internal error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. `argv` are the arguments without the name of the program.

    Exit status 0: the launch fits, or the GPU memory is not known. 1: a rank does not fit, or the verdict is one of those in
    `--info-fail-on`. 2: invalid or unsupported input. 3: a comparison failed. 70: an error of this program. 130: interrupted
    (SIGINT). The environment, the working directory and the garbage collector of the process do not change. `--info-launch`
    replaces the process by the training.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        debug = DEBUG in arguments or (DEBUG_OF_COMMAND in arguments and _is_command(arguments[0]))
        return _reported(lambda: _run(arguments), debug=debug)
    except KeyboardInterrupt:
        from analyzer.cli.output import print_message

        print_message("interrupted")
        return INTERRUPTED


def _reported(action: Callable[[], int], *, debug: bool) -> int:
    """The exit status of `action`. An error is printed as one line. With `debug` an internal error is raised."""
    from analyzer.cli.output import print_message

    try:
        return action()
    except AnalyzerError as error:
        print_message(str(error))
        return error.exit_code
    except Exception as error:
        if (wrong := _unusable_file(error)) is not None:
            print_message(str(wrong))
            return wrong.exit_code
        if debug:
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        remedy = "report it with the command line and the output of --info-debug"
        print_message(f"internal error: {what[:MAX_ERROR]}; {remedy}")
        return INTERNAL_ERROR


def _unusable_file(error: Exception) -> InputError | None:
    """The error for a file or folder that the operating system refuses. None for files of this program, and for other errors."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return None
    if os.path.abspath(error.filename).startswith(OWN_FOLDER):
        return None
    return InputError(error.filename, f"cannot be used ({error.strerror})", "give a path that exists and that you may read")


def _run(argv: list[str]) -> int:
    if not argv:
        remedy = "write get-training-info fit, time, search or another command; --help lists them"
        raise InputError("launch", "none is given", remedy)
    if _is_command(argv[0]):
        from analyzer.cli.commands.run import run_command

        return run_command(argv[0], argv[1:], _drop_in)
    _refuse_misspelled_command(argv[0])
    return _drop_in(argv)


def _refuse_misspelled_command(word: str) -> None:
    """Raises InputError for a first word that is no file and nearly a command."""
    if not word.isalpha() or os.path.exists(word):
        return
    from analyzer.cli.commands.table import COMMANDS
    from analyzer.cli.script import STARTERS
    from analyzer.launch.spelling import is_misspelling

    if word in STARTERS:
        return
    meant = [name for name in COMMANDS if abs(len(name) - len(word)) <= 1 and is_misspelling(word, name)]
    if meant:
        raise InputError(repr(word), "is not a command", f"did you mean {' or '.join(meant)}?")


def _is_command(word: str) -> bool:
    """Whether the first word is a command, and not a launch in the drop-in form."""
    from analyzer.cli.commands.table import COMMANDS, COMPLETION

    return word in COMMANDS or word == COMPLETION


def _drop_in(argv: list[str]) -> int:
    """Runs a command line of the drop-in form."""
    from analyzer.cli.information import print_information

    position = _position_of_script(argv)
    if print_information(argv[:position]):
        return FITS
    environ, folder = dict(os.environ), _working_folder()
    if position is not None:
        from analyzer.cli.script import analyze_script

        return analyze_script(argv, position, environ=environ, folder=folder, analysis=_analyze_one)
    for option in ("--info-dry", "--info-run-all"):
        if option in argv:
            raise InputError(option, "is only used with a launch script", "give the script, or leave the option out")
    return _analyze(argv, environ=environ, folder=folder)


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise InputError("the working folder", f"cannot be used ({error.strerror})", "change to a folder that exists") from None


def _position_of_script(argv: Sequence[str]) -> int | None:
    """The position of a launch script in `argv`, before which there are only --info options. None without a script."""
    from analyzer.launch.info_options import SCRIPT_ENDINGS

    words = (word for word in argv if not word.startswith("-"))
    first = next((word for word in words if os.path.isfile(word) or word.endswith(SCRIPT_ENDINGS)), None)
    if first is None or (first.endswith(".py") and not _starts_a_launcher(first, argv)):
        return None
    from analyzer.cli.script import find_script

    return find_script(argv)


def _starts_a_launcher(path: str, argv: Sequence[str]) -> bool:
    """Whether a Python file is no training script itself, but starts one through a launcher."""
    from analyzer.script.python_launchers import starts_a_launcher

    return starts_a_launcher(path, argv)


def _analyze_one(argv: Sequence[str], environ: Mapping[str, str], folder: Path) -> int:
    """Analyzes one launch of a script."""
    return _reported(lambda: _analyze(list(argv), environ=environ, folder=folder), debug=DEBUG in argv)


def _analyze(argv: list[str], *, environ: Mapping[str, str], folder: Path) -> int:
    from analyzer.cli.environment import Environment
    from analyzer.launch.inference.options import asks_for_inference
    from analyzer.launch.info_options import asks_for_search, value_of

    environ = Environment(environ)
    if asks_for_inference(argv):
        from analyzer.cli.inference import analyze_inference

        return analyze_inference(argv, environ=environ, folder=folder)
    if "--info-print-options" in argv:
        from analyzer.cli.print_options import print_options

        return print_options(argv, environ=environ, folder=folder)
    trace = value_of("--info-check", argv)
    if trace is not None:
        from analyzer.cli.check import check_trace

        return check_trace(trace, argv, environ=environ, folder=folder)
    calibration = value_of("--info-calibrate", argv)
    if calibration is not None:
        from analyzer.cli.calibrate import calibrate_machine

        return calibrate_machine(calibration, argv, environ=environ, folder=folder)
    if asks_for_search(argv):
        from analyzer.cli.search import search_launch

        return search_launch(argv, environ=environ, folder=folder)
    from analyzer.cli.predict import predict_launch

    return predict_launch(argv, environ=environ, folder=folder)
