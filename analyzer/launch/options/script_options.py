"""Options that a training script of Megatron-LM adds to Megatron's own.

`script_options.json` has those of pretrain_vlm.py, examples/multimodal/multimodal_args.py and examples/mimo/train.py of August 2026
(core 0.19), in the format of the catalogue without releases. Earlier releases have some of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from analyzer.launch.options.catalogue import Catalogue
from analyzer.launch.options.option_table import Option, OptionTable, frozen

SCRIPTS: Final = ("pretrain_vlm", "multimodal/train", "mimo/train")
"""The scripts, by their name or by folder and name."""


def script_of(entry: str | None) -> str | None:
    """Which of `SCRIPTS` a launch starts; None for another one. `entry`: the path of the script or the name of a module."""
    if entry is None:
        return None
    written = entry.replace("\\", "/").removesuffix(".py")
    parts = written.split("/") if "/" in written else written.split(".")
    return next((each for each in (parts[-1], "/".join(parts[-2:])) if each in SCRIPTS), None)


@cache
def options_of(script: str) -> tuple[Option, ...]:
    """The options that a script adds."""
    content = json.loads(Path(__file__).with_name("script_options.json").read_bytes())
    return tuple(Option(*row) for row in content[script])


def flags_of(entry: str | None) -> frozenset[str]:
    """The flags that the script of a launch adds."""
    script = script_of(entry)
    return frozenset() if script is None else frozenset(flag for each in options_of(script) for flag in each.flags)


def with_script(catalogue: Catalogue, entry: str | None) -> Catalogue:
    """The catalogue with the options of the script in all releases."""
    script = script_of(entry)
    if script is None:
        return catalogue
    every = (1 << len(catalogue.releases)) - 1
    added = options_of(script)
    flags = {flag: option for option in added for flag in option.flags}
    return replace(
        catalogue,
        variants=(*catalogue.variants, *((every, option) for option in added)),
        masks={**catalogue.masks, **dict.fromkeys(flags, every)},
        newest={**catalogue.newest, **flags},
    )


def table_with_script(table: OptionTable | None, entry: str | None) -> OptionTable | None:
    """The options of a checkout or release, with those of the script."""
    script = script_of(entry)
    if table is None or script is None:
        return table
    flags: Mapping[str, Option] = {flag: option for option in options_of(script) for flag in option.flags}
    defaults = {option.dest: frozen(option.default) for option in options_of(script)}
    return replace(
        table, options=MappingProxyType({**table.options, **flags}), defaults=MappingProxyType({**table.defaults, **defaults})
    )
