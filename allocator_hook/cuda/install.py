"""Puts the recorder in the place of PyTorch's CUDA allocator. To be called before anything touches CUDA memory."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
from typing import Any

from allocator_hook.cuda.build import build
from allocator_hook.cuda.library import CudaRecorder, Mode
from analyzer.errors import InputError
from analyzer.trace.events import Header

_OPTION = "--info-record"


def install(path: str | os.PathLike[str], header: Header, *, mode: Mode = "pool", torch: Any = None) -> CudaRecorder:
    """Every CUDA allocation of PyTorch from now on goes through the recorder, and into a trace at `path`.

    `torch` is the module to install into, imported where it is not given. Raises InputError where it is too late, where there is no
    GPU, or where PyTorch is built without CUDA; OSError where the trace cannot be written.

    PyTorch's own statistics (torch.cuda.memory_allocated and the like) are not to be had under another allocator: ask the recorder.
    """
    torch = torch or _import_torch()
    check(torch)
    library = build()
    recorder = CudaRecorder(library)
    if recorder.runtime_error:
        raise InputError(_OPTION, recorder.runtime_error, "use a PyTorch that loads libcudart as a library of its own")
    recorder.set_mode(mode)
    recorder.library.hook_set_throws(1)
    _put_in_place(torch, recorder)
    recorder.open(path, header)
    atexit.register(recorder.close)
    return recorder


def check(torch: Any) -> None:
    """Raises InputError unless the recorder can be installed into `torch` now."""
    if getattr(torch.version, "cuda", None) is None:
        fault = f"PyTorch {torch.__version__} is built without CUDA"
        raise InputError(_OPTION, fault, "install a build with CUDA, or use --info-engine shadow")
    if torch.cuda.is_initialized():
        raise _too_late()
    if torch.cuda.device_count() == 0:
        raise InputError(_OPTION, "there is no GPU here", "use a machine with one, or --info-engine shadow")


def _put_in_place(torch: Any, recorder: CudaRecorder) -> None:
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(recorder.path), "hook_malloc", "hook_free")
    set_record_stream = getattr(allocator.allocator(), "set_record_stream_fn", None)
    if set_record_stream is None:  # without it the pool would give memory back that another stream still uses
        recorder.set_mode("malloc")
    else:
        set_record_stream(ctypes.cast(recorder.library.hook_record_stream, ctypes.c_void_p).value)
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:  # PyTorch's own check, which sees uses that is_initialized() does not
        raise _too_late() from error


def _too_late() -> InputError:
    fault = "CUDA was used before the recorder was installed"
    return InputError(_OPTION, fault, "install it before the first tensor on a GPU")


def _import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise InputError(_OPTION, "PyTorch is not installed", "install it, or check an existing trace with --info-check") from error
