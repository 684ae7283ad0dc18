"""Parses a command line into Megatron's arguments, the processes of the launch, and the --info options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from analyzer.errors import InputError
from analyzer.launch.arguments import Arguments
from analyzer.launch.argv_parser import is_option, read_words
from analyzer.launch.coverage.legacy_options import UNRECOGNISED, refuse_retired
from analyzer.launch.entry_script import check_entry
from analyzer.launch.info_options import PREFIX, InfoOptions, read_info_options, takes_value
from analyzer.launch.launchers.torchrun import World, read_world
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.options.choose_release import chosen_table, read_with_catalogue
from analyzer.launch.options.option_table import Option
from analyzer.launch.split_argv import split_argv


def parse(argv: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> tuple[Arguments, World, InfoOptions]:
    """Parses `argv`, the words after the program's name.

    `environ` is the environment and `folder` the working folder of the launch. Raises InputError for what torchrun or
    Megatron refuses, UnsupportedError for what is not modelled.
    """
    catalogue = load_catalogue()
    words = split_argv(argv, catalogue.newest)
    info = read_info_options(words.info)
    table, notes = chosen_table(info.megatron, catalogue, environ, folder, entry=words.entry)
    if table is not None:
        known: Mapping[str, Option] = {**catalogue.newest, **table.options}
        words = split_argv(argv, known)
    assumptions = list(notes)
    if words.entry is not None:
        module = any(dest == "module" for dest, _, _ in words.torchrun)
        assumed = check_entry(words.entry, module=module)
        assumptions += [assumed] if assumed else []
    world = read_world(words.torchrun, environ)
    if table is not None:
        _check_flags(words.megatron, table.options)
        reading = read_words(words.megatron, table)
    else:
        _check_flags(words.megatron, catalogue.masks)
        table, reading, note = read_with_catalogue(words.megatron, catalogue)
        assumptions.append(note)
    arguments = Arguments(
        values=MappingProxyType({**table.defaults, **reading.values}),
        given=frozenset(reading.values),
        spelled=MappingProxyType(reading.spelled),
        release=table.release,
        source=table.source,
        entry=words.entry,
        assumptions=tuple(assumptions),
    )
    if arguments.get("use_checkpoint_args"):
        from analyzer.launch.options.checkpoint_args import with_checkpoint_args

        arguments = with_checkpoint_args(arguments, folder)
    return arguments, world, info


def words_of_launch(argv: Sequence[str], *, recorded: Sequence[str]) -> list[str]:
    """`argv`, preceded by the words of a recorded launch if `argv` has only --info options.

    `recorded` starts with the program's name.
    """
    words = split_argv(argv, load_catalogue().newest)
    if words.megatron or words.torchrun or words.entry is not None:
        return list(argv)
    return [*_without_info_options(recorded[1:]), *argv]


def _without_info_options(argv: Sequence[str]) -> list[str]:
    """The words without the --info options and their values."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        if not flag.startswith(PREFIX):
            kept.append(word)
        elif takes_value(flag) and not equals:
            next(words, None)
    return kept


def _check_flags(words: Sequence[str], known: Collection[str]) -> None:
    """Raises InputError for a flag that is not in `known`, or that Megatron parses and then refuses."""
    for word in words:
        flag = word.partition("=")[0]
        if not is_option(word):
            continue
        if flag in known:
            refuse_retired(flag)
        else:
            raise _unknown(flag, known)


def _unknown(flag: str, known: Collection[str]) -> InputError:
    """The error for a flag that no parser has."""
    if flag in UNRECOGNISED:
        return InputError(flag, "Megatron-LM no longer has this option", UNRECOGNISED[flag])
    from difflib import get_close_matches

    near = get_close_matches(flag, known, n=1, cutoff=0.75)
    remedy = f"did you mean {near[0]}?" if near else "remove it, or give the checkout that has it with --info-megatron"
    return InputError(flag, "is not an option of torchrun or Megatron-LM", remedy)
