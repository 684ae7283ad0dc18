"""Parallelism: sizes, order of ranks, and distribution of layers over pipeline ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """Distribution of layers over pipeline ranks (`--decoder-first-pipeline-num-layers` and related options)."""

    num_layers_in_first: int | None = None
    num_layers_in_last: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    layout: tuple[str, ...] | None = None
    """`--pipeline-model-parallel-layout`: for each virtual stage, in model order, a string of the letters E t m L."""


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Sizes of the dimensions of parallelism, and the order of ranks."""

    world_size: int
    nodes: int
    gpus_per_node: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    """Model chunks of each pipeline rank; None without interleaving."""
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    order: str = "tp-cp-ep-dp-pp"
    """Fastest-changing dimension first; `--use-tp-pp-dp-mapping` gives tp-cp-ep-pp-dp."""
    sequence_parallel: bool = False
    microbatch_group_size: int | None = None
    """`--microbatch-group-size-per-virtual-pipeline-stage`; None for the pipeline size."""
    distributed_optimizer_instances: int = 1
    overlap_p2p: bool = False
    """Point-to-point communication of an interleaved schedule is asynchronous. In 1F1B it never is."""
    pipeline_layout: PipelineSpec = PipelineSpec()
    cp_comm_type: str = "p2p"
    """p2p, a2a, all_gather or a2a+p2p."""
    cp_inner_size: int = 1
    """Ranks of the inner groups of a2a+p2p: the first of `--hierarchical-context-parallel-sizes`."""

    @property
    def data(self) -> int:
        """Data-parallel size, without context parallelism."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def data_with_context(self) -> int:
        """Number of ranks over which gradients of dense parameters are reduced (Megatron's dp_cp)."""
        return self.data * self.context

    @property
    def expert_data(self) -> int:
        """Expert data-parallel size: number of replicas of each expert."""
        return self.world_size // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def chunks(self) -> int:
        """Model chunks on a pipeline rank: virtual_pipeline, or 1."""
        return self.virtual_pipeline or 1
