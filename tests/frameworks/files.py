"""Writes configurations of frameworks, and reads them as the command line does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from analyzer.api import Launch, read_launch
from analyzer.specs import TrainingJob


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the text of each file, whose path is relative to `folder`."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def read(folder: Path, *words: str, environ: Mapping[str, str] | None = None) -> Launch:
    """The launch of `words` in `folder`."""
    return read_launch(words, environ=dict(environ or {}), folder=folder)


def job(folder: Path, *words: str, environ: Mapping[str, str] | None = None) -> TrainingJob:
    """The job of `words` in `folder`."""
    return read(folder, *words, environ=environ).job


def layout(job: TrainingJob) -> tuple[int, ...]:
    """GPUs, and the tensor, pipeline, context, expert and expert-tensor sizes."""
    each = job.parallel
    return each.world_size, each.tensor, each.pipeline, each.context, each.expert, each.expert_tensor


def batch(job: TrainingJob) -> tuple[int, int, int]:
    """Micro-batch size, global batch size and sequence length."""
    return job.batch.micro_batch_size, job.batch.global_batch_size, job.batch.seq_length
