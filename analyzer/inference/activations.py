"""Temporary tensors of an inference step: the peak over its modules, without tensors saved for backward.

While a module runs, its inputs and outputs, its temporary tensors and the residual stream are allocated. The inputs and outputs are
those that the same module would save for backward, and its workspace. Tensors of finished modules are freed.
"""

from __future__ import annotations

from math import prod

from analyzer.inference.forward_job import forward_job
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, Tensor
from analyzer.specs import InferenceJob
from analyzer.units import BLOCK, DTYPE_BYTES, dtype_bytes, round_up

_AFTER_LAYERS = frozenset({ModuleKind.OUTPUT_LAYER, ModuleKind.LOSS, ModuleKind.BATCH})


def step_tokens(job: InferenceJob, *, requests: int, tokens: int) -> tuple[int, int]:
    """(requests, tokens of each) of the largest step of prefill: the dynamic engine limits the tokens of a step."""
    dynamic = job.inference.dynamic
    if dynamic is None or requests * tokens <= dynamic.max_tokens:
        return requests, tokens
    return 1, dynamic.max_tokens


def layer_peak(job: InferenceJob, stage: StageModel, *, requests: int, tokens: int) -> int:
    """Bytes at the peak of a step in the layers of a stage, whose trees are those of the step."""
    residual = round_up(requests * tokens * job.model.hidden_size * int(DTYPE_BYTES[job.precision.parameters]), BLOCK)
    return residual + max((tree.derived(_largest_module) for tree in stage.trees), default=0)


def logits_bytes(job: InferenceJob, *, requests: int) -> int:
    """Bytes of the logits of the last token of each request: of this rank, gathered over the tensor-parallel ranks, and in fp32.

    Source: `GPTModel._postprocess` (core/models/gpt/gpt_model.py, 0.16.1), which computes those of the last token alone and always
    gathers them; the sampling of text_generation_controller.py computes in fp32.
    """
    columns, tensor, dtype = job.model.padded_vocab_size, job.parallel.tensor, job.precision.parameters
    full = dtype_bytes(dtype, requests * columns)
    return full // tensor + (full if tensor > 1 else 0) + (4 * requests * columns if dtype != "fp32" else 0)


def _largest_module(module: Module) -> int:
    """The bytes of the module without children that has the most, with the workspaces of the modules around it."""
    if module.kind in _AFTER_LAYERS:
        return 0
    around = sum(_size(tensor) for tensor in module.forward_workspace)
    if not module.children:
        return around + sum(_size(tensor) for tensor in module.saved)
    return around + max(child.derived(_largest_module) for child in module.children)


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor, also if it uses the storage of a tensor of another module."""
    return tensor.bytes or round_up(dtype_bytes(tensor.dtype, prod(tensor.shape)), BLOCK)


def stage_of_step(job: InferenceJob, rank: int, *, requests: int, tokens: int) -> StageModel:
    """The trees of a pipeline rank in a step."""
    from analyzer.passes.stages import stage_models

    return stage_models(forward_job(job, requests=requests, tokens=tokens))[rank]
