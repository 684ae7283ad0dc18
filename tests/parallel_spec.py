"""Creates a ParallelSpec for tests from sizes, or from the options of a recorded launch."""

from __future__ import annotations

from typing import Any

from analyzer.specs import ParallelSpec

PP_LAST = "tp-cp-ep-dp-pp"
DP_LAST = "tp-cp-ep-pp-dp"


def spec(world: int, **sizes: Any) -> ParallelSpec:
    return ParallelSpec(world_size=world, nodes=1, gpus_per_node=world, **{"overlap_p2p": True, **sizes})


def option(argv: list[str], name: str, default: str | None = None) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else default


def spec_of_argv(argv: list[str], world: int) -> ParallelSpec:
    """Return the spec of the options that determine the rank layout. Other options are ignored."""
    tensor = int(option(argv, "--tensor-model-parallel-size", "1") or 1)
    virtual = option(argv, "--num-virtual-stages-per-pipeline-rank")
    return spec(
        world,
        tensor=tensor,
        pipeline=int(option(argv, "--pipeline-model-parallel-size", "1") or 1),
        virtual_pipeline=int(virtual) if virtual else None,
        context=int(option(argv, "--context-parallel-size", "1") or 1),
        expert=int(option(argv, "--expert-model-parallel-size", "1") or 1),
        expert_tensor=int(option(argv, "--expert-tensor-parallel-size") or tensor),
        order=DP_LAST if "--use-tp-pp-dp-mapping" in argv else PP_LAST,
        overlap_p2p="--no-overlap-p2p-communication" not in argv,
    )
