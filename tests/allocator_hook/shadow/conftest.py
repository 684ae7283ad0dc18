"""Recording with packages that are imported once for many launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from analyzer.specs import TrainingJob
    from tools.kept_sessions import KeptSessions

Record = Callable[["TrainingJob", Sequence[int], Path], dict[int, Path]]
"""Records ranks of a job and returns their traces, which are in the given folder."""


@pytest.fixture(scope="session")
def record() -> Iterator[Record]:
    """Return a function that records in another process, so that this one does not import torch."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda job, ranks, folder: pool.submit(_record, job, ranks, folder).result()


@cache
def _sessions() -> KeptSessions:
    from tools.kept_sessions import KeptSessions

    return KeptSessions()


def _record(job: TrainingJob, ranks: Sequence[int], folder: Path) -> dict[int, Path]:
    return _sessions().record(job, ranks, folder)
