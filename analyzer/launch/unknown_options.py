"""Options that no known Megatron-LM has: misspelled ones are errors, others are not counted, and the report says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.errors import InputError
from analyzer.launch.argv_parser import is_option, operands_of
from analyzer.launch.options.option_table import Option
from analyzer.launch.spelling import is_misspelling, nearest


@dataclass(frozen=True, slots=True)
class SortedWords:
    """The words of Megatron's part of a command line."""

    known: tuple[str, ...]
    """The options that the parser has, with their values, and words that belong to no option."""
    unknown: Mapping[str, tuple[str, ...]]
    """The other options, with the words that follow them."""


def sort_words(words: Sequence[str], known: Mapping[str, Option], *, counts: Mapping[str, int]) -> SortedWords:
    """Separates the options that are in `known` from the others.

    An option that is not known takes the words up to the next option; at most as many as `counts` says for its flag.
    Of equal options the last one counts, as in argparse.
    """
    kept: list[str] = []
    unknown: dict[str, tuple[str, ...]] = {}
    position = 0
    while position < len(words):
        word = words[position]
        flag, equals, attached = word.partition("=")
        position += 1
        if not is_option(word):
            kept.append(word)
        elif flag in known:
            taken = [] if equals else operands_of(known[flag], words[position:])
            kept += [word, *taken]
            position += len(taken)
        else:
            values = [attached] if equals else _values(words[position:], counts.get(flag))
            unknown[flag] = tuple(values)
            position += 0 if equals else len(values)
    return SortedWords(tuple(kept), unknown)


def _values(following: Sequence[str], most: int | None) -> list[str]:
    values: list[str] = []
    for word in following[:most]:
        if is_option(word):
            break
        values.append(word)
    return values


_SHORT = 4
"""Letters of the longest word that counts as an abbreviation."""


def refuse_misspelled(flags: Collection[str], known: Collection[str], *, strict: bool, fork: bool = False) -> None:
    """Raises InputError if some of `flags`, which no parser has, are misspelled; with `strict`, if there are any.

    Names all of them. An option that shares its first word with another unknown one belongs to a fork: with --dion-momentum,
    --dion-beta1 is not a misspelled --lion-beta1. With `fork`, the launch has options of a fork, whose other options may be
    unknown: --enable-mhc is not a misspelled --enable-msc.
    """
    meant = {flag: _meant(flag, known) for flag in flags}
    families = {_family(flag) for flag in flags if meant[flag] is None}
    for flag, option in meant.items():
        if option is None:
            continue
        if (_family(flag) in families and _family(flag) != _family(option)) or (fork and _differ_in_abbreviation(flag, option)):
            meant[flag] = None
    misspelled = [flag for flag in flags if meant[flag] is not None]
    named = list(flags) if strict else misspelled
    if not named:
        return
    plural = len(named) > 1
    fault = f"{'are not options' if plural else 'is not an option'} of torchrun or Megatron-LM"
    remedies = []
    if misspelled:
        remedies.append(f"did you mean {' and '.join(str(meant[flag]) for flag in misspelled)}?")
    if len(misspelled) < len(named):
        what = "the options" if len(named) - len(misspelled) > 1 else "the option"
        remedies.append(f"leave out --info-strict to ignore {what}, or give the checkout with --info-megatron")
    raise InputError(", ".join(named), fault, " ".join(remedies))


def _meant(flag: str, known: Collection[str]) -> str | None:
    return next((each for each in known if abs(len(each) - len(flag)) <= 1 and is_misspelling(flag, each)), None)


def _differ_in_abbreviation(flag: str, option: str) -> bool:
    """Whether the flags differ in one letter of a short word, as --enable-mhc and --enable-msc do."""
    if len(flag) != len(option) or sorted(flag) == sorted(option):
        return False
    pairs = [pair for pair in zip(flag.split("-"), option.split("-"), strict=False) if pair[0] != pair[1]]
    return len(pairs) == 1 and len(pairs[0][0]) == len(pairs[0][1]) <= _SHORT


def _family(flag: str) -> str:
    """The first word of a flag."""
    return flag.lstrip("-").replace("_", "-").partition("-")[0]


_ABBREVIATED: Final = {
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--ep": "--expert-model-parallel-size",
    "--etp": "--expert-tensor-parallel-size",
    "--vpp": "--num-virtual-stages-per-pipeline-rank",
    "--mbs": "--micro-batch-size",
    "--gbs": "--global-batch-size",
}
"""Usual abbreviations, which no release has as options."""


def not_counted(flags: Collection[str], known: Collection[str]) -> tuple[str, ...]:
    """One sentence for each option that is neither known nor misspelled."""
    sentences = []
    for flag in flags:
        similar = _ABBREVIATED.get(flag.lower()) or nearest(flag, known, cutoff=0.8)
        hint = f" Did you mean {similar}?" if similar else ""
        fault = "is not a known option of Megatron-LM and is not counted: its effect on memory and time is unknown"
        sentences.append(f"{flag} {fault}.{hint}")
    return tuple(sentences)
