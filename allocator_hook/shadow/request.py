"""The request that is sent to the worker, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from allocator_hook.shadow.job_json import from_json, to_json
from analyzer.specs import TrainingJob


@dataclass(frozen=True, kw_only=True)
class Request:
    """A job and the ranks to record."""

    job: TrainingJob
    traces: Mapping[int, Path]
    """The trace path of each global rank."""
    iterations: int = 2
    microbatches: int | None = None
    """Overrides the number of microbatches of the job; fewer can need the same memory."""
    jobs: int = 1
    """Number of ranks that are recorded in parallel."""
    argv: tuple[str, ...] = ()
    """The launch command, for the header."""
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(
            {
                "job": json.loads(to_json(self.job)),
                "traces": {str(rank): str(path) for rank, path in self.traces.items()},
                "iterations": self.iterations,
                "microbatches": self.microbatches,
                "jobs": self.jobs,
                "argv": list(self.argv),
                "versions": dict(self.versions),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Request:
        data = json.loads(text)
        return cls(
            job=from_json(json.dumps(data["job"])),
            traces={int(rank): Path(path) for rank, path in data["traces"].items()},
            iterations=data["iterations"],
            microbatches=data["microbatches"],
            jobs=data["jobs"],
            argv=tuple(data["argv"]),
            versions=data["versions"],
        )
