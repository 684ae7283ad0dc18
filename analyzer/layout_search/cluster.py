"""The executor of a Dask cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, NamedTuple

from analyzer.errors import InputError

CONNECT_SECONDS: Final = 10
"""Time to connect to a scheduler, and to connect again after the connection was lost."""


class Cluster(NamedTuple):
    """The workers of a Dask scheduler."""

    executor: Executor
    lost: tuple[type[BaseException], ...]
    """Errors of tasks that were lost with their worker or with the connection to the scheduler."""
    is_alive: Callable[[], bool]
    """Whether the scheduler answers, or may answer again."""


@contextmanager
def cluster(address: str) -> Iterator[Cluster]:
    """The cluster of the Dask scheduler at `address`. Raises InputError if it does not answer."""
    try:
        from distributed import Client, KilledWorker
    except ImportError:
        raise InputError(
            "--info-workers", "an address needs the package distributed", "run pip install '.[cluster]' in this project's folder"
        ) from None
    _check_scheduler(address)
    client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    try:
        yield Cluster(
            executor=client.get_executor(pure=False),
            lost=(CancelledError, OSError, KilledWorker),
            is_alive=lambda: client.status in ("running", "connecting"),
        )
    finally:
        client.close(timeout=CONNECT_SECONDS)


def _check_scheduler(address: str) -> None:
    """Raises InputError unless a scheduler answers. A Client would wait forever for an answer of another program."""
    remedy = "give the address that dask scheduler prints"
    try:
        with ThreadPoolExecutor(1) as thread:  # this thread may have an event loop
            kind = thread.submit(asyncio.run, _kind(address)).result()
    except Exception as error:  # each protocol has its own ones
        reason = " ".join(str(error).split()) or f"no answer in {CONNECT_SECONDS} seconds"
        raise InputError("--info-workers", f"no Dask scheduler answers at {address} ({reason})", remedy) from None
    if kind != "Scheduler":
        raise InputError("--info-workers", f"at {address} answers a {kind} of Dask, not a scheduler", remedy)


async def _kind(address: str) -> object:
    """What answers at an address."""
    from distributed import Security, rpc

    async with asyncio.timeout(CONNECT_SECONDS):
        async with rpc(address, connection_args=Security().get_connection_args("client")) as server:
            return (await server.identity())["type"]
