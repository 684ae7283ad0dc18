"""How a framework holds the parts of its model for images and sound, and what of them is trained.

Sources: mcore_bridge/model/mm_gpts (mcore-bridge 1.6) and `_init_multimodal_full` of ms-swift 4.6; models/qwen_vl, qwen_omni,
glm_vl and gemma_vl of Megatron-Bridge; mbridge/models/qwen{2_5_vl,3_vl,3_5} of mbridge (June 2026); mcore_adapter/models of ROLL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.adapters import ALL_LINEAR
from analyzer.launch.derive.model.vision_adapters import adapter_weights
from analyzer.launch.info_options import IMAGE_TOKENS, MODEL
from analyzer.specs.fine_tuning import FineTuning
from analyzer.specs.freezing import FreezeSpec
from analyzer.specs.vision_part import (
    NEMOTRON,
    SECTIONS,
    VISION_TYPES,
    ImageSpec,
    VisionHolder,
    VisionTraining,
    VisionWeight,
    VisionWeights,
)

if TYPE_CHECKING:
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import TrainingJob

_LANGUAGE: Final = "language_model"
_EVERYTHING: Final = FreezeSpec(pattern=".")


@dataclass(frozen=True, kw_only=True)
class _Held:
    """How a library holds the parts of one family."""

    split: bool = False
    """Modules of Megatron, which tensor-parallel ranks share; otherwise the module of transformers on each of them."""
    split_projection: bool = False
    """The encoder is the module of transformers, and tensor-parallel ranks share the projection."""
    frozen: frozenset[str] = frozenset()
    """Sections that are frozen unless the launch says otherwise."""
    encoder: tuple[str, ...] = ("",)
    """The beginnings of the names of weights that freezing the encoder freezes."""
    apart: bool = True
    """The projection is a section of its own; otherwise it is frozen with the encoder."""


_SWIFT: Final = _Held(frozen=frozenset(SECTIONS))
_BRIDGE_OMNI: Final = _Held(apart=False)
_BRIDGE_QWEN3_MOE: Final = _Held(split=True, frozen=frozenset({"vision_model", _LANGUAGE}))
_HELD: Final[Mapping[VisionHolder, Mapping[str, _Held]]] = {
    "ms-swift": {kind: _SWIFT for kind in VISION_TYPES if kind not in ("gemma3", "gemma4", *NEMOTRON)},
    "Megatron-Bridge": {
        "qwen2_5_vl": _Held(encoder=("patch_embed.", "blocks.")),
        "qwen3_vl": _Held(split=True),
        "qwen3_vl_moe": _BRIDGE_QWEN3_MOE,
        "qwen3_5": _Held(split=True),
        "qwen3_5_moe": _Held(split=True),
        "gemma3": _Held(split_projection=True),
        "gemma4": _Held(),
        "kimi_k25": _Held(),
        "mistral3": _Held(encoder=("patch_conv.", "ln_pre.", "transformer.")),
        "glm4v_moe": _Held(encoder=("patch_embed.", "blocks.")),
        "qwen2_5_omni": _BRIDGE_OMNI,
        "qwen3_omni_moe": _BRIDGE_OMNI,
        **dict.fromkeys(NEMOTRON, _Held(split=True)),
    },
    "ROLL": dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _Held()),
    "mbridge": {
        "qwen2_5_vl": _Held(split=True),
        "qwen3_vl": _Held(split=True),
        "qwen3_vl_moe": _Held(split=True),
        "qwen3_5": _Held(),
        "qwen3_5_moe": _Held(),
    },
}
"""By library and model_type. Nothing in mbridge freezes parameters (`freeze` of its models is not called)."""
_BOUNDED: Final = frozenset({
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe"),
    *("internvl", "internvl_chat", "gemma3", "mistral3"),
})  # fmt: skip
"""Types whose tensors for images were counted (tests/data/vision_activations.json)."""
_MASKED: Final = "mistral3"
"""The type whose encoder masks pairs of patches: those of different images."""
_POOLED: Final = {"gemma3": 16}
"""By model_type, the patches whose mean is a token: 64² patches become 256 tokens."""


def with_vision_part(launch: LaunchInput, job: TrainingJob) -> tuple[TrainingJob, FineTuning]:
    """The job with the parts of its model for images and sound, and its tuning without what is read of them.

    Raises UnsupportedError for a model whose parts the library of the framework does not build.
    """
    weights, tuning = launch.arguments.parts.vision, launch.arguments.tuning
    if weights is None:
        return job, tuning
    training = tuning.vision
    if not weights.weights:
        return _unread(job, tuning, weights)
    if training is None:
        launch.assume(f"{weights.model}: its {weights.described} is left out; its memory is not counted.")
        return job, tuning
    held = _HELD[training.holder].get(weights.model_type)
    if held is None:
        fault = f"the {weights.described} of {weights.model} in {training.holder} is not modelled"
        raise UnsupportedError(MODEL, fault, "use another framework, or analyze a launch of its language model")
    frozen = _frozen_sections(held, training)
    every = tuning.adapter is not None and not training.trained_beside_adapters
    found = tuple(_as_held(each, held, weights, frozen, every=every) for each in weights.weights)
    adapters, reason = adapter_weights(found, weights, training, tuning.adapter, tensor=job.parallel.tensor, split=held.split)
    _check_split((*found, *adapters), weights, tensor=job.parallel.tensor)
    _describe(launch, found, adapters, weights, held)
    model = replace(job.model, vision_weights=_beside(found, adapters))
    reasons = (*training.uncounted, *((reason,) if reason else ()))
    images = (
        f"the activations of the {weights.described} of {weights.model} on the {weights.inputs} of the data, and their embeddings, "
        "are not counted"
    )
    withheld = (*job.withheld, *_estimated(job, tuning, weights))
    spec = _images(job, tuning, weights)
    if spec is not None:
        job = replace(job, images=spec)
        launch.assume(
            f"At most {spec.tokens:,} tokens of each sequence are those of images. The launch fits if it does with the upper bound "
            "of their memory, which assumes attention kernels that store no scores."
        )
    else:
        if training.image_tokens is not None:
            launch.warn(f"{IMAGE_TOKENS} has no effect: the memory for the {weights.inputs} of this launch has no upper bound.")
        reasons = (images, *reasons)
    return replace(job, model=model, not_counted=reasons, withheld=withheld), _of_language(tuning, held, training)


def _images(job: TrainingJob, tuning: FineTuning, weights: VisionWeights) -> ImageSpec | None:
    """The images, if the memory for them has a bound. It has none in fp32, and in other phases than the update."""
    if weights.model_type not in _BOUNDED or tuning.phases or job.precision.parameters == "fp32":
        return None
    tokens = job.batch.seq_length
    given = tuning.vision.image_tokens if tuning.vision is not None else None
    return ImageSpec(
        tokens=tokens if given is None else min(given, tokens),
        patches_per_token=_patches_per_token(weights),
        masked=weights.model_type == _MASKED,
        projection=weights.projection,
        model=weights.model,
    )


def _patches_per_token(of: VisionWeights) -> int:
    """The patches that become one token, and one more if there are class tokens, which each image has before its patches."""
    if of.model_type in _POOLED:
        return _POOLED[of.model_type]
    layers = [each for each in of.weights if each.linear and "*" in each.name and not each.name.startswith(of.projection)]
    width = layers[0].shape[1]
    joined = [each.shape[1] // width for each in of.weights if each.linear and each.name.startswith(of.projection)]
    joined += [prod(each.shape[2:]) for each in of.weights if each.name == "downsample.weight"]
    return max(joined) + any("cls_token" in each.name or "class_token" in each.name for each in of.weights)


def _unread(job: TrainingJob, tuning: FineTuning, weights: VisionWeights) -> tuple[TrainingJob, FineTuning]:
    """A launch whose model has a part that is not read: its configuration says so, and a framework builds it."""
    training = tuning.vision
    if training is None:
        return job, tuning
    reason = f"the vision part of {weights.model} is not modelled: its weights and activations are not counted"
    return replace(job, not_counted=(reason, *training.uncounted)), _of_language(tuning, _Held(), training)


def _frozen_sections(held: _Held, training: VisionTraining) -> frozenset[str]:
    given = {section: frozen for section, frozen, _ in training.frozen}
    return frozenset(section for section in (*SECTIONS, _LANGUAGE) if given.get(section, section in held.frozen))


def _as_held(weight: VisionWeight, held: _Held, of: VisionWeights, frozen: frozenset[str], *, every: bool) -> VisionWeight:
    """A weight as a rank holds it. `every`: all weights are frozen, beside adapters."""
    section = of.section(weight) if held.apart else f"{weight.part}_model"
    fixed = every or (section in frozen and (section.endswith("projection") or weight.name.startswith(held.encoder)))
    split = held.split or (held.split_projection and of.section(weight).endswith("projection"))
    return replace(weight, frozen=fixed, split=weight.split if split else None)


def _beside(weights: tuple[VisionWeight, ...], adapters: tuple[VisionWeight, ...]) -> tuple[VisionWeight, ...]:
    """All weights of each part, followed by those of its adapters."""
    parts = dict.fromkeys(each.part for each in weights)
    return tuple(each for part in parts for each in (*weights, *adapters) if each.part == part)


def _check_split(weights: tuple[VisionWeight, ...], of: VisionWeights, *, tensor: int) -> None:
    uneven = next((each for each in weights if each.split is not None and each.shape[each.split] % tensor), None)
    if uneven is not None:
        fault = f"{uneven.name} of the {of.described} of {of.model} cannot be split over {tensor} tensor-parallel ranks"
        raise InputError("--tensor-model-parallel-size", fault, "use a divisor of its heads and of the width of its FFN")


def _of_language(tuning: FineTuning, held: _Held, training: VisionTraining) -> FineTuning:
    """The tuning of the language model: what freezes the other parts is read, and all of the language model can be frozen."""
    settings = {setting for section, frozen, setting in training.frozen if frozen}
    others = tuple(each for each in tuning.frozen if each not in settings)
    if _LANGUAGE not in _frozen_sections(held, training) or tuning.adapter is not None:
        return replace(tuning, frozen=others)
    setting = next((setting for section, frozen, setting in training.frozen if frozen and section == _LANGUAGE), "")
    listed = setting or f"the default of {training.holder} (freeze_language_model)"
    return replace(tuning, frozen=(*others, listed), freezing=_EVERYTHING)


def _describe(
    launch: LaunchInput, found: tuple[VisionWeight, ...], adapters: tuple[VisionWeight, ...], of: VisionWeights, held: _Held
) -> None:
    trained = sum(each.numel for each in found if not each.frozen)
    how = "as modules of Megatron, which tensor-parallel ranks share" if held.split else "complete on each tensor-parallel rank"
    if held.split_projection:
        how = "complete on each tensor-parallel rank but for the projection, which these ranks share"
    what = "all frozen" if not trained else "all trained" if trained == of.numel else f"of which {trained:,} are trained"
    added = sum(each.numel for each in adapters)
    what += f"; {added:,} parameters of adapters are beside its linear layers" if added else ""
    launch.assume(
        f"The {of.numel:,} parameters of the {of.described} of {of.model} are on the first pipeline stage, {how}, {what}. "
        f"The {of.inputs}, and the time for them, are not in the figures: the sequences are counted as text of their length."
    )


def _estimated(job: TrainingJob, tuning: FineTuning, of: VisionWeights) -> Iterator[str]:
    """What is counted otherwise than it is held, in either direction."""
    spec, training = tuning.freezing, tuning.vision
    if (
        training is not None
        and training.holder == "ms-swift"
        and not training.trained_beside_adapters
        and tuning.adapter is not None
    ):
        settings = [setting for section, frozen, setting in training.frozen if frozen and section == _LANGUAGE]
        if settings and set(tuning.adapter.targets) & set(ALL_LINEAR):
            yield f"{settings[0]} adds no adapters to the language model, which are counted"
    of_images = spec is not None and any(each.startswith("visual") for each in spec.prefixes)
    if spec is not None and (of_images or spec.pattern or spec.ratio or spec.trained_pattern):
        yield f"what {', '.join(tuning.frozen)} freezes in the {of.described} of {of.model} is not known"
    if job.fsdp is not None:
        yield f"the {of.described} of {of.model} is counted without FSDP units of its own"
    if job.optimizer.muon is not None:
        yield f"which weights of the {of.described} of {of.model} Muon updates is not known"
