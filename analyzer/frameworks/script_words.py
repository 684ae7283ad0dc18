"""The words of a launch for the Python API: those that are given, or those of the only launch of a script."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from analyzer.launch.info_options import SCRIPT_ENDINGS, separated
from analyzer.launch.written_files import files_of_launch


class LaunchWords(NamedTuple):
    """A launch that can be read."""

    words: tuple[str, ...]
    environ: Mapping[str, str]
    folder: Path


@contextlib.contextmanager
def words_of_script(words: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> Iterator[LaunchWords]:
    """`words` as they are, or the words of the launch of the script that they begin with, with the --info options among them.

    Other words after the script are its arguments. Files that the script wrote are read inside the context. Raises InputError for a
    script that does not exist, or that does not start exactly one launch.
    """
    own, others = separated(words)
    if not others or not others[0].endswith(SCRIPT_ENDINGS):
        yield LaunchWords(tuple(words), environ, folder)
        return
    from analyzer.script.single_launch import single_launch  # for scripts only, for a short start-up

    with single_launch(Path(others[0]), others[1:], environ=environ, folder=folder) as launch, files_of_launch(launch.written):
        size = () if launch.processes is None else ("--info-world-size", str(launch.processes))
        yield LaunchWords((*launch.argv, *size, *own), launch.environ, launch.folder)
