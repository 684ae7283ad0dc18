"""The settings of a job that kernels depend on, in addition to the module itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from analyzer.modules.inputs import ExpertInputs, LayerInputs, module_inputs
from analyzer.modules.moe.routing import Routing
from analyzer.modules.shapes import ExpertShapes, Shapes
from analyzer.modules.tree import Part
from analyzer.specs import TrainingJob
from analyzer.time.work.kernels import Precision
from analyzer.units import DTYPE_BYTES

PRECISIONS: Final[dict[str, Precision]] = {"fp32": "32", "fp16": "16", "bf16": "16"}


@dataclass(frozen=True)
class WorkContext:
    """Inputs of the kernel formulas. It is the cache key of the kernels of a module."""

    inputs: LayerInputs
    gradients: str
    """Element type of the gradient buffers."""
    chunks: int = 1
    """Parts into which GEMMs are split to overlap with tensor-parallel communication (`--tp-comm-overlap`)."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.inputs, self.gradients, self.chunks))

    @cached_property
    def shapes(self) -> Shapes:
        """The shapes of the modules of a rank."""
        return Shapes(self.inputs)

    @cached_property
    def routing(self) -> Routing:
        """The routing of a MoE layer."""
        assert isinstance(self.inputs, ExpertInputs), "the context is that of a MoE layer"
        return Routing(ExpertShapes(self.inputs)).of_tokens

    def of_part(self, part: Part) -> WorkContext:
        """The context of the modules of a part of a T5."""
        inputs = self.inputs.of_part(part)
        return self if inputs is self.inputs else replace(self, inputs=inputs)

    @cached_property
    def of_dense_layers(self) -> WorkContext:
        """The context of modules that do not depend on expert parallelism."""
        return replace(self, inputs=self.inputs.of_dense_layers)

    @cached_property
    def outside_userbuffers(self) -> WorkContext:
        """The context of GEMMs that do not overlap with communication."""
        return replace(self, chunks=1)

    @property
    def precision(self) -> Precision:
        """Precision of GEMMs that are not quantized."""
        return PRECISIONS[self.inputs.dtype]

    @property
    def quantized(self) -> Precision:
        """Precision of the GEMMs of quantized layers."""
        fp8 = self.inputs.fp8
        return self.precision if fp8 is None else "4" if fp8.recipe == "nvfp4" else "8"

    @property
    def any_layout(self) -> bool:
        """Whether quantized factors can have any layout: on GPUs from Blackwell on."""
        capability = self.inputs.compute_capability
        return capability is not None and capability >= (10, 0)

    @property
    def frees_transposes(self) -> bool:
        """Whether each data gradient transposes its weight in FP8 (`Fp8Spec.keeps_transposes`)."""
        return self.inputs.fp8 is not None and not self.inputs.fp8.keeps_transposes and not self.any_layout

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of an activation."""
        return int(DTYPE_BYTES[self.inputs.dtype])

    @property
    def accumulated_bytes(self) -> float:
        """Bytes moved for each element of a weight gradient, which is added to the gradient buffer.

        The GEMM reads and writes the buffer, or without `gradient_accumulation_fusion` writes a tensor that another kernel adds.
        """
        return 2 * DTYPE_BYTES[self.gradients] if self.inputs.gradient_accumulation_fusion else self.element_bytes


def work_context(job: TrainingJob) -> WorkContext:
    """The context of a job, created once for each job object."""
    cache = job.__dict__
    if "_work_context" not in cache:
        chunks = job.parallel.tensor if job.flags.tp_comm_overlap else 1
        cache["_work_context"] = WorkContext(module_inputs(job), job.precision.gradients, chunks)
    return cache["_work_context"]  # type: ignore[no-any-return]
