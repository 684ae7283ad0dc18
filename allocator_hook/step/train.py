"""The training loop, after `setup_model_and_optimizer`, `train` and `train_step` of megatron/training/training.py (0.16)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from allocator_hook.step import groups, schedule_plans, userbuffers
from allocator_hook.step import model as models
from allocator_hook.step.config import stores_fp8, transformer_config
from allocator_hook.step.cuda_graphs import Graphs, check_release
from allocator_hook.step.data import ForwardStep
from allocator_hook.step.iterations import captured_before
from allocator_hook.step.marks import Marks
from allocator_hook.step.muon import muon_optimizer
from allocator_hook.step.optimizer_config import optimizer_config, uses_torch_fsdp
from allocator_hook.step.patching import Patches
from allocator_hook.step.versions import known_to
from analyzer.specs import TrainingJob


@dataclass
class Trained:
    """The model chunks and the optimizer, for labelling their tensors."""

    job: TrainingJob
    chunks: list[Any]
    optimizer: Any


def run(
    job: TrainingJob,
    *,
    rank: int,
    iterations: int,
    marks: Marks,
    microbatches: int | None = None,
    after_setup: Callable[[Trained], None] = lambda _: None,
    after_iteration: Callable[[Trained, int], None] = lambda *_: None,
) -> Trained:
    """Build the model of `rank` and train it for `iterations`. Memory is in steady state from the second iteration.

    `microbatches` overrides the number of microbatches of the job. Creates the process groups with torch's fake backend.
    """
    if job.graphs is not None:
        check_release()
    groups.initialize(job, rank=rank)
    userbuffers.initialize(job)
    config = transformer_config(job)
    with marks.in_phase("build"):
        chunks = models.wrap(job, config, models.chunks(job, config))
        optimizer = _optimizer(job, chunks)
    if job.optimizer.offload is None or job.optimizer.offload.collected:
        # `train` does this with --manual-gc; without it, Python frees reference cycles of FP8 parameters at some later time
        gc.collect()
    for chunk in chunks:
        marks.watch(chunk)
        if job.flags.overlap_moe_expert_parallel_comm:
            schedule_plans.watch_methods(chunk, marks)
    trained = Trained(job, chunks, optimizer)
    after_setup(trained)
    _prepare(job, config, trained, marks)
    count = microbatches or job.batch.microbatches
    graphs = _graphs(job, config, trained, count, marks)
    with Patches(schedule_plans.patches(marks) if job.flags.overlap_moe_expert_parallel_comm else ()):
        for iteration in range(iterations):
            marks.start_iteration(iteration)
            if graphs is not None and iteration == captured_before(job):
                _capture(job, graphs, chunks, hooked=iteration > 0)
            _train_step(job, trained, marks, count, graphs)
            if job.flags.overlap_moe_expert_parallel_comm:
                gc.collect()  # the nodes of the loss are reference cycles, which Python frees at some later time
            if graphs is not None and iteration == 0:
                graphs.finish_first_iteration()
            if iteration == 0 and _gathers_in_hooks(job):
                for chunk in chunks:
                    chunk.enable_forward_pre_hook()
                config.param_sync_func = _of_chunks(chunks, "start_param_sync", job)
                if graphs is not None and captured_before(job) == 0:
                    graphs.set_hooks()
            marks.finish()
            after_iteration(trained, iteration)
    return trained


def _optimizer(job: TrainingJob, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer

    config = optimizer_config(job)
    if job.optimizer.muon is not None:
        return muon_optimizer(job.optimizer.muon, config, chunks)
    return get_megatron_optimizer(
        **known_to(get_megatron_optimizer, config=config, model_chunks=chunks, use_gloo_process_groups=False)
    )


def _prepare(job: TrainingJob, config: Any, trained: Trained, marks: Marks) -> None:
    """Set the functions of the configuration, as `train` does before its loop."""
    from megatron.core import distributed
    from megatron.core.pipeline_parallel import schedules

    def finalize_model_grads(*args: Any, **kwargs: Any) -> None:
        with marks.in_phase("backward"):
            distributed.finalize_model_grads(*args, **kwargs)

    for chunk in trained.chunks:
        chunk.train()
    if job.flags.defer_embedding_wgrad:
        schedules.drain_embedding_wgrad_compute = marks.of_phase("backward", schedules.drain_embedding_wgrad_compute)
    config.grad_scale_func = trained.optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if job.optimizer.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in trained.chunks]
        config.no_sync_func = functions[0] if len(functions) == 1 else functions
        # `train` of megatron/training/training.py: all stages reduce at the same time
        if job.parallel.pipeline > 1 and job.optimizer.aligned_grad_reduce:
            functions = [chunk.start_grad_sync for chunk in trained.chunks]
            config.grad_sync_func = functions[0] if len(functions) == 1 else functions
    if _gathers_in_hooks(job):
        # the first iteration needs no gather: every rank has initialized all parameters
        for chunk in trained.chunks:
            chunk.disable_forward_pre_hook(**known_to(chunk.disable_forward_pre_hook, param_sync=False))


def _graphs(job: TrainingJob, config: Any, trained: Trained, microbatches: int, marks: Marks) -> Graphs | None:
    if job.graphs is None:
        return None
    return Graphs(job, config=config, chunks=trained.chunks, optimizer=trained.optimizer, microbatches=microbatches, marks=marks)


def _capture(job: TrainingJob, graphs: Graphs, chunks: list[Any], *, hooked: bool) -> None:
    """Capture graphs. Hooks that gather parameters are not captured; `hooked` if the chunks have them."""
    hooked = hooked and _gathers_in_hooks(job)
    if hooked:
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
    graphs.capture()
    if hooked:
        for chunk in chunks:
            chunk.enable_forward_pre_hook()
        graphs.set_hooks()


def _gathers_in_hooks(job: TrainingJob) -> bool:
    """Whether parameters are gathered by hooks that can be disabled (`should_disable_forward_pre_hook`)."""
    return job.fsdp is None and job.optimizer.distributed and job.optimizer.overlap_param_gather


def _of_chunks(chunks: list[Any], name: str, job: TrainingJob) -> Any:
    """Return method `name` of the chunk, or a list for several chunks; None without interleaved stages."""
    if job.parallel.virtual_pipeline is None:
        return None
    functions = [getattr(chunk, name) for chunk in chunks]
    return functions[0] if len(functions) == 1 else functions


def _train_step(job: TrainingJob, trained: Trained, marks: Marks, microbatches: int, graphs: Graphs | None) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks, optimizer = trained.chunks, trained.optimizer
    with marks.in_phase("forward"):
        if not uses_torch_fsdp(job):
            for chunk in chunks:
                chunk.zero_grad_buffer()
        optimizer.zero_grad()
        if job.optimizer.overlap_param_gather and stores_fp8(job, "mxfp8"):
            # parameters are gathered through the gradient buffer in the forward pass, after the buffer was zeroed
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                part._copy_main_params_to_param_buffer()
        function = partial(get_forward_backward_func(), data_iterator=[None] * len(chunks) if len(chunks) > 1 else None)
        losses = (function if graphs is None else graphs.forward_backward(function))(
            forward_step_func=ForwardStep(job, marks.start_microbatch, microbatches=microbatches),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=microbatches,
            seq_length=job.batch.seq_length,
            micro_batch_size=job.batch.micro_batch_size,
            decoder_seq_length=job.model.decoder_seq_length or job.batch.seq_length,
            forward_only=False,
        )
    if job.flags.empty_unused_memory_level >= 1:
        torch.cuda.empty_cache()
    with marks.in_phase("optimizer"):
        updated, norm, _ = optimizer.step()
        _reduce_statistics(updated, norm)
        if job.flags.empty_unused_memory_level >= 2:
            torch.cuda.empty_cache()
        _reduce_losses(losses)
        if job.model.mtp_num_layers:
            _reduce_mtp_losses(microbatches)


def _reduce_statistics(updated: bool, norm: Any) -> None:
    """As `logical_and_across_model_parallel_group` and `reduce_max_stat_across_model_parallel_group`."""
    from megatron.core import parallel_state as mpu

    group = mpu.get_model_parallel_group()
    flag = torch.tensor([int(updated)], dtype=torch.int, device=torch.cuda.current_device())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
    value = torch.tensor([-1.0 if norm is None else norm], dtype=torch.float32, device=torch.cuda.current_device())
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=group)


def _reduce_losses(losses: list[dict[str, torch.Tensor]]) -> None:
    """Average the losses over microbatches and data-parallel ranks, on the last stage.

    Losses that the loss function has averaged over the ranks are single numbers, and are not reduced again.
    """
    from megatron.core import parallel_state as mpu

    if not losses:
        return
    if losses[0]["lm loss"].numel() == 1:
        for name in losses[0]:
            torch.cat([loss[name].view(-1) for loss in losses]).mean()
        return
    values = torch.vstack([loss["lm loss"] for loss in losses]).sum(dim=0)
    torch.distributed.all_reduce(values, group=mpu.get_data_parallel_group(with_context_parallel=True))


def _reduce_mtp_losses(microbatches: int) -> None:
    """Average the loss of each MTP layer, as `training_log` does."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.track_mtp_metrics(1 / microbatches, 0, None, None, {})
