"""The model of every pipeline stage: trees of its chunks, after the passes that a job needs.

Trees come from `modules.models.gpt.chunk_tree`, which caches them by their inputs. The passes here change the tensors that
modules of a layer save: delayed weight gradients, then activation offloading. FSDP and CUDA graphs are passes of `memory`,
which do not change the reported trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from analyzer.layout.stages import Chunk, chunks
from analyzer.modules.inputs import module_inputs
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.models import gpt
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module
from analyzer.specs import ActivationOffloadSpec, TrainingJob

if TYPE_CHECKING:
    from analyzer.passes.activation_offload import InputFrom

Placement = Literal["gpu", "groups", "groups after embedding", "groups after stage", "host", "host after embedding", "listed"]
"""Where the saved tensors of a layer are: on the GPU, those of `--offload-modules` on the host, or all on the host.

"listed": on the GPU, in the list of a layer that Transformer Engine does not offload.

For the first layer of a chunk, what computes its input is part of the placement.
"""


_INPUTS: Final[dict[Placement, InputFrom]] = {
    "groups": "layer",
    "groups after embedding": "embedding",
    "groups after stage": "stage",
}
Kept = tuple[frozenset[str], ...]
"""For each layer of a chunk, the groups of `--offload-modules` that stay on the GPU."""


def stage_models(job: TrainingJob) -> tuple[StageModel, ...]:
    """Chunks and trees of each pipeline rank. Equal chunks share one tree."""
    inputs = module_inputs(job)
    passed: dict[tuple[int, tuple[Placement, ...], Kept], Module] = {}

    def tree(chunk: Chunk) -> Module:
        built = gpt.chunk_tree(inputs, gpt.chunk_kind(job, chunk))
        if job.fsdp is None and not _changes_layers(job):
            return built
        placements, kept = _placements(job, chunk), _kept_groups(job, built, chunk)
        key = (id(built), placements, kept)
        if key not in passed:
            passed[key] = _with_kept_masks(job, built)
            if _changes_layers(job):
                passed[key] = _without_skipped_norm(job, _with_layers(passed[key], _layer_pass(job), placements, kept))
        return passed[key]

    return tuple(
        StageModel(pipeline_rank=rank, chunks=of_rank, trees=tuple(tree(chunk) for chunk in of_rank))
        for rank, of_rank in enumerate(chunks(job.model.num_layers, job.parallel, mtp_layers=job.model.mtp_num_layers))
    )


def _with_kept_masks(job: TrainingJob, tree: Module) -> Module:
    """The tree with the dropout masks that Megatron-FSDP keeps."""
    if job.fsdp is None:
        return tree
    from analyzer.passes.fsdp_masks import keeps_masks, with_kept_masks

    return with_kept_masks(tree) if keeps_masks(job) else tree


def trees_key(stage: StageModel) -> tuple[bool, tuple[int, ...]]:
    """Equal for stages that have the same trees, and so the same work and communication.

    The first stage is equal to no other one: only it has several gradient buckets.
    """
    return stage.pipeline_rank == 0, tuple(map(id, stage.trees))


def first_of_equal(stages: Sequence[StageModel]) -> list[StageModel]:
    """For each pipeline stage the first one that has the same trees."""
    found: dict[tuple[bool, tuple[int, ...]], StageModel] = {}
    return [found.setdefault(trees_key(each), each) for each in stages]


def without_equal(stages: Sequence[StageModel]) -> list[StageModel]:
    """The pipeline stages without those whose trees an earlier one has, in order."""
    return [stage for stage, first in zip(stages, first_of_equal(stages), strict=True) if first is stage]


def full_model(job: TrainingJob) -> Module:
    """The unsharded model, all layers on one rank, after the passes that the job needs."""
    built = gpt.full_model(module_inputs(job))
    if not _changes_layers(job):
        return built
    layers = tuple(range(1, job.model.num_layers + 1))
    all_layers = Chunk(virtual_stage=0, layers=layers, pre_process=True, post_process=False, mtp_layers=job.model.mtp_num_layers)
    return _with_layers(built, _layer_pass(job), _placements(job, all_layers), _kept_groups(job, built, all_layers))


def _changes_layers(job: TrainingJob) -> bool:
    flags = job.flags
    return flags.overlap_moe_expert_parallel_comm or flags.overlap_expert_gradients or job.activation_offload is not None


def _kept_groups(job: TrainingJob, tree: Module, chunk: Chunk) -> Kept:
    """Before the loss, the last group of each name. From the second iteration on it is not offloaded: its backward is next."""
    offload = job.activation_offload
    if offload is None or not offload.modules or job.flags.overlap_moe_expert_parallel_comm:
        return ()
    if not (chunk.post_process or chunk.mtp_layers):
        return ()
    from analyzer.passes.activation_offload import last_groups

    return last_groups(offload, tree)


def _placements(job: TrainingJob, chunk: Chunk) -> tuple[Placement, ...]:
    """The placement of each layer of the chunk. MTP layers come last."""
    offload = job.activation_offload
    if offload is None:
        everywhere: Placement = "gpu"
        return (everywhere,) * (len(chunk.layers) + chunk.mtp_layers)
    if job.flags.overlap_moe_expert_parallel_comm:  # the node of a layer references its input
        referenced: Placement = "groups after stage"
        return (referenced,) * (len(chunk.layers) + chunk.mtp_layers)
    if offload.layers:  # without pipeline parallelism. MTP layers are not in the block with the offloaded layers
        first: Placement = "host after embedding"
        following: list[Placement] = ["host" if layer <= offload.layers else "listed" for layer in chunk.layers[1:]]
        predicted: list[Placement] = ["gpu"] * chunk.mtp_layers
        return (first, *following, *predicted)
    decoder: list[Placement] = ["groups"] * len(chunk.layers)
    predicting: list[Placement] = ["groups"] * chunk.mtp_layers
    if decoder:
        decoder[0] = "groups after embedding" if chunk.pre_process else "groups after stage"
    return (*decoder, *predicting)


def _layer_pass(job: TrainingJob) -> Callable[[Module, Placement, frozenset[str]], Module]:
    """The passes over one layer, with the groups that stay on the GPU. They are imported only here."""
    offload = job.activation_offload

    def changed(layer: Module, placement: Placement, kept: frozenset[str]) -> Module:
        if job.flags.delay_wgrad_compute:
            from analyzer.passes.delayed_weight_gradients import with_delayed_weight_gradients

            layer = with_delayed_weight_gradients(layer, fused=job.flags.gradient_accumulation_fusion)
        if job.flags.overlap_expert_gradients:
            from analyzer.passes.delayed_weight_gradients import with_gradients_at_dispatch

            layer = with_gradients_at_dispatch(layer)
        if job.flags.overlap_moe_expert_parallel_comm:
            from analyzer.passes.overlapped_layers import with_nodes

            layer = with_nodes(layer, frees_unsaved=job.core.frees_unsaved_rows)
        if offload is None:
            return layer
        from analyzer.passes.activation_offload import (
            with_everything_offloaded,
            with_hooks,
            with_offloaded_groups,
            with_unused_nodes,
        )

        if placement == "gpu":
            return with_hooks(offload, layer)
        if offload.layers:
            layer = with_unused_nodes(job.model, layer)
        if placement == "listed":
            return layer
        if placement in ("host", "host after embedding"):
            return with_everything_offloaded(layer, input_from="layer" if placement == "host" else "embedding")
        if kept:
            layer = with_hooks(_of_groups(offload, kept), layer)
        return with_offloaded_groups(_of_groups(offload, kept, kept=False), layer, input_from=_INPUTS[placement])

    return changed


def _of_groups(offload: ActivationOffloadSpec, names: frozenset[str], *, kept: bool = True) -> ActivationOffloadSpec:
    """The specification with these groups only, or without them."""
    return replace(offload, modules=tuple(name for name in offload.modules if (name in names) is kept)) if names else offload


def _without_skipped_norm(job: TrainingJob, tree: Module) -> Module:
    """The tree without a final norm that overlapped microbatches do not run."""
    if not job.flags.overlap_moe_expert_parallel_comm or not job.core.skips_final_norm:
        return tree
    from analyzer.passes.overlapped_layers import without_skipped_norm

    return without_skipped_norm(tree)


def _with_layers(
    tree: Module,
    change: Callable[[Module, Placement, frozenset[str]], Module],
    placements: Sequence[Placement],
    kept: Kept = (),
) -> Module:
    """The tree with `change` applied to every transformer layer, in order. Equal layers stay one object."""
    left = iter(zip(placements, kept or (frozenset[str](),) * len(placements), strict=True))
    done: dict[tuple[int, Placement, frozenset[str]], Module] = {}

    def visit(module: Module) -> Module:
        if module.kind is ModuleKind.LAYER:
            placement, stays = next(left)
            key = (id(module), placement, stays)
            if key not in done:
                done[key] = change(module, placement, stays)
            return done[key]
        if not module.children:
            return module
        changed = replace(module, children=tuple(visit(child) for child in module.children))
        if module.kind is not ModuleKind.MTP_DEPTH:
            return changed
        from analyzer.passes.activation_offload import with_offloaded_projection
        from analyzer.passes.overlapped_layers import with_referenced_states

        return with_offloaded_projection(with_referenced_states(changed))

    return visit(tree)


def fsdp_trees_of(job: TrainingJob, tree: Module) -> tuple[Module, Module | None]:
    """A tree with its unsharded parameters and gradients, and the tree of the first forward of the job if it differs."""
    if job.fsdp is None:
        return tree, None
    from analyzer.passes.fsdp import fsdp_trees

    return fsdp_trees(job, tree)


def offload_trees_of(job: TrainingJob, tree: Module, chunk: Chunk) -> tuple[Module, Module]:
    """With activation offloading, the trees of a chunk in the first iteration and in later ones.

    In the first iteration all layers are offloaded, and nothing is copied back early. With overlapped microbatches
    `memory.overlapped.offload` follows later iterations.
    """
    offload = job.activation_offload
    if offload is None or job.flags.overlap_moe_expert_parallel_comm:
        return tree, tree
    from analyzer.passes.activation_reload import with_early_reloads, with_reloaded_layers

    if offload.layers:
        reloaded = with_reloaded_layers(job, tree, offloaded_layers=offload.layers)
        return reloaded, reloaded

    from analyzer.passes.activation_offload import with_hooks, with_offloaded_groups

    def of_first(layer: Module, placement: Placement, kept: frozenset[str]) -> Module:
        layer = with_hooks(offload, layer)
        return with_offloaded_groups(_of_groups(offload, kept), layer, input_from=_INPUTS[placement]) if kept else layer

    first = _with_layers(tree, of_first, _placements(job, chunk), _kept_groups(job, tree, chunk))
    return with_early_reloads(offload, first, first_iteration=True), with_early_reloads(offload, tree)


def frees_input(job: TrainingJob, tree: Module, *, first_iteration: bool = False) -> bool:
    """With activation offloading, whether the input of a chunk is freed in its forward, although the schedule references it."""
    if job.activation_offload is None:
        return False
    from analyzer.passes import activation_offload

    return activation_offload.frees_input(job.activation_offload, tree, first_iteration=first_iteration)


def last_layer_bytes_on_gpu(job: TrainingJob, tree: Module) -> int:
    """With activation offloading, bytes of the last layer that are not offloaded for the microbatch whose backward runs first."""
    if job.activation_offload is None or job.flags.overlap_moe_expert_parallel_comm:
        return 0
    from analyzer.passes.activation_offload import bytes_of_last_groups

    return bytes_of_last_groups(job.activation_offload, tree)
