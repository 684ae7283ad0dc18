"""`--info-calibrate`: measures the efficiencies of the machine that the command runs on, and prints what they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from analyzer.api import read_launch
from analyzer.cli.output import standard_output
from analyzer.errors import FITS, InputError
from analyzer.files import NOT_WRITABLE, check_writable, refuse_special_file, replacing
from analyzer.hardware.gpus import find
from analyzer.time.efficiencies import efficiencies_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from analyzer.api import Launch
    from analyzer.specs.speed import SpeedSpec

OPTION: Final = "--info-calibrate"
LINES: Final = 10
"""Lines of the progress, if standard error is no terminal."""


def calibrate_machine(file: str, argv: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> int:
    """Measures the machine, writes `file`, prints a summary on rank 0 and returns the exit status. Raises AnalyzerError.

    Without torch or a GPU, or if the speeds of the GPU are not known, this is an InputError.
    """
    require_gpu()
    path = folder / file
    _check_writable(path)
    launch = read_launch(argv, environ=environ, folder=folder)
    disk = _folder_of_disk(launch.options.calibrate_disk, folder)
    from allocator_hook.calibrate.session import calibrate, gpu_name

    speed = speed_of_gpu(launch, gpu_name(environ))
    with _progress(shown=environ.get("RANK", "0") == "0") as show:
        document = calibrate(launch.job, speed, environ=environ, disk=disk, show=show, save=lambda content: save(content, path))
    if document is None:
        return FITS
    from analyzer.report.console.report import write

    with standard_output() as stream:
        write(lambda _width: summary(document, speed, path), stream=stream)
    return FITS


def require_gpu() -> None:
    """Raises InputError if torch is not installed or finds no GPU."""
    if find_spec("torch") is None:
        raise InputError(OPTION, "the package torch is not installed", "run it in the Python environment of the training")
    import torch

    if not torch.cuda.is_available():
        raise InputError(OPTION, "there is no CUDA GPU on this machine", "run it on the machine of the training")


def speed_of_gpu(launch: Launch, name: str) -> SpeedSpec:
    """The speeds of the GPU of this machine, whose driver calls it `name`.

    Raises InputError if they are not known, or if the launch is for another GPU.
    """
    if launch.time is None:
        raise InputError(OPTION, f"the speeds of the GPU {name} are not known", "give them with --info-hardware FILE")
    speed = launch.time.speed
    try:
        local = find(name)[0].name
    except InputError:
        local = speed.name
    if local != speed.name and launch.options.hardware is None:
        raise InputError("--info-gpu", f"this machine has {local}, not {speed.name}", "leave it out, or run on the target GPU")
    return speed


def _folder_of_disk(name: str | None, folder: Path) -> Path | None:
    """The folder on the disk to measure. Raises InputError if no file can be written there."""
    if name is None:
        return None
    found = folder / name
    if not found.is_dir() or not os.access(found, os.W_OK | os.X_OK):
        raise InputError(
            "--info-calibrate-disk", f"'{found}' is no folder that you may write to", "name one on the disk to measure"
        )
    return found


def _check_writable(path: Path) -> None:
    """Raises InputError before minutes are spent on a result that cannot be written."""
    refuse_special_file(path, OPTION, NOT_WRITABLE)
    check_writable(str(path), OPTION)


def save(document: dict[str, Any], path: Path) -> None:
    """Writes the result. A failure leaves an older file. Raises InputError."""
    from analyzer.report.json.document import dumps

    try:
        with replacing(path) as unfinished:
            unfinished.write_text(dumps(document), encoding="utf-8")
    except OSError as error:
        raise InputError(OPTION, f"cannot write '{path}' ({error.strerror})", NOT_WRITABLE) from None


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Shows on standard error what is measured: a bar on a terminal, otherwise a line for each tenth. Only rank 0 shows it."""
    if not shown or not sys.stderr.isatty():
        yield plain_progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def plain_progress() -> Callable[[int, int, str], None]:
    """Prints a line on standard error for each tenth of the items."""
    shown = -1

    def show(done: int, total: int, what: str) -> None:
        nonlocal shown
        tenth = LINES * done // max(1, total)
        if tenth != shown:
            print(f"measured {done} of {total}{': ' if what else ''}{what}", file=sys.stderr)
        shown = tenth

    return show


def summary(document: Mapping[str, Any], speed: SpeedSpec, path: Path) -> list[RenderableType]:
    """The measured efficiencies beside the shipped ones, how well the model agrees with the kernels, and what was not measured."""
    from analyzer.report.console.elements import heading, paragraph, points, table

    shipped = efficiencies_of(speed)
    rows = [(name, f"{getattr(shipped, name):.4g}", f"{value:.4g}") for name, value in document["efficiencies"].items()]
    measured = document["measured"]
    text = (
        f"{path}: {len(measured)} times measured on {document['gpu']}. Predicted times differ from them by "
        f"{_median_error(measured, 'predicted'):.0%} (median); with the shipped efficiencies by "
        f"{_median_error(measured, 'predicted_as_shipped'):.0%}. --info-calibration {path} uses the result."
    )
    return [
        paragraph(text, indent=0),
        *heading("Efficiencies"),
        table(("", "shipped", "measured"), rows, align="lrr"),
        *_offload(document.get("offload") or {}),
        *heading("Not measured"),
        points(document["not_measured"]),
    ]


def _offload(field: Mapping[str, Any]) -> list[RenderableType]:
    """The rates of offloading, in GB/s."""
    from analyzer.report.console.elements import heading, table

    rows = [(name.removesuffix("_gb_per_s").replace("_", " "), f"{value:.4g}") for name, value in field.get("rates", {}).items()]
    return [*heading("Rates of offloading"), table(("", "GB/s"), rows, align="lr")] if rows else []


def _median_error(measured: Sequence[Mapping[str, Any]], field: str) -> float:
    from statistics import median

    return median([abs(float(each[field]) / float(each["seconds"]) - 1) for each in measured] or [0.0])
