"""Starts the worker, keeps its traces in a cache, and stops it whatever happens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from allocator_hook.packages import installed
from allocator_hook.shadow.job_json import to_json
from allocator_hook.shadow.request import Request
from allocator_hook.step.supported import check_supported
from analyzer.errors import AnalyzerError
from analyzer.schedule.pipeline import equivalent_microbatches
from analyzer.specs import TrainingJob

ROOT: Final = Path(__file__).resolve().parents[2]
Progress = Callable[[int, int], None]


def run(
    job: TrainingJob,
    ranks: Sequence[int],
    *,
    jobs: int | None = None,
    cache_dir: Path | None = None,
    iterations: int = 2,
    microbatches: int | None = None,
    argv: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> dict[int, Path]:
    """The trace of each of `ranks`, one for each class of ranks that are alike.

    `jobs` ranks run side by side, by default as many as there are cores. Traces are kept in `cache_dir` (default:
    `get-training-info` in the user's cache folder) by launch, rank, versions and our own code. `microbatches`: None
    runs as many as show the memory of all (`equivalent_microbatches`). Raises AnalyzerError where a package is
    missing, an option has no stand-in, or megatron-core fails. On an interruption no process is left behind.
    """
    check_supported(job)
    versions = installed()
    microbatches = microbatches or enough_microbatches(job)
    folder = cache_dir or default_cache()
    folder.mkdir(parents=True, exist_ok=True)
    keys = {rank: _key(job, rank, iterations, microbatches, versions) for rank in ranks}
    traces = {rank: folder / f"{key}.trace" for rank, key in keys.items()}
    missing = {rank: path for rank, path in traces.items() if not path.exists()}
    done = len(traces) - len(missing)
    progress(done, len(traces))
    if missing:
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            request = Request(
                job=job,
                traces={rank: Path(unfinished) / path.name for rank, path in missing.items()},
                iterations=iterations,
                microbatches=microbatches,
                jobs=min(jobs or os.cpu_count() or 1, len(missing)),
                argv=tuple(argv),
                versions=versions,
            )

            def finished(rank: int) -> None:
                nonlocal done
                # a trace gets its name in the cache once it is whole
                request.traces[rank].replace(traces[rank])
                done += 1
                progress(done, len(traces))

            _work(request, finished)
    return traces


def enough_microbatches(job: TrainingJob) -> int:
    """The fewest microbatches that need as much memory as those of the launch."""
    parallel = job.parallel
    return equivalent_microbatches(
        pipeline=parallel.pipeline,
        chunks=parallel.chunks,
        microbatches=job.batch.microbatches,
        group_size=parallel.microbatch_group_size,
    )


def default_cache() -> Path:
    """Where traces are kept: XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "get-training-info" / "shadow"


def _key(job: TrainingJob, rank: int, iterations: int, microbatches: int, versions: dict[str, str]) -> str:
    """Everything that a trace depends on. Assumptions are sentences about the launch, and change nothing."""
    spec = json.loads(to_json(job))
    del spec["assumptions"]
    parts = json.dumps([spec, rank, iterations, microbatches, versions, _own_code()], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _own_code() -> str:
    digest = hashlib.sha256()
    for path in sorted((ROOT / "allocator_hook").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _work(request: Request, finished: Callable[[int], None]) -> None:
    """Runs the worker in a session of its own, so that it and its children can be ended together."""
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "allocator_hook.shadow.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
            start_new_session=True,
        )
        try:
            _listen(worker, request, finished)
            if worker.wait() != 0:
                raise AnalyzerError(f"--info-engine shadow: the worker failed ({_last_line(errors)}); use --info-engine formula")
        finally:
            _end(worker)


def _listen(worker: subprocess.Popen[str], request: Request, finished: Callable[[int], None]) -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(request.to_json())
        worker.stdin.close()
    except BrokenPipeError:
        return
    for line in worker.stdout:
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            error = AnalyzerError(answer["error"])
            error.exit_code = answer["exit"]
            raise error
        finished(answer["rank"])


def _end(worker: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    if worker.stdout is not None:
        worker.stdout.close()


def _last_line(errors: Any) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"
