"""Muon and layer-wise Muon, which distributes unsharded parameters over replicas, and their requirements.

Megatron: `validate_args` and `get_megatron_muon_optimizer` (megatron/core/optimizer/muon.py), 0.16.1. 0.17 supports overlap with
dist_muon. From 0.18 on `--use-distributed-optimizer` also selects the layer-wise optimizer, with buffers laid out for it unless
`--no-use-layer-wise-param-layout` is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import option, positive, since, switched_on, text
from analyzer.specs import OPTIMIZERS, MuonSpec, OptimizerSpec
from analyzer.specs.release_changes import core_behavior
from analyzer.specs.rules.violation import multiple_near

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

QUINTIC = 5
"""Number of quintic coefficients; `newton_schulz` of emerging_optimizers needs a multiple of it as the number of steps."""
FORMATS = ("torch", "torch_dist")


def muon_spec(arguments: Arguments) -> MuonSpec:
    """The settings of Muon. Raises InputError for what Megatron refuses."""
    layer_wise = _is_layer_wise(arguments)
    has_layout = core_behavior(arguments.release).has_layer_wise_layout
    aligned = layer_wise and has_layout and bool(arguments.get("use_layer_wise_param_layout", True))
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
        scalar_optimizer=text(arguments, "muon_scalar_optimizer", MuonSpec.scalar_optimizer),
    )


def _is_layer_wise(arguments: Arguments) -> bool:
    """Whether unsharded parameters are distributed over replicas."""
    named = option(arguments, "use_distributed_optimizer")
    asked = switched_on(arguments, "use_distributed_optimizer")
    if asked and not since(arguments, "0.18"):
        raise InputError(
            named, "cannot be used with Muon in this release", "leave it out, or use --optimizer dist_muon for sharded states"
        )
    return asked or OPTIMIZERS[text(arguments, "optimizer", OptimizerSpec.name)].layer_wise


def _check_overlap(arguments: Arguments, *, layer_wise: bool, aligned: bool) -> None:
    overlaps = since(arguments, "0.18") or (layer_wise and since(arguments, "0.17"))
    for dest in ("overlap_grad_reduce", "overlap_param_gather"):
        if switched_on(arguments, dest) and not overlaps:
            raise InputError(option(arguments, dest), "cannot be used with Muon in this release", "leave it out")
    if switched_on(arguments, "overlap_param_gather"):
        named = option(arguments, "overlap_param_gather")
        if not layer_wise:
            raise InputError(named, "there are no parameter shards to gather", "leave it out")
        if not aligned:
            raise UnsupportedError(named, "overlapped gathering of unsharded parameters is not modelled", "leave it out")


def _check_companions(arguments: Arguments) -> None:
    """Options that cannot be used with Muon."""
    named = f"--optimizer {text(arguments, 'optimizer', 'muon')}"
    if switched_on(arguments, "fp16"):
        raise InputError("--fp16", "cannot be used with Muon", "use --bf16")
    for dest in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if switched_on(arguments, dest):
            raise InputError(option(arguments, dest), "cannot be used with Muon", "leave it out, or use --optimizer adam")
    written = text(arguments, "ckpt_format", "torch_dist")
    if written not in FORMATS:
        raise InputError(named, f"does not support --ckpt-format {written}", "use --ckpt-format torch_dist")
    if text(arguments, "muon_scalar_optimizer", "adam") != "adam" and since(arguments, "0.18"):
        raise UnsupportedError(
            option(arguments, "muon_scalar_optimizer"), "Lion with Muon is not modelled for this release", "use adam"
        )
    if switched_on(arguments, "fp8_param_gather"):
        raise InputError(
            option(arguments, "fp8_param_gather"), "needs the distributed optimizer, which cannot be used with Muon", "leave it out"
        )


def _steps(arguments: Arguments) -> int:
    steps = positive(arguments, "muon_num_ns_steps") or QUINTIC
    quintic = text(arguments, "muon_coefficient_type", "quintic") == "quintic"
    if quintic and steps % QUINTIC:
        raise InputError(
            option(arguments, "muon_num_ns_steps"),
            f"{steps} steps are not a multiple of the {QUINTIC} quintic coefficients",
            f"use {multiple_near(steps, QUINTIC)}",
        )
    return steps
