"""Chooses the Megatron-LM release or checkout whose options a launch is read with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from analyzer.errors import InputError
from analyzer.launch.argv_parser import Reading, is_option, read_words
from analyzer.launch.coverage.option_effects import NO_EFFECT
from analyzer.launch.derive.dropped_layers import drops_layers, splits_layers
from analyzer.launch.options.catalogue import OLDEST, PREFERRED, Catalogue
from analyzer.launch.options.megatron_parser import assumed_release, find_checkout, load_table, release_of
from analyzer.launch.options.option_table import OptionTable
from analyzer.specs.release import describe, minor
from analyzer.specs.release_changes import core_behavior

_ANY_RELEASE: Final = {*NO_EFFECT, "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"}
"""Dests that do not show the release of a fork: they have no effect, or the same in all releases."""
OF_DEEPSPEED: Final = "--deepspeed-activation-checkpointing"
"""An option that all forks of Megatron-DeepSpeed have. Their defaults, such as one expert, mean something else in Megatron-LM."""
NO_CHECKOUT: Final = "no checkout was found"
_NO_VERSION: Final = "the checkout has no megatron/core/package_info.py"

if TYPE_CHECKING:
    from analyzer.launch.forks.guess import ForkGuess


@dataclass(frozen=True, slots=True)
class Choice:
    """The options that a launch is read with, as far as they do not depend on the options it gives."""

    table: OptionTable | None = None
    """None if the release is to be chosen from the catalogue."""
    base: str | None = None
    """The release of the catalogue nearest to that of a checkout whose parser does not load."""
    reason: str = NO_CHECKOUT
    """Why the release is chosen from the catalogue."""
    assumptions: tuple[str, ...] = ()
    failure: str | None = None
    """Why the parser of the checkout that was found is not used, as a sentence."""


LATER: Final = ("0.18.2", "0.19.0")
"""Releases that are tried, in this order, if the assumed one refuses the launch of a framework."""


class LaterRelease(NamedTuple):
    """A release that is assumed for the launch of a framework in the place of the one that the framework is based on."""

    release: str
    reason: str

    @classmethod
    def after(cls, release: str, refusal: InputError) -> LaterRelease:
        """The release that is assumed because an earlier one refuses the launch."""
        return cls(release, f"the release that the framework is based on refuses the launch: {str(refusal).rstrip('.')}")

    def choice(self, found: Choice, catalogue: Catalogue) -> Choice:
        """The choice of this release, if `found` is not that of a checkout or of --info-megatron."""
        if found.table is not None or found.base is not None:
            return found
        return Choice(catalogue.table(self.release), assumptions=(f"{describe(self.release)} is assumed; {self.reason}.",))


def chosen_table(named: str | None, catalogue: Catalogue, environ: Mapping[str, str], folder: Path, *, entry: str | None) -> Choice:
    """The options of the checkout or release `named` by --info-megatron, or of the checkout that the launch would import.

    The parser of a checkout is executed. Raises InputError if `named` is neither a release nor a checkout whose parser loads.
    """
    if named is not None and not (folder / named).exists():
        release = catalogue.find_release(named)
        if release is not None:
            return Choice(catalogue.table(release), assumptions=(f"{describe(release)} is assumed, from --info-megatron {named}.",))
        releases = ", ".join(catalogue.releases)
        fault = f"'{named}' is neither a folder nor a known release"
        raise InputError("--info-megatron", fault, f"give the root folder of a Megatron-LM checkout, or one of {releases}")
    if named is not None:
        return _of_checkout(folder / named, environ)
    checkout = find_checkout(folder, environ=environ, entry=entry)
    if checkout is None:
        return Choice()
    try:
        return _of_checkout(checkout, environ)
    except InputError as error:
        release = assumed_release(checkout)
        return Choice(
            base=catalogue.newest_until(release),
            reason=f"the checkout is {describe(release)}" if release_of(checkout) else _NO_VERSION,
            failure=f"{error.fault[0].upper()}{error.fault[1:].rstrip('.')}.",
        )


def _of_checkout(checkout: Path, environ: Mapping[str, str]) -> Choice:
    """The options of a checkout. Raises InputError if its parser does not load."""
    table = load_table(checkout, environ=environ)
    if OF_DEEPSPEED in table.options:
        return Choice(reason="the checkout is one of Megatron-DeepSpeed, whose options this program translates")
    return Choice(table, assumptions=() if release_of(checkout) else (f"{describe(table.release)} is assumed: {_NO_VERSION}.",))


def read_with_catalogue(
    words: Sequence[str], catalogue: Catalogue, *, choice: Choice | None = None, fork: ForkGuess | None = None
) -> tuple[OptionTable, Reading, str]:
    """Parses the words with the release nearest to the preferred one that accepts them. Also returns that assumption.

    The release of the checkout in `choice`, or else that on which the `fork` of the launch is based, takes the place of the
    preferred one. A release that has every flag may still refuse a value. If no release has every flag, the options of all
    releases are used. A fork may have options without effect that its release does not have.
    """
    choice = choice or Choice()
    given = {word.partition("=")[0]: None for word in words if is_option(word)}
    flags = given if fork is None else {flag: None for flag in given if catalogue.newest[flag].dest not in _ANY_RELEASE}
    preferred = choice.base or (catalogue.find_release(fork.fork.base) if fork is not None else None) or PREFERRED
    refusal: InputError | None = None
    releases = catalogue.releases_with(flags, near=preferred)
    if preferred == OLDEST and choice.base is None:  # what the oldest code lacks is modelled as in the preferred release
        releases = [OLDEST] * (OLDEST in releases) + [each for each in catalogue.releases_with(flags) if each != OLDEST]
    for release in releases:
        table = catalogue.table(release, also=given)
        try:
            reading = read_words(words, table)
        except InputError as error:
            refusal = refusal or error
            continue
        if fork is not None and (refused := _refused_size(reading, release, releases)):
            refusal = refusal or InputError(refused, "it is not accepted", "use another release")
            continue
        excluded = _excluded(release, flags, catalogue, preferred=preferred, refused=refusal)
        return table, reading, _assumption(release, excluded, choice=choice, fork=fork)
    if refusal is not None:
        raise refusal
    union = catalogue.union()
    missing = ", ".join(flag for flag in flags if flag not in catalogue.table(PREFERRED).options)
    note = f"No release of Megatron-LM has all of these options; {describe(PREFERRED)} is assumed to have {missing} as well."
    return union, read_words(words, union), note


def _refused_size(reading: Reading, release: str, releases: Sequence[str]) -> str | None:
    """The option for which `release` refuses a launch that another one of `releases` accepts, None without one."""
    if not splits_layers(reading.values, release) and any(drops_layers(other) for other in releases):
        return "--num-layers"
    groups, tensor = reading.values.get("num_query_groups"), reading.values.get("tensor_model_parallel_size")
    few = isinstance(groups, int) and isinstance(tensor, int) and groups < tensor
    return "--num-query-groups" if few and not core_behavior(release).few_query_groups else None


def _assumption(release: str, excluded: str, *, choice: Choice, fork: ForkGuess | None) -> str:
    """The assumption about the release, with its reason."""
    if fork is None or choice.base is not None:
        return f"{describe(release)} is assumed: {choice.reason}{excluded and f', and {excluded}'}."
    based = f"{fork.fork.name} is based on {fork.fork.base}{excluded and f', but {excluded}'}"
    return f"{describe(release)} is assumed: {choice.reason}, and {based}. {fork.reason}"


def _excluded(release: str, flags: Collection[str], catalogue: Catalogue, *, preferred: str, refused: InputError | None) -> str:
    """Why releases nearer to the preferred one are not assumed; empty for the preferred one."""
    if release == preferred:
        return ""
    nearer = catalogue.releases_nearer_than(release, preferred)
    decisive = _decisive(flags, catalogue, nearer)
    span = minor(nearer[0]) if len(nearer) == 1 else f"{minor(nearer[0])} to {minor(nearer[-1])}"
    if len(decisive) == 1:
        return f"{span} {'has' if len(nearer) == 1 else 'have'} no {decisive[0]}"
    if decisive:
        return f"{span} {'does' if len(nearer) == 1 else 'do'} not have all of {', '.join(decisive)}"
    return f"{preferred} refuses {refused.option}" if refused else f"it is nearest to {preferred}"


def _decisive(flags: Collection[str], catalogue: Catalogue, excluded: Collection[str]) -> list[str]:
    """As few of `flags` as exclude all releases in `excluded`; none if there are no such flags."""
    lacking = {flag: set(excluded).difference(catalogue.releases_with([flag])) for flag in flags}
    found: list[str] = []
    remaining = set(excluded)
    while remaining:
        best = max(lacking, key=lambda flag: len(lacking[flag] & remaining), default=None)
        if best is None or not lacking[best] & remaining:
            return []
        found.append(best)
        remaining -= lacking[best]
    return found
