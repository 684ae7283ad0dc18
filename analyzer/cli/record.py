"""`--info-record`: one rank's step under a recorder, the CUDA one where there is a GPU, else the shadow."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from analyzer.errors import InputError
from analyzer.specs import TrainingJob

OPTION = "--info-record"
ITERATIONS = 2
"""The second shows the steady state."""


def record(
    job: TrainingJob, *, rank: int, path: Path, argv: Sequence[str], allocator: Literal["pool", "malloc"] | None = None
) -> str:
    """Writes the trace of `rank` to `path` and says which recorder did it. Raises AnalyzerError.

    `allocator` is what the CUDA recorder takes memory from; the shadow, which takes none, refuses it.
    """
    if not 0 <= rank < job.parallel.world_size:
        raise InputError("--info-rank", f"there is no rank {rank} in a world of {job.parallel.world_size}", "give a rank of it")
    if has_gpu():
        from allocator_hook.cuda.session import record_on_gpu

        record_on_gpu(job, rank=rank, path=path, argv=argv, iterations=ITERATIONS, mode=allocator or "pool")
        return "cuda"
    if allocator is not None:
        raise InputError("--info-allocator", "there is no GPU here to allocate on", "leave it out, or record where there is one")
    from allocator_hook.shadow.engine import run

    trace = run(job, [rank], iterations=ITERATIONS, argv=argv)[rank]
    try:
        shutil.copyfile(trace, path)
    except OSError as error:
        raise InputError(OPTION, f"cannot write '{path}' ({error.strerror})", "name a file that you may write to") from None
    return "shadow"


def has_gpu() -> bool:
    """Whether PyTorch is here and sees a GPU. Asks without starting CUDA: the recorder has to come first."""
    if find_spec("torch") is None:
        return False
    import torch

    return torch.version.cuda is not None and torch.cuda.device_count() > 0
