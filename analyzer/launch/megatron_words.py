"""Megatron's part of a command line in terms of Megatron-LM's own options.

Options of known forks are translated. Misspelled options are errors. Any other unknown option is left out, with a statement for the
report.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from analyzer.errors import InputError
from analyzer.launch.argv_parser import is_option, operands_of
from analyzer.launch.coverage.legacy_options import RETIRED, UNRECOGNISED, refuse_retired
from analyzer.launch.launchers.world import World
from analyzer.launch.options.catalogue import OLDEST
from analyzer.launch.options.script_options import flags_of
from analyzer.launch.placeholders import with_whole_placeholders
from analyzer.specs.fine_tuning import ALL_PARAMETERS, FineTuning
from analyzer.specs.vision_part import NO_PARTS, ModelParts

if TYPE_CHECKING:
    from analyzer.launch.forks.fork_table import ForkOption, ForkTable
    from analyzer.launch.forks.guess import ForkGuess
    from analyzer.launch.options.catalogue import Catalogue
    from analyzer.launch.options.choose_release import LaterRelease
    from analyzer.launch.options.option_table import Option, OptionTable

_Value = TypeVar("_Value")


class LayoutSettings(NamedTuple):
    """The settings of a configuration that give the layout and the microbatches of its training."""

    engine: str
    """What the names of the parallel sizes begin with."""
    mirrored: tuple[str, ...] = ()
    """The same for models that run with the layout of the training."""
    microbatch: str = ""
    """The setting with the samples or the tokens of a microbatch."""
    value: int = 1
    """Its value."""
    of_rank: bool = False
    """Whether it counts the tokens of one context-parallel rank."""
    steps: str = ""
    """The setting with the microbatches of a replica, if the global batch follows from it."""
    samples: int = 0
    """Samples of an iteration, with `steps`."""
    per_step: int = 0
    """Samples of a microbatch, with `steps`; 0 if `microbatch` has them."""
    overlap: str = ""
    """What the names of overlapped communication begin with, if they take precedence there."""
    overriding: frozenset[str] = frozenset()
    """Fields that the configuration sets where they take precedence over all others."""


@dataclass(frozen=True, slots=True)
class MegatronWords:
    """The words that Megatron's parser reads, and what was changed."""

    words: tuple[str, ...]
    fork: ForkGuess | None = None
    """The fork of the launch; None if no options of a fork are given."""
    notes: tuple[str, ...] = ()
    """Assumptions about translated options, one sentence each."""
    statements: tuple[str, ...] = ()
    """About options that are not counted, one sentence each."""
    unknown: tuple[str, ...] = ()
    """Keys of a framework that are not known, each of which has a statement."""
    withheld: tuple[str, ...] = ()
    """Why there can be no verdict (`Arguments.withheld`)."""
    world: World | None = None
    """The number of GPUs, if options of the fork give it."""
    model: str | None = None
    """The Hugging Face name or the folder of the model, if the fork gives it instead of options."""
    of_experts: tuple[str, ...] = ()
    """Further words of the fork for a model with experts that is given by its name."""
    complete: bool = False
    """Whether the words have all that a launch needs beside its model: the fork has a training script of its own."""
    validated: bool = True
    """Whether `validate_args` of Megatron-LM checks the launch. Some frameworks build the configuration without it."""
    tuning: FineTuning = ALL_PARAMETERS
    """What is trained beside, or instead of, all parameters of the model."""
    release: LaterRelease | None = None
    """The release of megatron-core that the framework needs for the model; None for any."""
    parts: ModelParts = NO_PARTS
    """What options of the fork, or a configuration of a framework, say of the model."""
    layout: LayoutSettings | None = None
    """Where a configuration of a framework has the layout; None if its names are those of Megatron-LM."""


def megatron_words(
    words: Sequence[str],
    entry: str | None,
    table: OptionTable | None,
    catalogue: Catalogue,
    *,
    world: int | None,
    strict: bool,
) -> MegatronWords:
    """Translates options of forks in `words`, and separates unknown ones.

    `entry`: the training script or module. `table`: the options of the checkout or release of the launch, None if the release is
    to be chosen from the catalogue. `world`: number of GPUs, if it is known. Raises InputError for misspelled options, for
    options that only other releases than `table` have, and with `strict` for unknown options.
    """
    words, sentences = with_whole_placeholders(words)
    found = _megatron_words(words, table, catalogue, world=world, strict=strict, of_script=flags_of(entry))
    return replace(found, statements=(*sentences, *found.statements))


