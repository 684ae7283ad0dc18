"""Memory of a pass without gradients, with the layout of a training.

While a module runs, its inputs, its outputs and its temporary tensors are allocated, with the input of the layer, the residual
stream, and the input of the stage: `GPTModel.forward` references the embeddings, and `TransformerBlock` what it received.
Nothing is kept for a backward. The last stage then computes the logits, of which the log-probabilities are made.
`tests/inference/phases/test_passes_against_shadow.py` compares the peak with a run of megatron-core.
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.inference.activations import experts_bytes, largest_module
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from analyzer.specs import BatchSpec, RecomputeSpec, TrainingJob
from analyzer.specs.fine_tuning import ALL_PARAMETERS, ForwardPass
from analyzer.units import BLOCK, dtype_bytes, round_up

_AFTER_LAYERS = frozenset({ModuleKind.OUTPUT_LAYER, ModuleKind.LOSS, ModuleKind.BATCH})


def forward_bytes(job: TrainingJob, work: ForwardPass) -> tuple[int, ...]:
    """Bytes of the temporary tensors at the peak of a pass, for each pipeline stage."""
    alone = job_of_pass(job, work)
    rows = alone.batch.seq_length // job.parallel.context
    return tuple(_stage_bytes(alone, stage, rows=rows, logit_bytes=work.logit_bytes) for stage in stage_models(alone))


def job_of_pass(job: TrainingJob, work: ForwardPass) -> TrainingJob:
    """A training with the layout of `job` whose micro-batch is that of the pass."""
    parallel = job.parallel
    tokens = round_up(work.tokens, 2 * parallel.context * parallel.tensor)
    batch = BatchSpec(micro_batch_size=1, global_batch_size=parallel.data, seq_length=tokens, microbatches=1, first_microbatches=1)
    return replace(
        job, batch=batch, recompute=RecomputeSpec(), graphs=None, activation_offload=None, tuning=ALL_PARAMETERS, fsdp=None
    )


def _stage_bytes(job: TrainingJob, stage: StageModel, *, rows: int, logit_bytes: int) -> int:
    """`rows`: tokens of a context-parallel rank."""
    model, parallel = job.model, job.parallel
    kept = rows // parallel.tensor if parallel.sequence_parallel else rows
    hidden = round_up(dtype_bytes(job.precision.parameters, kept * model.hidden_size), BLOCK)
    kept = sum(tree.lingering_bytes for tree in stage.trees)
    layers = 3 * hidden + max((tree.derived(_largest_part) for tree in stage.trees), default=0)
    last = any(chunk.post_process for chunk in stage.chunks)
    logits = rows * (model.padded_vocab_size // parallel.tensor) * logit_bytes if last else 0
    received = hidden if stage.pipeline_rank else 0
    return kept + max(layers, received + logits)


def _largest_part(module: Module) -> int:
    """Bytes of the part of a chunk that needs the most, beside the input of its layer and the residual stream."""
    if module.kind in _AFTER_LAYERS:
        return 0
    if module.kind is ModuleKind.LAYER:
        return max(_part_bytes(module, child) for child in module.children)
    if module.children:
        return max(child.derived(_largest_part) for child in module.children)
    return largest_module(module)


def _part_bytes(layer: Module, part: Module) -> int:
    if any(each.kind is ModuleKind.EXPERTS for each in part.children):
        return experts_bytes(layer, part)
    return largest_module(part)
