"""A training job."""

from __future__ import annotations

from dataclasses import dataclass

from analyzer.specs.fine_tuning import ALL_PARAMETERS, FineTuning
from analyzer.specs.hardware import HardwareSpec
from analyzer.specs.model import AssumedVocabulary, ModelSpec
from analyzer.specs.optimizer import FsdpSpec, OptimizerSpec
from analyzer.specs.parallel import ParallelSpec
from analyzer.specs.precision import PrecisionSpec
from analyzer.specs.release_changes import CoreBehavior, EngineBehavior, core_behavior, engine_behavior
from analyzer.specs.software import DEFAULT_NCCL, NcclSpec, SoftwareSpec
from analyzer.specs.training import ActivationOffloadSpec, BatchSpec, GraphSpec, RecomputeSpec, TrainingFlags
from analyzer.specs.vision_part import ImageSpec


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """All inputs of the analysis of one launch."""

    model: ModelSpec
    parallel: ParallelSpec
    batch: BatchSpec
    precision: PrecisionSpec
    optimizer: OptimizerSpec
    recompute: RecomputeSpec
    flags: TrainingFlags
    hardware: HardwareSpec
    megatron: str
    """The release whose behaviour is assumed: '0.16.1', or '2023' for the code before core 0.3."""
    software: SoftwareSpec
    assumptions: tuple[str, ...] = ()
    """Assumptions made while the arguments were read, one sentence each."""
    warnings: tuple[str, ...] = ()
    """The assumptions about options that are given: they are not modelled in full, or have no effect."""
    withheld: tuple[str, ...] = ()
    """Why there is no verdict, a fragment of a sentence each."""
    not_counted: tuple[str, ...] = ()
    """What needs memory beside all that is counted, a fragment of a sentence each: a verdict only if the rest does not fit."""
    images: ImageSpec | None = None
    """The images of a vision-language model, if the memory for them has a bound; `not_counted` is about the rest."""
    tuning: FineTuning = ALL_PARAMETERS
    """What is trained beside, or instead of, all parameters of the model. No formula uses it yet."""
    unknown: tuple[str, ...] = ()
    """What the launch does not say or this program does not know, one sentence each."""
    assumed_vocabulary: AssumedVocabulary | None = None
    """Set if the number of tokens is unknown."""
    fsdp: FsdpSpec | None = None
    graphs: GraphSpec | None = None
    activation_offload: ActivationOffloadSpec | None = None
    nccl: NcclSpec = DEFAULT_NCCL

    @property
    def core(self) -> CoreBehavior:
        """What the release of megatron-core does."""
        return core_behavior(self.megatron)

    @property
    def engine(self) -> EngineBehavior:
        """What the version of Transformer Engine does."""
        return engine_behavior(self.software.te)
