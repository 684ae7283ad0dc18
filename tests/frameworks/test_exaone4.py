"""EXAONE 4 in containers of Megatron-Bridge and in NeMo-RL. Source: models/exaone/exaone4 of Megatron-Bridge, August 2026."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analyzer.errors import UnsupportedError
from analyzer.passes.stages import stage_models
from analyzer.predict import predict
from analyzer.specs import TrainingJob
from tests.frameworks.files import job, nemo_rl, write
from tests.frameworks.gemma_containers import gemma_container
from tests.launch.model_config.configurations import published

NAME = "LGAI-EXAONE/EXAONE-4.0-1.2B"
WORLD = ("--info-world-size", "8", "--info-gpu", "H100-80GB")
FIELDS = published()[NAME]["config"]


def job_of(folder: Path, *words: str) -> TrainingJob:
    write(folder, {"config.yaml": gemma_container(FIELDS)})
    return job(folder, "config.yaml", *words, *WORLD)


def test_layers_have_norms_after_their_branches_only(tmp_path: Path) -> None:
    """`exaone4_layer_spec`: TEColumnParallelLinear before, TERowParallelLinearLayerNorm after; norms of 64 elements for q and k."""
    found = job_of(tmp_path)
    walked = [(path.rpartition("decoder.layers.")[2], module) for path, module in stage_models(found)[0].trees[0].walk()]
    shapes = {path: {each.shape for each in module.parameters} for path, module in walked if path.startswith(("self", "mlp"))}
    assert {path: each for path, each in shapes.items() if each} == {
        "self_attention.linear_qkv": {(3072, 2048)},
        "self_attention.qk_layernorm.q_layernorm": {(64,)},
        "self_attention.qk_layernorm.k_layernorm": {(64,)},
        "self_attention.linear_proj": {(2048, 2048)},
        "self_attention.linear_proj.post_layernorm": {(2048,)},
        "mlp.linear_fc1": {(8192, 2048)},
        "mlp.linear_fc2": {(2048, 4096)},
        "mlp.linear_fc2.post_layernorm": {(2048,)},
    }
    assert found.withheld == ()


def test_there_is_no_verdict_in_fp8(tmp_path: Path) -> None:
    found = job_of(tmp_path, "mixed_precision=bf16_with_fp8_current_scaling_mixed")
    assert found.withheld == ("norms after attention and FFN are not modelled in FP8 without norms before attention and FFN",)
    assert predict(found).verdict.state is None


def test_nemo_rl_reads_it_from_the_catalogue(tmp_path: Path) -> None:
    pytest.importorskip("omegaconf")
    write(tmp_path, {"sft.yaml": nemo_rl(NAME)})
    model = job(tmp_path, "sft.yaml").model
    assert (model.branch_norms, model.norms_in_projections, model.norm_modules) == (True, True, "none")


@pytest.mark.parametrize("changed", [{"sliding_window": 4096}, {"layer_types": ["full_attention", "sliding_attention"]}])
def test_models_with_windows_are_refused(changed: dict[str, object], tmp_path: Path) -> None:
    """Their layers without a window have no rotary positions, which `exaone4_layer_spec` gives all of them."""
    pytest.importorskip("omegaconf")
    write(tmp_path, {"config.json": json.dumps({**FIELDS, **changed}), "sft.yaml": nemo_rl(tmp_path)})
    with pytest.raises(UnsupportedError, match="rotary positions in a part of its layers"):
        job(tmp_path, "sft.yaml")


def test_launches_of_megatron_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="analyze a launch of Megatron-Bridge or NeMo-RL, which add them"):
        job(tmp_path, "--nproc-per-node", "8", "--info-model", NAME)


def test_other_layers_have_no_verdict(tmp_path: Path) -> None:
    found = job_of(tmp_path, "model.transformer_layer_spec=own_layer_spec")
    assert found.withheld == ("model.transformer_layer_spec=own_layer_spec: the effect on memory is not known",)
