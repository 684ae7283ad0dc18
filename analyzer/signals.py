"""What a process that waits in system calls needs to answer signals at once."""

from __future__ import annotations

import signal

_INTERVAL = 1.0
"""Seconds between two interruptions."""


def interrupt_blocking_calls() -> None:
    """Interrupt the system calls of the main thread once a second, so that its signal handlers run within that time.

    Python runs a handler between two instructions of the main thread. A signal that arrives just before a blocking call does not
    interrupt the call, and its handler would run only after it (PEP 475 retries calls that a signal interrupts). Child processes
    do not inherit the timer (fork(2)).
    """
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, _INTERVAL, _INTERVAL)
