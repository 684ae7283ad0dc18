"""Hybrid models with Mamba layers: the pattern of their layers, and the sizes of the Mamba layers.

Megatron: `validate_args` (megatron/training/arguments.py), core/ssm/mamba_hybrid_layer_allocation.py (0.16.1), and from 0.18 on
core/models/hybrid/hybrid_layer_allocation.py. Whether tensor and context parallelism divide the sizes is checked by
`analyzer.specs.rules.hybrid`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import integer, option, positive, share, since, switched_on
from analyzer.specs.hybrid import LETTERS, MAMBA_EXPANSION
from analyzer.specs.model import HybridSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import BlockSpec, ModelSpec

STACKS: Final = ("mamba_stack_spec", "hybrid_stack_spec")
"""Names of the layer specifications (`--spec MODULE NAME`) of hybrid models."""
_PATTERNS: Final = ("hybrid_layer_pattern", "hybrid_override_pattern")
_INCOMPATIBLE: Final = {
    "heterogeneous_layers_config_path": "leave one of them out",
    "fine_grained_activation_offloading": "offloading is not modelled with hybrid models; leave it out",
    "cpu_offloading_num_layers": "offloading is not modelled with hybrid models; leave it out",
    "overlap_moe_expert_parallel_comm": "overlapped microbatches are not modelled with hybrid models; leave it out",
    "delay_wgrad_compute": "delayed weight gradients are not modelled with hybrid models; leave it out",
}
"""By dest: options that change what is modelled, and what to do."""
_OF_STAGES: Final = (
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
_LONGEST: Final = 10_000
"""Letters of the longest pattern that is read: more than any model has."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The layers of a hybrid model, as its pattern lists them."""

    stages: tuple[str, ...]
    """The letters of each virtual pipeline stage; one item if the pattern has no |."""
    mtp: str = ""
    """The letters of one MTP depth."""
    depths: int = 0

    @property
    def letters(self) -> str:
        """A letter for each decoder layer."""
        return "".join(self.stages)

    @property
    def written(self) -> str:
        """The pattern as an option has it."""
        return "/".join(["|".join(self.stages), *[self.mtp] * self.depths])

    def split(self, counts: Sequence[int]) -> Pattern:
        """The same layers with these numbers of layers in the virtual pipeline stages."""
        letters = iter(self.letters)
        return replace(self, stages=tuple("".join(islice(letters, count)) for count in counts))

    @property
    def layout(self) -> tuple[str, ...] | None:
        """The stages as those of `--pipeline-model-parallel-layout`; None for an even or uneven split."""
        if len(self.stages) == 1:
            return None
        letters = ["t" * len(stage) for stage in self.stages]
        letters[0] = "E" + letters[0]
        letters[-1] += "m" * self.depths + "L"
        return tuple(letters)


def is_hybrid(arguments: Arguments) -> bool:
    """Whether the options describe a hybrid model, by a pattern, by shares of layer types or by the layer specification."""
    if any(arguments.get(dest) is not None for dest in _PATTERNS) or switched_on(arguments, "is_hybrid_model"):
        return True
    if any(arguments.get(dest) for dest in ("hybrid_attention_ratio", "hybrid_mlp_ratio")):
        return True
    spec = arguments.get("spec")
    return isinstance(spec, list | tuple) and any(str(word) in STACKS for word in spec)


def pattern_dest(arguments: Arguments) -> str:
    """The option with the pattern, or that to write one with."""
    return next((dest for dest in _PATTERNS if arguments.get(dest) is not None), _PATTERNS[0])


def read_pattern(arguments: Arguments) -> Pattern | None:
    """The layers of a hybrid model; None for other models.

    Raises InputError for patterns that Megatron refuses, UnsupportedError for layer types that are not modelled.
    """
    if not is_hybrid(arguments):
        return None
    if not since(arguments, "0.13"):
        raise UnsupportedError("--hybrid-override-pattern", "hybrid models are modelled from core 0.13 on", "use a later release")
    given = [dest for dest in _PATTERNS if arguments.get(dest) is not None]
    if len(given) > 1:
        raise InputError(option(arguments, given[1]), f"contradicts {option(arguments, given[0])}", "keep one of the two")
    if not given:
        return Pattern(stages=(_of_shares(arguments),))
    named, written = option(arguments, given[0]), str(arguments.get(given[0]))
    known = [letter for letter, layer in LETTERS.items() if since(arguments, layer.since)]
    pattern = _parsed(named, written, known, with_stages=since(arguments, "0.17"))
    _check_layers(arguments, named, pattern)
    return pattern


def _is_latent(letters: str) -> bool:
    """Whether any of the letters is a layer with multi-latent attention."""
    return "+" in letters or "D" in letters


