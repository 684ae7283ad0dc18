"""What every check of the options shares: values read with their type, options named as the user wrote them.

The checks themselves lie by topic in `validate_parallel`, `validate_pipeline`, `validate_shape`, `validate_model`,
`validate_mla`, `validate_moe`, `validate_router`, `validate_mtp`, `validate_batch`, `validate_precision`,
`validate_optimizer`, `validate_recompute`, `validate_layers` and `validate_runtime`. They follow Megatron's `validate_args` and the
`__post_init__` of its configs, read in core 0.16.1 unless a line says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

RELEASE_2023: Final = "2023"
"""The code of August 2023, core package 0.2.0."""

_FLAGS: Final = {
    "add_bias_linear": "--disable-bias-linear",
    "add_position_embedding": "--no-position-embedding",
    "apply_rope_fusion": "--no-rope-fusion",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "clone_scatter_output_in_embedding": "--no-clone-scatter-output-in-embedding",
    "deprecated_use_mcore_models": "--use-mcore-models",
    "fp4": "--fp4-format",
    "fp8": "--fp8-format",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "nccl_ub": "--use-nccl-ub",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "pad_vocab_size": "--no-pad-vocab-size",
    "torch_fsdp2_reshard_after_forward": "--torch-fsdp2-no-reshard-after-forward",
}
"""Flags that are not their dest with dashes, of the dests that messages name."""


def option(arguments: Arguments, dest: str) -> str:
    """The flag of `dest` as the user wrote it, or as Megatron names it where the user did not."""
    return arguments.spelled.get(dest) or _FLAGS.get(dest) or "--" + dest.replace("_", "-")


def release_number(release: str) -> tuple[int, ...]:
    """'0.16.1' as (0, 16, 1), so that releases compare; '2023' as the core package of that year, (0, 2, 0)."""
    if release == RELEASE_2023:
        return (0, 2, 0)
    return tuple(int(part) for part in release.split(".") if part.isdigit())


def since(arguments: Arguments, release: str) -> bool:
    """Whether the release that is assumed is `release` or a later one."""
    return release_number(arguments.release) >= release_number(release)


def switched_on(arguments: Arguments, dest: str) -> bool:
    """A flag without a value; a dest that the release does not know is off."""
    return bool(arguments.get(dest, False))


def text(arguments: Arguments, dest: str, default: str) -> str:
    """A word; `default` where there is none."""
    value = arguments.get(dest)
    return default if value is None else str(value)


def number(arguments: Arguments, dest: str, default: float) -> float:
    """A number; `default` where there is none. Raises InputError for what is not a number."""
    value = arguments.get(dest)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(option(arguments, dest), f"{value!r} is not a number", "give a number")
    return float(value)


def share(arguments: Arguments, dest: str, default: float, *, zero: bool) -> float:
    """A number from 0 to 1: a probability, where 0 is one (`zero`), else a part. Raises InputError for any other."""
    value = number(arguments, dest, default)
    if not 0 <= value <= 1 or (value == 0 and not zero):
        bounds = "between 0 and 1" if zero else "above 0 and at most 1"
        raise InputError(option(arguments, dest), f"{value:g} is not {bounds}", f"give a number {bounds}, such as {default:g}")
    return value


def whole(arguments: Arguments, dest: str) -> int | None:
    """A whole number, or None. Raises InputError for anything else."""
    value = arguments.get(dest)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(option(arguments, dest), f"{value!r} is not a whole number", "give a whole number")
    return value


def positive(arguments: Arguments, dest: str) -> int | None:
    """A whole number above 0, or None. Raises InputError for 0 and below."""
    value = whole(arguments, dest)
    if value is not None and value <= 0:
        raise InputError(option(arguments, dest), f"{value} is not above 0", "give 1 or more")
    return value


def required(arguments: Arguments, dest: str, example: str) -> int:
    """A whole number above 0 that Megatron cannot do without. Raises InputError where it is missing."""
    value = positive(arguments, dest)
    if value is None:
        raise InputError(option(arguments, dest), "is missing", f"add it, for example {option(arguments, dest)} {example}")
    return value


def size(arguments: Arguments, dest: str) -> int:
    """A size of parallelism: 1 where it is not given."""
    value = positive(arguments, dest)
    return 1 if value is None else value


def multiple_near(value: int, factor: int) -> int:
    """The multiple of `factor` next to `value`, at least one `factor`: what a remedy can propose."""
    return max(1, round(value / factor)) * factor
