"""Landlock (kernel 5.13): this process and its children write only in given folders, also by programs that no library reaches.

Names and numbers are those of linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os

from analyzer.script.isolation.system_calls import LIBC

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""The same numbers on every architecture."""
VERSION = 1
"""Flag that asks for the version of the interface."""
PATH_BENEATH = 1
WRITE_FILE = 1 << 1
TRUNCATE = 1 << 14
CHANGES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Writing files, and removing and making entries of each kind."""
SINCE = {1 << 13: 2, TRUNCATE: 3}
"""Moving between folders, and truncation, with the version that has them."""
CONNECT_TCP, NETWORK_SINCE = 1 << 1, 4
ABSTRACT_SOCKETS_AND_SIGNALS, SCOPES_SINCE = 3, 6
WRITABLE_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts")


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Path(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("handle", ctypes.c_int32))


def restrict_writing(folder: str) -> bool:
    """Allows writing in `folder` and to devices that keep nothing, and no TCP connection or signal to other processes.

    Needs PR_SET_NO_NEW_PRIVS. Returns False where the kernel has no Landlock.
    """
    version = LIBC.syscall(CREATE_RULESET, None, 0, VERSION)
    if version < 1:
        return False
    files = CHANGES | sum(access for access, since in SINCE.items() if version >= since)
    network = CONNECT_TCP if version >= NETWORK_SINCE else 0
    scopes = ABSTRACT_SOCKETS_AND_SIGNALS if version >= SCOPES_SINCE else 0
    attributes = _Ruleset(files, network, scopes)
    size = 8 if version < NETWORK_SINCE else 16 if version < SCOPES_SINCE else 24
    rules = LIBC.syscall(CREATE_RULESET, ctypes.byref(attributes), size, 0)
    if rules < 0:
        return False
    _allow(rules, folder, files)
    for device in WRITABLE_DEVICES:
        is_folder = os.path.isdir(device)
        _allow(rules, device, files if is_folder else files & (WRITE_FILE | TRUNCATE))
    done = bool(LIBC.syscall(RESTRICT_SELF, rules, 0) == 0)
    os.close(rules)
    return done


def _allow(rules: int, path: str, access: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    rule = _Path(access, handle)
    LIBC.syscall(ADD_RULE, rules, PATH_BENEATH, ctypes.byref(rule), 0)
    os.close(handle)
