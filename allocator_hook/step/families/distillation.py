"""Distillation from the logits of a teacher, as in ms-swift (megatron/trainers/gkd_trainer.py and rlhf_trainers/gkd_loss.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.nn import functional

from analyzer.specs import TrainingJob
from analyzer.specs.distillation import DistillationSpec

_BETA: Final = {"forward": 0.0, "reverse": 1.0, "Jensen-Shannon": 0.5}
_TEMPERATURE: Final = 0.9


class Teacher:
    """The logits of a teacher for the microbatches of an iteration, which it computes before the first forward."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._stored: list[dict[str, torch.Tensor]] = []

    def next_logits(self, microbatches: int, *, width: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Those of a microbatch. `width`: elements of the vocabulary on this rank."""
        if not self._stored:
            self._stored = [self._computed(width, dtype) for _ in range(microbatches)]
        return self._stored.pop(0)

    def _computed(self, width: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        batch = self._job.batch
        tokens = (batch.micro_batch_size, batch.seq_length // self._job.parallel.context)
        spec = _spec(self._job)
        if spec.topk is None:
            return {"logits": torch.zeros((*tokens, width), dtype=dtype, device="cuda")}
        return {
            "logits": torch.zeros((*tokens, spec.topk), dtype=dtype, device="cuda"),
            "indices": torch.zeros((*tokens, spec.topk), dtype=torch.int64, device="cuda"),
        }


def distillation_loss(job: TrainingJob, teacher: dict[str, torch.Tensor], output: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """`MegatronGKDTrainer.loss_func` without the term of supervised fine-tuning."""
    total = _gkd_loss(_spec(job), teacher, output)
    loss = total / output.shape[0] / output.shape[1]
    return loss, {"lm loss": torch.stack([loss.detach(), loss.detach()])}


def _spec(job: TrainingJob) -> DistillationSpec:
    assert job.model.distillation is not None, "the model is a student"
    return job.model.distillation


def _active(tensor: torch.Tensor) -> torch.Tensor:
    """All tokens, as `tensor[mask]` with a mask of ones copies them."""
    every = torch.arange(tensor.shape[0] * tensor.shape[1], device=tensor.device)
    return tensor.view(-1, tensor.shape[-1])[every]


def _gkd_loss(spec: DistillationSpec, teacher: dict[str, torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """`gkd_loss`."""
    active = _active(output)
    of_teacher = {name: _active(each) for name, each in teacher.items()}
    split = _size() > 1 and spec.topk is None
    student_logits = active if spec.topk is None else _gathered_at(active, of_teacher["indices"])
    student_logits = student_logits / _TEMPERATURE
    teacher_logits = of_teacher["logits"] / _TEMPERATURE
    return _jsd_loss(student_logits, teacher_logits, _BETA[spec.divergence], split=split)


def _gathered_at(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`tp_gather_topk`."""
    if _size() == 1:
        return torch.gather(tensor, dim=-1, index=indices)
    rows = tensor.shape[-1]
    in_range = (indices >= 0) & (indices < rows)
    gathered = torch.gather(tensor, dim=-1, index=indices.clamp(0, rows - 1)).masked_fill(~in_range, float("-inf"))
    reduced = gathered.detach()
    torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX, group=_group())
    return torch.where(in_range, gathered, reduced)


def _chunks(tokens: int, size: int = 512) -> Iterator[slice]:
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _jsd_loss(student: torch.Tensor, teacher: torch.Tensor, beta: float, *, split: bool) -> torch.Tensor:
    """`jsd_loss`. Local variables of a chunk live until the next one replaces them."""
    log_softmax = _split_log_softmax if split else _log_softmax
    total = student.new_zeros(())
    weight = torch.tensor(beta, dtype=student.dtype, device=student.device)
    log_weight, log_rest = torch.log(weight), torch.log1p(-weight)
    for chunk in _chunks(student.size(0)):
        s_log = log_softmax(student[chunk])
        t_log = log_softmax(teacher[chunk])
        if beta == 0:
            divergence = _kl(s_log, t_log, split=split)
        elif beta == 1:
            divergence = _kl(t_log, s_log, split=split)
        else:
            m_log = torch.logsumexp(torch.stack([s_log + log_rest, t_log + log_weight]), dim=0)
            divergence = weight * _kl(m_log, t_log, split=split) + (1 - weight) * _kl(m_log, s_log, split=split)
        total = total + divergence.sum()
    return total


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return functional.log_softmax(logits, dim=-1)


def _split_log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """`vocab_parallel_log_softmax`."""
    largest = logits.max(dim=-1, keepdim=True)[0]
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=_group())
    exponentials = torch.exp(logits - largest)
    total = exponentials.sum(dim=-1, keepdim=True)
    torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM, group=_group())
    return logits - largest - torch.log(total)


def _kl(input_log: torch.Tensor, target_log: torch.Tensor, *, split: bool) -> torch.Tensor:
    """`vocab_parallel_kl_div`."""
    probabilities = torch.exp(target_log)
    partial = (probabilities * (target_log - input_log)).sum(dim=-1)
    if split:
        torch.distributed.all_reduce(partial, op=torch.distributed.ReduceOp.SUM, group=_group())
    return partial


def _group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _size() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_world_size())
