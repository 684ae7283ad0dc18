"""Largest values of FP8 tensors, agreed on by the ranks that scale alike.

The delayed recipe keeps histories of them: those of all quantizers are reduced at the end of each forward pass under
`fp8_autocast`, also where a checkpoint repeats it, and in the backward pass of its first layer
(`FP8GlobalStateManager.reduce_and_update_fp8_tensors`). Weights stored in FP8 are cast from shards of their masters, so
that ranks need the largest of all shards first (`cast_master_weights_to_fp8`). What one tensor sharded over tensor-parallel
ranks needs is with its module.

Sources: Transformer Engine 2.11, pytorch/quantization.py and pytorch/tensor/utils.py; `get_fp8_context` in
megatron/core/fp8_utils.py (0.16.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from analyzer.communication.rows import Phase, row
from analyzer.modules.quantized import scales
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, Parameter, parameters
from analyzer.results import Message
from analyzer.specs import TrainingJob
from analyzer.states.bytes_per_parameter import adam_keeps_masters
from analyzer.states.fp8_weights import BACKWARD_QUANTIZERS, FORWARD_QUANTIZERS, matrices, quantized, quantized_products


def largest_value_messages(job: TrainingJob, stage: StageModel) -> Iterator[Message]:
    """All-reduces of fp32 values: of the delayed recipe for each microbatch and chunk, of stored weights once."""
    fp8 = job.precision.fp8
    products = quantized_products(stage.trees)
    if fp8 is None or not products:
        return
    if fp8.recipe == "delayed":
        again, each = (sum(counts) for counts in zip(*(_under_checkpoints(tree) for tree in stage.trees), strict=True))
        first = sum(_firsts(tree) for tree in stage.trees)
        calls: tuple[tuple[Phase, int, int], ...] = (
            ("forward", FORWARD_QUANTIZERS, len(stage.trees)),
            ("recompute", FORWARD_QUANTIZERS, again),
            ("backward", BACKWARD_QUANTIZERS, first + each),
        )
        for phase, quantizers, count in (call for call in calls if call[2]):
            yield row(
                job,
                pipeline_rank=stage.pipeline_rank,
                group="tp_dp_cp",
                kind="all_reduce",
                phase=phase,
                module="fp8.largest_values",
                shape=(products * quantizers,),
                dtype="fp32",
                per_microbatch=count,
            )
    # mxfp8 is cast from whole parameters in 16 bit after they are gathered, and an Adam with masters of its own casts by itself
    if fp8.stored_parameters and fp8.recipe != "mxfp8" and not adam_keeps_masters(job):
        values: Counter[str] = Counter()
        for parameter in quantized(stage.trees):
            values[_shard_group(job, parameter)] += _largest_values(job, parameter)
        for group, count in values.items():
            yield row(
                job,
                pipeline_rank=stage.pipeline_rank,
                group=group,
                kind="all_reduce",
                phase="parameter",
                module="fp8.largest_weights",
                shape=(count,),
                dtype="fp32",
                per_iteration=1,
            )


def _under_checkpoints(module: Module) -> tuple[int, int]:
    """Checkpoints that multiply in FP8, each an `fp8_autocast` of its own when it runs again, and linear layers under them.

    Each of these takes itself for the first of its pass (`IS_FIRST_FP8_MODULE` in pytorch/module/linear.py).
    """
    if module.recomputed and any(parameter.quantized for parameter in parameters(module)):
        return 1, sum(any(parameter.quantized for parameter in each.parameters) for _, each in module.walk())
    found = [_under_checkpoints(child) for child in module.children]
    return sum(checkpoints for checkpoints, _ in found), sum(layers for _, layers in found)


def _firsts(tree: Module) -> int:
    """Modules outside checkpoints that take themselves for the first: with checkpointed layers the final norm does so too."""
    decoder = next(child for child in tree.children if child.name == "decoder")
    names = {child.name for child in decoder.children}
    outside = {child.name for child in decoder.children if not child.recomputed}
    return 1 if outside == names else len(outside)


def _shard_group(job: TrainingJob, parameter: Parameter) -> str:
    """Over which the masters of a weight are sharded."""
    group = "edp" if parameter.sharding == "expert" and job.parallel.expert > 1 else "dp_cp"
    return f"intra_{group}" if job.parallel.distributed_optimizer_instances > 1 else group


def _largest_values(job: TrainingJob, parameter: Parameter) -> int:
    """One for each scale."""
    assert job.precision.fp8 is not None
    count, rows, columns = matrices(parameter)
    shape, _ = scales(job.precision.fp8.recipe, rows, columns, "row", square_blocks=True)
    return count * prod(shape)
