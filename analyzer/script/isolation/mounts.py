"""The file system that a script sees: a copy of that of this machine, whose changes go to memory and are thrown away.

overlayfs takes a folder only if no other file system is mounted below it, because a user namespace may not look under the mounts of
its parent. Such a folder is made again, with its entries: an overlay for each folder, a copy of each small file.
"""

from __future__ import annotations

import contextlib
import os
import stat

from analyzer.script.isolation import system_calls as call

OWN = frozenset({"/proc", "/dev", "/sys"})
"""Folders of the kernel, which are not copied."""
AUTOMATIC = "autofs"
"""File system type of folders whose entries are mounted when they are used. overlayfs refuses it."""
MOST_ENTRIES = 1000
"""Entries of a folder that is made again. A folder with more is read-only itself."""
LARGEST_COPY = 1 << 20
"""Bytes of a file that is copied. A larger one is read-only."""
SHARE_OF_MEMORY = "25%"
"""What changed files may use of the memory of the machine."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
NAMED_ONLY = ("nvidia", "infiniband", "kfd", "dri")
"""Beginnings of the names of devices that scripts count. They are there as empty files, and cannot be used."""


def read_mounts(text: str) -> dict[str, str]:
    """The file system type of each mount point, from /proc/self/mountinfo (proc_pid_mountinfo(5))."""
    found = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        found[_decoded(before.split(" ")[4])] = after.split(" ")[0]
    return found


def _decoded(path: str) -> str:
    """The path without the escapes of space, tab, newline and backslash."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


class FileSystem:
    """The new root, which is built in a mount of memory at `memory`. `read_only` lists folders that could not be copied."""

    def __init__(self, memory: str, mounts: dict[str, str]) -> None:
        self.root = os.path.join(memory, "new")
        self.layers = os.path.join(memory, "layers")
        self.mounts = mounts
        self.read_only: list[str] = []
        self._count = 0

    def build(self, shared: str) -> None:
        """Builds the root, in which the folder `shared` is the real one. Raises OSError if it cannot be built."""
        memory = os.path.dirname(self.root)
        call.mount("none", "/", "none", call.MS_REC | call.MS_PRIVATE)
        handle = os.open(shared, os.O_RDONLY | os.O_DIRECTORY)
        call.mount("tmpfs", memory, "tmpfs", call.MS_NOSUID | call.MS_NODEV, f"size={SHARE_OF_MEMORY},mode=755")
        os.mkdir(self.root)
        os.mkdir(self.layers)
        call.mount(self.root, self.root, "none", call.MS_BIND)
        self._again("/")
        if not self._count:
            raise OSError(0, "overlayfs is not allowed", "overlay")
        self._processes()
        self._devices()
        self._bind("/sys")
        target = self._target(shared)  # after /dev, because it may be in /dev/shm
        os.makedirs(target, exist_ok=True)
        call.mount(f"/proc/self/fd/{handle}", target, "none", call.MS_BIND)
        os.close(handle)

    def _target(self, path: str) -> str:
        return self.root + path if path != "/" else self.root

    def _place(self, path: str) -> None:
        """Puts the folder `path`, whose target exists, into the new root."""
        if path in OWN:
            return
        below = [point for point in self.mounts if point.startswith(path + "/")]
        if self.mounts.get(path) != AUTOMATIC:
            if not below and self._overlay(path):
                return
            if below and self._again(path):
                return
        self._bind(path)
        self.read_only.append(path)
        for point in below:
            if not any(point.startswith(other + "/") for other in below) and os.path.isdir(point):
                self._place(point)

    def _overlay(self, path: str) -> bool:
        """Puts an overlay of `path` there. False if the file system does not allow that."""
        self._count += 1
        layer = os.path.join(self.layers, str(self._count))
        upper, work = os.path.join(layer, "upper"), os.path.join(layer, "work")
        os.makedirs(upper)
        os.mkdir(work)
        _copy_owner(path, upper)
        options = f"lowerdir={_escaped(path)},upperdir={_escaped(upper)},workdir={_escaped(work)},userxattr"
        try:
            call.mount("overlay", self._target(path), "overlay", 0, options)
        except OSError:
            self._count -= 1
            return False
        return True

    def _again(self, path: str) -> bool:
        """Makes the folder and its entries again. False if it cannot be read, or has too many."""
        try:
            with os.scandir(path) as listing:
                entries = list(listing)
        except OSError:
            return False
        if len(entries) > MOST_ENTRIES and path != "/":
            return False
        target = self._target(path)
        _copy_owner(path, target)
        for entry in entries:
            inside = os.path.join(target, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), inside)
            elif entry.is_dir():
                os.mkdir(inside)
                self._place(entry.path)
            elif entry.is_file():
                self._file(entry.path, inside)
        return True

    def _file(self, path: str, target: str) -> None:
        """A copy of a small file. A larger one is the real file, read-only."""
        try:
            if os.stat(path).st_size <= LARGEST_COPY:
                with open(path, "rb") as source, open(target, "wb") as copy:
                    copy.write(source.read())
                _copy_owner(path, target)
                return
        except OSError:
            pass
        _touch(target)
        try:
            call.mount(path, target, "none", call.MS_BIND)
            call.make_read_only(target)
        except OSError:
            os.chmod(target, 0)  # unreadable, as it is outside

    def _bind(self, path: str) -> None:
        """The real folder, read-only, with what is mounted below it. It stays empty if that is not allowed."""
        target = self._target(path)
        os.makedirs(target, exist_ok=True)
        try:
            call.mount(path, target, "none", call.MS_BIND | call.MS_REC)
        except OSError:
            return
        call.make_read_only(target)

    def _processes(self) -> None:
        """/proc of the new process namespace, without writing. In some containers it must be that of the machine."""
        try:
            flags = call.MS_RDONLY | call.MS_NOSUID | call.MS_NODEV | call.MS_NOEXEC
            call.mount("proc", self._target("/proc"), "proc", flags)
        except OSError:
            self._bind("/proc")

    def _devices(self) -> None:
        """/dev with the devices that hold nothing, and with an own folder for shared memory."""
        target = self._target("/dev")
        call.mount("tmpfs", target, "tmpfs", call.MS_NOSUID, f"size={SHARE_OF_MEMORY},mode=755")
        for name in DEVICES:
            _touch(f"{target}/{name}")
            call.mount(f"/dev/{name}", f"{target}/{name}", "none", call.MS_BIND)
        for name, link in LINKS.items():
            os.symlink(link, f"{target}/{name}")
        for name in ("shm", "pts"):
            os.mkdir(f"{target}/{name}")
        os.chmod(f"{target}/shm", 0o1777)
        for name in os.listdir("/dev"):
            if name.startswith(NAMED_ONLY):
                _touch(f"{target}/{name}")
        try:
            call.mount("devpts", f"{target}/pts", "devpts", call.MS_NOSUID | call.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
            os.symlink("pts/ptmx", f"{target}/ptmx")
        except OSError:
            return  # programs that need a terminal do not find one


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _copy_owner(source: str, target: str) -> None:
    """Gives `target` the permissions and, where that is possible, the owner of `source`."""
    found = os.stat(source)
    with contextlib.suppress(OSError):  # a user who is unknown in the namespace
        os.chown(target, found.st_uid, found.st_gid)
    os.chmod(target, stat.S_IMODE(found.st_mode))


def _escaped(path: str) -> str:
    """The path as an option of overlayfs."""
    for character in ("\\", ":", ","):
        path = path.replace(character, "\\" + character)
    return path
