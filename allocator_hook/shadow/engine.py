"""Runs the shadow worker and caches its traces. The worker is always stopped, also after an error or an interruption."""

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
from allocator_hook.sources import digests
from allocator_hook.step.iterations import default_iterations, needs_every_microbatch
from allocator_hook.step.supported import check_supported
from analyzer.errors import AnalyzerError, InputError
from analyzer.files import is_private, private_folder, publish
from analyzer.memory.order import microbatches_to_peak
from analyzer.specs import TrainingJob
from analyzer.trace.reader import read_complete_trace

ROOT: Final = Path(__file__).resolve().parents[2]
Progress = Callable[[int, int], None]


def run(
    job: TrainingJob,
    ranks: Sequence[int],
    *,
    jobs: int | None = None,
    cache_dir: Path | None = None,
    iterations: int | None = None,
    microbatches: int | None = None,
    argv: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> dict[int, Path]:
    """Record each of `ranks` and return the paths of their traces.

    `jobs` ranks run in parallel (default: the number of CPU cores). Traces are cached in `cache_dir` (default: see
    `default_cache`); the key includes job, rank, package versions, and the Python files of megatron-core, of Transformer Engine
    and of this package. `microbatches` defaults to `enough_microbatches(job)`. `progress(done, total)` is called after each
    rank. Raises AnalyzerError if a package is missing, an option is not supported, or megatron-core fails. No process survives
    an interruption.
    """
    check_supported(job)
    versions = installed()
    iterations = iterations or default_iterations(job)
    microbatches = microbatches or enough_microbatches(job)
    folder = _private(cache_dir or default_cache())
    code = {**digests(), "own": _own_code()}
    keys = {rank: _key(job, rank, iterations, microbatches, versions, code) for rank in ranks}
    traces = {rank: folder / f"{key}.trace" for rank, key in keys.items()}
    missing = {rank: path for rank, path in traces.items() if not _is_usable(path)}
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
                # a trace is moved into the cache only when it is complete
                read_complete_trace(request.traces[rank])
                publish(request.traces[rank], traces[rank], mode=0o600)
                done += 1
                progress(done, len(traces))

            _work(request, Path(unfinished), finished)
    return traces


def enough_microbatches(job: TrainingJob) -> int:
    """Return the smallest number of microbatches that needs as much memory as all microbatches of the job."""
    if needs_every_microbatch(job):
        return job.batch.microbatches
    return microbatches_to_peak(job, job.batch.microbatches)


def default_cache() -> Path:
    """Return the default cache folder: get-training-info/shadow in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "get-training-info" / "shadow"


def _private(folder: Path) -> Path:
    try:
        return private_folder(folder)
    except OSError as error:
        fault = f"cannot use the folder {folder} for recorded traces ({error.strerror})"
        raise InputError("--info-engine", fault, "set XDG_CACHE_HOME to a folder that only you can write to") from None


def _is_usable(path: Path) -> bool:
    """Whether there is a complete cached trace that only this user can write to. Any other one is recorded again."""
    if not is_private(path) or not path.is_file():
        return False
    try:
        read_complete_trace(path)
    except (AnalyzerError, OSError):
        return False
    return True


def _key(job: TrainingJob, rank: int, iterations: int, microbatches: int, versions: dict[str, str], code: dict[str, str]) -> str:
    """Return a hash of everything that a trace depends on. Fields that only contain text are excluded."""
    spec = json.loads(to_json(job))
    for text in ("assumptions", "warnings", "unknown", "assumed_vocabulary"):
        del spec[text]
    parts = json.dumps([spec, rank, iterations, microbatches, versions, code], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _own_code() -> str:
    digest = hashlib.sha256()
    for path in sorted((ROOT / "allocator_hook").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _work(request: Request, folder: Path, finished: Callable[[int], None]) -> None:
    """Run the worker in its own process session, so that it can be killed together with its children.

    The worker removes `folder` if this process is killed.
    """
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "allocator_hook.shadow.worker", str(os.getpid()), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_search_path())},
            start_new_session=True,
        )
        try:
            _listen(worker, request, finished)
            if worker.wait() != 0:
                raise AnalyzerError(f"--info-engine shadow: the worker failed ({_last_line(errors)}); use --info-engine formula")
        finally:
            _end(worker)


def _search_path() -> list[str]:
    """The module search path of this process, so that the worker imports the sources that are part of the key."""
    folders = [str(Path(folder).absolute()) for folder in sys.path if os.pathsep not in folder]
    return [*dict.fromkeys((*folders, str(ROOT)))]


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
    return lines[-1][:200] if lines else "no error output"
