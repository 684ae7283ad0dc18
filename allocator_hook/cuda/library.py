"""Python interface (ctypes) of the compiled recorder: the methods of trace_writer.TraceWriter, and memory statistics."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from analyzer.trace.events import PHASES, Header, Phase, Role
from analyzer.trace.format import collective_text, header_text, label_text

Mode = Literal["pool", "malloc"]
MODES: Final[dict[Mode, int]] = {"pool": 0, "malloc": 1}
"""pool: the memory pool of cudaMallocAsync if the driver supports it, else cudaMalloc. malloc: always cudaMalloc."""

_PHASE_CODES: Final = {phase: code for code, phase in enumerate(PHASES)}
_TEXT, _INT, _LONG, _SIZE = ctypes.c_char_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
_SIGNATURES: Final = {
    "hook_open": ([_TEXT, _TEXT], _INT),
    "hook_mark": ([_INT, _TEXT, _INT, _LONG, _LONG], None),
    "hook_collective": ([_TEXT, _SIZE], None),
    "hook_label": ([_SIZE, _SIZE, _TEXT], None),
    "hook_flush": ([], None),
    "hook_close": ([], _INT),
    "hook_is_recording": ([], _INT),
    "hook_current_bytes": ([_INT], _SIZE),
    "hook_peak_bytes": ([_INT], _SIZE),
    "hook_reset_peak": ([_INT], None),
    "hook_unknown_frees": ([], _SIZE),
    "hook_set_mode": ([_INT], None),
    "hook_uses_pool": ([_INT], _INT),
    "hook_set_throws": ([_INT], None),
    "hook_runtime_error": ([], _TEXT),
    "hook_malloc": ([ctypes.c_ssize_t, _INT, ctypes.c_void_p], ctypes.c_void_p),
    "hook_free": ([ctypes.c_void_p, ctypes.c_ssize_t, _INT, ctypes.c_void_p], None),
    "hook_record_stream": ([ctypes.c_void_p, ctypes.c_void_p], None),
}


class CudaRecorder:
    """The recorder of this process. A process has one trace at a time, even if the library is loaded several times."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.library = ctypes.CDLL(str(self.path))
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = arguments, result

    def open(self, path: str | os.PathLike[str], header: Header) -> None:
        """Start a trace at `path`. Its first records are the live allocations. Raises OSError."""
        _check(self.library.hook_open(os.fsencode(path), header_text(header).encode()), path)

    def enter(self, name: str, phase: Phase, microbatch: int = -1, iteration: int = -1) -> None:
        """Record that the module `name` is entered."""
        self.library.hook_mark(1, name.encode(), _PHASE_CODES[phase], microbatch, iteration)

    def leave(self, name: str, phase: Phase, microbatch: int = -1, iteration: int = -1) -> None:
        """Record that the module `name` is left."""
        self.library.hook_mark(0, name.encode(), _PHASE_CODES[phase], microbatch, iteration)

    def collective(
        self,
        kind: str,
        *,
        group: str,
        shape: Sequence[int],
        dtype: str,
        bytes: int,
        members: Sequence[int] = (),
        size: int | None = None,
        phase: Phase | None = None,
        peer: int | None = None,
    ) -> None:
        """Record one call of a collective. `bytes` is its payload on this rank; `size` defaults to the number of members."""
        text = collective_text(kind=kind, group=group, members=members, size=size, shape=shape, dtype=dtype, phase=phase, peer=peer)
        self.library.hook_collective(text.encode(), bytes)

    def label(self, pointer: int, role: Role, name: str, *, shape: Sequence[int], dtype: str, bytes: int) -> None:
        """Record that the tensor `name` is at `pointer`, an address inside a live allocation."""
        self.library.hook_label(pointer, bytes, label_text(role=role, name=name, shape=shape, dtype=dtype).encode())

    def flush(self) -> None:
        """Write all buffered records to the file."""
        self.library.hook_flush()

    def close(self) -> None:
        """End the trace. The allocator and its statistics continue to work. A second call does nothing. Raises OSError."""
        _check(self.library.hook_close(), "the trace")

    def __enter__(self) -> CudaRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def is_recording(self) -> bool:
        """False before `open`, after `close`, in a forked child, and after the disk was full."""
        return bool(self.library.hook_is_recording())

    def current_bytes(self, device: int = 0) -> int:
        """Requested bytes that are allocated on `device`."""
        return int(self.library.hook_current_bytes(device))

    def peak_bytes(self, device: int = 0) -> int:
        """Maximum of `current_bytes` since the library was loaded or the peak was reset."""
        return int(self.library.hook_peak_bytes(device))

    def reset_peak(self, device: int = 0) -> None:
        """Set the peak to the bytes that are allocated now."""
        self.library.hook_reset_peak(device)

    @property
    def unknown_frees(self) -> int:
        """Number of frees of memory that the recorder did not allocate or that was already freed."""
        return int(self.library.hook_unknown_frees())

    @property
    def runtime_error(self) -> str:
        """Why the CUDA runtime cannot be used; empty if it can."""
        return str(self.library.hook_runtime_error().decode(errors="replace"))

    def uses_pool(self, device: int = 0) -> bool:
        """True if memory of `device` comes from CUDA's stream-ordered memory pool."""
        return bool(self.library.hook_uses_pool(device))

    def set_mode(self, mode: Mode) -> None:
        """Set how memory is allocated from now on."""
        self.library.hook_set_mode(MODES[mode])


def _check(error: int, path: object) -> None:
    if error:
        raise OSError(error, os.strerror(error), str(path))
