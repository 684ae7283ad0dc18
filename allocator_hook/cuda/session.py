"""Record the step of one rank on a real GPU with the CUDA recorder. The other ranks are simulated by torch's fake process group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allocator_hook.cuda.install import check, install
from allocator_hook.cuda.library import Mode
from allocator_hook.packages import installed
from analyzer.specs import TrainingJob
from analyzer.trace.events import Header


def record_on_gpu(job: TrainingJob, *, rank: int, path: Path, argv: Sequence[str], iterations: int, mode: Mode = "pool") -> int:
    """Write the trace and return the peak of the allocated bytes. Must run before anything else uses CUDA.

    Memory is allocated on the GPU. Collectives are recorded but not executed, because the other ranks do not exist.
    """
    import torch

    check(torch)
    gpu, driver = _gpu_and_driver()
    header = Header(
        recorder="cuda",
        argv=tuple(argv),
        versions={**installed(), "cuda driver": driver},
        gpu=gpu,
        rank=rank,
        world_size=job.parallel.world_size,
        extra={"iterations": iterations, "microbatches": job.batch.microbatches, "layers": job.model.num_layers},
    )
    recorder = install(path, header, mode=mode)

    from allocator_hook.step.collectives import CollectiveHooks
    from allocator_hook.step.labels import write_labels
    from allocator_hook.step.marks import Marks
    from allocator_hook.step.patching import Patch, Patches
    from allocator_hook.step.sink import CollectiveWriter
    from allocator_hook.step.train import run

    marks = Marks(recorder)
    sink = CollectiveWriter()
    hooks = CollectiveHooks(sink, perform=False)
    sink.connect(recorder, marks)

    def label(trained: Any, *, optimizer: bool) -> None:
        write_labels(trained, sink=recorder, pointer=_pointer, optimizer=optimizer)

    with Patches(Patch(*patch, "the call is recorded, not executed: there are no peers") for patch in hooks.patches()):
        run(
            job,
            rank=rank,
            iterations=iterations,
            marks=marks,
            after_setup=lambda trained: label(trained, optimizer=False),
            after_iteration=lambda trained, iteration: label(trained, optimizer=True) if iteration == 0 else None,
        )
    torch.cuda.synchronize()
    peak = recorder.peak_bytes(0)
    recorder.close()
    return int(peak)


def _pointer(tensor: Any) -> int | None:
    """Return the start address of the tensor's storage; None for a CPU tensor."""
    return int(tensor.untyped_storage().data_ptr()) if tensor.is_cuda else None


def _gpu_and_driver() -> tuple[str, str]:
    """Return the name of the first GPU and the driver version from NVML. Asking torch would initialize CUDA."""
    try:
        import pynvml
    except ImportError:
        return "", "unknown"
    try:
        pynvml.nvmlInit()
        found = (pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)), pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return "", f"unknown ({error})"
    gpu, driver = (text.decode() if isinstance(text, bytes) else str(text) for text in found)
    return gpu, driver
