"""BERT: `model_provider`, `get_batch`, `forward_step` and `loss_func` of pretrain_bert.py (0.16.1)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from allocator_hook.step.families.broadcast import broadcast_fields
from allocator_hook.step.language_model import language_model
from allocator_hook.step.versions import known_to
from analyzer.specs import TrainingJob


def bert_module(job: TrainingJob, config: Any, **stage: Any) -> Any:
    """Return the BertModel of one stage."""
    from megatron.core.models.bert import bert_layer_specs as specs
    from megatron.core.models.bert.bert_model import BertModel

    model = job.model
    if model.implementation == "local":
        layer = specs.bert_layer_local_spec
    elif hasattr(specs, "get_bert_layer_with_transformer_engine_spec"):
        layer = specs.get_bert_layer_with_transformer_engine_spec()
    else:
        layer = specs.bert_layer_with_transformer_engine_spec
    known_to(BertModel.__init__, vp_stage=stage["virtual_stage"])  # releases without it have no interleaved BERT
    return language_model(
        BertModel,
        job,
        config,
        **stage,
        transformer_layer_spec=layer,
        num_tokentypes=2 if model.binary_head else 0,
        add_binary_head=model.binary_head,
    )


def bert_forward(job: TrainingJob, model: Any) -> tuple[Any, Any]:
    """Run the forward of one microbatch. Every stage has the complete batch."""
    samples, length = job.batch.micro_batch_size, job.batch.seq_length
    names = ("text", "types", "labels", "is_random", "loss_mask", "padding_mask")
    batch = broadcast_fields({name: (samples,) if name == "is_random" else (samples, length) for name in names})
    mask = batch["loss_mask"].float()
    types = batch["types"] if job.model.binary_head else None
    output = model(batch["text"], batch["padding_mask"], tokentype_ids=types, lm_labels=batch["labels"])
    return output, partial(bert_loss, mask, batch["is_random"])


def bert_loss(loss_mask: torch.Tensor, order: torch.Tensor, output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the mean losses of tokens and of the order of sentences, and both averaged over data-parallel ranks."""
    losses, order_logits = output
    losses, loss_mask = losses.float(), loss_mask.float()
    loss = torch.sum(losses.view(-1) * loss_mask.reshape(-1)) / loss_mask.sum()
    parts = [loss]
    if order_logits is not None:
        of_order = torch.nn.functional.cross_entropy(order_logits.view(-1, 2).float(), order.view(-1), ignore_index=-1)
        parts.append(of_order.float())
        loss = parts[0] + parts[1]
    averaged = _averaged(parts)
    return loss, {f"{name} loss": averaged[index] for index, name in enumerate(("lm", "sop")[: len(parts)])}


def _averaged(losses: list[torch.Tensor]) -> torch.Tensor:
    """`average_losses_across_data_parallel_group` (megatron/training/utils.py, 0.16)."""
    from megatron.core import parallel_state as mpu

    averaged = torch.cat([loss.clone().detach().view(1) for loss in losses])
    torch.distributed.all_reduce(averaged, group=mpu.get_data_parallel_group())
    return averaged / mpu.get_data_parallel_world_size()
