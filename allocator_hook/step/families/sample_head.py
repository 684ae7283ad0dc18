"""Heads of models that score or embed samples, as in mcore-bridge (model/gpt_model.py) and ms-swift (megatron/trainers).

The head of a critic is that of Megatron-Bridge (training/utils/train_utils.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from analyzer.specs import TrainingJob


def replace_output_layer(job: TrainingJob, config: Any, model: Any) -> None:
    """Put the head of the job in place of the output layer of the last stage. Sequence-parallel ranks gather its output."""
    outputs = job.model.head_outputs
    if job.model.token_score and model.post_process:
        model.output_layer.forward = partial(_token_score, model.output_layer.forward)
    if outputs is None or not model.post_process:
        return
    linear = _values if job.model.value_head else _linear
    model.output_layer = linear(config, outputs) if outputs else _Normalized()
    if config.sequence_parallel and config.tensor_model_parallel_size > 1:
        model.output_layer.forward = partial(_gathered, model.output_layer.forward)


def loss_of_samples(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of the last token of each sample, as a reward model compares them (`MegatronRewardTrainer.loss_func`)."""
    samples, tokens = output.shape[:2]
    last = torch.full((samples,), tokens - 1, device=output.device)
    loss = -functional.logsigmoid(output[torch.arange(samples, device=output.device), last]).mean()
    return loss, {"lm loss": torch.stack([loss.detach(), loss.detach()])}


def _linear(config: Any, outputs: int) -> Any:
    from megatron.core.extensions.transformer_engine import TELinear

    class OutputLayerLinear(TELinear):  # type: ignore[misc]
        """Takes the arguments of the output layer that it replaces."""

        def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
            return super().forward(hidden)

    return OutputLayerLinear(
        config.hidden_size,
        outputs,
        config=config,
        init_method=config.init_method,
        bias=False,
        skip_bias_add=False,
        parallel_mode="duplicated",
        skip_weight_param_allocation=False,
    )


def _values(config: Any, outputs: int) -> Any:
    class LinearForLastLayer(torch.nn.Linear):
        """Takes the arguments of the output layer that it replaces."""

        def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> Any:  # type: ignore[override]
            return super().forward(hidden).float(), None

    layer: Any = LinearForLastLayer(config.hidden_size, outputs, bias=False, dtype=config.params_dtype, device="cuda")
    layer.weight.sequence_parallel = config.sequence_parallel
    return layer


class _Normalized(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return functional.normalize(hidden, p=2, dim=-1), None


def _gathered(forward: Callable[..., tuple[torch.Tensor, None]], *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    return gather_from_sequence_parallel_region(forward(*args, **options)[0], tensor_parallel_output_grad=False), None


def _token_score(forward: Callable[..., tuple[torch.Tensor, None]], *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """The logit of "yes" minus that of "no" (`GPTModel._postprocess` of mcore-bridge)."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    logits, _ = forward(*args, **options)
    logits = gather_from_tensor_model_parallel_region(logits)
    return (logits[..., 1] - logits[..., 0])[..., None], None
