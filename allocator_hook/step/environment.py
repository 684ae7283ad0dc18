"""The environment variables of a job that Transformer Engine and Megatron read."""

from __future__ import annotations

from analyzer.specs import TrainingJob


def variables(job: TrainingJob) -> dict[str, str]:
    """Return the variables and their values. Jobs with equal ones can run in the same process."""
    fine_grained = job.activation_offload is not None and bool(job.activation_offload.modules)
    found = {
        # `validate_args` requires it for fine-grained offloading
        "NVTE_CPU_OFFLOAD_V1": str(int(fine_grained)),
        # `TEDotProductAttention` requires the same value as that of `--apply-query-key-layer-scaling`
        "NVTE_APPLY_QK_LAYER_SCALING": str(int(job.model.apply_query_key_layer_scaling)),
    }
    if job.flags.deterministic:
        found["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    if job.flags.cuda_device_max_connections is not None:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = job.flags.cuda_device_max_connections
    return found
