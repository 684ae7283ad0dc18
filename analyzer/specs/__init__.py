"""The specification of a training or inference job, as frozen records.

`analyzer.launch` builds them from the command line. They include the values that Megatron's `validate_args` derives: padded
vocabulary, ffn_hidden_size, data-parallel size, number of microbatches. Fields have the names of
Megatron's arguments and config fields if these exist.
"""

from analyzer.specs.adapters import AdapterSpec
from analyzer.specs.attention import (
    AbsorbedSpec,
    AttentionKind,
    CompressedAttentionSpec,
    HyperConnectionSpec,
    LinearAttentionSpec,
    MlaSpec,
    SparseAttentionSpec,
)
from analyzer.specs.distillation import DistillationSpec
from analyzer.specs.fine_tuning import Adapter, FineTuning
from analyzer.specs.freezing import FreezeSpec
from analyzer.specs.hardware import HardwareSpec
from analyzer.specs.inference import DynamicEngineSpec, InferenceJob, InferenceSpec, QuantizationSpec
from analyzer.specs.job import TrainingJob
from analyzer.specs.model import (
    FAMILY_NAMES,
    FROZEN_PARTS,
    Activation,
    AssumedVocabulary,
    AttentionBackend,
    BlockSpec,
    Branch,
    CrossEntropy,
    Family,
    FrozenPart,
    HybridSpec,
    Implementation,
    ModelSpec,
    NormModules,
    VisionEncoder,
    VisionSpec,
)
from analyzer.specs.moe import FlexSpec, MoeSpec
from analyzer.specs.optimizer import OPTIMIZERS, FsdpSpec, MuonSpec, OffloadSpec, OptimizerFacts, OptimizerSpec
from analyzer.specs.parallel import ParallelSpec, PipelineSpec
from analyzer.specs.precision import Fp8Recipe, Fp8Spec, PrecisionSpec
from analyzer.specs.software import NcclSpec, SoftwareSpec
from analyzer.specs.training import ActivationOffloadSpec, BatchSpec, GraphSpec, RecomputeSpec, TrainingFlags
from analyzer.specs.vision_part import VisionTraining, VisionWeight

__all__ = [
    "FAMILY_NAMES",
    "FROZEN_PARTS",
    "OPTIMIZERS",
    "AbsorbedSpec",
    "Activation",
    "ActivationOffloadSpec",
    "Adapter",
    "AdapterSpec",
    "AssumedVocabulary",
    "AttentionBackend",
    "AttentionKind",
    "BatchSpec",
    "BlockSpec",
    "Branch",
    "CompressedAttentionSpec",
    "CrossEntropy",
    "DistillationSpec",
    "DynamicEngineSpec",
    "Family",
    "FineTuning",
    "FlexSpec",
    "Fp8Recipe",
    "Fp8Spec",
    "FreezeSpec",
    "FrozenPart",
    "FsdpSpec",
    "GraphSpec",
    "HardwareSpec",
    "HybridSpec",
    "HyperConnectionSpec",
    "Implementation",
    "InferenceJob",
    "InferenceSpec",
    "LinearAttentionSpec",
    "MlaSpec",
    "ModelSpec",
    "MoeSpec",
    "MuonSpec",
    "NcclSpec",
    "NormModules",
    "OffloadSpec",
    "OptimizerFacts",
    "OptimizerSpec",
    "ParallelSpec",
    "PipelineSpec",
    "PrecisionSpec",
    "QuantizationSpec",
    "RecomputeSpec",
    "SoftwareSpec",
    "SparseAttentionSpec",
    "TrainingFlags",
    "TrainingJob",
    "VisionEncoder",
    "VisionSpec",
    "VisionTraining",
    "VisionWeight",
]
