"""Megatron-FSDP: dropout masks that checkpoints keep, when gradients are allocated, and reductions between optimizer instances.

Expectations are from megatron_fsdp.py and transformer_layer.py of megatron-core 0.16.1.
"""

from __future__ import annotations

import pytest

from analyzer.communication.table import communication_rows
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor, total_bytes
from analyzer.passes.fsdp import fsdp_trees
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from analyzer.states.buffers.fsdp_gathering import GRADIENTS
from tests.job_of import job_of

FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer --untie-embeddings-and-output-weights"
UNITS = f"{FSDP} --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 --num-layers 4"
MASK = 2048 * 1 * 1024
"""Bytes of a dropout mask of one sequence of 2048 tokens with h = 1024."""


def tree_of(line: str) -> Module:
    return stage_models(job_of(line, gpus=8))[0].trees[0]


def kept_masks(tree: Module) -> list[list[int]]:
    """Bytes of the masks that each checkpoint and the final norm save."""
    kinds = (ModuleKind.CHECKPOINT, ModuleKind.FINAL_NORM)
    pieces = [module for _, module in tree.walk() if module.kind in kinds]
    return [[tensor.bytes for tensor in piece.saved if "mask" in tensor.name] for piece in pieces]


def layers(job: TrainingJob) -> list[Module]:
    """The layers with their unsharded buckets."""
    changed, _ = fsdp_trees(job, stage_models(job)[0].trees[0])
    return [module for _, module in changed.walk() if module.kind is ModuleKind.LAYER]


def gradients(tensors: tuple[Tensor, ...]) -> int:
    return total_bytes(tensor for tensor in tensors if tensor.name == GRADIENTS)


def starting(layer: Module) -> dict[str, int]:
    """Bytes of the gradients that are allocated in the backward of each part of a layer."""
    return {module.name: gradients(module.reloads) for _, module in layer.walk() if gradients(module.reloads)}


def test_view_of_a_unit_keeps_the_masks_of_the_last_layer_of_a_checkpoint() -> None:
    """The output of the first checkpoint is the input of the second, that of the second the input of the final norm."""
    assert kept_masks(tree_of(f"{UNITS} {FULL}")) == [[], [MASK, MASK], [MASK, MASK]]


@pytest.mark.parametrize(
    "line",
    [
        f"{UNITS} {FULL} --disable-bias-linear",
        f"{UNITS} {FULL} --hidden-dropout 0",
        f"{UNITS.replace('optim_grads_params', 'optim_grads')} {FULL}",
        f"--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights {FULL}",
        FULL,
    ],
)
def test_masks_are_freed_without_a_bias_without_dropout_and_without_views(line: str) -> None:
    assert kept_masks(tree_of(line)) == [[], [], []]


def test_no_bias_is_added_to_the_output_of_experts() -> None:
    """Only the sum after attention has a graph."""
    experts = "--num-experts 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --no-bias-dropout-fusion"
    assert kept_masks(tree_of(f"{UNITS} {FULL} {experts}")) == [[], [MASK], [MASK]]


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("--disable-bias-linear", "linear_fc2"),
        ("", "mlp_bda"),  # the gradient of the bias is computed by the sum after the FFN
    ],
)
def test_gradients_are_allocated_with_the_first_of_a_layer(line: str, first: str) -> None:
    layer = layers(job_of(f"{UNITS} --num-layers 1 {line}", gpus=8))[0]
    expected = 4 * sum(parameter.numel for _, module in layer.walk() for parameter in module.parameters)
    assert list(starting(layer)) == [first]
    assert starting(layer)[first] >= expected


def test_expert_gradients_are_allocated_before_those_of_the_router() -> None:
    experts = "--num-experts 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4"
    layer = layers(job_of(f"{UNITS} --disable-bias-linear --num-layers 1 {experts}", gpus=8))[0]
    assert sorted(starting(layer)) == ["linear_fc2", "router"]


def test_fused_gemms_allocate_gradients_before_they_run() -> None:
    line = f"{FSDP} --data-parallel-sharding-strategy optim_grads_params --disable-bias-linear --num-layers 1"
    layer = layers(job_of(line, gpus=8))[0]
    fc2 = next(module for _, module in layer.walk() if module.kind is ModuleKind.FC2)
    assert gradients(fc2.backward_workspace) == gradients(fc2.reloads) > 0


@pytest.mark.parametrize(("line", "reduced"), [("", False), ("--overlap-grad-reduce", True)])
def test_instances_are_reduced_only_if_no_sync_announces_the_last_microbatch(line: str, reduced: bool) -> None:
    job = job_of(f"{UNITS} --num-distributed-optimizer-instances 2 {line}", gpus=8)
    rows = communication_rows(job, stage_models(job)[:1])
    assert any(row.group == "inter_dist_opt" for row in rows) is reduced
