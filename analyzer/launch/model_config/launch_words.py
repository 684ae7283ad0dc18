"""`--info-model`: the words of a launch whose model is given by its Hugging Face configuration.

The options of the model precede the words of the launch, so that an option in the launch takes precedence. Without a training
script, the options that a launch needs besides its model are added as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from analyzer.launch.argv_parser import is_option
from analyzer.launch.info_options import value_of
from analyzer.launch.model_config.common import MegatronModel, Option
from analyzer.launch.model_config.families import megatron_model
from analyzer.launch.model_config.published import read_configuration
from analyzer.specs import OPTIMIZERS, OptimizerSpec
from analyzer.specs.release import release_number
from analyzer.specs.vision_part import NO_PARTS, ModelParts
from analyzer.units import natural

SEQUENCE: Final = 4096
"""Tokens of a sequence if the launch does not give them and the model allows as many."""
SIZES: Final = frozenset(
    {"--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups", "--num-experts"}
)
"""Options that make another model."""
TOKENIZER_FLAGS: Final = frozenset({"--tokenizer-type", "--tokenizer-model", "--vocab-file"})
SEQUENCE_FLAGS: Final = frozenset({"--seq-length", "--encoder-seq-length"})


@dataclass(frozen=True, kw_only=True)
class ModelWords:
    """The words of a launch, with those of its model."""

    words: tuple[str, ...]
    notes: tuple[str, ...]
    """Assumptions, one sentence each."""
    warnings: tuple[str, ...] = ()
    """Options of the launch that replace those of the model, in one sentence."""
    parts: ModelParts = NO_PARTS
    """What its options do not say of the model."""


def with_model(
    reference: str, words: Sequence[str], *, of_experts: Sequence[str] = (), script: bool, release: str, folder: Path
) -> ModelWords:
    """`words`, Megatron's options in a launch, preceded by those of the model that `reference` names.

    `of_experts`: further options of the launch for a model with experts. `script`: the launch names a training script, so only
    the model is added. `release` is Megatron's. Raises InputError if the model is not found, UnsupportedError if Megatron-LM
    cannot express it.
    """
    config = read_configuration(reference, folder=folder)
    model = megatron_model(config)
    given = {word.partition("=")[0] for word in words if is_option(word)}
    positions = ("--max-position-embeddings", str(_positions(model, words)))
    options = [*model.options, positions, *_vocabulary(model, given, release=release)]
    notes = [f"The model is that of {config.name}, from its Hugging Face configuration.", *model.notes]
    if not script:
        added = _launch_options(model, words, given)
        options += added
        if added:
            notes.append(f"Assumed, because the launch has no training script: {', '.join(' '.join(each) for each in added)}.")
    added_words = [word for option in options for word in option]
    if any(option[0] == "--num-experts" for option in model.options):
        added_words += of_experts
    replaced = [option[0] for option in model.options if option[0] in SIZES and value_of(option[0], words) not in (None, option[1])]
    verb = "overrides the value" if len(replaced) == 1 else "override the values"
    warnings = (f"{', '.join(replaced)} of your launch {verb} of {config.name}.",) if replaced else ()
    return ModelWords(warnings=warnings, words=(*added_words, *words), notes=tuple(notes), parts=model.parts)


def _vocabulary(model: MegatronModel, given: Collection[str], *, release: str) -> list[Option]:
    """A tokenizer with as many tokens as the embedding has rows; NullTokenizer adds one token up to 0.17."""
    if not TOKENIZER_FLAGS.isdisjoint(given):
        return []
    extra = 0 if release_number(release) >= release_number("0.18") else 1
    return [("--tokenizer-type", "NullTokenizer"), ("--vocab-size", str(model.vocabulary - extra))]


def _launch_options(model: MegatronModel, words: Sequence[str], given: Collection[str]) -> list[Option]:
    """What a launch needs besides its model, as far as `words` do not give it."""
    flags = {option[0] for option in model.options}
    experts = "--num-experts" in flags
    biased = experts and "--disable-bias-linear" not in flags  # Megatron does not split experts with biases
    candidates: list[tuple[bool, Option]] = [
        (SEQUENCE_FLAGS.isdisjoint(given), ("--seq-length", str(min(SEQUENCE, model.positions)))),
        (not {"--micro-batch-size", "--batch-size"} & set(given), ("--micro-batch-size", "1")),
        (
            not {"--tensor-model-parallel-size", "--model-parallel-size"} & set(given),
            ("--tensor-model-parallel-size", "1"),
        ),
        ("--pipeline-model-parallel-size" not in given, ("--pipeline-model-parallel-size", "1")),
        (not {"--bf16", "--fp16"} & set(given), ("--bf16",)),
        (_takes_distributed_optimizer(words, given), ("--use-distributed-optimizer",)),
        (experts and "--moe-token-dispatcher-type" not in given, ("--moe-token-dispatcher-type", "alltoall")),
        (experts and "--moe-grouped-gemm" not in given, ("--moe-grouped-gemm",)),
        (biased and "--expert-tensor-parallel-size" not in given, ("--expert-tensor-parallel-size", "1")),
    ]
    return [option for wanted, option in candidates if wanted]


def _takes_distributed_optimizer(words: Sequence[str], given: Collection[str]) -> bool:
    """Not if it is given, or replaced by torch FSDP2 or another optimizer than Adam."""
    if {"--use-distributed-optimizer", "--use-torch-fsdp2"} & set(given):
        return False
    facts = OPTIMIZERS.get(value_of("--optimizer", words) or OptimizerSpec.name)
    return facts is not None and facts.sharding == "distributed"


def _positions(model: MegatronModel, words: Sequence[str]) -> int:
    """Rows of a learned position embedding; otherwise the longest sequence, which a longer one in the launch replaces."""
    if model.position_rows is not None:
        return model.position_rows
    lengths = [value_of(flag, words) for flag in SEQUENCE_FLAGS]
    return max([model.positions, *(natural(each) or 0 for each in lengths if each is not None)])
