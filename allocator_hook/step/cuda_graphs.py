"""CUDA graphs of the training loop, as `train` of megatron/training/training.py (0.16) creates them.

Transformer Engine's graphs are captured before an iteration. The schedule captures Megatron's own graphs at the end of the first
iteration. Graphs of full iterations replace the function that runs forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch

from allocator_hook.step.data import on_gpu
from allocator_hook.step.iterations import EAGER, captured_before, full_iteration
from allocator_hook.step.marks import Marks
from analyzer.errors import AnalyzerError
from analyzer.specs import TrainingJob

CAPTURE: Final = "capture of CUDA graphs"


class Graphs:
    """The graphs of one rank."""

    def __init__(
        self, job: TrainingJob, *, config: Any, chunks: list[Any], optimizer: Any, microbatches: int, marks: Marks
    ) -> None:
        self._job, self._chunks, self._marks, self._microbatches = job, chunks, marks, microbatches
        self._helper: Any = None
        self._function: Callable[..., Any] | None = None
        _count_microbatches(job, microbatches)
        if captured_before(job) is not None:
            from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

            self._helper = TECudaGraphHelper(
                model=chunks,
                config=config,
                seq_length=job.batch.seq_length,
                micro_batch_size=job.batch.micro_batch_size,
                optimizers=[optimizer],
            )

    def capture(self) -> None:
        """Capture the graphs of Transformer Engine."""
        layers = list(self._helper.flattened_callables)
        for layer in layers:
            self._marks.unwatch(layer)  # a captured module must not have hooks
        with self._marks.in_part(CAPTURE, "forward", -1):
            self._helper.create_cudagraphs()
        for layer in layers:
            # a replay calls no hooks
            layer._te_cuda_graph_replay = self._marks.watched(layer, layer._te_cuda_graph_replay)

    def finish_first_iteration(self) -> None:
        """Megatron's own graphs are captured now. From here on they refuse layers with hooks other than Megatron's."""
        from megatron.core.ssm.mamba_layer import MambaLayer
        from megatron.core.transformer.transformer_layer import TransformerLayer

        for chunk in self._chunks:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer | MambaLayer) and hasattr(module, "cudagraph_manager"):
                    self._marks.unwatch_all(module)

    def set_hooks(self) -> None:
        """Let replayed layers gather their parameters."""
        self._helper.cuda_graph_set_manual_hooks()

    def forward_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, or one that captures and replays it."""
        if not full_iteration(self._job):
            return function
        if self._function is None:
            from megatron.core.full_cuda_graph import FullCudaGraphWrapper

            assert self._job.graphs is not None
            self._function = FullCudaGraphWrapper(function, cuda_graph_warmup_steps=min(self._job.graphs.warmup_steps, EAGER))
        return partial(self._function, data_iterator=self._batches())

    def _batches(self) -> Any:
        """The batches on the host, for each chunk. The ranks of a tensor-parallel group except the first receive them."""
        from megatron.core import parallel_state as mpu

        read = mpu.get_tensor_model_parallel_rank() == 0
        iterators: list[Iterator[Any] | None] = [self._host_batches() if read else None for _ in self._chunks]
        return iterators if len(iterators) > 1 else iterators[0]

    def _host_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        batch = on_gpu(self._job, device="cpu")
        for _ in range(self._microbatches):
            yield {name: tensor for name, tensor in batch.items() if tensor is not None}


def check_release() -> None:
    """Raise AnalyzerError if the installed megatron-core is older than 0.16."""
    from megatron.core.transformer import enums

    if not hasattr(enums, "CudaGraphScope"):
        raise AnalyzerError(
            "--info-engine shadow: CUDA graphs need megatron-core 0.16 or later; install it, or use --info-engine formula"
        )


def _count_microbatches(job: TrainingJob, microbatches: int) -> None:
    """Set the number of microbatches that graphs are captured for."""
    from megatron.core import num_microbatches_calculator as calculator

    size = job.batch.micro_batch_size
    calculator.init_num_microbatches_calculator(0, None, microbatches * size, size, 1)
