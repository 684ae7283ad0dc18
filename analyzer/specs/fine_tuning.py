"""What a launch trains beside, or instead of, all parameters of one model: adapters, frozen parts, and phases with other models.

The readers of launches fill these records. `analyzer.launch.derive.adapters` reads the adapters. No formula uses the rest:
`not_counted` says so in the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from analyzer.specs.adapters import AdapterLayers

AdapterKind = Literal["lora", "canonical_lora", "dora", "vlm_lora", "other"]
Objective = Literal["language model", "preference", "reward", "distillation", "reinforcement", "classification"]
"""What the loss compares. `language model`: pretraining and supervised fine-tuning. `preference`: DPO, KTO and the like, with a
reference model. `classification`: a head of another width, as for rerankers and embeddings."""
PhaseName = Literal["log-probabilities", "reference", "rollout", "refit", "critic", "teacher", "reward"]

_PHASES: Final[dict[PhaseName, str]] = {
    "log-probabilities": "logits of the pass for log-probabilities, which are in fp32",
    "reference": "reference model",
    "rollout": "inference engine of the rollout",
    "refit": "buffers that send weights to the inference engine",
    "critic": "critic",
    "teacher": "teacher model and its logits",
    "reward": "reward model",
}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Adapters beside frozen linear layers."""

    kind: AdapterKind
    rank: int
    alpha: float | None = None
    """None if the launch does not give it."""
    targets: tuple[str, ...] = ()
    """Names of modules, as the launch gives them; none for the default of the framework."""
    excluded: tuple[str, ...] = ()
    dropout: float = 0.0
    base_dtype: str | None = None
    """The dtype of the frozen weights: bf16, fp16, fp32 or fp8; None for that of the training."""
    adapter_dtype: str | None = None
    """None for the dtype of the training."""
    share_expert_adapters: bool | None = None
    """Whether the experts of a rank share an adapter; None for the default of the framework."""
    layers: AdapterLayers = "megatron"
    also_trained: tuple[str, ...] = ()
    """Modules whose weights are trained too, as the launch names them."""
    source: str = ""
    """The setting that turns the adapters on, as the launch writes it."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of an iteration of reinforcement learning or distillation beside the update, and another model."""

    name: PhaseName
    on_same_gpus: bool = True
    """Whether it runs on the GPUs of the update, or other GPUs hold it."""
    offloaded: bool = False
    """Whether its weights are in host memory during the update."""


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """What a launch trains. The defaults are those of a training of all parameters."""

    objective: Objective = "language model"
    method: str = ""
    """The name of the method, such as DPO or GRPO; empty for supervised training."""
    adapter: Adapter | None = None
    frozen: tuple[str, ...] = ()
    """Parts whose parameters are not trained, as the launch names them."""
    phases: tuple[Phase, ...] = ()
    sequences_per_sample: int = 1
    """Sequences that the model reads for each sample: 2 for DPO, which compares a chosen and a rejected one."""

    def not_counted(self) -> Iterator[str]:
        """Why there is no verdict: fragments of a sentence, one for each part that is not modelled beside adapters."""
        if self.frozen:
            parts = ", ".join(self.frozen)
            yield f"{parts} freeze{'s' if len(self.frozen) == 1 else ''} parameters, which are counted as trained ones"
        phases = list(dict.fromkeys(_PHASES[phase.name] for phase in self.phases if phase.on_same_gpus))
        if phases:
            listed = phases[0] if len(phases) == 1 else f"{', the '.join(phases[:-1])} and the {phases[-1]}"
            method = f" ({self.method})" if self.method else ""
            yield f"only the update is counted{method}, not the {listed}"
        elif self.objective not in ("language model", "reinforcement"):
            yield f"the loss of {self.method or self.objective} is counted as that of a language model"


ALL_PARAMETERS: Final = FineTuning()
"""A training of all parameters of one model."""
