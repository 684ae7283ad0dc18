"""Parameters that are frozen by their names, as in ms-swift."""

from __future__ import annotations

from functools import partial
from typing import Any

from allocator_hook.step.adapters import with_input_gradient
from analyzer.specs import TrainingJob


def freeze_parameters(job: TrainingJob, model: Any) -> None:
    """Freeze the parameters that the job names, and request a gradient of the output of the embedding (`GPTModel._preprocess`)."""
    spec = job.model.frozen_parameters
    if spec is None:
        return
    names = spec.frozen([(name, parameter.numel()) for name, parameter in model.named_parameters()])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
    if model.pre_process:
        model.decoder.forward = partial(with_input_gradient, model.decoder.forward)
