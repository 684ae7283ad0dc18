"""Reads a pickle from an unknown source: executes nothing, and limits memory and time.

It uses the unpickler that the standard library has in Python, because the one in C allocates as much memory as a pickle of nine
bytes asks for. Each operation takes constant time, or time for the values that it removes from the stack.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any, ClassVar, Final

MAX_BYTES: Final = 1 << 26
"""Size of a pickle. Those of checkpoints have up to 250 bytes per tensor."""
MAX_READS: Final = 4_000_000
"""Operands and operations of a pickle, which takes about a microsecond each. A tensor takes about 45."""
_KEYS: Final = (str, bytes, int, float, bool, type(None))
_HASHED_INTEGER: Final = 1 << 64


class TooLargeError(ValueError):
    """The pickle exceeds a limit."""


class Placeholder:
    """Replaces every object that is not built in. It stores its state and does nothing else."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: object = None

    def append(self, item: object) -> None:
        """Ignores an item of a list or a set."""

    add = append


class _Counted(io.BytesIO):
    """The bytes of a pickle. Limits the number of reads."""

    reads = 0

    def _count(self) -> None:
        self.reads += 1
        if self.reads > MAX_READS:
            raise TooLargeError(f"its pickle has more than {MAX_READS} operations")

    def read(self, size: int | None = -1, /) -> bytes:
        self._count()
        return super().read(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        self._count()
        return super().readline(size)


class _Unpickler(pickle._Unpickler):
    """Does not import, call or hash what a pickle references, and copies no value that stays in use."""

    stack: list[Any]
    append: Callable[[object], None]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, _module: str, _name: str, /) -> Any:
        return Placeholder

    def persistent_load(self, _reference: Any, /) -> Any:
        return Placeholder()

    def _skip_frame(self) -> None:
        """A frame is only a hint for buffering. Without it every read is counted."""
        self.read(8)

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("an operation that no checkpoint has")

    def _call(self) -> None:
        """REDUCE and NEWOBJ: a function or class and its arguments."""
        del self.stack[-2:]
        self.append(Placeholder())

    def _call_with_keywords(self) -> None:
        del self.stack[-3:]
        self.append(Placeholder())

    def _instance(self) -> None:
        self.readline()
        self.readline()
        self._from_mark()

    def _from_mark(self) -> None:
        """A set, or an old-style instance and its arguments."""
        self.pop_mark()
        self.append(Placeholder())

    def _empty_set(self) -> None:
        self.append(Placeholder())

    def _add_items(self) -> None:
        self.pop_mark()

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Placeholder):
            self.stack[-1].state = state

    def _dictionary(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._store(items)

    def _set_item(self) -> None:
        items = self.stack[-2:]
        del self.stack[-2:]
        self._store(items)

    def _set_items(self) -> None:
        self._store(self.pop_mark())

    def _store(self, items: list[Any]) -> None:
        """Set the items of a dictionary. Those of other objects, and those whose key could take long to hash, are ignored."""
        target = self.stack[-1]
        if not isinstance(target, dict):
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            if isinstance(key, _KEYS) and not (isinstance(key, int) and abs(key) >= _HASHED_INTEGER):
                target[key] = value

    def _bytearray(self) -> None:
        """BYTEARRAY8, for which the original allocates the stated size before it reads."""
        (size,) = struct.unpack("<Q", self.read(8))
        if size > MAX_BYTES or len(self.read(size)) < size:
            raise EOFError("it ends inside an array")
        self.append(Placeholder())

    def _long(self) -> None:
        """LONG4: an integer of up to 2 GiB."""
        (size,) = struct.unpack("<i", self.read(4))
        data = self.read(max(size, 0))
        self.append(int.from_bytes(data, "little", signed=True) if size <= 8 else Placeholder())


_REPLACED: Final[dict[bytes, Callable[[Any], None]]] = {
    pickle.FRAME: _Unpickler._skip_frame,
    pickle.BYTEARRAY8: _Unpickler._bytearray,
    pickle.NEXT_BUFFER: _Unpickler._refuse,
    pickle.EXT1: _Unpickler._refuse,
    pickle.EXT2: _Unpickler._refuse,
    pickle.EXT4: _Unpickler._refuse,
    pickle.REDUCE: _Unpickler._call,
    pickle.NEWOBJ: _Unpickler._call,
    pickle.NEWOBJ_EX: _Unpickler._call_with_keywords,
    pickle.INST: _Unpickler._instance,
    pickle.OBJ: _Unpickler._from_mark,
    pickle.FROZENSET: _Unpickler._from_mark,
    pickle.EMPTY_SET: _Unpickler._empty_set,
    pickle.ADDITEMS: _Unpickler._add_items,
    pickle.BUILD: _Unpickler._build,
    pickle.DICT: _Unpickler._dictionary,
    pickle.SETITEM: _Unpickler._set_item,
    pickle.SETITEMS: _Unpickler._set_items,
    pickle.LONG4: _Unpickler._long,
}
_Unpickler.dispatch.update({code[0]: method for code, method in _REPLACED.items()})


def read_pickle(data: bytes) -> object:
    """Return the object in the pickle `data`. Only numbers, strings, lists, tuples and dictionaries are not a `Placeholder`.

    Raises TooLargeError if it exceeds a limit; pickle.UnpicklingError, EOFError and other exceptions if it is damaged.
    """
    if len(data) > MAX_BYTES:
        raise TooLargeError(f"its pickle has more than {MAX_BYTES >> 20} MiB")
    return _Unpickler(_Counted(data)).load()
