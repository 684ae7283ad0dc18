"""Chooses the Megatron-LM release or checkout whose options a launch is read with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.launch.argv_parser import Reading, is_option, read_words
from analyzer.launch.options.catalogue import PREFERRED, Catalogue, describe
from analyzer.launch.options.megatron_parser import find_checkout, load_table
from analyzer.launch.options.option_table import OptionTable

if TYPE_CHECKING:
    from analyzer.launch.forks.guess import ForkGuess


def chosen_table(
    named: str | None, catalogue: Catalogue, environ: Mapping[str, str], folder: Path, *, entry: str | None
) -> tuple[OptionTable | None, tuple[str, ...]]:
    """The options of the checkout or release `named` by --info-megatron, or of the checkout that the launch would import.

    None if the release is to be chosen from the catalogue. Also returns assumptions about the choice.
    """
    if named is not None and not (folder / named).exists():
        release = catalogue.find_release(named)
        if release is not None:
            return catalogue.table(release), (f"{describe(release)} is assumed, from --info-megatron {named}.",)
        releases = ", ".join(catalogue.releases)
        fault = f"'{named}' is neither a folder nor a known release"
        raise InputError("--info-megatron", fault, f"give the root folder of a Megatron-LM checkout, or one of {releases}")
    if named is not None:
        return load_table(folder / named, environ=environ), ()
    checkout = find_checkout(folder, environ=environ, entry=entry)
    if checkout is None:
        return None, ()
    try:
        return load_table(checkout, environ=environ), ()
    except InputError as error:
        return None, (f"The parser of {checkout} could not be loaded ({error.fault}). The built-in catalogue is used.",)


def read_with_catalogue(
    words: Sequence[str], catalogue: Catalogue, *, fork: ForkGuess | None = None
) -> tuple[OptionTable, Reading, str]:
    """Parses the words with the release nearest to the preferred one that accepts them. Also returns that assumption.

    `fork`: the fork of the launch. The release that it is based on takes the place of the preferred one.

    A release that has every flag may still refuse a value. If no release has every flag, the options of all releases are used.
    """
    flags = {word.partition("=")[0]: None for word in words if is_option(word)}
    refusal: InputError | None = None
    preferred = (catalogue.find_release(fork.fork.base) if fork is not None else None) or PREFERRED
    for release in catalogue.releases_with(flags, near=preferred):
        table = catalogue.table(release)
        try:
            return table, read_words(words, table), _release_assumption(release, flags, catalogue, refused=refusal, fork=fork)
        except InputError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    union = catalogue.union()
    missing = ", ".join(flag for flag in flags if flag not in catalogue.table(PREFERRED).options)
    note = f"No release of Megatron-LM has all of these options; {describe(PREFERRED)} is assumed to have {missing} as well."
    return union, read_words(words, union), note


def _release_assumption(
    release: str, flags: Collection[str], catalogue: Catalogue, *, refused: InputError | None, fork: ForkGuess | None
) -> str:
    """The assumption about the release, with the reason if it is not the preferred one."""
    if fork is not None:
        based = f"{fork.fork.name} is based on {fork.fork.base}"
        return f"{describe(release)} is assumed: no checkout was found, and {based}. {fork.reason}"
    if release == PREFERRED:
        return f"{describe(release)} is assumed: no checkout was found."
    missing = [flag for flag in flags if PREFERRED not in catalogue.releases_with([flag])]
    if missing:
        reason = f"{PREFERRED} has no {', '.join(missing)}"
    else:
        reason = f"{PREFERRED} refuses {refused.option}" if refused else f"it is nearest to {PREFERRED}"
    return f"{describe(release)} is assumed: no checkout was found, and {reason}."
