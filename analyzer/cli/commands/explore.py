"""`get-training-info explore [TARGET]`: opens a page on which a launch is changed, with a local server that answers it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from analyzer.cli.commands.table import EXPLORE, OF_EXPLORE
from analyzer.cli.commands.words import END, drop_in_words
from analyzer.cli.output import print_message
from analyzer.errors import FITS, InputError

if TYPE_CHECKING:
    from analyzer.cli.explorer.state import Opened

PORT, NO_BROWSER = OF_EXPLORE


class Asked(NamedTuple):
    """The words of the command, split."""

    port: int
    """0 for a free one."""
    browser: bool
    """Whether a browser is opened."""
    launch: list[str]
    """The target with the other options."""


def explore(words: Sequence[str]) -> int:
    """Serves the page until Ctrl-C, and returns the exit status. Raises AnalyzerError."""
    from analyzer.cli.explorer.server import ExplorerServer

    asked = split(words)
    with _opened(asked.launch) as opened:
        server = ExplorerServer(asked.port, opened)
        print_message(f"the explorer is at {server.url} (Ctrl-C ends it)")
        if asked.browser and _has_windows():
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return FITS
        finally:
            server.search.stop()
            server.server_close()
    return FITS


def _has_windows() -> bool:
    """Whether a browser would open a window. One in the terminal would keep the program waiting."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def split(words: Sequence[str]) -> Asked:
    """The options of the command, and the other words. Raises InputError."""
    port, browser, launch = 0, True, list[str]()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, attached = word.partition("=")
        if word == END:
            launch += [word, *rest]
            break
        if flag == PORT:
            value = attached if equals else "".join(rest[:1])
            del rest[: 0 if equals else 1]
            if not (value.isascii() and value.isdigit() and 0 < int(value) < 65536):
                raise InputError(PORT, f"{value!r} is not a port", "write a number from 1 to 65535, or leave it out")
            port = int(value)
        elif word == NO_BROWSER:
            browser = False
        else:
            launch.append(word)
    return Asked(port, browser, launch)


@contextmanager
def _opened(words: Sequence[str]) -> Iterator[Opened | None]:
    """The launch of the command line. A script is run once, in isolation, as the other commands run it. Raises InputError."""
    if not words:
        yield None
        return
    from analyzer.cli.explorer.state import Opened
    from analyzer.frameworks.script_words import words_of_script
    from analyzer.launch.written_files import copies

    with words_of_script(drop_in_words(EXPLORE, words), environ=dict(os.environ), folder=Path.cwd()) as found:
        text = shlex.join(["get-training-info", *found.words])
        yield Opened(text, tuple(found.words), dict(found.environ), found.folder, copies())
