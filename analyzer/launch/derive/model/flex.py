"""The flex dispatcher: which library it sends tokens with, and what that demands.

Megatron: `TransformerConfig.__post_init__` and `MoEFlexTokenDispatcher` (megatron/core/transformer/moe/token_dispatcher.py),
0.16.1; deepseek-ai/DeepEP `Buffer.get_dispatch_config`, and on its branch hybrid-ep `BufferConfig::is_valid` and
`HybridEPBuffer.__init__`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import multiple_near, option, positive, switched_on, text
from analyzer.specs import FlexSpec, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.parallel import Grid

DEEPEP_SMS: Final = 20
DEEPEP_RANKS: Final = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Groups that DeepEP has settings for."""
HYBRIDEP_WIDTH: Final = 512
"""HybridEP moves rows of a multiple of so many values."""
DOMAIN_VARIABLES: Final = ("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "NUM_OF_RANKS_PER_NVLINK_DOMAIN")
"""Of newer and older releases of HybridEP."""
DOMAIN: Final = 8


def check_flex(
    arguments: Arguments, *, model: ModelSpec, grid: Grid, num_experts: int, padded: bool, environ: Mapping[str, str]
) -> FlexSpec:
    """The library of the flex dispatcher.

    `padded` says that the experts' input is padded to their capacity. Raises InputError for groups and widths that the library
    refuses, UnsupportedError for libraries that are not modelled.
    """
    ranks = grid.expert * grid.expert_tensor
    flag = option(arguments, "moe_flex_dispatcher_backend")
    backend = text(arguments, "moe_flex_dispatcher_backend", "deepep")
    if backend == "hybridep":
        if switched_on(arguments, "moe_enable_deepep"):
            raise InputError(
                option(arguments, "moe_enable_deepep"), f"does not go with {flag} hybridep", f"leave it out, or use {flag} deepep"
            )
        return _hybridep(arguments, model=model, ranks=ranks, local_experts=num_experts // grid.expert, environ=environ)
    if backend != "deepep":
        raise UnsupportedError(
            f"{flag} {backend}", "its buffers are not modelled", f"use {flag} deepep or hybridep, or another dispatcher"
        )
    return _deepep(arguments, ranks=ranks, padded=padded)


def _deepep(arguments: Arguments, *, ranks: int, padded: bool) -> FlexSpec:
    if ranks not in DEEPEP_RANKS:
        raise InputError(
            f"{option(arguments, 'moe_token_dispatcher_type')} flex",
            f"DeepEP has no settings for {ranks} ranks that share experts",
            f"make expert times expert-tensor size one of {', '.join(map(str, DEEPEP_RANKS))}",
        )
    if padded:
        raise InputError(
            option(arguments, "moe_pad_expert_input_to_capacity"), "does not go with DeepEP", "leave it out, or use alltoall"
        )
    dest = "moe_flex_dispatcher_num_sms" if arguments.get("moe_flex_dispatcher_num_sms") else "moe_deepep_num_sms"
    sms = positive(arguments, dest) or DEEPEP_SMS
    if sms % 2:
        raise InputError(option(arguments, dest), f"{sms} is odd", "give an even number, such as 20")
    return FlexSpec(backend="deepep", sms=sms)


def _hybridep(arguments: Arguments, *, model: ModelSpec, ranks: int, local_experts: int, environ: Mapping[str, str]) -> FlexSpec:
    named = f"{option(arguments, 'moe_flex_dispatcher_backend')} hybridep"
    if ranks == 1:
        raise InputError(named, "there is one rank, and nobody to send to", "use --expert-model-parallel-size 2 or more")
    width = positive(arguments, "moe_latent_size") or model.hidden_size
    if width % HYBRIDEP_WIDTH:
        raise InputError(
            named,
            f"sends rows of a multiple of {HYBRIDEP_WIDTH} values, and these have {width}",
            f"use --hidden-size {multiple_near(width, HYBRIDEP_WIDTH)}, or another dispatcher",
        )
    domain = min(ranks, _domain(environ))
    if ranks % domain or domain % 2 or local_experts * domain % 4:
        raise InputError(
            named,
            f"cannot share {local_experts} experts of each rank over NVLink domains of {domain} of its {ranks} ranks: the ranks "
            "must fill whole domains of an even number of ranks, with a multiple of 4 experts each",
            "change --expert-model-parallel-size, or use another dispatcher",
        )
    return FlexSpec(backend="hybridep", nvlink_ranks=domain)


def _domain(environ: Mapping[str, str]) -> int:
    for name in DOMAIN_VARIABLES:
        written = environ.get(name)
        if written is None:
            continue
        if not written.isdecimal() or int(written) < 1:
            raise InputError(name, f"{written!r} is no number of ranks", f"set it to {DOMAIN}, or unset it")
        return int(written)
    return DOMAIN
