"""Replace PyTorch's CUDA allocator with the recorder. Must be called before the first CUDA allocation."""

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
    """Install the recorder. From now on every CUDA allocation of PyTorch is recorded in the trace at `path`.

    `torch` is the module to install into; it is imported by default. Raises InputError if CUDA was used before, if there is no
    GPU, or if PyTorch is built without CUDA; OSError if the trace cannot be written.

    PyTorch's own statistics (torch.cuda.memory_allocated and others) are not available with another allocator. Use those of the
    recorder.
    """
    torch = torch or _import_torch()
    check(torch)
    library = build()
    recorder = CudaRecorder(library)
    if recorder.runtime_error:
        raise InputError(_OPTION, recorder.runtime_error, "use a PyTorch build that loads libcudart as a shared library")
    recorder.set_mode(mode)
    recorder.library.hook_set_throws(1)
    _put_in_place(torch, recorder)
    recorder.open(path, header)
    atexit.register(recorder.close)
    return recorder


def check(torch: Any) -> None:
    """Raise InputError unless the recorder can be installed into `torch` now."""
    if getattr(torch.version, "cuda", None) is None:
        fault = f"PyTorch {torch.__version__} is built without CUDA"
        raise InputError(_OPTION, fault, "install a build with CUDA, or use --info-engine shadow")
    if torch.cuda.is_initialized():
        raise _too_late()
    if torch.cuda.device_count() == 0:
        raise InputError(_OPTION, "this machine has no GPU", "use a machine with a GPU, or --info-engine shadow")


def _put_in_place(torch: Any, recorder: CudaRecorder) -> None:
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(recorder.path), "hook_malloc", "hook_free")
    set_record_stream = getattr(allocator.allocator(), "set_record_stream_fn", None)
    if set_record_stream is None:  # the pool cannot know which other streams use a block, so it could free it too early
        recorder.set_mode("malloc")
    else:
        set_record_stream(ctypes.cast(recorder.library.hook_record_stream, ctypes.c_void_p).value)
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:  # PyTorch's own check also detects uses that is_initialized() does not report
        raise _too_late() from error


def _too_late() -> InputError:
    fault = "CUDA was used before the recorder was installed"
    return InputError(_OPTION, fault, "install it before the first GPU tensor is created")


def _import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        remedy = "install PyTorch, or check an existing trace with --info-check"
        raise InputError(_OPTION, "PyTorch is not installed", remedy) from error
