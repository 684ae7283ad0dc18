"""The only launch of a script, for the Python API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from analyzer.errors import InputError
from analyzer.script.run import Intercepted, run_script
from analyzer.script.uneven_nodes import together


@contextlib.contextmanager
def single_launch(script: Path, arguments: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> Iterator[Intercepted]:
    """Runs `script` as `get-training-info script` does, and gives its launch. Files that it wrote exist until the context ends.

    Raises InputError if there is no such file, or if the script starts no launch or several different ones.
    """
    place = folder / script
    if not place.is_file():
        raise InputError(str(script), "is not a file", "give the path of the launch script")
    with run_script(place, arguments, environ=environ, folder=folder) as ran:
        launches = together(ran.launches)
        if not launches:
            remedy = f"run get-training-info {script}, which names the command that ends it"
            raise InputError(str(script), "ended without starting a training", remedy)
        if len(launches) > 1:
            lines = ", ".join(str(each.line) for each in launches if each.line is not None)
            fault = f"starts {len(launches)} launches" + (f" (lines {lines})" if lines else "")
            remedy = f"get-training-info {script} --info-dry prints them: give the words of one"
            raise InputError(str(script), fault, remedy)
        yield launches[0]
