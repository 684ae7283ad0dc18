"""Records one rank: combines the fake CUDA, the recorder, the marks and the collective hooks around the step.

Entering a `Session` imports megatron-core under the fake CUDA. `record` runs one rank. Each happens once per process, because
Megatron and Transformer Engine keep state in module variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from allocator_hook.shadow import sharding
from allocator_hook.shadow.balance import ImagePlaces, Means, equal_parts, padded, permuting_and_padding
from allocator_hook.shadow.facade import fake_cuda
from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.jit import FakeCompiler
from allocator_hook.shadow.kernel_calls import calls
from allocator_hook.shadow.recorder import Recorder
from allocator_hook.shadow.request import Request
from allocator_hook.shadow.stand_ins import cu_tile, cuda_graphs, linear_attention, sparse_attention
from allocator_hook.shadow.stand_ins.received_shapes import received_shapes
from allocator_hook.step.collectives import CollectiveHooks
from allocator_hook.step.environment import variables
from allocator_hook.step.families.llava import IMAGE_TOKEN
from allocator_hook.step.labels import write_labels
from allocator_hook.step.marks import Marks
from allocator_hook.step.patching import Patch, Patches
from allocator_hook.step.sink import CollectiveWriter
from allocator_hook.trace_writer import TraceWriter
from analyzer.errors import AnalyzerError
from analyzer.memory.workspaces import cublas_workspace_bytes
from analyzer.modules.moe.routing import Routing
from analyzer.modules.shapes import shapes_of
from analyzer.specs import TrainingJob
from analyzer.trace.events import Header


class Session:
    """Context manager that simulates CUDA in this process and records the step of one rank."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self._stack = ExitStack()
        self._compiler = FakeCompiler()
        self._sink: CollectiveWriter = CollectiveWriter()
        self._recorder: Recorder | None = None
        self._trained: Any = None

    def __enter__(self) -> Session:
        hooks = CollectiveHooks(self._sink, perform=False, on_receive=self._copy_mean)
        gpu = Gpu.of(self.job.hardware)
        environ(self.job)
        self._stack.enter_context(_deterministic(self.job))
        self._stack.enter_context(
            Patches(Patch(*patch, "the call is recorded, not executed: there are no peers") for patch in hooks.patches())
        )
        self._stack.enter_context(fake_cuda(gpu, compiler=self._compiler, memory_allocated=self._current_bytes))
        self._stack.enter_context(Patches(cuda_graphs.patches() if self.job.graphs is not None else ()))
        try:
            import_module("megatron.core.models.gpt.gpt_model")
            import_module("megatron.core.optimizer")
        except ImportError as error:
            self._stack.close()
            raise AnalyzerError(f"--info-engine shadow: megatron-core cannot be imported ({error}); {INSTALL}") from error
        if self.job.model.implementation == "transformer_engine":
            _need_transformer_engine()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def record(self, request: Request, rank: int) -> Path:
        """Run the step of `rank` and return the path of its trace. Can be called once per session."""
        from allocator_hook.step.train import run

        path = Path(request.traces[rank])
        gpu = Gpu.of(self.job.hardware)
        header = Header(
            recorder="shadow",
            argv=request.argv,
            versions=request.versions,
            gpu=gpu.name,
            rank=rank,
            world_size=self.job.parallel.world_size,
            extra={
                "microbatches": request.microbatches or self.job.batch.microbatches,
                "iterations": request.iterations,
                "layers": self.job.model.num_layers,
            },
        )
        with TraceWriter(path, header) as writer, ExitStack() as stack:
            moe, graphed = self.job.model.moe, self.job.graphs is not None
            on_streams = graphed or (moe is not None and moe.shared_overlap and moe.shared_gate)
            workspace = cublas_workspace_bytes(self.job)
            recorder = Recorder(writer, cublas_workspace_bytes=workspace, each_stream=on_streams, gpu=gpu)
            marks = Marks(writer)
            recorder.means.multiple, recorder.means.padded_on_arrival = _padding(self.job)
            recorder.means.images = _images(self.job)
            received = received_shapes(self.job)
            stack.enter_context(Patches([*recorder.patches(), *_router_padding(recorder.means), *received]))
            stack.enter_context(Patches([*_shared_storage(recorder), *_random_states(self.job)]))
            stack.enter_context(Patches(_hadamard_signs(self.job)))
            of_kernels = (linear_attention, sparse_attention, cu_tile)
            stack.enter_context(Patches([each for module in of_kernels for each in module.patches(self.job)]))
            stack.enter_context(Patches(sharding.patches(self.job, recorder, writer)))
            stack.enter_context(Patches(cuda_graphs.tensor_patches(recorder) if graphed else ()))
            calls_sink = cuda_graphs.GraphedCalls(writer) if graphed else writer
            self.count_with(recorder)
            self._sink.connect(calls_sink, marks)
            stack.enter_context(calls.passed_to(calls_sink))
            stack.enter_context(recorder)

            def after_setup(trained: Any) -> None:
                write_labels(trained, sink=writer, pointer=recorder.pointer, optimizer=False)

            def after_iteration(trained: Any, iteration: int) -> None:
                if iteration == 0:
                    write_labels(trained, sink=writer, pointer=recorder.pointer, optimizer=True)

            # referenced until the process ends: what it holds is allocated after the step
            self._trained = run(
                self.job,
                rank=rank,
                iterations=request.iterations,
                marks=marks,
                microbatches=request.microbatches,
                after_setup=after_setup,
                after_iteration=after_iteration,
            )
        return path

    def count_with(self, recorder: Recorder) -> None:
        """Uses the recorder for fused kernels, for numbers of tokens, and for the allocated bytes that CUDA reports."""
        self._recorder = self._compiler.recorder = recorder

    def _copy_mean(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Copy the known mean of the values of `input` to `output`.

        The known values are numbers of tokens, and the ranks of a group send theirs. With `--info-moe-imbalance` this rank's
        experts receive more than the mean.
        """
        if self._recorder is None:
            return
        moe = self.job.model.moe
        self._recorder.means.copy(output, input, 1.0 if moe is None else moe.imbalance)

    def _current_bytes(self) -> int:
        return self._recorder.current_bytes if self._recorder is not None else 0


@contextmanager
def _deterministic(job: TrainingJob) -> Iterator[None]:
    """Use PyTorch's deterministic algorithms with `--deterministic-mode`, as `validate_args` does.

    They can save other tensors for backward.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(job.flags.deterministic)
    yield
    torch.use_deterministic_algorithms(before)


def _padding(job: TrainingJob) -> tuple[int, bool]:
    """The multiple to which rows of each expert are padded, 1 if they are not, and whether they are padded where they arrive.

    Otherwise the map of the router is padded before rows are sent. If inputs are padded to the capacity, all experts have as many
    rows.
    """
    moe = job.model.moe
    if moe is None or moe.pad_to_capacity:
        return 1, True
    return Routing(shapes_of(job)).padded_to, moe.flex is not None or not moe.pad_for_quantization


def _images(job: TrainingJob) -> ImagePlaces | None:
    vision = job.model.vision
    if vision is None:
        return None
    return ImagePlaces(token=IMAGE_TOKEN, share=1 / vision.text_length, number=job.batch.micro_batch_size)


def _router_padding(means: Means) -> Iterator[Patch]:
    dispatcher = import_module("megatron.core.transformer.moe.token_dispatcher")
    for name in ("pad_routing_map", "fused_pad_routing_map"):
        if hasattr(dispatcher, name):
            yield Patch(dispatcher, name, padded(means, getattr(dispatcher, name)), "the amount of padding depends on values")
    utils, name = import_module("megatron.core.transformer.moe.moe_utils"), "fused_permute_and_pad_with_probs"
    if getattr(utils, name, None) is not None:
        yield Patch(utils, name, permuting_and_padding(means, getattr(utils, name)), "the amount of padding depends on values")
    exchanging, name = dispatcher.MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize"
    if hasattr(exchanging, name):
        yield Patch(exchanging, name, equal_parts(getattr(exchanging, name)), "the rows of tensor-parallel ranks depend on values")


def _shared_storage(recorder: Recorder) -> Iterator[Patch]:
    """Yield the patch of the extension that a checkpoint without output compiles from 0.17 on."""
    module = import_module("megatron.core.tensor_parallel.random")
    if hasattr(module, "_get_share_storage"):
        yield Patch(module, "_get_share_storage", lambda: recorder.share, "tensors without data have no memory to share")


def _random_states(job: TrainingJob) -> Iterator[Patch]:
    """Yield the patch of Megatron-FSDP's function that sets the random states that another tensor-parallel rank sends."""
    if job.fsdp is None or job.fsdp.implementation == "torch":
        return
    module = import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    if hasattr(module, "_load_rng_state_dict"):
        yield Patch(module, "_load_rng_state_dict", lambda _: None, "nothing is received, and tensors have no values")


def _hadamard_signs(job: TrainingJob) -> Iterator[Patch]:
    if job.precision.fp8 is not None and job.precision.fp8.recipe == "nvfp4":
        module = import_module("transformer_engine.pytorch.tensor.nvfp4_tensor")
        yield Patch(module, "get_sign_from_vector", lambda _: 0, "it shifts booleans, which the meta device refuses")


INSTALL = "run pip install '.[shadow]' in this project's folder, which installs torch, megatron-core and transformer-engine"


def _need_transformer_engine() -> None:
    try:
        import_module("transformer_engine.pytorch")
        moved = find_spec("megatron.core.extensions") is not None  # in 0.9
        import_module(f"megatron.core.{'extensions' if moved else 'transformer.custom_layers'}.transformer_engine")
    except ImportError as error:
        raise AnalyzerError(
            f"--transformer-impl transformer_engine: Transformer Engine cannot be imported ({error}); "
            "run pip install --no-deps transformer-engine, or use --transformer-impl local"
        ) from error


def environ(job: TrainingJob) -> None:
    """Set the environment variables that Transformer Engine and Megatron read to the values of the job."""
    os.environ.update(variables(job))
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):  # Megatron sets them for the backend
        os.environ.pop(name, None)
