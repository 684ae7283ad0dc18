"""The attention kernel that Transformer Engine selects. It decides whether the score matrices exist.

`get_attention_backend` of Transformer Engine 2.11
(transformer_engine/pytorch/attention/dot_product_attention/utils.py), without the parts on fp8, packed sequences
and biases, which do not occur here. Head sizes of the fused kernel: `nvte_get_fused_attn_backend`
(transformer_engine/common/fused_attn/fused_attn.cpp) with cuDNN 9.5 or later, on Blackwell and for heads of two sizes
9.11 or later. Later releases have more kernels on Blackwell: deterministic ones in 2.12 with cuDNN 9.18.1, heads of 256 in 2.18.
Megatron turns `--attention-backend` into the environment variables that this function reads
(`_set_attention_backend` in megatron/core/models/common/language_module/language_module.py, 0.16.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, cast

from analyzer.errors import InputError
from analyzer.launch.derive.reading import since, text
from analyzer.specs import AttentionBackend, HardwareSpec
from analyzer.specs.software import SoftwareSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

HOPPER: Final = (9, 0)
BLACKWELL: Final = (10, 0)
CONSUMER_BLACKWELL: Final = (12, 0)
KERNELS: Final = ("flash", "fused", "unfused")
_SWITCHES: Final = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_ALLOWED: Final = {"auto": "111", "flash": "100", "fused": "010", "unfused": "001"}
"""For each --attention-backend, the values that Megatron sets the three variables to."""


_READ: Final = SoftwareSpec(te="2.11", torch="2.9")
_OF_256: Final = "2.18"
"""The release of Transformer Engine whose fused kernel has heads of 256 on Blackwell, with cuDNN 9.23."""


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """What an attention kernel must support."""

    half_precision: bool
    head_dim: int
    """Elements of a query or key head."""
    value_head_dim: int | None = None
    """Elements of a value head if different, in multi-latent attention."""
    context: int = 1
    deterministic: bool = False
    software: SoftwareSpec = _READ
    max_logit: bool = False
    sinks: bool = False
    """A softmax with a sink (`--softmax-type`); in the fused kernel with cuDNN 9.13.1 or later."""
    window: tuple[int, int] | None = None
    """Tokens before and after each token that it attends to; None for all tokens before it."""
    dropout: bool = False
    cp_comm_type: str = "p2p"
    in_fp8: bool = False
    """Queries, keys and values in MXFP8, which only later releases have a kernel for."""


def attention_in_mxfp8(arguments: Arguments) -> bool:
    """Whether the launch asks for attention in MXFP8 (`fp8_dot_product_attention`) of a release that has it.

    Before core 0.18 `get_fp8_recipe` does not pass it on to Transformer Engine.
    """
    mxfp8 = arguments.get("fp8") is not None and text(arguments, "fp8_recipe", "delayed") == "mxfp8"
    return arguments.parts.fp8_attention and mxfp8 and since(arguments, "0.18")


def check_switches(backend: str, *, environ: Mapping[str, str], option: str = "--attention-backend") -> None:
    """Raises InputError if the environment contradicts the option. Megatron asserts the same.

    `auto` is an exception: releases before 0.10 have no such option, and the environment chooses the kernel (`switched_off`).
    """
    if backend == "auto":
        return
    for name, expected in zip(_SWITCHES, _ALLOWED[backend], strict=True):
        value = environ.get(name)
        if value is not None and value != expected:
            raise InputError(
                option,
                f"{backend} needs {name}={expected}, and the environment has {value}",
                f"unset {name} and choose with --attention-backend flash, fused, unfused or auto",
            )


def switched_off(backend: str, *, environ: Mapping[str, str]) -> dict[str, str]:
    """The kernels that the environment excludes under `auto`, with the variable that does: {'fused': 'NVTE_FUSED_ATTN=0'}."""
    if backend != "auto":
        return {}
    return {kernel: f"{name}=0" for kernel, name in zip(KERNELS, _SWITCHES, strict=True) if environ.get(name) == "0"}


def choose_backend(
    backend: str,
    *,
    needs: AttentionNeeds,
    gpu: HardwareSpec,
    option: str = "--attention-backend",
    off: Mapping[str, str] = MappingProxyType({}),
) -> tuple[AttentionBackend, str]:
    """The kernel, and a sentence about it for the report. Raises InputError if no allowed kernel supports `needs`.

    `off`: kernels that must not be used (`switched_off`).
    """
    capability = gpu.compute_capability or HOPPER
    candidates = [kernel for kernel in _supported(needs, capability) if kernel not in off]
    if backend == "flash" and _flash_3_supports(needs, capability):
        candidates.append("flash")
    allowed = [b for b in candidates if backend in ("auto", b)]
    if not allowed and candidates and backend in ("flash", "fused") and needs.half_precision and backend not in off:
        return cast(AttentionBackend, backend), (
            f"Transformer Engine 2.11 has no {backend} attention for {_describe(needs)}: it is analyzed as given, because another "
            f"release may have it. --attention-backend {candidates[0]} is in this one."
        )
    if not allowed:
        raise InputError(
            option,
            f"Transformer Engine has no {'' if backend == 'auto' else backend + ' '}attention for {_describe(needs)}"
            + (f" under {' and '.join(off.values())}" if off else ""),
            f"use --attention-backend {candidates[0]}" if candidates else "leave out --context-parallel-size, or train in bf16",
        )
    picked = allowed[0]
    where = gpu.name or (
        f"a GPU of compute capability {capability[0]}.{capability[1]}" if gpu.compute_capability else "a Hopper GPU (none is given)"
    )
    if needs.in_fp8 and picked == "fused":
        return (
            picked,
            f"Attention kernel: {_KERNELS[picked]} in MXFP8 (Transformer Engine 2.15 and cuDNN 9.21 or later, on {where}).",
        )
    sentence = f"Attention kernel: {_KERNELS[picked]} (Transformer Engine 2.11 on {where})"
    if picked == "flash" and _two_sizes(needs):
        sentence += ", with flash-attn 3 installed; without it the training does not start"
    elif picked == "flash":
        sentence += ", with flash-attn 2 installed; without it the peak may be higher"
    if needs.sinks and picked == "fused":
        sentence += ", with cuDNN 9.13.1 or later for the sinks; without it the score matrices exist and the peak is higher"
    if _fused_of_256(needs, capability):
        if picked == "fused":
            sentence += f", with Transformer Engine {_OF_256} and cuDNN 9.23 or later"
        elif picked == "unfused":
            sentence += f"; Transformer Engine {_OF_256} with cuDNN 9.23 has a kernel without score matrices (--info-te {_OF_256})"
    if needs.deterministic and picked == "fused" and capability >= BLACKWELL:
        sentence += ", with Transformer Engine 2.12 and cuDNN 9.18.1 or later, which are deterministic"
    if off:
        sentence += f", because of {' and '.join(off.values())}; releases since 0.10 start only without that"
    return picked, sentence + "."


_KERNELS: Final[Mapping[str, str]] = {"fused": "cuDNN fused attention", "flash": "flash-attn", "unfused": "unfused attention"}
"""Names of the kernels in the report."""


def _describe(needs: AttentionNeeds) -> str:
    values = f" and {needs.value_head_dim}" if _two_sizes(needs) else ""
    parts = [f"heads of {needs.head_dim}{values}", "16-bit" if needs.half_precision else "fp32"]
    if needs.context > 1:
        parts.append(f"context size {needs.context}")
    if needs.deterministic:
        parts.append("deterministic")
    if needs.sinks:
        parts.append("sinks")
    if needs.window:
        parts.append("a window of {},{}".format(*needs.window) + (" with dropout" if needs.dropout else ""))
    return ", ".join(parts)


def _supported(needs: AttentionNeeds, capability: tuple[int, int]) -> list[AttentionBackend]:
    """Kernels that support `needs`, the preferred one first: fused before flash from Hopper on, otherwise flash first."""
    picks: list[AttentionBackend] = []
    if needs.context > 1 and ((needs.sinks and needs.cp_comm_type != "a2a") or (needs.window and "p2p" in needs.cp_comm_type)):
        return picks
    if _flash_supports(needs, capability):
        picks.append("flash")
    if _fused_supports(needs, capability):
        picks.insert(0 if capability >= HOPPER else len(picks), "fused")
    if needs.context == 1:
        picks.append("unfused")
    return picks


def _two_sizes(needs: AttentionNeeds) -> bool:
    return needs.value_head_dim not in (None, needs.head_dim)


def _flash_supports(needs: AttentionNeeds, capability: tuple[int, int]) -> bool:
    widest = 256 if capability in ((8, 0), (9, 0), (10, 0), (12, 0)) else 192
    return (
        needs.half_precision
        and capability >= (8, 0)
        and not needs.max_logit
        and not needs.sinks
        and not _two_sizes(needs)
        and needs.head_dim % 8 == 0
        and needs.head_dim <= widest
    )


def _flash_3_supports(needs: AttentionNeeds, capability: tuple[int, int]) -> bool:
    """Whether flash-attn 3, which runs on Hopper only, supports queries and values of the two sizes of multi-latent attention.

    Source: `_is_fa3_supported` in pytorch/attention/dot_product_attention/utils.py (TE 2.11).
    """
    queries, values = needs.head_dim, needs.value_head_dim or needs.head_dim
    supported = (128 < queries <= 192 and 96 < values <= 128) or (queries <= 64 and values <= 512)
    plain = not (needs.max_logit or needs.sinks or needs.deterministic)
    return _two_sizes(needs) and plain and needs.half_precision and capability == HOPPER and supported


def _fused_supports(needs: AttentionNeeds, capability: tuple[int, int]) -> bool:
    deterministic = not needs.deterministic or _fused_is_deterministic(needs, capability)
    window = needs.window is None or (needs.window[1] == 0 and not needs.dropout)
    sizes = _fused_sizes(needs, capability) or (not needs.software.te_is_before(_OF_256) and _fused_of_256(needs, capability))
    return needs.half_precision and capability >= (8, 0) and deterministic and window and sizes


def _fused_of_256(needs: AttentionNeeds, capability: tuple[int, int]) -> bool:
    """Heads of 256 on Blackwell, whose backward is always the deterministic one."""
    plain = not (_two_sizes(needs) or needs.dropout or needs.sinks)
    return plain and needs.head_dim == 256 and BLACKWELL <= capability < (11, 0)


def _fused_is_deterministic(needs: AttentionNeeds, capability: tuple[int, int]) -> bool:
    if needs.software.te_is_before("2.12"):
        return HOPPER <= capability < BLACKWELL
    return not needs.sinks and HOPPER <= capability < CONSUMER_BLACKWELL and (capability < BLACKWELL or not needs.dropout)


def _fused_sizes(needs: AttentionNeeds, capability: tuple[int, int]) -> bool:
    """Head sizes of the fused kernel in training: up to 128, on Hopper up to 256, and DeepSeek's 192 and 128."""
    sizes = (needs.head_dim, needs.value_head_dim or needs.head_dim)
    if any(each % 8 for each in sizes):
        return False
    if max(sizes) <= 128:
        return True
    if sizes == (192, 128):
        return capability == HOPPER or BLACKWELL <= capability < CONSUMER_BLACKWELL
    if capability != HOPPER or max(sizes) > 256:
        return False
    return not (_two_sizes(needs) and min(sizes) >= 128)
