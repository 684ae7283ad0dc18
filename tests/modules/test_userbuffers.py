"""Which linear layers overlap their communication with GEMMs (`--tp-comm-overlap`)."""

from __future__ import annotations

import pytest

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from tests.job_of import job_of

LINE = "--num-layers 8 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"
LATENT = f"{LINE} --multi-latent-attention --position-embedding-type rope"
PIPELINE = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"


def _layers(tree: Module) -> list[Module]:
    return [module for _, module in tree.walk() if module.kind is ModuleKind.LAYER]


def _overlapping(layer: Module) -> list[str]:
    return [module.name for _, module in layer.walk() if module.overlaps_collectives]


def test_all_linear_layers_of_self_attention_and_ffn_overlap() -> None:
    (stage,) = stage_models(job_of(LINE))
    assert {tuple(_overlapping(layer)) for layer in _layers(stage.trees[0])} == {
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    }


@pytest.mark.parametrize("more", ["", PIPELINE, "--recompute-granularity full --recompute-method block --recompute-num-layers 1"])
def test_only_the_first_projection_of_a_chunk_of_latent_attention_overlaps(more: str) -> None:
    """`TELinear.__init__` switches `tp_comm_overlap` off at the projection after `linear_proj`, which is created first."""
    for stage in stage_models(job_of(f"{LATENT} {more}")):
        for tree in stage.trees:
            first, *others = _layers(tree)
            assert _overlapping(first) == ["linear_proj"]
            assert not any(_overlapping(layer) for layer in others)
            assert len(set(map(id, others))) == 1


def test_the_overlapping_projection_has_no_gathered_output_gradient() -> None:
    """Transformer Engine gathers it in a buffer that the CUDA driver allocates."""
    (stage,) = stage_models(job_of(LATENT))
    first, second, *_ = (module for _, module in stage.trees[0].walk() if module.kind is ModuleKind.ATTENTION_OUTPUT)
    names = [[tensor.name for tensor in module.backward_workspace] for module in (first, second)]
    assert names[1] == ["output gradient", "gathered output gradient", *names[0][1:]]


def test_no_layer_of_megatron_itself_overlaps() -> None:
    (stage,) = stage_models(job_of(f"{LINE} --transformer-impl local --no-persist-layer-norm"))
    assert not _overlapping(stage.trees[0])
