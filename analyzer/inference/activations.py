"""Temporary tensors of an inference step: the peak over its modules, without tensors saved for backward.

While a module runs, its inputs and outputs, its temporary tensors and the residual stream are allocated. The inputs and outputs are
those that the same module would save for backward, and its workspace. Tensors of finished modules are freed, with these exceptions
(megatron-core 0.16.1): `TransformerBlock.forward` references the input of a layer until the layer returns; a pipeline stage
references its input; `MoELayer.forward` references the input of the experts in every form until they return, and
`TEGroupedMLP.forward` the output of their first layer; attention: `analyzer.inference.attention`. Every MoE layer references what
its router and its dispatcher computed until its next step. `tests/inference/test_shadow.py` compares the peak with a run.
"""

from __future__ import annotations

from math import prod

from analyzer.inference.attention import AttentionStep, attention_step
from analyzer.inference.kv_cache import padded_tokens
from analyzer.modules.kinds import FEED_FORWARD_BRANCH, ModuleKind
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import LAYER, STREAM, Module, Tensor
from analyzer.specs import InferenceJob
from analyzer.units import BLOCK, DTYPE_BYTES, dtype_bytes, round_up

_AFTER_LAYERS = frozenset({ModuleKind.OUTPUT_LAYER, ModuleKind.LOSS, ModuleKind.BATCH})


def step_tokens(job: InferenceJob, *, requests: int, tokens: int) -> tuple[int, int]:
    """(requests, tokens of each) of the largest step of prefill: the dynamic engine limits the tokens of a step and pads them."""
    dynamic = job.inference.dynamic
    if job.inference.prefill_tokens is not None:
        return 1, min(requests * tokens, job.inference.prefill_tokens)
    if dynamic is None:
        return requests, tokens
    return 1, padded_tokens(min(requests * tokens, dynamic.max_tokens))


def step_bytes(job: InferenceJob, stage: StageModel, *, rows: int, decode: bool, other: int = 0) -> int:
    """Bytes at the peak of a step on a stage, whose trees are those of the step: in its layers, or of its logits.

    `rows`: tokens of the step; `other`: bytes of further temporary tensors in a layer.
    """
    dynamic = job.inference.dynamic
    width = int(DTYPE_BYTES[job.precision.parameters])
    hidden = round_up(rows * job.model.hidden_size * width, BLOCK)
    attention = attention_step(job, rows=rows, hidden=hidden, decode=decode)
    layers = other + max((tree.derived(_largest_part, attention) for tree in stage.trees), default=0)
    inputs = 0 if dynamic is not None else 2 * round_up(8 * rows, BLOCK)  # tokens and their positions, 64-bit integers
    received = hidden if stage.pipeline_rank else 0
    kept = sum(tree.lingering_bytes for tree in stage.trees)
    last = any(chunk.post_process for chunk in stage.chunks)
    head = logits_bytes(job, rows=rows, hidden=hidden + received, last=last)
    return inputs + kept + max(received + layers, head)


def logits_bytes(job: InferenceJob, *, rows: int, hidden: int, last: bool) -> int:
    """Bytes of the logits of a step with `rows` tokens at their peak, on the `last` pipeline stage or another one.

    `hidden`: bytes of the hidden states, which the last stage references until it has the logits. They are gathered over the
    tensor-parallel ranks in one tensor and concatenated in another, and then converted to fp32.

    Static engine: those of the last token of each request. Dynamic engine: the same, or with the static engine around it those of
    all tokens. Every pipeline stage receives them, and a copy of the last token of each request is sampled from.
    Sources (megatron-core 0.16.1): `GPTModel._postprocess`, `_gather_along_last_dim`, `Float16Module.forward`,
    `TextGenerationController._dynamic_step_forward_logits` and `_dynamic_step_sample_logits`.
    """
    dynamic, tensor, requests = job.inference.dynamic, job.parallel.tensor, job.inference.batch_size
    width = int(DTYPE_BYTES[job.precision.parameters])
    count = rows if dynamic is not None and dynamic.in_static_engine else min(requests, rows)
    full, chosen = (each * job.model.padded_vocab_size for each in (count, min(requests, rows)))
    converted = 4 if job.precision.parameters != "fp32" else 0
    made = width * (full // tensor + (2 * full if tensor > 1 else 0)) + hidden
    peaks = [made, full * (width + converted)] if last else []
    if dynamic is not None:
        sampled = width if job.parallel.pipeline > 1 else 4
        copies = 2 if dynamic.in_static_engine else 1  # the last tokens of all, and of the requests with one way of sampling
        peaks.append(full * sampled + copies * chosen * sampled)
    return max(peaks, default=0)


def _largest_part(module: Module, attention: AttentionStep) -> int:
    """Bytes of the part of a model that needs most, with the residual stream."""
    if module.kind in _AFTER_LAYERS:
        return 0
    if module.kind is ModuleKind.LAYER:
        return max(_branch_bytes(module, child, attention) for child in module.children)
    if module.children:
        return max(child.derived(_largest_part, attention) for child in module.children)
    return _working_set(module)


def _branch_bytes(layer: Module, child: Module, attention: AttentionStep) -> int:
    """Bytes while a part of a layer runs. After attention, the input of the layer and the residual stream are two tensors."""
    hidden = attention.hidden
    if child.kind is ModuleKind.ATTENTION:
        found = attention.bytes_of(child)
        return hidden + (largest_module(child) if found is None else found)
    residual = 2 * hidden if child.kind in FEED_FORWARD_BRANCH else hidden
    if any(each.kind is ModuleKind.EXPERTS for each in child.children):
        return residual + experts_bytes(layer, child)
    return residual + largest_module(child)


def experts_bytes(layer: Module, moe: Module) -> int:
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


def largest_module(module: Module) -> int:
    """The bytes of the module without children that has the most, with the workspaces of the modules around it."""
    if not module.children:
        return _working_set(module)
    around = sum(map(_size, module.forward_workspace))
    return around + max(largest_module(child) for child in module.children)


def _working_set(module: Module) -> int:
    """Bytes of the inputs, outputs and temporary tensors of a module, without the residual stream."""
    inputs = [tensor for tensor in module.saved if tensor.made_in not in (STREAM, LAYER)]
    return sum(map(_size, (*inputs, *module.forward_workspace)))


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor, also if it uses the storage of a tensor of another module."""
    return tensor.bytes or round_up(dtype_bytes(tensor.dtype, prod(tensor.shape)), BLOCK)
