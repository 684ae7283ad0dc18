"""Checks of how checkpoints are saved and loaded.

Megatron: `validate_args` (megatron/training/arguments.py), 0.16 to 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from analyzer.launch.derive.reading import option, since, switched_on, text
from analyzer.specs import OPTIMIZERS, OptimizerSpec
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


def checkpoint_violations(arguments: Arguments) -> Iterator[Violation]:
    """Options of checkpoints that contradict each other or other options."""
    yield from _saving(arguments)
    if since(arguments, "0.16"):
        yield from _non_persistent(arguments)
        yield from _formats(arguments)
        yield from _without_gloo(arguments)
        yield from _loading(arguments)


def _saving(arguments: Arguments) -> Iterator[Violation]:
    """How often checkpoints are saved, and which are kept. Before 0.16 only that the number is given."""
    if arguments.get("save") is None:
        return
    every = arguments.get("save_interval")
    if every is None:
        yield Violation(("save",), "needs the number of iterations between checkpoints", "add --save-interval 1000")
    if not isinstance(every, int) or not since(arguments, "0.16"):
        return
    if every <= 0:
        yield Violation(("save_interval",), f"{every} is not above 0", "give 1 or more")
        return
    kept = arguments.get("save_retain_interval")
    if isinstance(kept, int) and kept <= 0:
        yield Violation(("save_retain_interval",), f"{kept} is not above 0", "give 1 or more")
    elif isinstance(kept, int) and kept % every:
        yield Violation(
            ("save_retain_interval",),
            f"{kept} is not a multiple of {option(arguments, 'save_interval')} {every}",
            f"use a multiple of {every}",
        )
    if arguments.get("save_params_interval") is not None and switched_on(arguments, "overlap_param_gather"):
        yield Violation(("save_params_interval",), "contradicts --overlap-param-gather", "keep one of the two")


def _non_persistent(arguments: Arguments) -> Iterator[Violation]:
    """Checkpoints between the persistent ones."""
    kind = arguments.get("non_persistent_ckpt_type")
    if kind not in (None, "global", "local"):
        yield Violation(("non_persistent_ckpt_type",), f"{kind} is not supported", "use global or local")
    if kind == "local" and arguments.get("non_persistent_local_ckpt_dir") is None:
        yield Violation(("non_persistent_ckpt_type",), "local needs a folder", "add --non-persistent-local-ckpt-dir FOLDER")
    if not switched_on(arguments, "replication"):
        return
    if arguments.get("replication_jump") is None:
        yield Violation(("replication",), "needs the distance between copies", "add --replication-jump N")
    if kind != "local":
        yield Violation(("replication",), "is for local checkpoints", "add --non-persistent-ckpt-type local")


def _formats(arguments: Arguments) -> Iterator[Violation]:
    """Formats of fully sharded models."""
    written = text(arguments, "ckpt_format", "torch_dist")
    if written == "fsdp_dtensor" and not switched_on(arguments, "use_megatron_fsdp"):
        yield Violation(("ckpt_format",), "fsdp_dtensor is for Megatron-FSDP", "use torch_dist, or add --use-megatron-fsdp")
    if written != "torch_dcp":
        return
    if not switched_on(arguments, "use_torch_fsdp2"):
        yield Violation(("ckpt_format",), "torch_dcp is for FSDP2 of torch", "use torch_dist, or add --use-torch-fsdp2")
    for dest in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        ranks = arguments.get(dest)
        if isinstance(ranks, int) and ranks > 1:
            yield Violation(("ckpt_format",), f"torch_dcp does not support {option(arguments, dest)} {ranks}", "use torch_dist")


def _without_gloo(arguments: Arguments) -> Iterator[Violation]:
    """Without process groups on the host, optimizer shards are not gathered to be saved.

    From 0.18 on, emerging optimizers have no such shards when this is checked.
    """
    gloo = arguments.get("use_gloo_process_groups", arguments.get("enable_gloo_process_groups"))
    emerging = OPTIMIZERS[text(arguments, "optimizer", OptimizerSpec.name)].emerging and since(arguments, "0.18")
    if gloo is not False or not switched_on(arguments, "use_distributed_optimizer") or emerging:
        return
    dest = "use_gloo_process_groups" if "use_gloo_process_groups" in arguments.values else "enable_gloo_process_groups"
    if text(arguments, "ckpt_format", "torch_dist") == "torch":
        yield Violation(
            (dest,), "the distributed optimizer cannot be saved with --ckpt-format torch", "add --ckpt-format torch_dist"
        )
    efficient = "distrib_optim_fully_reshardable_mem_efficient"
    if switched_on(arguments, "dist_ckpt_optim_fully_reshardable") and switched_on(arguments, efficient):
        yield Violation((efficient,), f"contradicts {option(arguments, dest)}", "keep one of the two")


def _loading(arguments: Arguments) -> Iterator[Violation]:
    if switched_on(arguments, "load_main_params_from_ckpt") and not switched_on(arguments, "no_load_optim"):
        yield Violation(("load_main_params_from_ckpt",), "contradicts loading of the optimizer", "add --no-load-optim")
    if arguments.get("override_ckpt_iteration") is not None and switched_on(arguments, "finetune"):
        yield Violation(("override_ckpt_iteration",), "contradicts --finetune", "keep one of the two")
    if switched_on(arguments, "moe_use_upcycling") and arguments.get("save") is None:
        yield Violation(("moe_use_upcycling",), "needs a folder for the converted checkpoint", "add --save FOLDER")
