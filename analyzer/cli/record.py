"""`--info-record`: records training steps of one rank, with the CUDA recorder on a GPU or else with the shadow recorder."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from analyzer.errors import InputError
from analyzer.files import NOT_WRITABLE, check_writable, replacing
from analyzer.launch.info_options import InfoOptions
from analyzer.memory.verdict import highest
from analyzer.report.visible import visible
from analyzer.results import Report
from analyzer.specs import TrainingJob
from analyzer.trace.check import shortened

OPTION = "--info-record"
ITERATIONS = 2
"""Number of recorded iterations. The second one is in the steady state."""


def record_rank(report: Report, options: InfoOptions, command: Sequence[str]) -> None:
    """Records the rank given by `--info-rank`, or the highest-memory rank. Raises AnalyzerError."""
    job = report.job if options.layers is None else shortened(report.job, options.layers)
    rank = options.rank if options.rank is not None else highest(report.ranks).ranks[0][0]
    path = Path(str(options.record))
    check_writable(str(path), OPTION)
    recorder = record(job, rank=rank, path=path, argv=command, allocator=options.allocator)
    print(f"{visible(str(path))}: rank {rank}, recorded by the {recorder} recorder", file=sys.stderr)


def record(
    job: TrainingJob, *, rank: int, path: Path, argv: Sequence[str], allocator: Literal["pool", "malloc"] | None = None
) -> str:
    """Writes the trace of `rank` to `path` and returns the name of the recorder. Raises AnalyzerError.

    `allocator` is the allocation function of the CUDA recorder. The shadow recorder does not allocate memory, so InputError is
    raised if it is given.
    """
    world = job.parallel.world_size
    if not 0 <= rank < world:
        raise InputError("--info-rank", f"rank {rank} is not in a world of {world} ranks", f"give a rank from 0 to {world - 1}")
    if has_gpu():
        from allocator_hook.cuda.session import record_on_gpu

        with _published(path) as unfinished:
            record_on_gpu(job, rank=rank, path=unfinished, argv=argv, iterations=ITERATIONS, mode=allocator or "pool")
        return "cuda"
    if allocator is not None:
        raise InputError("--info-allocator", "there is no GPU to allocate on", "remove it, or record on a machine with a GPU")
    from allocator_hook.shadow.engine import run

    trace = run(job, [rank], iterations=ITERATIONS, argv=argv)[rank]
    with _published(path) as unfinished:
        shutil.copyfile(trace, unfinished)
    return "shadow"


@contextmanager
def _published(path: Path) -> Iterator[Path]:
    """A path that is renamed to `path` after the block, as `files.replacing` does. Raises InputError if it cannot be written."""
    try:
        with replacing(path) as unfinished:
            yield unfinished
    except OSError as error:
        raise InputError(OPTION, f"cannot write '{path}' ({error.strerror})", NOT_WRITABLE) from None


def has_gpu() -> bool:
    """Whether PyTorch is installed and finds a GPU. Does not initialize CUDA, because the recorder must be loaded first."""
    if find_spec("torch") is None:
        return False
    import torch

    return torch.version.cuda is not None and torch.cuda.device_count() > 0
