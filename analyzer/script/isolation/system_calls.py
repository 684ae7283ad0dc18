"""The system calls of Linux that Python 3.11 does not have. Numbers and names are those of the kernel's headers."""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY = 1
MOUNT_SETATTR = 442
"""The same number on every architecture."""
PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SIOCSIFFLAGS = 0x8914
INTERFACE_UP = 0x41
"""IFF_UP and IFF_RUNNING."""
KEPT_CAPABILITIES = frozenset({0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 24, 31})
"""CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, SYS_RESOURCE, SETFCAP:
what a script of the administrator needs for files of other users and for its own limits. The others change mounts, devices, the
network, the clock or the kernel."""
LAST_CAPABILITY = 63

LIBC = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def unshare(flags: int) -> None:
    """Moves this process, and for CLONE_NEWPID its children, to new namespaces. Raises OSError."""
    _checked(LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """Mounts `source` of the file system type `kind` at `target`. Raises OSError."""
    words = [os.fsencode(word) for word in (source, target, kind)]
    _checked(LIBC.mount(*words, ctypes.c_ulong(flags), os.fsencode(options) or None), f"mount {kind} at {target}")


def make_read_only(target: str) -> None:
    """Makes the mount at `target`, and every mount below it, read-only. Raises OSError."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    words = (MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    _checked(LIBC.syscall(*words), f"mount_setattr {target}")


def pivot_root(root: str) -> None:
    """Makes the mount at `root` the root of the file system, and detaches the old one. Raises OSError."""
    os.chdir(root)
    _checked(LIBC.pivot_root(b".", b"."), "pivot_root")
    _checked(LIBC.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def end_with_parent(number: int) -> None:
    """Sends this process the signal `number` when its parent ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


def give_up_rights() -> None:
    """Programs that follow get no rights from set-user-ID files, and none of the capabilities that act on the machine."""
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)
    for capability in range(LAST_CAPABILITY + 1):
        if capability not in KEPT_CAPABILITIES:
            LIBC.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)


def start_loopback() -> None:
    """Starts the loopback interface of a new network namespace, which has no other. A failure changes nothing that matters."""
    handle = LIBC.socket(2, 2, 0)  # AF_INET, SOCK_DGRAM
    if handle >= 0:
        request = b"lo".ljust(16, b"\0") + INTERFACE_UP.to_bytes(2, sys.byteorder) + bytes(22)
        LIBC.ioctl(handle, ctypes.c_ulong(SIOCSIFFLAGS), ctypes.create_string_buffer(request))
        os.close(handle)
