"""Distillation from the largest logits of a teacher, as in NeMo-RL.

The statements are those of `DistillationLossFn` (nemo_rl/algorithms/loss/loss_functions.py), `SequencePackingLossWrapper`
(loss/wrapper.py), and `get_distillation_topk_logprobs_from_logits` and what it calls (nemo_rl/distributed/model_utils.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from analyzer.specs import TrainingJob
from analyzer.specs.distillation import DistillationSpec

_CHUNK = 1024
_WEIGHT = 0.5


class MicrobatchTeacher:
    """The logits of a teacher for one microbatch, which `make_processed_microbatch_iterator` copies from the host on all stages.

    The iterator references them until it has the next ones.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._data: dict[str, torch.Tensor] = {}

    def next_logits(self) -> dict[str, torch.Tensor]:
        """Those of a microbatch."""
        self._data = {}
        batch, spec = self._job.batch, _spec(self._job)
        parts = max(spec.sequences, 1)
        size = (batch.micro_batch_size * parts, batch.seq_length // parts, spec.topk or 1)
        self._data = {
            "logits": torch.zeros(size, dtype=torch.float32, device="cuda"),
            "indices": torch.zeros(size, dtype=torch.int64, device="cuda"),
        }
        return self._data


def nemo_rl_loss(job: TrainingJob, teacher: dict[str, torch.Tensor], output: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """The loss of a microbatch: that of each packed sequence, or that of all samples."""
    spec = _spec(job)
    if not spec.sequences:
        loss = _loss(spec, teacher["logits"], teacher["indices"], output)
        return loss, {"lm loss": torch.stack([loss.detach(), loss.detach()])}
    total: Any = 0
    length = output.shape[1] // spec.sequences
    for number in range(spec.sequences):
        one = slice(number, number + 1)
        logits = output.narrow(1, number * length, length)
        total += _loss(spec, teacher["logits"][one], teacher["indices"][one], logits)
    return total, {"lm loss": torch.stack([total.detach(), total.detach()])}


def _spec(job: TrainingJob) -> DistillationSpec:
    assert job.model.distillation is not None, "the model is a student"
    return job.model.distillation


def _loss(spec: DistillationSpec, teacher: torch.Tensor, indices: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`wrap_loss_fn_with_input_preparation`."""
    student_log, teacher_log, entropy = _log_probabilities(spec, logits, teacher, indices)
    return _divergence(spec, student_log, teacher_log, entropy)


def _log_probabilities(
    spec: DistillationSpec, logits: torch.Tensor, teacher: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`get_distillation_topk_logprobs_from_logits`."""
    logits = logits.to(torch.float32)
    start = tensor_rank() * logits.shape[-1]
    entropy = None
    if spec.whole_vocabulary:
        local = of_this_rank(indices)
        chunk = max(1, min(logits.shape[1], _CHUNK))
        student_log = _GatheredLogProbabilities.apply(logits, local, start, start + logits.shape[-1], chunk)
        if spec.divergence != "forward":
            entropy = _Entropy.apply(logits, chunk)
        if context_size() > 1:
            student_log = _GatheredTokens.apply(student_log)
            if entropy is not None:
                entropy = _GatheredTokens.apply(entropy)
    else:
        student_log = functional.log_softmax(_gathered_logits(logits, indices, start, start + logits.shape[-1]), dim=-1)
    teacher_log = functional.log_softmax(teacher.to(student_log.device, dtype=student_log.dtype), dim=-1)
    teacher_log = teacher_log[:, :-1, :]
    student_log = student_log[:, :-1, :]
    return student_log, teacher_log, None if entropy is None else entropy[:, :-1]


def _divergence(
    spec: DistillationSpec, student_log: torch.Tensor, teacher_log: torch.Tensor, entropy: torch.Tensor | None
) -> torch.Tensor:
    """`DistillationLossFn.__call__`. Local variables live until it returns."""
    student = student_log.exp()
    teacher = teacher_log.exp()
    correction = torch.zeros_like(student[..., 0])
    if entropy is not None:
        rest = entropy - (student * student_log).sum(-1)
        others = 1 - (student.sum(-1))
        correction = rest - (-100) * others
        if spec.divergence == "mixed":
            correction = correction * (1.0 - _WEIGHT)
    if spec.divergence == "forward":
        each = teacher * (teacher_log - student_log)
    elif spec.divergence == "reverse":
        each = student * (student_log - teacher_log)
    else:
        forward = teacher * (teacher_log - student_log)
        reverse = student * (student_log - teacher_log)
        each = _WEIGHT * forward + (1.0 - _WEIGHT) * reverse
    each = each.sum(dim=-1) + correction
    mask = torch.ones(each.shape, dtype=torch.float32, device=each.device)
    return torch.sum(each * mask) / (each.numel() + 1e-8)


def _gathered_logits(logits: torch.Tensor, indices: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """`gather_logits_at_global_indices`, whose chunk is the whole sequence."""
    indices = of_this_rank(indices)
    _, length, width = logits.shape
    found = []
    for first in range(0, length, length):
        chunk = logits[:, first : first + length, :].to(dtype=torch.float32)
        wanted = indices[:, first : first + length, :]
        in_range = (wanted >= start) & (wanted < end)
        local = (wanted - start).clamp(min=0, max=width - 1)
        values = torch.gather(chunk, dim=-1, index=local)
        values = values * in_range.to(dtype=values.dtype)
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.SUM, group=tensor_group())
        found.append(values)
    gathered = found[0]
    return _GatheredTokens.apply(gathered) if context_size() > 1 else gathered  # type: ignore[no-any-return]


def of_this_rank(indices: torch.Tensor) -> torch.Tensor:
    """`_get_tokens_on_this_cp_rank`."""
    size = context_size()
    if size == 1:
        return indices
    part = indices.shape[1] // (size * 2)
    rank = context_rank()
    chunks = [indices[:, each * part : (each + 1) * part] for each in (rank, size * 2 - rank - 1)]
    return torch.cat(chunks, dim=1)


def gathered_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of all context-parallel ranks, in the order of the sequence."""
    return _GatheredTokens.apply(tensor)  # type: ignore[no-untyped-call, no-any-return]


class _GatheredTokens(torch.autograd.Function):
    """`AllGatherCPTensor`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of all context-parallel ranks, in the order of the sequence."""
        ranks = [torch.empty_like(tensor) for _ in range(context_size())]
        torch.distributed.all_gather(tensor_list=ranks, tensor=tensor, group=context_group())
        halves = [half for each in ranks for half in torch.chunk(each, chunks=2, dim=1)]
        return torch.cat(halves, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """The part of this rank."""
        gradient, size, rank = gradients[0], context_size(), context_rank()
        torch.distributed.all_reduce(gradient, group=context_group())
        gradient = gradient.view(gradient.shape[0], 2 * size, gradient.shape[1] // (2 * size), *gradient.shape[2:])
        index = torch.tensor([rank, 2 * size - rank - 1], device=gradient.device)
        found = gradient.index_select(1, index)
        return found.view(found.shape[0], -1, *found.shape[3:])


@torch.no_grad()
def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """`_compute_distributed_log_softmax`."""
    largest = torch.amax(logits, dim=-1, keepdim=True).detach()
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=tensor_group())
    logits = logits - largest
    total = logits.exp().sum(-1, keepdim=True).float()
    total = total.clone(memory_format=torch.contiguous_format)  # `torch.distributed.nn.functional.all_reduce`
    torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM, group=tensor_group())
    return logits - total.log().to(logits.dtype)


class _GatheredLogProbabilities(torch.autograd.Function):
    """`ChunkedDistributedGatherLogprob`."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, indices: torch.Tensor, start: int, end: int, chunk: int) -> torch.Tensor:
        """The log-probabilities at the indices."""
        found = []
        for first in range(0, logits.shape[1], chunk):
            part = logits[:, first : first + chunk, :].to(dtype=torch.float32)
            log = log_softmax(part)
            in_range, local = _local(indices[:, first : first + chunk, :], start, end)
            values = torch.gather(log, dim=-1, index=local)
            values = values * in_range.to(dtype=values.dtype)
            torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.SUM, group=tensor_group())
            found.append(values)
        out = torch.cat(found, dim=1) if len(found) > 1 else found[0]
        ctx.save_for_backward(logits, indices)
        ctx.numbers = (start, end, chunk)
        return out.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        """The gradient of the logits, with probabilities that are computed again."""
        logits, indices = ctx.saved_tensors
        start, end, chunk = ctx.numbers
        result = torch.zeros_like(logits, dtype=torch.float32)
        for first in range(0, logits.shape[1], chunk):
            part = logits[:, first : first + chunk, :].to(dtype=torch.float32)
            log = log_softmax(part)
            probabilities = log.exp()
            in_range, local = _local(indices[:, first : first + chunk, :], start, end)
            gradient = gradients[0][:, first : first + chunk, :]
            total = gradient.sum(dim=-1, keepdim=True)
            of_chunk = result[:, first : first + chunk, :]
            of_chunk.copy_(probabilities.neg().mul_(total))
            masked = gradient * in_range.to(dtype=gradient.dtype)
            of_chunk.scatter_add_(2, local, masked)
            del probabilities, log, part, in_range, local, gradient, total, masked
        return result, None, None, None, None


def _local(indices: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    in_range = (indices >= start) & (indices < end)
    return in_range, (indices - start).clamp(min=0, max=end - start - 1)


class _Entropy(torch.autograd.Function):
    """`ChunkedDistributedEntropy`."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, chunk: int) -> torch.Tensor:
        """The sum of the products of probabilities and their logarithms."""
        found = []
        for first in range(0, logits.shape[1], chunk):
            part = logits[:, first : first + chunk, :].to(dtype=torch.float32)
            log = log_softmax(part)
            probabilities = log.exp()
            local = (probabilities * log).sum(dim=-1)
            torch.distributed.all_reduce(local, op=torch.distributed.ReduceOp.SUM, group=tensor_group())
            found.append(local)
        ctx.save_for_backward(logits)
        ctx.chunk = chunk
        return (torch.cat(found, dim=1) if len(found) > 1 else found[0]).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient of the logits."""
        (logits,) = ctx.saved_tensors
        chunk = ctx.chunk
        result = torch.empty_like(logits, dtype=torch.float32)
        for first in range(0, logits.shape[1], chunk):
            part = logits[:, first : first + chunk, :].to(dtype=torch.float32)
            log = log_softmax(part)
            probabilities = log.exp()
            local = (probabilities * log).sum(dim=-1)
            torch.distributed.all_reduce(local, op=torch.distributed.ReduceOp.SUM, group=tensor_group())
            of_chunk = result[:, first : first + chunk, :]
            of_chunk.copy_(probabilities.mul_(log - local.unsqueeze(-1)))
            of_chunk.mul_(gradients[0][:, first : first + chunk].unsqueeze(-1))
            del probabilities, log, part, local
        return result, None


def tensor_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def tensor_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_rank())


def context_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def context_size() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_context_parallel_world_size())


def context_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_context_parallel_rank())
