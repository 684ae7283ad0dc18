"""The flex dispatcher: the library that communicates tokens, and its requirements.

Megatron: `TransformerConfig.__post_init__` and `MoEFlexTokenDispatcher` (megatron/core/transformer/moe/token_dispatcher.py),
0.16.1; deepseek-ai/DeepEP `Buffer.get_dispatch_config`, and on its branch hybrid-ep `BufferConfig::is_valid` and
`HybridEPBuffer.__init__`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import option, positive, switched_on, text
from analyzer.specs import FlexSpec, HardwareSpec, ModelSpec, ParallelSpec
from analyzer.specs.rules.violation import multiple_near
from analyzer.units import natural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput

DEEPEP_SMS: Final = 20
DEEPEP_RANKS: Final = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Group sizes that DeepEP supports."""
HYBRIDEP_WIDTH: Final = 16
"""HybridEP needs rows whose length is a multiple of this: 32 bytes of bf16.

Its first versions, and rows in FP8, which Megatron does not send, need a multiple of 512.
"""
HYBRIDEP_TOKENS: Final = 64
"""Where ranks may have different numbers of tokens, these are padded to a multiple of this (fused_a2a.py, 0.19)."""
DOMAIN_VARIABLES: Final = ("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "NUM_OF_RANKS_PER_NVLINK_DOMAIN")
"""Of newer and older releases of HybridEP."""


def flex_spec(launch: LaunchInput, *, model: ModelSpec, parallel: ParallelSpec, num_experts: int, padded: bool) -> FlexSpec:
    """The library of the flex dispatcher.

    `padded`: the input of the experts is padded to their capacity. Raises InputError for groups and widths that the library
    refuses, UnsupportedError for libraries that are not modelled.
    """
    arguments = launch.arguments
    ranks = parallel.expert * parallel.expert_tensor
    flag = option(arguments, "moe_flex_dispatcher_backend")
    backend = text(arguments, "moe_flex_dispatcher_backend", "deepep")
    if backend == "hybridep":
        if switched_on(arguments, "moe_enable_deepep"):
            raise InputError(
                option(arguments, "moe_enable_deepep"),
                f"cannot be used with {flag} hybridep",
                f"leave it out, or use {flag} deepep",
            )
        return _hybridep(launch, model=model, parallel=parallel, local_experts=num_experts // parallel.expert)
    if backend != "deepep":
        raise UnsupportedError(
            f"{flag} {backend}", "its buffers are not modelled", f"use {flag} deepep or hybridep, or another dispatcher"
        )
    return _deepep(arguments, ranks=ranks, padded=padded)


def _deepep(arguments: Arguments, *, ranks: int, padded: bool) -> FlexSpec:
    if ranks not in DEEPEP_RANKS:
        raise InputError(
            f"{option(arguments, 'moe_token_dispatcher_type')} flex",
            f"DeepEP does not support groups of {ranks} ranks that share experts",
            f"make expert × expert tensor-parallel size one of {', '.join(map(str, DEEPEP_RANKS))}",
        )
    if padded:
        raise InputError(
            option(arguments, "moe_pad_expert_input_to_capacity"), "cannot be used with DeepEP", "leave it out, or use alltoall"
        )
    dest = "moe_flex_dispatcher_num_sms" if arguments.get("moe_flex_dispatcher_num_sms") else "moe_deepep_num_sms"
    sms = positive(arguments, dest) or DEEPEP_SMS
    if sms % 2:
        raise InputError(option(arguments, dest), f"{sms} is odd", "give an even number, such as 20")
    return FlexSpec(backend="deepep", sms=sms)


def _hybridep(launch: LaunchInput, *, model: ModelSpec, parallel: ParallelSpec, local_experts: int) -> FlexSpec:
    arguments, ranks = launch.arguments, parallel.expert * parallel.expert_tensor
    named = f"{option(arguments, 'moe_flex_dispatcher_backend')} hybridep"
    if ranks == 1:
        raise InputError(named, "needs more than one rank that shares experts", "use --expert-model-parallel-size 2 or more")
    width = positive(arguments, "moe_latent_size") or model.hidden_size
    if width % HYBRIDEP_WIDTH:
        raise InputError(
            named,
            f"needs a row length that is a multiple of {HYBRIDEP_WIDTH}, and it is {width}",
            f"use --hidden-size {multiple_near(width, HYBRIDEP_WIDTH)}, or another dispatcher",
        )
    domain = min(ranks, _domain(launch.environ, ranks=ranks, gpu=launch.gpu))
    if ranks % domain or domain % 2 or local_experts * domain % 4:
        raise InputError(
            named,
            f"does not support {ranks} ranks with {local_experts} experts each in NVLink domains of {domain} ranks: the number of "
            "ranks must be a multiple of the domain size, which must be even, and a domain needs a multiple of 4 experts",
            "change --expert-model-parallel-size, or use another dispatcher",
        )
    return FlexSpec(backend="hybridep", nvlink_ranks=domain, equalizes=_equalizes(launch, parallel))


def _equalizes(launch: LaunchInput, parallel: ParallelSpec) -> bool:
    """Whether the ranks agree on the largest number of their tokens. All have as many, which must not be padded."""
    arguments = launch.arguments
    if not switched_on(arguments, "moe_hybridep_pad_uneven_dispatch_inputs"):
        return False
    sequences = (positive(arguments, "micro_batch_size") or 1) * (positive(arguments, "seq_length") or 1)
    tokens = sequences // (parallel.context * parallel.tensor)
    if tokens % HYBRIDEP_TOKENS:
        raise UnsupportedError(
            option(arguments, "moe_hybridep_pad_uneven_dispatch_inputs"),
            f"pads the {tokens:,} tokens of a rank to a multiple of {HYBRIDEP_TOKENS}, which is not modelled",
            f"change --seq-length so that they are a multiple of {HYBRIDEP_TOKENS}, or leave it out",
        )
    return True


def _domain(environ: Mapping[str, str], *, ranks: int, gpu: HardwareSpec) -> int:
    """Ranks whose memory a rank can access: those that a variable gives, or those that the library finds.

    Of a rack that a group does not fill evenly, it is assumed to use a power of two. Source: `detect_accessible_ranks` of
    csrc/hybrid_ep/allocator/allocator.cu.
    """
    for name in DOMAIN_VARIABLES:
        written = environ.get(name)
        if written is None:
            continue
        number = natural(written)
        if not number:
            raise InputError(name, f"{written!r} is not a number of ranks", f"set it to {gpu.nvlink_domain}, or unset it")
        return number
    found = gpu.nvlink_domain
    return found if ranks % found == 0 else 1 << (found.bit_length() - 1)
