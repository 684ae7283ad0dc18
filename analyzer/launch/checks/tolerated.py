"""Checks of Megatron that are reported as warnings: frameworks on top of Megatron-Core run launches that break them.

Source: `validate_args`, 0.16 to 0.19. Recipes of Megatron-Bridge set these options without that function.
Launches that Megatron runs, but that train wrongly, are reported as warnings too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.launch.checks.graph_options import recomputed_dropout
from analyzer.launch.derive.reading import since, switched_on
from analyzer.launch.derive.recompute import ignores_recompute_of_stack, recomputes_mtp_layers
from analyzer.specs.option_names import flag_of

if TYPE_CHECKING:
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import TrainingJob


def warn_of_tolerated(launch: LaunchInput, job: TrainingJob) -> None:
    """Adds a warning for each check that a launch breaks."""
    arguments = launch.arguments
    captured = job.graphs is not None and "full_iteration" in job.graphs.scope
    if captured and job.flags.check_for_nan_in_loss_and_grad and since(arguments, "0.16"):
        launch.warn("--no-check-for-nan-in-loss-and-grad is assumed: a CUDA graph of the full iteration cannot check for NaN.")
    if job.model.cross_entropy == "te" and since(arguments, "0.18") and switched_on(arguments, "cross_entropy_loss_fusion"):
        launch.warn("pretrain_gpt.py of Megatron 0.18 refuses --cross-entropy-fusion-impl te. It is analyzed as given.")
    if ignores_recompute_of_stack(arguments, job.model):
        _warn_of_ignored_recompute(launch, mtp_layers=recomputes_mtp_layers(arguments, job.model))
    for module, dest in recomputed_dropout(arguments, job):
        if dest not in arguments.given and since(arguments, "0.16"):
            launch.warn(f"Megatron refuses CUDA graphs that recompute {module} with dropout, its default: add {flag_of(dest)} 0.")
    if _replaces_referenced(job):
        launch.warn(
            "With --use-torch-fsdp2 Megatron does not train dt_bias, A_log and D of Mamba layers: MambaContextParallel reads the "
            "parameters that FSDP2 has replaced. Use --use-megatron-fsdp."
        )
    if _instances_diverge(job):
        launch.warn(
            "Megatron-FSDP reduces no gradients between the optimizer instances without --overlap-grad-reduce, so the instances "
            "train different models: add --overlap-grad-reduce."
        )
    if _experts_are_reduced_with_others(job):
        launch.warn(
            "Without expert parallelism Megatron reduces the gradients of experts with all others, over ranks with other parts of "
            f"the experts, and trains wrongly: use --expert-tensor-parallel-size {job.parallel.tensor}, as "
            "--tensor-model-parallel-size, or --expert-model-parallel-size 2 or more."
        )
    if _experts_are_mixed(job):
        launch.warn(
            "With several optimizer instances Megatron-FSDP of this release shards experts over the replicas of the dense model, "
            "which have other experts, and trains wrongly: leave out --num-distributed-optimizer-instances."
        )


def _warn_of_ignored_recompute(launch: LaunchInput, *, mtp_layers: bool) -> None:
    named = f"{flag_of('recompute_granularity')} full has no effect"
    since_0_18 = "hybrid models recompute layers from core 0.18 on."
    if mtp_layers:
        launch.warn(f"{named} on the decoder: {since_0_18} The MTP layers are recomputed.")
    else:
        launch.warn(f"{named}: {since_0_18} They are analyzed without it.")


def _experts_are_reduced_with_others(job: TrainingJob) -> bool:
    """Whether gradients of experts are summed over ranks that have other parts of the weights, or not over all of their ranks.

    The attribute `allreduce` of their weights selects the group of all other parameters with one expert-parallel rank
    (core/extensions/transformer_engine.py, core/transformer/moe/experts.py, 0.16.1). Those groups have the ranks with the same
    part of a weight only if experts are split over the tensor-parallel ranks.
    """
    parallel = job.parallel
    if job.model.moe is None or job.fsdp is not None or parallel.expert > 1:
        return False
    return parallel.expert_tensor != parallel.tensor


def _experts_are_mixed(job: TrainingJob) -> bool:
    """Whether Megatron-FSDP gathers and reduces experts over other ranks than their replicas.

    Source: `FSDPDistributedIndex` (core/distributed/fsdp/src/megatron_fsdp/utils.py, 0.16.1).

    Without a mesh of experts it uses that of the dense model.
    """
    parallel, fsdp = job.parallel, job.fsdp
    if fsdp is None or fsdp.implementation != "megatron" or fsdp.expert_instances or job.model.moe is None:
        return False
    return parallel.distributed_optimizer_instances > 1 and parallel.expert_data != parallel.data_with_context


def _instances_diverge(job: TrainingJob) -> bool:
    """Whether Megatron-FSDP leaves out the reduction between optimizer instances.

    `MegatronFSDP` makes it in the last microbatch, which its `no_sync` announces (`_process_post_backward_gradients`,
    megatron_fsdp.py, 0.16.1). Training calls `no_sync` only with `--overlap-grad-reduce`. `DistributedDataParallel` reduces in
    `finish_grad_sync` without that option (param_and_grad_buffer.py).
    """
    megatron_fsdp = job.fsdp is not None and job.fsdp.implementation == "megatron"
    return megatron_fsdp and job.parallel.distributed_optimizer_instances > 1 and not job.optimizer.overlap_grad_reduce


def _replaces_referenced(job: TrainingJob) -> bool:
    """Whether FSDP2 replaces parameters that a Mamba layer references (`MambaContextParallel.__init__`, 0.13 to 0.20)."""
    hybrid, fsdp = job.model.hybrid, job.fsdp
    return hybrid is not None and hybrid.has_mamba and fsdp is not None and fsdp.implementation == "torch"
