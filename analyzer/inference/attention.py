"""Temporary tensors of attention in an inference step.

`Attention.forward` (core/transformer/attention.py, 0.16.1) references the output of the QKV projection, the query made from it and
the normalized query and key until it returns. The static engine rotates the query and all cached keys of a layer into new tensors
before the kernel, the dynamic engine each in place (`DynamicInferenceContext.apply_rotary_emb_query` and `apply_rotary_emb_key`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from analyzer.inference.kv_cache import request_blocks
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.paged_attention import splits_of_keys
from analyzer.modules.tree import Module
from analyzer.specs import InferenceJob
from analyzer.specs.hardware import MULTIPROCESSORS
from analyzer.units import BLOCK, DTYPE_BYTES, dtype_bytes, round_up


@dataclass(frozen=True, kw_only=True)
class AttentionStep:
    """Bytes of tensors in the attention of a step, without those of its module tree. It can be a key of a cache."""

    hidden: int
    """The residual stream."""
    exact: bool
    """The tensors are known. Otherwise they are estimated from the module tree: multi-latent attention."""
    query: int
    rotated_keys: int
    """The static engine's."""
    rotation: int
    """The tensors while the dynamic engine rotates the query: its angles in fp32, and the rotated query."""
    kernel: int
    """The workspaces of the attention kernel."""
    rotates: bool
    """The query is rotated into a new tensor, which the kernel reads."""

    def bytes_of(self, attention: Module) -> int | None:
        """Bytes at the peak of attention beside the residual stream. None if they are not known."""
        kinds = {each.kind: each for _, each in attention.walk()}
        kernel = kinds.get(ModuleKind.ATTENTION_KERNEL)
        fused = kernel is not None and any(tensor.name == "softmax statistics" for tensor in kernel.saved)
        if not self.exact or kernel is None or not fused or ModuleKind.QKV not in kinds:
            return None
        projected = sum(tensor.bytes for tensor in kinds[ModuleKind.QKV].forward_workspace)
        if ModuleKind.Q_NORM in kinds or ModuleKind.QK_NORMS in kinds:
            key = next(tensor.bytes for tensor in kernel.saved if tensor.name == "key")
            made = self.query + key
        else:
            made = sum(tensor.bytes for tensor in kernel.forward_workspace if tensor.name == "query before rotation")
        output = self.query + max(self.hidden, self.kernel)
        rotated = self.query + self.rotated_keys if self.rotates else 0
        return projected + made + max(self.rotation, rotated + output)


def attention_step(job: InferenceJob, *, rows: int, hidden: int, decode: bool) -> AttentionStep:
    """The attention of a step with `rows` tokens."""
    spec, model = job.inference, job.model
    width = int(DTYPE_BYTES[job.precision.parameters])
    heads = model.num_attention_heads // job.parallel.tensor
    query = round_up(rows * heads * model.kv_channels * width, BLOCK)
    rope, dynamic = model.position_embedding == "rope", spec.dynamic is not None
    angles = round_up(4 * rows * model.kv_channels, BLOCK)
    length = spec.sequence_length if decode else ceil(rows / spec.batch_size)
    return AttentionStep(
        hidden=hidden,
        exact=model.mla is None,
        query=query,
        rotated_keys=0 if dynamic else rotated_keys_bytes(job, tokens=length),
        rotation=angles + query if rope and dynamic else 0,
        kernel=_kernel_bytes(job, rows=rows, heads=heads, decode=decode),
        rotates=rope and not dynamic,
    )


def _kernel_bytes(job: InferenceJob, *, rows: int, heads: int, decode: bool) -> int:
    """Bytes of the fp32 statistics of flash-attn and, in decode of the dynamic engine, of the outputs of the parts of the keys."""
    statistics = round_up(4 * rows * heads, BLOCK)
    dynamic, model = job.inference.dynamic, job.model
    if dynamic is None or not decode:
        return statistics
    groups = max(1, model.num_query_groups // job.parallel.tensor)
    keys = request_blocks(job.inference) * dynamic.block_tokens
    multiprocessors = job.hardware.multiprocessors or MULTIPROCESSORS
    blocks = rows * groups * ceil(heads / groups / 64)
    splits = splits_of_keys(blocks, keys=keys, width=model.kv_channels, multiprocessors=multiprocessors)
    if splits == 1:
        return statistics
    return statistics + splits * (4 * rows * heads + round_up(4 * rows * heads * 32 * ceil(model.kv_channels / 32), BLOCK))


def rotated_keys_bytes(job: InferenceJob, *, tokens: int) -> int:
    """Bytes of the keys of a layer, of `tokens` tokens of each request, that the static engine rotates again in every step.

    It caches them without their rotation. Multi-latent attention caches rotated keys. Source: `Attention.forward`
    (core/transformer/attention.py, 0.16.1).
    """
    model = job.model
    if job.inference.cache != "static" or model.position_embedding != "rope" or model.mla is not None:
        return 0
    width = max(1, model.num_query_groups // job.parallel.tensor) * model.kv_channels
    return round_up(dtype_bytes(job.precision.parameters, job.inference.batch_size * tokens * width), BLOCK)
