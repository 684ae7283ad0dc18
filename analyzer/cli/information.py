"""What is printed without a launch: `--help`, `--version`, `--info-gpu list` and `--info-model list`."""

from __future__ import annotations

from collections.abc import Sequence

from analyzer.cli.output import standard_output
from analyzer.launch.info_options import usage, value_of


def print_information(argv: Sequence[str]) -> bool:
    """Prints what the arguments request instead of an analysis. Returns False, and prints nothing, if they request none.

    `--version` must be the first word, because a word of a launch script may be the same.
    """
    if "--help" in argv or "-h" in argv:
        from analyzer.cli.commands.help import commands_text

        return _print(usage(commands_text().splitlines()))
    if argv[:1] == ["--version"]:
        from analyzer import __version__

        return _print(f"get-training-info {__version__}")
    if value_of("--info-gpu", argv) == "list":
        from analyzer.report.console.gpus_section import print_gpus

        with standard_output() as stream:
            print_gpus(stream)
        return True
    if value_of("--info-model", argv) == "list":
        from analyzer.launch.model_config.published import published_names

        return _print("\n".join(sorted(set(published_names().values()), key=str.lower)))
    return False


def _print(text: str) -> bool:
    with standard_output() as stream:
        print(text, file=stream)
    return True
