"""User and group ids of a new user namespace: those of this process, or all of them for the administrator (user_namespaces(7))."""

from __future__ import annotations

import os
from collections.abc import Callable


def map_users(enter: Callable[[], None]) -> None:
    """Calls `enter`, which moves this process to a new user namespace, and gives every user the same id there.

    The maps of the administrator may only be written from outside, so a child writes them. Raises OSError.
    """
    process = os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(write)
            if os.read(read, 1):
                _write_maps(f"/proc/{process}")
                status = 0
        finally:
            os._exit(status)
    os.close(read)
    try:
        enter()
        os.write(write, b"1")
    finally:
        os.close(write)
        status = os.waitpid(child, 0)[1]
    if status != 0:
        raise OSError(0, "the map of user ids is refused", "uid_map")


def _write_maps(process: str) -> None:
    """Writes the maps of the process. Raises OSError."""
    if os.geteuid() == 0:
        try:
            _write(f"{process}/uid_map", _every_id("uid"))
            _write(f"{process}/gid_map", _every_id("gid"))
            return
        except OSError:
            pass  # an administrator without the capability to set ids, as in some containers
    _write(f"{process}/setgroups", "deny")
    _write(f"{process}/uid_map", f"{os.geteuid()} {os.geteuid()} 1")
    _write(f"{process}/gid_map", f"{os.getegid()} {os.getegid()} 1")


def _every_id(kind: str) -> str:
    """The map of every id of this namespace to itself."""
    with open(f"/proc/self/{kind}_map", encoding="ascii") as file:
        rows = [line.split() for line in file]
    return "\n".join(f"{first} {first} {count}" for first, _, count in rows)


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)
