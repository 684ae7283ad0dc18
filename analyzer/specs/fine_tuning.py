"""What a launch trains beside, or instead of, all parameters of one model: adapters, frozen parts, and phases with other models.

The readers of launches fill these records. `analyzer.launch.derive.adapters` reads the adapters, `analyzer.memory.workspaces` the
weights of a reference model, and `analyzer.inference.phases` the phases. `not_counted` says in the report what no formula counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from analyzer.specs.adapters import AdapterLayers
from analyzer.specs.distillation import DistillationSpec
from analyzer.specs.freezing import FreezeSpec
from analyzer.specs.model import ModelSpec
from analyzer.specs.parallel import ParallelSpec
from analyzer.specs.vision_part import VisionTraining

if TYPE_CHECKING:
    from analyzer.specs.job import TrainingJob

AdapterKind = Literal["lora", "canonical_lora", "dora", "vlm_lora", "other"]
Objective = Literal["language model", "preference", "reward", "distillation", "reinforcement", "classification"]
"""What the loss compares. `language model`: pretraining and supervised fine-tuning. `preference`: DPO, KTO and the like, with a
reference model. `classification`: a head of another width, as for rerankers and embeddings."""
PhaseName = Literal["log-probabilities", "reference", "rollout", "refit", "critic", "teacher", "reward"]

TYPICAL_SAMPLE: Final = 512
"""Tokens of a packed sample of instruction data whose length is not given. The samples of the Tulu 3 mixture have 3,102 bytes
in the mean (its dataset card: 2,914,250,826 bytes, 939,343 samples), which are 500 to 800 tokens."""
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
    regathers: bool = False
    """Inputs are gathered again in the backward (`AdapterSpec.regathers`)."""
    options: tuple[str, ...] = ()
    """Other settings of Megatron-Bridge that change adapters, as the launch names them."""
    also_trained: tuple[str, ...] = ()
    """Modules whose weights are trained too, as the launch names them."""
    source: str = ""
    """The setting that turns the adapters on, as the launch writes it."""


StatePart = Literal["parameters", "gradients", "optimizer"]
"""Model states of the training."""


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    """A pass without gradients over the samples of an iteration, with the layout of the training."""

    tokens: int
    """Tokens of a microbatch, on all context-parallel ranks together."""
    logit_bytes: int
    """Bytes at the peak for each logit of a rank: the logits in each dtype, and copies of them."""


EngineName = Literal["vllm", "sglang"]


def engine_name(word: str | None) -> EngineName:
    """The engine that a launch names; vLLM, which frameworks take by default, if it names none."""
    return "sglang" if (word or "").lower().startswith("sglang") else "vllm"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The inference engine of a rollout on the GPUs of the training."""

    name: EngineName = "vllm"
    gpu_share: float
    """The part of the memory of a GPU that it takes while it generates; of SGLang that of its weights and its cache."""
    tensor: int
    """Tensor-parallel size, with which its weights are split."""
    stays: bool = False
    """Whether its memory stays allocated during the update."""
    buffer_bytes: int = 0
    """Buffers through which weights are sent to it."""


