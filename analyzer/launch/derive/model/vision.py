"""Vision-language models: what pretrain_vlm.py reads and derives.

Sources: pretrain_vlm.py and megatron/core/models/multimodal/context_parallel.py (0.16.1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.model.attention_backend import AttentionNeeds, choose_backend, switched_off
from analyzer.launch.derive.reading import option, positive, required, switched_on, text
from analyzer.launch.software import software_in
from analyzer.specs import AttentionBackend, FrozenPart, ModelSpec, VisionSpec
from analyzer.units import round_up

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.launch.derive.model.shape import Shape
    from analyzer.specs import ParallelSpec

CLASS_TOKENS: Final = 1
"""`class_token_len` of CLIP."""
_OPTIMIZERS: Final = ("adam", "sgd")
_PARTS: Final[dict[str, FrozenPart]] = {"freeze_ViT": "vision_model", "freeze_LM": "language_model"}


def combined_length(tokens: int, parallel: ParallelSpec) -> int:
    """Tokens of a sequence with padding, so that it can be split over the ranks (`context_parallel.get_padding`)."""
    divisor = 1
    if parallel.context > 1:
        divisor = 2 * parallel.context
    if parallel.sequence_parallel and parallel.tensor > 1:
        divisor *= parallel.tensor
    return round_up(tokens, divisor)


def image_size(arguments: Arguments) -> tuple[int, int, int]:
    """Height and width of an image, and of a patch. Raises InputError if an image cannot be split into patches."""
    height, width = (required(arguments, dest, "336") for dest in ("img_h", "img_w"))
    patch = required(arguments, "patch_dim", "14")
    for dest, pixels in (("img_h", height), ("img_w", width)):
        if pixels % patch:
            raise InputError(
                option(arguments, dest), f"{pixels} pixels cannot be split into patches of {patch}", f"use a multiple of {patch}"
            )
    return height, width, patch


def _image_tokens(arguments: Arguments) -> int:
    height, width, patch = image_size(arguments)
    kept = 0 if switched_on(arguments, "disable_vision_class_token") else CLASS_TOKENS
    return (height // patch) * (width // patch) + kept


def _text_length(arguments: Arguments, shape: Shape) -> int:
    return positive(arguments, "dataloader_seq_length") or shape.seq_length


def vlm_shape(launch: LaunchInput, shape: Shape, parallel: ParallelSpec) -> Shape:
    """The sizes with the length of text and image in place of that of the text. The table of positions has this length too.

    With context parallelism and a packed sequence the table has the positions of all samples of a microbatch.
    """
    arguments = launch.arguments
    tokens = _text_length(arguments, shape) + _image_tokens(arguments)
    length = combined_length(tokens, parallel)
    micro = required(arguments, "micro_batch_size", "1")
    packed = micro if _is_packed(arguments, parallel, padding=length - tokens) else 1
    if length != shape.seq_length:
        launch.assume(
            f"A sequence of the language model has {length} tokens: {_text_length(arguments, shape)} of text, "
            f"{_image_tokens(arguments)} of an image and {length - tokens} of padding (model_provider of pretrain_vlm.py)."
        )
    return replace(shape, seq_length=length, max_position_embeddings=length * packed)


def _is_packed(arguments: Arguments, parallel: ParallelSpec, *, padding: int) -> bool:
    return parallel.context > 1 and (switched_on(arguments, "use_packed_sequence") or padding > 0)


def vlm_model(launch: LaunchInput, model: ModelSpec, parallel: ParallelSpec, *, length: int) -> ModelSpec:
    """The model of pretrain_vlm.py: encoder and projector have the sizes of the language model."""
    arguments = launch.arguments
    check_optimizer(arguments)
    if text(arguments, "ckpt_format", "torch_dist") != "torch":
        named = option(arguments, "ckpt_format")
        raise InputError(named, "pretrain_vlm.py accepts only the format torch", "add --ckpt-format torch")
    layers = positive(arguments, "decoder_num_layers") or model.num_layers
    if layers != model.num_layers:
        fault = f"another number than the {model.num_layers} layers of the encoder is not modelled"
        raise UnsupportedError(option(arguments, "decoder_num_layers"), fault, f"use {model.num_layers}, or leave it out")
    if switched_on(arguments, "decoder_tp_comm_overlap"):
        raise UnsupportedError(option(arguments, "decoder_tp_comm_overlap"), "is not modelled for LLaVA", "leave it out")
    height, width, patch = image_size(arguments)
    tokens = _image_tokens(arguments)
    encoder = replace(model, position_embedding="none", attention_backend=_encoder_kernel(launch, model))
    text_length = length - tokens + 1  # one token stands for the image
    vision = VisionSpec(
        kind="clip",
        encoder=encoder,
        projector=replace(model, position_embedding="none"),
        projector_input=model.hidden_size,
        normed_projector=model.implementation == "transformer_engine",
        image_height=height,
        image_width=width,
        patch=patch,
        class_tokens=CLASS_TOKENS,
        drops_class_tokens=switched_on(arguments, "disable_vision_class_token"),
        text_length=text_length,
        causal_encoder=model.implementation == "local",
        packed=_is_packed(arguments, parallel, padding=length - tokens - (positive(arguments, "dataloader_seq_length") or 0)),
    )
    return replace(model, vision=vision, frozen=frozen_parts(arguments), tied_embeddings=False, fp16_lm_cross_entropy=False)


def check_optimizer(arguments: Arguments) -> None:
    """Raises UnsupportedError for an optimizer whose states are not modelled for a model with frozen parts."""
    name = text(arguments, "optimizer", "adam")
    if name not in _OPTIMIZERS:
        named = option(arguments, "optimizer")
        raise UnsupportedError(f"{named} {name}", "is not modelled for vision-language models", "use adam or sgd")


def frozen_parts(arguments: Arguments) -> tuple[FrozenPart, ...]:
    """The parts that the options freeze."""
    return tuple(part for dest, part in _PARTS.items() if switched_on(arguments, dest))


def _encoder_kernel(launch: LaunchInput, model: ModelSpec) -> AttentionBackend:
    """The attention kernel of the encoder, which has no context parallelism."""
    return kernel_of(launch, model, head_dim=model.kv_channels)


def kernel_of(launch: LaunchInput, model: ModelSpec, *, head_dim: int) -> AttentionBackend:
    """The attention kernel of layers with heads of this size, on all tokens of a rank."""
    arguments, environ = launch.arguments, launch.environ
    if model.implementation == "local":
        return "unfused"
    requested = text(arguments, "attention_backend", "auto")
    needs = AttentionNeeds(
        half_precision=switched_on(arguments, "bf16") or switched_on(arguments, "fp16"),
        head_dim=head_dim,
        deterministic=switched_on(arguments, "deterministic_mode") or environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0",
        software=software_in(arguments),
        dropout=model.attention_dropout > 0,
    )
    named = option(arguments, "attention_backend")
    off = switched_off(requested, environ=environ)
    return choose_backend(requested, needs=needs, gpu=launch.gpu, option=named, off=off)[0]
