"""Records many launches with the shadow engine without importing megatron-core for each of them.

A process enters a `Session` once for each simulated GPU, set of environment variables, and use of CUDA graphs. It forks a
process for each rank that it records, as the worker of the shadow engine does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from collections.abc import Hashable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from allocator_hook.packages import installed
from allocator_hook.shadow.engine import enough_microbatches
from allocator_hook.shadow.parent import end_with_parent
from allocator_hook.shadow.request import Request
from allocator_hook.step.environment import variables
from allocator_hook.step.iterations import default_iterations
from allocator_hook.step.supported import check_supported
from analyzer.errors import AnalyzerError
from analyzer.specs import TrainingJob


class KeptSessions:
    """The processes with imported packages. They end with the process that made this object."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import allocator_hook.shadow.session  # noqa: F401  (the processes are forked with torch imported)

        self._processes: dict[Hashable, Connection] = {}

    def record(self, job: TrainingJob, ranks: Sequence[int], folder: Path) -> dict[int, Path]:
        """Record the iterations of `ranks` and return their traces in `folder`. Raises AnalyzerError like `engine.run`."""
        check_supported(job)
        traces = {rank: folder / f"{rank}.trace" for rank in ranks}
        pipe = self._process(job)
        request = Request(
            job=job,
            traces=traces,
            iterations=default_iterations(job),
            microbatches=enough_microbatches(job),
            versions=installed(),
        )
        pipe.send(request)
        try:
            fault = pipe.recv()
        except EOFError:
            raise AnalyzerError("the process that records has ended") from None
        if fault:
            raise AnalyzerError(fault)
        return traces

    def _process(self, job: TrainingJob) -> Connection:
        key = (job.hardware, job.graphs is not None, *variables(job).items())
        if key not in self._processes:
            ours, theirs = multiprocessing.Pipe()
            if not os.fork():
                _run(theirs, job)
            theirs.close()
            self._processes[key] = ours
        return self._processes[key]


def _run(pipe: Connection, job: TrainingJob) -> None:
    """Serve requests in a forked process until the parent ends."""
    end_with_parent(os.getppid())
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    warnings.filterwarnings("ignore")
    from allocator_hook.shadow.session import Session
    from allocator_hook.shadow.worker import serve

    try:
        with Session(job) as session:
            while True:
                request = pipe.recv()
                session.job = request.job
                path = next(iter(request.traces.values())).with_suffix(".answers")
                with path.open("w", buffering=1) as answers:
                    code = serve(session, request, answers)
                faults = [found["error"] for line in path.read_text().splitlines() if "error" in (found := json.loads(line))]
                pipe.send(faults[0] if faults else f"the worker ended with status {code}" if code else "")
    except (EOFError, KeyboardInterrupt):
        os._exit(0)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        os._exit(1)
