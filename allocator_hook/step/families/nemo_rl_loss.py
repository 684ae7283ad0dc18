"""The loss of supervised fine-tuning in NeMo-RL, which it computes from the log-probabilities of the tokens.

The statements are those of `get_next_token_logprobs_from_logits`, `from_parallel_logits_to_logprobs` and `DistributedLogprob`
(nemo_rl/distributed/model_utils.py), and of `NLLLossFn` (nemo_rl/algorithms/loss/loss_functions.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from allocator_hook.step.families.nemo_rl_distillation import (
    context_size,
    gathered_tokens,
    log_softmax,
    of_this_rank,
    tensor_group,
    tensor_rank,
)
from analyzer.specs import TrainingJob


def log_probability_loss(job: TrainingJob, output: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """The loss of a microbatch, and what is logged: that of all samples, or that of each packed sequence."""
    batch, sequences = job.batch, job.model.loss_sequences
    if not sequences:
        loss: Any = _loss(output, batch.micro_batch_size, batch.seq_length)
    else:
        loss, length = 0, output.shape[1] // sequences
        for number in range(sequences):
            loss += _loss(output.narrow(1, number * length, length), 1, batch.seq_length // sequences)
    return loss, {"lm loss": torch.stack([loss.detach(), loss.detach()])}


def _loss(logits: torch.Tensor, samples: int, length: int) -> torch.Tensor:
    """`NLLLossFn.__call__`."""
    tokens = torch.zeros((samples, length), dtype=torch.int64, device="cuda")
    found = log_probabilities(logits, tokens)
    mask = torch.ones(tokens.shape, dtype=torch.int64, device="cuda")[:, 1:] * torch.ones(len(tokens), device="cuda").unsqueeze(-1)
    return -(torch.sum(found * mask) / (mask.numel() + 1e-8))


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token that follows another one."""
    logits = logits.to(torch.float32)
    start = tensor_rank() * logits.shape[-1]
    target = tokens.roll(shifts=-1, dims=-1)
    missing = logits.shape[1] * context_size() - target.shape[1]
    if missing > 0:
        target = functional.pad(target, (0, missing), value=0)
    target = of_this_rank(target)
    found: torch.Tensor = _LogProbability.apply(logits, target, start, start + logits.shape[-1]).contiguous()  # type: ignore[no-untyped-call]
    if context_size() > 1:
        found = gathered_tokens(found)
    return found[:, :-1][:, : tokens.shape[1] - 1]


class _LogProbability(torch.autograd.Function):
    """`DistributedLogprob`. All tokens are those of this rank: `masked_select` of those that are has copies in its place."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """The log-probability of each target."""
        elsewhere = (target < start) | (target >= end)
        local = target - start
        local[elsewhere] = 0
        logits = logits.to(dtype=torch.float32)
        of_vocabulary = log_softmax(logits)
        found = torch.gather(of_vocabulary, -1, local.unsqueeze(-1)).squeeze(-1)
        found[elsewhere] = 0.0
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.SUM, group=tensor_group())
        ctx.save_for_backward(of_vocabulary.exp(), elsewhere, local)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The gradient of the logits."""
        gradient = gradients[0]
        probabilities, _, local = ctx.saved_tensors
        samples, length, width = probabilities.shape
        row = torch.arange(samples, device=probabilities.device).view(-1, 1).expand(-1, length).reshape(-1)
        column = torch.arange(length, device=probabilities.device).expand(samples, -1).reshape(-1)
        place = (row * length + column) * width
        chosen = place.clone() + local.reshape(-1).clone()
        result = probabilities.neg()
        result = result.mul_(gradient.unsqueeze(-1))
        selected = gradient.reshape(-1).clone()
        result.view(-1).scatter_add_(0, chosen, selected)
        return result, None, None, None