def _megatron_words(
    words: Sequence[str],
    table: OptionTable | None,
    catalogue: Catalogue,
    *,
    world: int | None,
    strict: bool,
    of_script: Collection[str],
) -> MegatronWords:
    """`of_script`: flags of the training script, which no release has retired."""
    flags = _flags(words)
    foreign = [flag for flag in flags if flag not in catalogue.masks]
    retired = [flag for flag in flags if flag in RETIRED and flag not in of_script]
    if foreign or retired:
        return _translated(words, flags, table, catalogue, world=world, strict=strict, of_script=of_script)
    if table is not None:
        _refuse_missing(flags, table, catalogue)
    return MegatronWords(tuple(words))


def _translated(
    words: Sequence[str],
    flags: Sequence[str],
    table: OptionTable | None,
    catalogue: Catalogue,
    *,
    world: int | None,
    strict: bool,
    of_script: Collection[str],
) -> MegatronWords:
    from analyzer.launch.coverage.later_options import refuse_later
    from analyzer.launch.forks import adapters, bridge, swift
    from analyzer.launch.forks.fork_table import load_fork_options
    from analyzer.launch.forks.guess import guess_fork, rank_forks
    from analyzer.launch.forks.launch_options import LaunchOptions
    from analyzer.launch.forks.translate import translate, world_of
    from analyzer.launch.forks.tuning import parts_of, tuning_of
    from analyzer.launch.unknown_options import not_counted, refuse_misspelled, sort_words

    forks = load_fork_options()
    own = {**catalogue.newest, **(table.options if table is not None else {})}
    found = _of_forks(flags, forks, own, catalogue, of_checkout=table is not None)
    old = table.release == OLDEST if table is not None else _is_old(flags, found, catalogue)
    found |= _retired(flags, forks, old=old, of_script=of_script)
    of_swift = rank_forks(found, forks)[:1] == [swift.KEY]
    if of_swift:
        words = swift.without_values_of_flags(words, _not_in(own, found))
        found.update(_of_forks(_flags(words), forks, own, catalogue, of_checkout=table is not None))
    sorted_words = sort_words(words, _not_in(own, found), counts=_counts(found))
    rest = _not_in(sorted_words.unknown, found)
    given = _not_in(sorted_words.unknown, rest)
    for flag, values in sorted_words.unknown.items():
        refuse_later(flag, values)
    withheld = [adapters.reason(flag, values) for flag, values in rest.items() if adapters.is_adapter_option(flag)]
    unknown = [flag for flag in rest if not adapters.is_adapter_option(flag)]
    refuse_misspelled(unknown, (*own, *forks.options), strict=strict, fork=bool(found))
    if table is not None:
        _refuse_missing([flag for flag in flags if flag not in found and flag not in unknown], table, catalogue)
    others = _values_by_flag(sorted_words.known, own)
    translation = translate(given, others, world=world)
    guess = guess_fork(given)
    model = swift.model_of(given, others) if of_swift else bridge.bridge_model(given, others)
    of_bridge = model is not None and not of_swift
    dropped = (*translation.dropped, *(bridge.MODEL_OPTIONS if of_bridge else ()))
    kept = _without(sorted_words.known, dropped, own)
    launch, key = LaunchOptions({**sorted_words.unknown, **given}, others), guess.fork.key if guess is not None else None
    return MegatronWords(
        (*kept, *translation.words),
        fork=guess,
        notes=(*translation.notes, *((bridge.note(model or "", others),) if of_bridge else ())),
        statements=(*translation.warnings, *not_counted(unknown, own), *_about_spelling(found, flags, forks, catalogue)),
        withheld=tuple(dict.fromkeys([*translation.withheld, *filter(None, withheld)])),
        world=World.of(gpus) if (gpus := world_of(given)) is not None else None,
        model=model,
        of_experts=translation.of_experts,
        complete=of_swift,
        tuning=tuning_of(launch, key),
        parts=parts_of(launch, key),
    )


def _not_in(values: Mapping[str, _Value], others: Collection[str]) -> dict[str, _Value]:
    """`values` of the flags that are not in `others`."""
    return {flag: value for flag, value in values.items() if flag not in others}


def _flags(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.partition("=")[0] for word in words if is_option(word)))


