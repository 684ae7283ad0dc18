"""An executor of worker processes for long searches.

It differs from `concurrent.futures.ProcessPoolExecutor` where a search needs it: a process that dies takes only its own call with
it, and is replaced; the main module of the program is not imported again; and `shutdown` ends running calls. A worker is a new
interpreter, not a fork, because the program may have threads. It ends when its connection is closed, and the kernel closes
it when the program ends in any way.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Final

COMMAND: Final = f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import serve; serve(int(sys.argv[1]))"


class ProcessExecutor(Executor):
    """Runs calls in up to `count` processes, which are started when they are needed.

    The future of a call raises BrokenExecutor if its process has died or cannot be started, and RuntimeError with the traceback of
    the process if the call fails.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._calls: SimpleQueue[tuple[Future[Any], bytes] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._processes: set[_Process] = set()
        self._lock = Lock()
        self._ended = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs `fn` in a process. It, its arguments and its result must be picklable."""
        if self._ended:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._calls.put((future, pickle.dumps((fn, args, kwargs))))
        if len(self._threads) < self._count:
            self._threads.append(Thread(target=self._work, daemon=True))
            self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the processes: after the calls that were submitted, or at once if `cancel_futures`."""
        with self._lock:
            self._ended = True
            if cancel_futures:
                _cancel(self._calls)
                for process in self._processes:
                    process.kill()
        for _ in self._threads:
            self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        """Passes calls to a process, one at a time."""
        process: _Process | None = None
        while (call := self._calls.get()) is not None:
            future, data = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                process = process or self._start()
                succeeded, value = process.run(data)
            except (OSError, EOFError) as error:
                self._end(process)
                process = None
                future.set_exception(BrokenExecutor(str(error) or "a worker process has ended"))
                continue
            if succeeded:
                future.set_result(value)
            else:
                future.set_exception(RuntimeError(value))
        self._end(process)

    def _start(self) -> _Process:
        with self._lock:
            if self._ended:
                raise BrokenPipeError("the executor has ended")
            process = _Process()
            self._processes.add(process)
            return process

    def _end(self, process: _Process | None) -> None:
        if process is not None:
            with self._lock:
                self._processes.discard(process)
            process.end()


def _cancel(calls: SimpleQueue[tuple[Future[Any], bytes] | None]) -> None:
    try:
        while True:
            call = calls.get_nowait()
            if call is not None:
                call[0].cancel()
    except Empty:
        pass


class _Process:
    """A worker process and the connection to it. Raises OSError if it cannot be started."""

    def __init__(self) -> None:
        self._connection, other = Pipe()
        try:
            with other:
                number = other.fileno()
                # in a process group of its own, a worker does not get the SIGINT of Ctrl-C, not even while it starts
                self._process = subprocess.Popen(
                    [sys.executable, "-c", COMMAND, str(number), *sys.path],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(number,),
                    process_group=0,
                )
        except OSError:
            self._connection.close()
            raise

    def run(self, data: bytes) -> tuple[bool, Any]:
        """Whether a call succeeded, and its result or its traceback. Raises OSError or EOFError if the process has died."""
        self._connection.send_bytes(data)
        answer: tuple[bool, Any] = pickle.loads(self._connection.recv_bytes())
        return answer

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Ends the process, and waits until it has ended."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def serve(descriptor: int) -> None:
    """Runs the calls that come through a connection until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    calls: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        try:
            while True:
                calls.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # the program has ended; a running call has no use any more

    Thread(target=read, daemon=True).start()
    while True:
        answer = _answer(calls.get())
        try:
            connection.send_bytes(answer)
        except OSError:
            return


def _answer(data: bytes) -> bytes:
    try:
        function, arguments, options = pickle.loads(data)
        return pickle.dumps((True, function(*arguments, **options)))
    except Exception:
        return pickle.dumps((False, traceback.format_exc()))
