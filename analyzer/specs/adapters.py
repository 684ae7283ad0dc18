"""Adapters that are trained beside a frozen model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

AdapterTarget = Literal[
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "in_proj", "out_proj", "eh_proj",
]  # fmt: skip
AdapterLayers = Literal["megatron", "transformer_engine"]
"""The layers of an adapter, and how tensor-parallel ranks share them: those of Megatron itself in Megatron-Bridge, those of
Transformer Engine in ms-swift."""
TrainedCopy = Literal["word_embeddings", "output_layer"]
"""Modules that can be trained beside adapters, in a copy: `ModulesToSaveWrapper` of PEFT keeps the original, which is frozen."""
AdapterMethod = Literal["lora", "canonical", "dora"]
"""canonical: q, k and v, and gate and up, have adapters of their own (`CanonicalLoRA` of Megatron-Bridge). dora: the outputs of a
layer and its adapter are scaled by a trained magnitude over the norm of their weights (`DoRA`)."""
DEFAULT_TARGETS: Final[tuple[AdapterTarget, ...]] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The layers that have an adapter by default in Megatron-Bridge."""
ADAPTER_TARGETS: Final[tuple[AdapterTarget, ...]] = get_args(AdapterTarget)
"""The linear layers that can have an adapter, by the names of their modules in Megatron: those of attention and the FFN, of
multi-latent attention, of linear attention and Mamba mixers (`in_proj`, `out_proj`), and of multi-token prediction (`eh_proj`)."""


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Low-rank adapters (LoRA), one beside each linear layer with one of these names in every layer of the model."""

    rank: int
    targets: tuple[AdapterTarget, ...]
    """In the order of `ADAPTER_TARGETS`."""
    per_expert: bool = False
    """Each expert has its own adapter, as in ms-swift; otherwise those of a rank share one, as by default in Megatron-Bridge
    (`LoRA.share_expert_adapters`)."""
    expert_rank: int | None = None
    """Rank of the adapters of routed experts; None if it is that of the others (`normalize_moe_lora` of Megatron-Bridge)."""
    layers: AdapterLayers = "megatron"
    method: AdapterMethod = "lora"
    dropout: bool = False
    """Elements of the input of an adapter are dropped."""
    regathers: bool = False
    """Under sequence parallelism the first projections beside `linear_qkv` and `linear_fc1`, other than those of experts, keep the
    part of the sequence on their rank, and gather it again in the backward (`LoRA.sequence_parallel_input_regather` of
    Megatron-Bridge)."""
    trained_copies: tuple[TrainedCopy, ...] = ()
    """Modules that are trained too, each as a copy of a frozen one that stays on the GPU."""

    def rank_of(self, *, experts: bool) -> int:
        """Rank of the adapter of a layer of routed experts, or of another layer."""
        return self.expert_rank if experts and self.expert_rank is not None else self.rank

    @property
    def grouped(self) -> bool:
        """Whether the adapters of a rank's experts are multiplied together by PyTorch (`GroupedExpertLinearAdapter` of
        Megatron-Bridge); those of ms-swift have layers of Transformer Engine."""
        return self.per_expert and self.layers == "megatron"

    def request_input_gradient(self, *, checkpoints: bool) -> bool:
        """Whether the output of the frozen embedding is made to need a gradient. `checkpoints`: around layers, by full recompute.

        All frameworks do so under checkpoints, which compute gradients only for inputs that need them, and ms-swift always. That of
        a trained embedding needs one.

        Sources: `maybe_enable_recompute_inputs_grad` of Megatron-Bridge, `GPTModel._preprocess` of mcore-bridge 1.6.
        """
        return not self.trains("word_embeddings") and (checkpoints or self.layers == "transformer_engine")

    def trains(self, module: TrainedCopy) -> bool:
        """Whether a module outside layers is trained."""
        return module in self.trained_copies

    def trains_output_weight(self, *, tied: bool) -> bool:
        """Whether the weight of the output layer is trained. `tied`: it is that of the word embedding."""
        return self.trains("word_embeddings" if tied else "output_layer")
