"""What a launch script did while its launches were found, in one or two lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from analyzer.script.isolation.start import Isolation
from analyzer.script.run import ScriptRun

KEPT: Final = {
    Isolation.NAMESPACES: "in a copy of the file system, without network; nothing was kept",
    Isolation.PRELOAD: "with private copies of written files, without network; nothing was kept",
    Isolation.NONE: "as they are, because of --info-run-all",
}
LONGEST_LIST: Final = 20
"""Folders or loops that are named."""


def what_ran(ran: ScriptRun, *, names: bool) -> Iterator[str]:
    """The lines about the run. `names`: with the name of each program, and how often it ran."""
    count = sum(ran.programs.values())
    if count:
        started = f"{count} program{'s' if count > 1 else ''} of the script ran {KEPT[ran.isolation]}"
        times = (f"{name} ({number} times)" if number > 1 else name for name, number in sorted(ran.programs.items()))
        yield f"{started}: {', '.join(times)}" if names else started
    for folder in ran.read_only[:LONGEST_LIST]:
        yield f"the script could not write in {folder}, because its file system cannot be copied"
    yield from waits_left(ran)


def waits_left(ran: ScriptRun) -> Iterator[str]:
    """A line for each loop that was left, because it waited for something that does not come."""
    for wait in dict.fromkeys(ran.waits):
        line, _, source = wait.partition(" ")
        yield f"a loop that waits was left (sleep in line {line} of {source})"