@dataclass(frozen=True, kw_only=True)
class OtherTraining:
    """The training of another model on the same GPUs, in turns with that of the first one: a critic."""

    words: tuple[str, ...]
    """Its options of Megatron-LM."""
    tuning: FineTuning
    moved: frozenset[StatePart] = frozenset()
    """States that are not on the GPU outside its update. Moved parameters are there in its pass without gradients too."""
    job: TrainingJob | None = None
    """None before the words are read."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of an iteration of reinforcement learning or distillation beside the update, and another model."""

    name: PhaseName
    on_same_gpus: bool = True
    """Whether it runs on the GPUs of the update, or other GPUs hold it."""
    weights: Literal["own", "shared", "host", "swapped"] | None = None
    """Of another model. own: in memory of the GPU, throughout. shared: those of the trained model, without its adapters. host: in
    host memory, except in this phase. swapped: in host memory, and in this phase in the place of those of the trained model. None
    if they are not counted."""
    model_name: str = ""
    """The other model, as the launch names it, if it has other sizes than the trained one."""
    layout: tuple[str, ...] = ()
    """Options of Megatron-LM for its layout; none for that of the training."""
    model: ModelSpec | None = None
    """Its sizes; None for those of the trained model."""
    parallel: ParallelSpec | None = None
    """Its layout; None for that of the training."""
    on_host: frozenset[StatePart] = frozenset()
    """States of the training that are not on the GPU during this phase."""
    work: ForwardPass | Engine | None = None
    """What runs in it; None if that is not known, and not counted."""
    groups_stay: bool = True
    """The process groups of the training, and with them the buffers of NCCL, exist during this phase."""
    sent: int = 0
    """Bytes that the last stage of the trained model receives from it for each token. They stay there for a whole iteration."""
    training: OtherTraining | None = None
    """Of another model that is trained too. `work` is then its pass without gradients."""

    @property
    def counted(self) -> bool:
        """Whether the memory of the phase is counted, if it runs on the GPUs of the update."""
        return self.weights is not None or self.work is not None


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """What a launch trains. The defaults are those of a training of all parameters."""

    objective: Objective = "language model"
    method: str = ""
    """The name of the method, such as DPO or GRPO; empty for supervised training."""
    adapter: Adapter | None = None
    frozen: tuple[str, ...] = ()
    """Parts whose parameters are not trained, as the launch names them."""
    freezing: FreezeSpec | None = None
    """The same by names of parameters, where the launch has them."""
    phases: tuple[Phase, ...] = ()
    sequences_per_sample: int = 1
    """Sequences that the model reads for each sample: 2 for DPO, which compares a chosen and a rejected one."""
    vision: VisionTraining | None = None
    """How the vision part of a model is held and trained; None for a launch that builds the language model only."""
    packed: bool = False
    """Whether several samples are packed into a sequence, which attend to themselves only."""
    longest_sample: int | None = None
    """Tokens of the longest sample of a packed microbatch whose number of samples is counted with it; None for other batches."""
    sample_length: int | None = None
    """Tokens of each of them; None if the launch does not tell."""
    filled: bool = False
    """Whether microbatches are filled with samples up to a number of tokens, so that their number follows from it."""
    token_score: bool = False
    """The loss reads the logits of two tokens only."""
    distillation: DistillationSpec | None = None
    """The loss of a student."""
    log_probability_loss: bool = False
    """The loss is computed from log-probabilities, as in NeMo-RL."""
    loss_sequences: int = 0
    """Packed sequences of a microbatch, of which such a loss is computed one by one; 0 for all tokens at once."""
    head_outputs: int | None = None
    """Outputs of a linear head in place of the output layer; 0 for normalized hidden states. None for logits of the vocabulary."""
    value_head: bool = False
    """The linear head is one of PyTorch with values in fp32, as that of a critic in verl."""
    longest_counted: bool = False
    """Whether each sample is counted with the longest length, and shorter ones need less memory: no packing, no padding to it."""

    @property
    def most_tokens_counted(self) -> bool:
        """Whether microbatches are counted with the most tokens they can have, and may have fewer throughout the training.

        In reinforcement learning these are the tokens of responses, which the launch does not tell.
        """
        return self.longest_counted or self.objective == "reinforcement"

    @property
    def beside(self) -> tuple[Phase, ...]:
        """The phases with another model whose weights are on the GPU beside the trained one during the update."""
        return tuple(each for each in self.phases if each.on_same_gpus and each.weights == "own")

    @property
    def in_turns(self) -> tuple[tuple[Phase, OtherTraining, TrainingJob], ...]:
        """The phases with another model that is trained on the same GPUs, whose job is known."""
        listed: list[tuple[Phase, OtherTraining, TrainingJob]] = []
        for each in self.phases:
            training = each.training if each.on_same_gpus else None
            if training is not None and training.job is not None:
                listed.append((each, training, training.job))
        return tuple(listed)

    def not_counted(self) -> Iterator[str]:
        """Why there is no verdict: fragments of a sentence, one for each part that is not modelled beside adapters."""
        if self.frozen and self.freezing is None:
            parts = ", ".join(self.frozen)
            yield f"{parts} freeze{'s' if len(self.frozen) == 1 else ''} parameters, which are counted as trained ones"
        if self._has_own_loss:
            if self._missing:
                yield from self._only_these
            else:
                yield f"the loss of {self.method or self.objective} is counted as that of a language model"

    def needs_more(self, *, pipeline: int) -> Iterator[str]:
        """The same for parts that only add memory. `pipeline`: stages, between which a reference model sends messages too."""
        if not self._has_own_loss:
            yield from self._only_these
        if self.objective == "preference" and self.beside and not self._missing and pipeline > 1:
            yield f"the messages of the reference model between pipeline stages are not counted{self._of_method}"

    @property
    def _of_method(self) -> str:
        return f" ({self.method})" if self.method else ""

    @property
    def _missing(self) -> list[str]:
        """The phases on the GPUs of the update whose memory is not counted."""
        passes = self.objective == "reinforcement"
        missing = [each for each in self.phases if each.on_same_gpus and not (each.work if passes else each.counted)]
        return list(dict.fromkeys(_PHASES[each.name] for each in missing))

    @property
    def _only_these(self) -> Iterator[str]:
        """That some phases are not counted."""
        missing = self._missing
        if missing:
            estimated = any(each.on_same_gpus and each.work is not None for each in self.phases)
            listed = missing[0] if len(missing) == 1 else f"{', the '.join(missing[:-1])} and the {missing[-1]}"
            counted = "only the update and the phases below are" if estimated else "only the update is"
            yield f"{counted} counted{self._of_method}, not the {listed}"

    @property
    def _has_own_loss(self) -> bool:
        """Whether the loss is another one than those that are modelled."""
        modelled = self.head_outputs is not None or self.token_score or self.distillation is not None
        return not modelled and self.objective not in ("language model", "reinforcement", "preference")


ALL_STATES: Final[frozenset[StatePart]] = frozenset({"parameters", "gradients", "optimizer"})
ALL_PARAMETERS: Final = FineTuning()
"""A training of all parameters of one model."""
