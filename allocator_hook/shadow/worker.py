"""The worker process: runs the steps of one or more ranks without a GPU and writes their traces.

    python -m allocator_hook.shadow.worker PARENT FOLDER < request.json

Standard output has one JSON object per finished rank, `{"rank": 3, "trace": "…", "seconds": 4.2}`, or
`{"error": "…", "exit": 2}`. All output of the packages goes to standard error. Packages are imported once; each rank then runs
in a forked child process, so that ranks share no state. When the
process PARENT ends, the worker removes FOLDER, which has the unfinished traces, and all processes end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from allocator_hook.shadow.parent import end_with_parent, remove_when_parent_ends
from analyzer.errors import WRONG_INPUT, AnalyzerError

if TYPE_CHECKING:
    from allocator_hook.shadow.request import Request
    from allocator_hook.shadow.session import Session


def main() -> int:
    """Serve the request on standard input. Returns the exit status: 0, or that of the first error."""
    remove_when_parent_ends(Path(sys.argv[2]), int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore")
    from allocator_hook.shadow.request import Request

    request = Request.from_json(sys.stdin.read())
    try:
        from allocator_hook.shadow.session import Session

        with Session(request.job) as session:
            return serve(session, request, answers)
    except AnalyzerError as error:
        return _fail(answers, str(error), error.exit_code)


def serve(session: Session, request: Request, answers: TextIO) -> int:
    """Run up to `jobs` children in parallel until every rank is recorded or one fails.

    Writes the answers that the module describes. Returns 0, or the exit status of the first error.
    """
    waiting, running = list(request.traces), set[int]()
    try:
        while waiting or running:
            while waiting and len(running) < request.jobs:
                running.add(_start(session, request, waiting.pop(0), answers))
            pid, status = os.wait()
            running.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                return _fail(
                    answers,
                    f"--info-engine shadow: a worker was killed by signal {-code}; check that the machine has enough free memory",
                    WRONG_INPUT,
                )
            if code:
                return code
        return 0
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


def _start(session: Session, request: Request, rank: int, answers: TextIO) -> int:
    worker = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        end_with_parent(worker)
        code = _record(session, request, rank, answers)
    except BaseException:
        traceback.print_exc()
        code = 1
    answers.flush()
    sys.stderr.flush()
    os._exit(code)  # the context managers belong to the parent process


def _record(session: Session, request: Request, rank: int, answers: TextIO) -> int:
    begin = time.monotonic()
    try:
        path = session.record(request, rank)
    except AnalyzerError as error:
        return _fail(answers, str(error), error.exit_code)
    except Exception as error:
        traceback.print_exc()
        last = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        return _fail(
            answers, f"--info-engine shadow: rank {rank} failed in megatron-core ({last}); use --info-engine formula", WRONG_INPUT
        )
    _answer(answers, {"rank": rank, "trace": str(path), "seconds": time.monotonic() - begin})
    return 0


def _fail(answers: TextIO, message: str, code: int) -> int:
    _answer(answers, {"error": message, "exit": code})
    return code


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # skips the interpreter shutdown, which takes a second with torch
