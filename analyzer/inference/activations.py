"""Temporary tensors of an inference step: the peak over its modules, without tensors saved for backward.

While a module runs, its inputs and outputs, its temporary tensors and the residual stream are allocated. The inputs and outputs are
those that the same module would save for backward, and its workspace. Tensors of finished modules are freed, with these exceptions
(megatron-core 0.16.1): `TransformerBlock.forward` references the input of a layer until the layer returns; a pipeline stage
references its input; `MoELayer.forward` references the input of the experts in every form until they return, and
`TEGroupedMLP.forward` the output of their first layer. `tests/inference/test_shadow.py` compares the peak with a run.
"""

from __future__ import annotations

from math import prod

from analyzer.modules.kinds import FEED_FORWARD_BRANCH, ModuleKind
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import LAYER, STREAM, Module, Tensor
from analyzer.specs import InferenceJob
from analyzer.units import BLOCK, DTYPE_BYTES, dtype_bytes, round_up

_AFTER_LAYERS = frozenset({ModuleKind.OUTPUT_LAYER, ModuleKind.LOSS, ModuleKind.BATCH})


def step_tokens(job: InferenceJob, *, requests: int, tokens: int) -> tuple[int, int]:
    """(requests, tokens of each) of the largest step of prefill: the dynamic engine limits the tokens of a step."""
    dynamic = job.inference.dynamic
    if dynamic is None or requests * tokens <= dynamic.max_tokens:
        return requests, tokens
    return 1, dynamic.max_tokens


def step_bytes(job: InferenceJob, stage: StageModel, *, requests: int, tokens: int, other: int = 0) -> int:
    """Bytes at the peak of a step on a stage, whose trees are those of the step: in its layers, or of the logits on the last stage.

    `other`: bytes of further temporary tensors in a layer.
    """
    hidden = round_up(requests * tokens * job.model.hidden_size * int(DTYPE_BYTES[job.precision.parameters]), BLOCK)
    layers = other + max((tree.derived(_largest_part, hidden) for tree in stage.trees), default=0)
    last = any(chunk.post_process for chunk in stage.chunks)
    head = hidden + logits_bytes(job, requests=job.inference.batch_size) if last else 0
    inputs = 2 * round_up(8 * requests * tokens, BLOCK)  # tokens and their positions, 64-bit integers
    return (hidden if stage.pipeline_rank else 0) + inputs + max(layers, head)


def rotated_keys_bytes(job: InferenceJob, *, tokens: int) -> int:
    """Bytes of the keys of a layer that a decode step rotates again. The static engine caches them without their rotation.

    Source: `Attention.forward` (core/transformer/attention.py, 0.16.1), where multi-latent attention caches rotated keys.
    """
    model = job.model
    if job.inference.cache != "static" or model.position_embedding != "rope" or model.mla is not None:
        return 0
    width = max(1, model.num_query_groups // job.parallel.tensor) * model.kv_channels
    return round_up(dtype_bytes(job.precision.parameters, job.inference.batch_size * tokens * width), BLOCK)


def logits_bytes(job: InferenceJob, *, requests: int) -> int:
    """Bytes of the logits of the last token of each request: of this rank, gathered over the tensor-parallel ranks, and in fp32.

    Source: `GPTModel._postprocess` (core/models/gpt/gpt_model.py, 0.16.1), which computes those of the last token alone and always
    gathers them; the sampling of text_generation_controller.py computes in fp32.
    """
    columns, tensor, dtype = job.model.padded_vocab_size, job.parallel.tensor, job.precision.parameters
    full = dtype_bytes(dtype, requests * columns)
    return full // tensor + (full if tensor > 1 else 0) + (4 * requests * columns if dtype != "fp32" else 0)


def _largest_part(module: Module, hidden: int) -> int:
    """Bytes of the part of a model that needs most, with the residual stream. `hidden`: bytes of the residual stream."""
    if module.kind in _AFTER_LAYERS:
        return 0
    if module.kind is ModuleKind.LAYER:
        return max(_branch_bytes(module, child, hidden) for child in module.children)
    if module.children:
        return max(child.derived(_largest_part, hidden) for child in module.children)
    return _working_set(module)


def _branch_bytes(layer: Module, child: Module, hidden: int) -> int:
    """Bytes while a part of a layer runs. After attention, the input of the layer and the residual stream are two tensors."""
    residual = 2 * hidden if child.kind in FEED_FORWARD_BRANCH else hidden
    if any(each.kind is ModuleKind.EXPERTS for each in child.children):
        return residual + _experts_bytes(layer, child)
    return residual + _largest_module(child)


def _experts_bytes(layer: Module, moe: Module) -> int:
    """Bytes while the second layer of the experts runs: normalized tokens, their permutations, and all outputs of the experts."""
    tensors = [tensor for each in layer.children if each.kind is ModuleKind.FEED_FORWARD_NORM for tensor in each.forward_workspace]
    for part in moe.children:
        if part.kind is ModuleKind.DISPATCH:
            tensors += part.forward_workspace
        elif part.kind is ModuleKind.EXPERTS:
            tensors += [tensor for _, each in part.walk() if not each.children for tensor in each.forward_workspace]
        elif part.kind is ModuleKind.SHARED_EXPERTS:
            tensors += [tensor for _, each in part.walk() if each.kind is ModuleKind.FC2 for tensor in each.forward_workspace]
    return sum(map(_size, tensors))


def _largest_module(module: Module) -> int:
    """The bytes of the module without children that has the most, with the workspaces of the modules around it."""
    if not module.children:
        return _working_set(module)
    around = sum(map(_size, module.forward_workspace))
    return around + max(_largest_module(child) for child in module.children)


def _working_set(module: Module) -> int:
    """Bytes of the inputs, outputs and temporary tensors of a module, without the residual stream."""
    inputs = [tensor for tensor in module.saved if tensor.made_in not in (STREAM, LAYER)]
    return sum(map(_size, (*inputs, *module.forward_workspace)))


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor, also if it uses the storage of a tensor of another module."""
    return tensor.bytes or round_up(dtype_bytes(tensor.dtype, prod(tensor.shape)), BLOCK)
