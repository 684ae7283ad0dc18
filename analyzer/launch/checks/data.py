"""Checks of the sources of data.

Megatron: `validate_args` (megatron/training/arguments.py), 0.16 to 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING, Final

from analyzer.launch.derive.reading import option, since, switched_on
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

_SPLITS: Final = ("train_data_path", "valid_data_path", "test_data_path")


def data_violations(arguments: Arguments) -> Iterator[Violation]:
    """Sources of data that exclude each other, and what they need."""
    threads = arguments.get("num_dataset_builder_threads")
    if isinstance(threads, int) and threads < 1:
        yield Violation(("num_dataset_builder_threads",), f"{threads} is not above 0", "give 1 or more")
    yield from _sources(arguments)
    yield from _fill_in_the_middle(arguments)


def _sources(arguments: Arguments) -> Iterator[Violation]:
    """Mock data, one blend of files, or files for each split; the files in the options or in a list."""
    if not since(arguments, "0.16"):
        return
    split = next((dest for dest in _SPLITS if arguments.get(dest)), None)
    given = [dest for dest in ("mock_data", "data_path") if arguments.get(dest)] + ([split] if split else [])
    pairs = [*combinations(given, 2)]
    if arguments.get("data_path") is not None and arguments.get("data_args_path") is not None:
        pairs.append(("data_path", "data_args_path"))
    if split and arguments.get("per_split_data_args_path") is not None:
        pairs.append((split, "per_split_data_args_path"))
    for one, other in pairs:
        yield Violation((one,), f"contradicts {option(arguments, other)}", "keep one of the two")


def _fill_in_the_middle(arguments: Arguments) -> Iterator[Violation]:
    """Data with parts that are moved to the end of a document (`--fim-data`, from 0.16 on)."""
    if not switched_on(arguments, "fim_data"):
        return
    for dest in ("mock_data", "legacy_tokenizer"):
        if switched_on(arguments, dest):
            yield Violation(("fim_data",), f"contradicts {option(arguments, dest)}", "keep one of the two")
    for dest in ("fim_rate", "fim_spm_rate"):
        if not arguments.get(dest):
            yield Violation((dest,), "is 0, and --fim-data needs a rate", "give a number above 0, such as 0.5")
