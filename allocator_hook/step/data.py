"""Mock batches on the GPU, as `get_batch` of pretrain_gpt.py creates them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from allocator_hook.step.families.bert import bert_forward
from allocator_hook.step.families.distillation import Teacher, distillation_loss
from allocator_hook.step.families.llava import llava_forward
from allocator_hook.step.families.nemo_rl_distillation import MicrobatchTeacher, nemo_rl_loss
from allocator_hook.step.families.nemo_rl_loss import log_probability_loss
from allocator_hook.step.families.sample_head import loss_of_samples
from allocator_hook.step.families.t5 import t5_forward
from allocator_hook.step.losses import loss_function
from allocator_hook.step.versions import accepted_by, known_to
from analyzer.specs import Family, TrainingJob


def get_batch(
    job: TrainingJob, *, first: bool, last: bool, mtp: bool = False, data_iterator: Any = None
) -> dict[str, torch.Tensor | None]:
    """Return the fields of one microbatch: [b, s] each, and the mask [b, 1, s, s]. All are None on intermediate stages.

    Source: `get_batch_on_this_tp_rank` (megatron/training/utils.py, 0.16). TP rank 0 copies every field to the GPU and
    broadcasts the fields that the stage needs (all of them if it has MTP layers). The other ranks allocate every field and
    keep those that they need. Then each context-parallel rank takes its part.
    """
    from megatron.core import parallel_state as mpu

    fields: tuple[str, ...] = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    if not (first or last or mtp):
        return dict.fromkeys(fields)
    batch = on_gpu(job) if data_iterator is None else {**dict.fromkeys(fields), **next(data_iterator)}
    if mtp or (first and last):
        needed = fields
    else:
        needed = ("tokens", "attention_mask", "position_ids") if first else ("labels", "loss_mask", "attention_mask")
    group, rank = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_rank()
    for name in needed:
        tensor = batch[name]
        if tensor is not None and mpu.get_tensor_model_parallel_world_size() > 1:
            torch.distributed.broadcast(tensor, mpu.get_tensor_model_parallel_src_rank(), group=group)
    if rank > 0:
        batch = {name: batch[name] if name in needed else None for name in fields}
    if job.parallel.context > 1:
        from megatron.core import utils

        # before 0.11 the function is in megatron/training, which the package does not have
        select = getattr(utils, "get_batch_on_this_cp_rank", _on_this_cp_rank)
        batch = part_of_batch(select, batch, group=mpu.get_context_parallel_group())
    return batch


def part_of_batch(select: Callable[..., Any], batch: dict[str, Any], *, group: Any) -> Any:
    """Return the part of a batch for this context-parallel rank, as `select` of any release gives it.

    From 0.18 on it needs both options: the first has no default, and without a group the batch is split over all ranks.
    """
    return select(batch, **accepted_by(select, is_hybrid_cp=False, cp_group=group))


def _on_this_cp_rank(batch: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Two of 2·c parts of each sequence, as `get_batch_on_this_cp_rank` selects them."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    found = dict(batch)
    for name, tensor in batch.items():
        if tensor is not None:
            axis = 2 if name == "attention_mask" else 1
            parts = tensor.unflatten(axis, (2 * size, -1))
            index = torch.tensor([rank, 2 * size - rank - 1], device=tensor.device)
            found[name] = parts.index_select(axis, index).flatten(axis, axis + 1)
    return found


def on_gpu(job: TrainingJob, *, device: str = "cuda") -> dict[str, torch.Tensor | None]:
    """Return the fields of one microbatch on `device`."""
    size = (job.batch.micro_batch_size, job.batch.seq_length)
    mask = None
    if job.flags.attention_mask_in_dataloader:
        mask = torch.zeros((size[0], 1, size[1], size[1]), dtype=torch.bool, device=device)
    return {
        "tokens": torch.zeros(size, dtype=torch.int64, device=device),
        "labels": torch.zeros(size, dtype=torch.int64, device=device),
        "loss_mask": torch.ones(size, dtype=torch.float32, device=device),
        "attention_mask": mask,
        "position_ids": torch.zeros(size, dtype=torch.int64, device=device),
    }


_FORWARDS: Final[dict[Family, Callable[[TrainingJob, Any], tuple[Any, Any]]]] = {
    "bert": bert_forward,
    "t5": t5_forward,
    "llava": llava_forward,
}
"""The forward steps of the scripts other than pretrain_gpt.py."""


class ForwardStep:
    """`forward_step` of the training script, with the signature that Megatron's schedules call. `before(model)` runs first.

    `microbatches`: those of an iteration.
    """

    def __init__(self, job: TrainingJob, before: Any, *, microbatches: int = 1) -> None:
        self._job = job
        self._before = before
        self._teacher = Teacher(job)
        self._copied = MicrobatchTeacher(job)
        self._microbatches = microbatches

    def __call__(self, data_iterator: Any, model: Any, *_: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        from megatron.core.utils import get_attr_wrapped_model

        self._before(model)
        if self._job.model.family in _FORWARDS:
            return _FORWARDS[self._job.model.family](self._job, model)
        gpt = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
        batch = get_batch(
            self._job,
            first=gpt.pre_process,
            last=gpt.post_process,
            mtp=getattr(gpt, "mtp_process", False),
            data_iterator=data_iterator,
        )
        run = gpt.build_schedule_plan if return_schedule_plan else model
        masked = known_to(gpt.forward, loss_mask=None)  # before 0.12 the mask is for the loss function only
        options = {name: batch[name] for name in ("labels", *masked)}
        distilled = gpt.post_process and self._job.model.distillation is not None
        scores = self._job.model.head_outputs is not None or self._job.model.token_score
        own_probabilities = gpt.post_process and self._job.model.log_probability_loss
        if scores or distilled or own_probabilities:
            options["labels"] = None
        teacher = None
        spec = self._job.model.distillation
        if spec is not None and spec.framework == "NeMo-RL":
            teacher = self._copied.next_logits()
        elif distilled:
            width = self._job.model.padded_vocab_size // self._job.parallel.tensor
            teacher = self._teacher.next_logits(self._microbatches, width=width, dtype=gpt.config.params_dtype)
        output = run(batch["tokens"], batch["position_ids"], batch["attention_mask"], **options)
        if scores:
            return output, loss_of_samples
        if own_probabilities:
            return output, partial(log_probability_loss, self._job)
        if teacher is not None and spec is not None:
            own_loss = distillation_loss if spec.framework == "ms-swift" else nemo_rl_loss
            return output, partial(own_loss, self._job, teacher)
        return output, partial(loss_function, self._job, batch["loss_mask"])
