"""What releases of megatron-core after 0.16 change in memory, communication and names, as one table.

Found by running each release in the shadow engine (`make shadow CHECKOUT=FOLDER`) and reading the difference of its sources. A
field has the value of 0.16 unless a release in `CHANGES` changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from analyzer.specs.release import is_before


@dataclass(frozen=True, kw_only=True)
class CoreBehavior:
    """What a release does. The defaults are those of 0.16."""

    mtp_layer: str = "transformer_layer"
    """Name of the transformer layer in an MTP layer (core/transformer/multi_token_prediction.py)."""
    marks_split_experts: bool = False
    """Weights of experts know the dimension in which tensor-parallel ranks split them (`TEGroupedLinear`)."""
    keeps_16_bit_parameters: bool = True
    """With `--reuse-grad-buf-for-mxfp8-param-ag`, parameters in 16 bit keep their allocations in addition to their buffer
    (`_ParamAndGradBuffer`)."""
    holds_mtp_logits: bool = True
    """The logits of the last MTP layer are referenced until the loss of the model is computed: they are a local variable of
    `GPTModel._postprocess`. Later they belong to the function `process_mtp_loss`, which returns before that."""
    frees_arrivals: bool = False
    """DeepEP's dispatcher drops the choices of arrived tokens after it has combined the rows (`_DeepepManager.combine`)."""
    counts_mtp_predictions: bool = False
    """Each MTP layer counts its right predictions: tensor-parallel ranks gather the largest logits and their indices, and
    data-parallel ranks sum two counters (`_compute_mtp_acceptance_counts`, `reduce_metrics_in_tracker`)."""
    fsdp_gradients_in_fp32: bool = True
    """`--accumulate-allreduce-grads-in-fp32`, on by default with bf16, overrides the gradient types of Megatron-FSDP. Later only
    `--megatron-fsdp-main-grads-dtype` counts, whose default is the type of the parameters
    (core/distributed/fsdp/mcore_fsdp_adapter.py)."""
    fsdp_units_without_sharding: bool = False
    """Layers are units of Megatron-FSDP, each with a bucket, also with strategies that do not shard parameters (the same file)."""


LIKE_0_16: Final = CoreBehavior()

CHANGES: Final[dict[str, dict[str, Any]]] = {
    "0.17": {
        "mtp_layer": "mtp_model_layer",
        "marks_split_experts": True,
        "keeps_16_bit_parameters": False,
        "holds_mtp_logits": False,
    },
    "0.18": {"frees_arrivals": True},
    "0.19": {"counts_mtp_predictions": True, "fsdp_gradients_in_fp32": False},
    "0.20": {"fsdp_units_without_sharding": True},
}
"""The changed fields by release, oldest first."""


MTP_LAYERS: Final = (LIKE_0_16.mtp_layer, *(changes["mtp_layer"] for changes in CHANGES.values() if "mtp_layer" in changes))
"""All names of the transformer layer in an MTP layer."""


@cache
def behavior(release: str) -> CoreBehavior:
    """The behavior of a release of megatron-core, such as '0.18.2'."""
    found = LIKE_0_16
    for first, changes in CHANGES.items():
        if not is_before(release, first):
            found = replace(found, **changes)
    return found