def with_implied_options(launch: LaunchInput) -> LaunchInput:
    """The launch with the options that Megatron derives from the pattern of a hybrid model; the same launch for other models.

    Multi-latent attention follows from + and D, sparse attention from D (`validate_args` and `core_transformer_config_from_args`,
    0.18). The layers have no norms of queries and keys (`hybrid_stack_spec`).
    """
    arguments = launch.arguments
    written = next((str(arguments.get(dest)) for dest in _PATTERNS if arguments.get(dest) is not None), "")
    implied: dict[str, object] = {}
    if _is_latent(written):
        implied["multi_latent_attention"] = True
    if "D" in written:
        implied["experimental_attention_variant"] = "dsa"
    if is_hybrid(arguments) and switched_on(arguments, "qk_layernorm"):
        implied["qk_layernorm"] = False
        launch.warn(f"{option(arguments, 'qk_layernorm')}: has no effect on the layers of a hybrid model.")
    if not implied:
        return launch
    return replace(launch, arguments=replace(arguments, values={**arguments.values, **implied}))


def _parsed(named: str, written: str, known: Sequence[str], *, with_stages: bool) -> Pattern:
    """A pattern of `known` letters, from core 0.17 on with | between pipeline stages and / before the layers of each MTP depth."""
    if len(written) > _LONGEST:
        raise InputError(named, f"has {len(written)} letters, and {_LONGEST} is the largest number that is modelled", "give less")
    main, *depths = written.split("/")
    stages = tuple(main.split("|"))
    for letter in main.replace("|", "") + "".join(depths):
        if letter not in known:
            first = f", or name core {LETTERS[letter].since} or later with --info-megatron" if letter in LETTERS else ""
            raise InputError(named, f"{letter!r} is not a layer type of this release", f"use {', '.join(known)}{first}")
    if (depths or len(stages) > 1) and not with_stages:
        raise InputError(named, "| and / need core 0.17 or later", "leave them out, or name a later release with --info-megatron")
    if "" in stages:
        raise UnsupportedError(named, "pipeline stages without layers are not modelled", "give each stage a layer")
    depths = [each for each in depths if each]
    if any(each != depths[0] for each in depths):
        raise InputError(named, "has MTP depths with different layers", "write the same letters after each /")
    if "*" in written and _is_latent(written):
        latent = next(letter for letter in written if _is_latent(letter))
        raise InputError(named, f"has attention (*) and multi-latent attention ({latent})", "use one of the two")
    return Pattern(stages=stages, mtp=depths[0] if depths else "", depths=len(depths))


def _check_layers(arguments: Arguments, named: str, pattern: Pattern) -> None:
    """Up to 0.16 the numbers of layers and of each layer type must be those of other options; later they are ignored."""
    layers = integer(arguments, "num_layers")
    if since(arguments, "0.17"):
        return
    if layers is not None and layers != len(pattern.letters):
        raise InputError(
            named,
            f"has {len(pattern.letters)} letters, and {option(arguments, 'num_layers')} is {layers}",
            f"write {layers} letters, or set --num-layers {len(pattern.letters)}",
        )
    if any(arguments.get(dest) for dest in ("hybrid_attention_ratio", "hybrid_mlp_ratio")):
        shares = _of_shares(arguments)
        if sorted(shares) != sorted(pattern.letters):
            raise InputError(
                named, "has other numbers of layer types than the shares of attention and FFN layers give", "leave the shares out"
            )


def _of_shares(arguments: Arguments) -> str:
    """The pattern of `--hybrid-attention-ratio` and `--hybrid-mlp-ratio` (`_allocate_auto`)."""
    layers = positive(arguments, "num_layers")
    if layers is None:
        raise InputError("--num-layers", "is missing", "add it, or give --hybrid-layer-pattern")
    attention = share(arguments, "hybrid_attention_ratio", 0.0, zero=True)
    feed_forward = share(arguments, "hybrid_mlp_ratio", 0.0, zero=True)
    if attention + feed_forward > 1:
        raise InputError(
            option(arguments, "hybrid_attention_ratio"),
            "and --hybrid-mlp-ratio have a sum above 1",
            "use shares with a sum of at most 1",
        )
    letters = ["M"] * layers
    mamba = layers - round(layers * attention)
    _place(letters, "*", mamba / (round(layers * attention) + 1))
    replaced = round(layers * feed_forward)
    if replaced:
        _place(letters, "-", (mamba - replaced) / replaced)
    return "".join(letters)


def _place(letters: list[str], letter: str, distance: float) -> None:
    """Replaces Mamba layers at equal distances, in Mamba layers, by another type."""
    left = distance
    for place, before in enumerate(letters):
        if before != "M":
            continue
        if left < 0.5:
            letters[place] = letter
            left += distance
        else:
            left -= 1