def with_fork_values(words: Sequence[str], known: Mapping[str, Option]) -> MegatronWords | None:
    """`words` with values that only forks accept in Megatron's terms; None if there are no such values."""
    from analyzer.launch.forks.translate import has_fork_value, translate

    others = _values_by_flag(words, known)
    if not has_fork_value(others):
        return None
    translation = translate({}, others)
    kept = _without(words, translation.dropped, known)
    return MegatronWords((*kept, *translation.words), notes=translation.notes, statements=translation.warnings)


def _of_forks(
    flags: Sequence[str], forks: ForkTable, own: Mapping[str, Option], catalogue: Catalogue, *, of_checkout: bool
) -> dict[str, ForkOption]:
    """The options of forks among `flags`, which no release of Megatron-LM has.

    Megatron's options with underscores instead of dashes are those of a fork. A checkout's own options that no fork in the table
    has are left to its parser.
    """
    found: dict[str, ForkOption] = {}
    for flag in flags:
        if flag in catalogue.masks:
            continue
        option = forks.find(flag, own)
        if option is not None and not (of_checkout and flag in own and flag not in forks.options):
            found[flag] = option
    return found


def _about_spelling(
    found: Mapping[str, ForkOption], flags: Sequence[str], forks: ForkTable, catalogue: Catalogue
) -> tuple[str, ...]:
    """A sentence about underscores among Megatron's dashes, if no option of a fork explains them."""
    mixed = [flag for flag in found if "_" in flag and flag not in forks.options]
    dashed = any("-" in flag.lstrip("-") for flag in flags if flag in catalogue.masks)
    if not mixed or not dashed or len(mixed) < len(found):
        return ()
    which = f"{', '.join(mixed)}: {'this spelling is' if len(mixed) == 1 else 'these spellings are'}"
    return (f"{which} read with dashes. Megatron-LM's own parser refuses underscores.",)


def _retired(flags: Sequence[str], forks: ForkTable, *, old: bool, of_script: Collection[str]) -> dict[str, ForkOption]:
    """The retired options among `flags` in a launch of the code of 2023. Raises InputError for those in other launches."""
    found: dict[str, ForkOption] = {}
    for flag in flags:
        if old and (flag in RETIRED or flag in UNRECOGNISED) and flag in forks.options:
            found[flag] = forks.options[flag]
        elif flag not in of_script:
            refuse_retired(flag)
    return found


def _is_old(flags: Sequence[str], found: Mapping[str, ForkOption], catalogue: Catalogue) -> bool:
    """Whether the code of 2023 or forks of it have all `flags`."""
    known = [flag for flag in flags if flag not in found and flag in catalogue.masks]
    return OLDEST in catalogue.releases_with(known)


def _counts(found: Mapping[str, ForkOption]) -> dict[str, int]:
    """The largest number of values of the options of forks that take a fixed number."""
    return {
        flag: option.nargs if isinstance(option.nargs, int) else 1
        for flag, option in found.items()
        if option.nargs not in ("*", "+")
    }


def _values_by_flag(words: Sequence[str], known: Mapping[str, Option]) -> dict[str, tuple[str, ...]]:
    values: dict[str, tuple[str, ...]] = {}
    for position, word in enumerate(words):
        flag, equals, attached = word.partition("=")
        if is_option(word) and flag in known:
            values[flag] = (attached,) if equals else tuple(operands_of(known[flag], words[position + 1 :]))
    return values


def _without(words: Sequence[str], dropped: Sequence[str], known: Mapping[str, Option]) -> tuple[str, ...]:
    """`words` without the options `dropped` and their values."""
    if not dropped:
        return tuple(words)
    from analyzer.launch.unknown_options import sort_words

    return sort_words(words, {flag: option for flag, option in known.items() if flag not in dropped}, counts={}).known


def _refuse_missing(flags: Sequence[str], table: OptionTable, catalogue: Catalogue) -> None:
    """Raises InputError for options that other releases have and `table` has not."""
    missing = [flag for flag in flags if flag not in table.options and flag in catalogue.masks]
    if not missing:
        return
    releases = catalogue.releases_with(missing)
    remedy = (
        f"name a release that has {'it' if len(missing) == 1 else 'them'} with --info-megatron {releases[0]}"
        if releases
        else ("leave --info-megatron out to use the options of all releases")
    )
    fault = f"{'is not an option' if len(missing) == 1 else 'are not options'} of the {table.source}"
    raise InputError(", ".join(missing), fault, remedy)
