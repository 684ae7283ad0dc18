"""Runs a command: prints its help, or analyzes the words of the drop-in form that it stands for."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

from analyzer.cli.commands.table import COMMANDS, COMPLETION, EXPLORE
from analyzer.cli.commands.words import drop_in_words, is_model, two_launches, words_of
from analyzer.cli.output import print_message, standard_output
from analyzer.errors import DOES_NOT_FIT, FITS, InputError

Analysis = Callable[[list[str]], int]
"""Analyzes the words of the drop-in form and returns the exit status. Raises AnalyzerError."""


def run_command(name: str, words: Sequence[str], analyze: Analysis) -> int:
    """Runs a command and returns the exit status. Raises AnalyzerError."""
    if name == COMPLETION:
        return _print_completion(words)
    before = words[: words.index("--")] if "--" in words else words
    if "--help" in before or "-h" in before:
        from analyzer.cli.commands.help import help_text

        return _print(help_text(name))
    if name == EXPLORE:
        from analyzer.cli.commands.explore import explore

        return explore(words)
    if COMMANDS[name].target == "two launches":
        return _compare(name, words, analyze)
    return analyze(drop_in_words(name, words))


def _compare(name: str, words: Sequence[str], analyze: Analysis) -> int:
    """Analyzes the first target, unless it is a JSON report, and then the second one beside it."""
    from analyzer.report.against import named_reports

    old, new = two_launches(name, words)
    report = old.target[0]
    if report.endswith(".json") and not is_model(report):
        if old.target[1:]:
            raise InputError(old.target[1], f"stands after {report}, a report, which takes no options", "write it after the launch")
        return analyze(["--info-against", report, *words_of(name, new)])
    with tempfile.TemporaryDirectory() as folder, named_reports(folder, shlex.join(old.target)):
        report = os.path.join(folder, "old.json")
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            status = analyze(["--info-json", report, *words_of(name, old)])
        if status not in (FITS, DOES_NOT_FIT):
            return status
        writes = any(field == "json" for field, _ in new.own)
        written = [] if writes else ["--info-json", os.path.join(folder, "new.json")]
        status = analyze(["--info-against", report, *written, *words_of(name, new)])
        if not writes:
            _state_numbers(folder, old.target, new.target)
        return status


def _state_numbers(folder: str, old: Sequence[str], new: Sequence[str]) -> None:
    """Prints that the scripts start different numbers of launches, from the reports that were written."""
    names = os.listdir(folder)
    before, now = (sum(each.startswith(prefix) for each in names) for prefix in ("old", "new"))
    if before and now and before != now:
        first, second = shlex.join(old), shlex.join(new)
        print_message(f"{first} starts {before} and {second} {now} launches: the first ones are compared")


def _print_completion(words: Sequence[str]) -> int:
    """Prints a script that completes the commands in a shell."""
    shells = ("bash", "zsh", "tcsh")
    if len(words) != 1 or words[0] not in shells:
        raise InputError(COMPLETION, "needs the name of a shell", f"write get-training-info completion {'|'.join(shells)}")
    try:
        import shtab
    except ImportError:
        raise InputError(COMPLETION, "needs the package shtab", "pip install shtab") from None
    from analyzer.cli.commands.help import completion_parser

    return _print(shtab.complete(completion_parser(), shell=words[0]))


def _print(text: str) -> int:
    with standard_output() as stream:
        print(text.rstrip(), file=stream)
    return FITS
