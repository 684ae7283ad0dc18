"""Counts the bytes that a rank allocates without gradients, on tensors without data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from allocator_hook.shadow import sharding
from allocator_hook.shadow.recorder import Recorder
from allocator_hook.shadow.session import Session
from allocator_hook.step.patching import Patches
from analyzer.memory.workspaces import cublas_workspace_bytes
from analyzer.specs import TrainingJob
from analyzer.units import BLOCK, round_up


class Counter:
    """An allocation sink that counts the allocated bytes and their maximum."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.bytes = 0
        self.peak = 0

    def allocation(self, pointer: int, bytes: int, *, stream: int = 0) -> None:
        self.live[pointer] = round_up(bytes, BLOCK)
        self.bytes += self.live[pointer]
        self.peak = max(self.peak, self.bytes)

    def free(self, pointer: int) -> None:
        self.bytes -= self.live.pop(pointer)

    def label(self, pointer: int, role: Any, name: str, *, shape: Sequence[int], dtype: str, bytes: int) -> None:
        """Names are not used."""

    def restart(self) -> int:
        """Forgets the maximum, and returns the bytes that are allocated."""
        self.peak = self.bytes
        return self.bytes


def built(job: TrainingJob, rank: int) -> Any:
    """The model of `rank`, which has one chunk, for passes without gradients."""
    from allocator_hook.step import groups, model
    from allocator_hook.step.config import transformer_config

    groups.initialize(job, rank=rank)
    (chunk,) = model.chunks(job, transformer_config(job))
    return chunk.eval()


@contextmanager
def counting(job: TrainingJob) -> Iterator[Counter]:
    """Simulates CUDA in this process, without gradients, and counts what is allocated. Can be entered once for each process."""
    counter = Counter()
    with ExitStack() as stack:
        session = stack.enter_context(Session(job))
        recorder = Recorder(counter, cublas_workspace_bytes=cublas_workspace_bytes(job))
        stack.enter_context(Patches(recorder.patches()))
        stack.enter_context(Patches(sharding.patches(job, recorder, counter)))  # type: ignore[arg-type]
        session.count_with(recorder)
        stack.enter_context(recorder)
        stack.enter_context(torch.no_grad())  # in inference mode, PyTorch does not split composite operations
        yield counter
