"""The loss function of pretrain_gpt.py, which pretrain_t5.py uses too."""

from __future__ import annotations

import torch

from analyzer.specs import TrainingJob


def loss_function(
    job: TrainingJob, loss_mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the masked loss sum, the number of tokens and the reported values, as `loss_func` of pretrain_gpt.py (0.16)."""
    assert loss_mask is not None, "get_batch returns a mask on the last stage"
    losses = output.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    if job.flags.check_for_nan_in_loss_and_grad:
        for test in (torch.isnan, torch.isinf):
            test(loss).item()
    tokens = loss_mask.sum().clone().detach().to(torch.int)
    reported = torch.cat([loss.clone().detach().view(1), tokens.view(1)])
    return loss, tokens, {"lm loss": reported}
