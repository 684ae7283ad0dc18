"""The options of all known Megatron-LM releases, used if there is no checkout.

`catalogue.json` is written by tools/make_catalogue.py from the parsers of the releases.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from analyzer.launch.options.option_table import Option, OptionTable, make_table
from analyzer.specs.release import describe, minor, release_number

PREFERRED: Final = "0.16.1"
"""The release that the formulas are based on."""
OLDEST: Final = "2023"
"""The code of August 2023, also used for older code."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Options of all releases: each variant of an option, with a bit mask of the releases of an interval that have this variant."""

    releases: tuple[str, ...]
    """Oldest first; '2023' is the code of August 2023."""
    variants: tuple[tuple[int, Option], ...]
    masks: Mapping[str, int]
    """By flag: the releases that have it, one bit for each."""
    newest: Mapping[str, Option]
    """By flag: its newest variant."""

    def releases_with(self, flags: Iterable[str], *, near: str = PREFERRED) -> list[str]:
        """The releases that have all `flags`, nearest to the release `near` first; of two equally near ones the newer first."""
        mask = (1 << len(self.releases)) - 1
        for flag in flags:
            mask &= self.masks[flag]
        preferred = self.releases.index(near)
        known = [index for index in range(len(self.releases)) if mask >> index & 1]
        return [self.releases[index] for index in sorted(known, key=lambda index: (abs(index - preferred), -index))]

    def releases_nearer_than(self, release: str, near: str) -> tuple[str, ...]:
        """The releases that are nearer to the release `near` than `release` is, oldest first."""
        preferred, index = self.releases.index(near), self.releases.index(release)
        distance = abs(index - preferred)
        first = max(0, preferred - distance + 1)
        last = preferred + distance - (index > preferred)  # of two equally near ones the newer is preferred
        return self.releases[first : last + 1]

    def find_release(self, name: str) -> str | None:
        """The known release with the major and minor version of `name`, or None.

        `name` is a version or the name of a tag or branch: '0.16', '0.16.1', 'core_v0.16.1', 'core_r0.16.0'.
        """
        wanted = minor(name.removeprefix("core_").removeprefix("v").removeprefix("r"))
        return next((release for release in self.releases if minor(release) == wanted), None)

    def newest_until(self, release: str) -> str:
        """The newest known release that is not newer than `release`, by major and minor version; the oldest if there is none."""
        number = release_number(release)[:2]
        return next((known for known in reversed(self.releases) if release_number(known)[:2] <= number), self.releases[0])

    def table(self, release: str, *, also: Iterable[str] = ()) -> OptionTable:
        """The options of `release`, and those in `also` that only other releases have."""
        bit = 1 << self.releases.index(release)
        options = [option for mask, option in self.variants if mask & bit]
        options += [self.newest[flag] for flag in also if not self.masks[flag] & bit]
        return make_table(options, release=release, source=f"catalogue of {describe(release)}")

    def union(self) -> OptionTable:
        """The options of the preferred release, and those that only other releases have."""
        bit = 1 << self.releases.index(PREFERRED)
        own = [option for mask, option in self.variants if mask & bit]
        others = [option for flag, option in self.newest.items() if not self.masks[flag] & bit]
        return make_table([*own, *others], release=PREFERRED, source="catalogue of all Megatron-LM releases")


@cache
def load_catalogue() -> Catalogue:
    """Loads the catalogue of this package. tools/make_catalogue.py describes the format."""
    content = json.loads(Path(__file__).with_name("catalogue.json").read_bytes())
    releases = content["releases"]
    since = {minor(release): 1 << index for index, release in enumerate(releases)}  # the bit of a release
    until = {release: bit << 1 for release, bit in since.items()}  # the bit after it
    since[""], until[""] = 1, 1 << len(releases)
    known: dict[str, int] = {}  # the mask of each interval
    variants: list[tuple[int, Option]] = []
    masks: dict[str, int] = {}
    newest: dict[str, Option] = {}
    for row in content["options"]:
        interval = row.pop(1)
        if (mask := known.get(interval)) is None:
            first, _, last = interval.partition("-")
            mask = known[interval] = until[last] - since[first]
        option = Option(*row)
        variants.append((mask, option))
        for flag in option.flags:
            earlier = masks.get(flag, 0)
            if mask > earlier:  # a later interval
                newest[flag] = option
            masks[flag] = earlier | mask
    return Catalogue(tuple(releases), tuple(variants), masks, newest)