def check_stages(arguments: Arguments, pattern: Pattern, *, pipeline: int) -> None:
    """Raises InputError for options that distribute layers and that Megatron refuses for hybrid models."""
    given = next((dest for dest in _OF_STAGES if arguments.get(dest) not in (None, False)), None)
    named = option(arguments, "hybrid_layer_pattern")
    if given is not None:
        remedy = "mark the stages with | in the pattern" if since(arguments, "0.17") else "leave it out"
        raise InputError(option(arguments, given), "cannot be used with a hybrid model", remedy)
    if len(pattern.stages) == 1:
        return
    for dest in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if arguments.get(dest) is not None:
            raise InputError(option(arguments, dest), f"contradicts the | in {named}", "keep one of the two")
    if len(pattern.stages) % pipeline:
        raise InputError(
            named,
            f"has {len(pattern.stages)} stages, which {pipeline} pipeline ranks cannot share equally",
            f"write a multiple of {pipeline} stages",
        )


def hybrid_spec(arguments: Arguments, *, model: ModelSpec) -> HybridSpec | None:
    """The sizes of the Mamba layers; None for other models. Raises InputError for sizes that Megatron refuses."""
    pattern = read_pattern(arguments)
    if pattern is None:
        return None
    _check_options(arguments, pattern, model=model)
    head_dim = positive(arguments, "mamba_head_dim") or 64
    groups = positive(arguments, "mamba_num_groups") or 8
    heads = positive(arguments, "mamba_num_heads")
    if heads is None:
        heads, rest = divmod(MAMBA_EXPANSION * model.hidden_size, head_dim)
        if rest:
            raise InputError(
                option(arguments, "mamba_head_dim"),
                f"{MAMBA_EXPANSION * model.hidden_size} elements cannot be split into heads of {head_dim}",
                "use a divisor, or add --mamba-num-heads",
            )
    if heads % groups:
        raise InputError(
            option(arguments, "mamba_num_groups"),
            f"{heads} heads cannot be split into {groups} groups",
            f"use a divisor of {heads}",
        )
    return HybridSpec(
        pattern=pattern.letters,
        state_dim=positive(arguments, "mamba_state_dim") or 128,
        head_dim=head_dim,
        groups=groups,
        heads=heads,
        memory_efficient=not (
            switched_on(arguments, "disable_mamba_mem_eff_path") or arguments.get("use_mamba_mem_eff_path") is False
        ),
        mtp_pattern=pattern.mtp,
        mtp_repeated=pattern.depths > 1 and switched_on(arguments, "mtp_use_repeated_layer"),
    )


def _check_options(arguments: Arguments, pattern: Pattern, *, model: ModelSpec) -> None:
    named = "a hybrid model"
    if model.mla is not None and not _is_latent(pattern.written):
        remedy = "leave it out, or use + in the pattern (from core 0.19 on)"
        fault = "is not modelled with a hybrid model whose pattern has no such layers"
        raise UnsupportedError(option(arguments, "multi_latent_attention"), fault, remedy)
    for dest, remedy in _INCOMPATIBLE.items():
        if arguments.get(dest):
            raise UnsupportedError(option(arguments, dest), f"cannot be analyzed with {named}", remedy)
    if model.implementation != "transformer_engine":
        raise UnsupportedError(
            option(arguments, "transformer_impl"),
            f"{named} has layers of Transformer Engine",
            "use --transformer-impl transformer_engine",
        )
    if arguments.get("fp4") is not None and not since(arguments, "0.17"):
        fault = f"has no effect on {named} before core 0.17, whose layers then run in bf16"
        raise UnsupportedError(option(arguments, "fp4"), fault, "use --fp8-format, leave it out, or name a later release")
    if "muon" in str(arguments.get("optimizer")) and since(arguments, "0.17"):
        fault = f"Muon is modelled with {named} before core 0.17 only: later releases update the input projection with Adam"
        raise UnsupportedError(option(arguments, "optimizer"), fault, "use --optimizer adam")
    if model.windowed:
        raise UnsupportedError(option(arguments, "window_size"), f"windows are not modelled with {named}", "leave it out")


def hybrid_blocks(hybrid: HybridSpec) -> tuple[BlockSpec, ...]:
    """The branches of each decoder layer."""
    return tuple(LETTERS[letter].block for letter in hybrid.pattern)


def layers_with_experts(arguments: Arguments) -> tuple[bool, ...] | None:
    """For each decoder layer of a hybrid model whether it has experts; None for other models."""
    pattern = read_pattern(arguments)
    return None if pattern is None else tuple(LETTERS[letter].moe for letter in pattern.letters)
