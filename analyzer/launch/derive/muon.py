"""Muon, and Muon with whole parameters shared out among replicas: what Megatron demands of a launch with it.

Megatron: `validate_args` and `get_megatron_muon_optimizer` (megatron/core/optimizer/muon.py), 0.16.1; 0.17 lets dist_muon
overlap, and from 0.18 on the distributed optimizer's flag asks for the same sharing out, in buffers laid out for it unless
--no-use-layer-wise-param-layout is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import option, positive, since, switched_on, text
from analyzer.specs import MuonSpec
from analyzer.specs.rules.violation import multiple_near

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

QUINTIC = 5
"""Steps of one round of coefficients; `newton_schulz` of emerging_optimizers takes whole rounds only."""
FORMATS = ("torch", "torch_dist")


def is_muon(arguments: Arguments) -> bool:
    """Whether matrices are updated by Muon."""
    return text(arguments, "optimizer", "adam") in ("muon", "dist_muon")


def muon_spec(arguments: Arguments) -> MuonSpec | None:
    """How Muon works; None with another optimizer. Raises InputError for what Megatron refuses."""
    if not is_muon(arguments):
        return None
    layer_wise = _shares_out(arguments)
    aligned = layer_wise and since(arguments, "0.18") and bool(arguments.get("use_layer_wise_param_layout", True))
    _check_overlap(arguments, layer_wise=layer_wise, aligned=aligned)
    _check_companions(arguments)
    return MuonSpec(
        layer_wise=layer_wise,
        aligned=aligned,
        tensor_parallel=cast(Literal["blockwise", "duplicated", "distributed"], text(arguments, "muon_tp_mode", "blockwise")),
        split_qkv=bool(arguments.get("muon_split_qkv", True)),
        nesterov=switched_on(arguments, "muon_use_nesterov") or switched_on(arguments, "muon_nesterov"),
        steps=_steps(arguments),
        iterates_dtype="bf16" if text(arguments, "muon_fp32_matmul_prec", "medium") == "medium" else "fp32",
        scalar_optimizer=cast(Literal["adam", "lion"], text(arguments, "muon_scalar_optimizer", "adam")),
    )


def _shares_out(arguments: Arguments) -> bool:
    """Whether whole parameters are shared out among replicas."""
    named = option(arguments, "use_distributed_optimizer")
    asked = switched_on(arguments, "use_distributed_optimizer")
    if asked and not since(arguments, "0.18"):
        raise InputError(named, "does not go with Muon", "leave it out, and use --optimizer dist_muon for sharded states")
    return asked or text(arguments, "optimizer", "adam") == "dist_muon"


def _check_overlap(arguments: Arguments, *, layer_wise: bool, aligned: bool) -> None:
    overlaps = since(arguments, "0.18") or (layer_wise and since(arguments, "0.17"))
    for dest in ("overlap_grad_reduce", "overlap_param_gather"):
        if switched_on(arguments, dest) and not overlaps:
            raise InputError(option(arguments, dest), "does not go with Muon in this release", "leave it out")
    if switched_on(arguments, "overlap_param_gather"):
        named = option(arguments, "overlap_param_gather")
        if not layer_wise:
            raise InputError(named, "there are no shards to gather", "leave it out")
        if not aligned:
            raise UnsupportedError(named, "overlapped gathering of whole parameters is not modelled", "leave it out")


def _check_companions(arguments: Arguments) -> None:
    """Options that Muon does not go with."""
    named = f"--optimizer {text(arguments, 'optimizer', 'muon')}"
    if switched_on(arguments, "fp16"):
        raise InputError("--fp16", "does not go with Muon", "use --bf16")
    for dest in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if switched_on(arguments, dest):
            raise InputError(option(arguments, dest), "does not go with Muon", "leave it out, or use --optimizer adam")
    written = text(arguments, "ckpt_format", "torch_dist")
    if written not in FORMATS:
        raise InputError(named, f"does not save as {written}", "use --ckpt-format torch_dist")
    if text(arguments, "muon_scalar_optimizer", "adam") != "adam" and since(arguments, "0.18"):
        raise UnsupportedError(
            option(arguments, "muon_scalar_optimizer"), "Lion beside Muon is not modelled for this release", "leave it at adam"
        )
    if switched_on(arguments, "fp8_param_gather"):
        raise InputError(
            option(arguments, "fp8_param_gather"), "needs the distributed optimizer, which Muon does not go with", "leave it out"
        )


def _steps(arguments: Arguments) -> int:
    steps = positive(arguments, "muon_num_ns_steps") or QUINTIC
    quintic = text(arguments, "muon_coefficient_type", "quintic") == "quintic"
    if quintic and steps % QUINTIC:
        raise InputError(
            option(arguments, "muon_num_ns_steps"),
            f"{steps} steps are no whole rounds of the {QUINTIC} quintic coefficients",
            f"use {multiple_near(steps, QUINTIC)}",
        )
    return steps
