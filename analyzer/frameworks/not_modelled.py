"""Options that a configuration of a framework sets and that are not modelled: they are left out, and the report has no verdict.

A command line is the user's own, and such an option of it is an error. A configuration lists all fields, many of which the user did
not choose.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.argv_parser import is_option

if TYPE_CHECKING:
    from analyzer.launch.megatron_words import MegatronWords

_REMEDIES: Final = ("leave it out", "leave one of them out")
"""Parts of remedies of errors that are gone without the option."""
_FAULT: Final = "not modelled"
"""Part of the text of an error about something that Megatron-LM accepts."""


def without_option(own: MegatronWords, error: InputError) -> MegatronWords | None:
    """The options of a configuration without the one that `error` names, and why there is no verdict; None if that is no remedy."""
    flag = error.option.split()[0].rstrip(",")
    accepted = isinstance(error, UnsupportedError) or _FAULT in error.fault
    if not accepted or flag not in own.words or not any(each in error.remedy for each in _REMEDIES):
        return None
    kept: list[str] = []
    dropping = False
    for word in own.words:
        dropping = word == flag or (dropping and not is_option(word))
        kept += [] if dropping else [word]
    return replace(
        own,
        words=tuple(kept),
        statements=(*own.statements, f"{error.option} is left out: {error.fault}."),
        withheld=(*own.withheld, f"{error.option} is not counted"),
    )
