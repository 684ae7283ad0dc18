"""Every option of the Megatron-LM releases that we know; stands in where no checkout is at hand.

`catalogue.json` is written by tools/make_catalogue.py from the parsers of the releases themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from analyzer.launch.options.option_table import Option, OptionTable, make_table

PREFERRED: Final = "0.16.1"
"""The release that the formulas were read in."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Options of all releases: each variant of an option with the mask of releases that have it so."""

    releases: tuple[str, ...]
    """Oldest first; '2023' is the code of August 2023."""
    variants: tuple[tuple[int, Option], ...]
    masks: Mapping[str, int]
    """By flag: the releases that know it, one bit for each."""
    newest: Mapping[str, Option]
    """By flag: its newest variant."""

    def knowing(self, flags: Iterable[str]) -> list[str]:
        """The releases that know all `flags`, nearest to the preferred one first, the newer of two equally near."""
        mask = (1 << len(self.releases)) - 1
        for flag in flags:
            mask &= self.masks[flag]
        preferred = self.releases.index(PREFERRED)
        known = [index for index in range(len(self.releases)) if mask >> index & 1]
        return [self.releases[index] for index in sorted(known, key=lambda index: (abs(index - preferred), -index))]

    def release_like(self, name: str) -> str | None:
        """The release that `name` means: '0.16.1', 'core_v0.16.1' and '0.16' are one. Another patch gives the one that is known."""
        wanted = name.removeprefix("core_").removeprefix("v").split(".")[:2]
        return next((release for release in self.releases if release.split(".")[:2] == wanted), None)

    def table(self, release: str) -> OptionTable:
        """The options of `release`."""
        bit = 1 << self.releases.index(release)
        options = (option for mask, option in self.variants if mask & bit)
        return make_table(options, release=release, source=f"catalogue of {describe(release)}")

    def union(self) -> OptionTable:
        """The options of the preferred release, and beside them those that only other releases know."""
        bit = 1 << self.releases.index(PREFERRED)
        own = [option for mask, option in self.variants if mask & bit]
        others = [option for flag, option in self.newest.items() if not self.masks[flag] & bit]
        return make_table([*own, *others], release=PREFERRED, source="catalogue of all Megatron-LM releases")


def describe(release: str) -> str:
    """A release as sentences name it: 'Megatron-LM core 0.16.1', 'Megatron-LM of August 2023'."""
    return "Megatron-LM of August 2023" if release == "2023" else f"Megatron-LM core {release}"


@cache
def load_catalogue() -> Catalogue:
    """The catalogue that is shipped with this package."""
    content = json.loads(Path(__file__).with_name("catalogue.json").read_bytes())
    variants = tuple((row[0], Option(*row[1:])) for row in content["options"])
    masks: dict[str, int] = {}
    newest: dict[str, Option] = {}
    highest: dict[str, int] = {}
    for mask, option in variants:
        for flag in option.flags:
            masks[flag] = masks.get(flag, 0) | mask
            if mask > highest.get(flag, 0):
                highest[flag], newest[flag] = mask, option
    return Catalogue(tuple(content["releases"]), variants, masks, newest)
