"""Parameters of published hybrid models.

Sizes: megatron/bridge/models/nemotronh/nemotron_h_provider.py of Megatron-Bridge. Totals: the model cards of nvidia/Nemotron-H-8B,
nvidia/Nemotron-H-47B, nvidia/NVIDIA-Nemotron-Nano-9B-v2, nvidia/NVIDIA-Nemotron-Nano-12B-v2 and
nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B, which are rounded.
"""

from __future__ import annotations

import pytest

from analyzer.memory.workspaces import workspaces
from analyzer.modules.kinds import ModuleKind
from analyzer.passes.stages import stage_models
from analyzer.predict import predict
from tests.job_of import job_of

COMMON = (
    "--kv-channels 128 --group-query-attention --mamba-num-groups 8 --squared-relu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type none --vocab-size 131071 --bf16 --is-hybrid-model"
)
MODELS = {
    "Nemotron-H 8B": (
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "--hidden-size 4096 --mamba-num-heads 128 --ffn-hidden-size 21504 --num-attention-heads 32 --num-query-groups 8",
        8.10e9,
    ),
    "Nemotron-H 47B": (
        "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
        "--hidden-size 8192 --mamba-num-heads 256 --mamba-state-dim 256 --ffn-hidden-size 30720 --num-attention-heads 64 "
        "--num-query-groups 8",
        46.8e9,
    ),
    "Nemotron Nano 9B v2": (
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "--hidden-size 4480 --mamba-num-heads 128 --mamba-head-dim 80 --ffn-hidden-size 15680 --num-attention-heads 40 "
        "--num-query-groups 8",
        8.89e9,
    ),
    "Nemotron Nano 12B v2": (
        "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
        "--hidden-size 5120 --mamba-num-heads 128 --mamba-head-dim 80 --ffn-hidden-size 20480 --num-attention-heads 40 "
        "--num-query-groups 8",
        12.31e9,
    ),
    "Nemotron 3 Nano 30B-A3B": (
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "--hidden-size 2688 --mamba-num-heads 64 --ffn-hidden-size 1856 --num-attention-heads 32 --num-query-groups 2 "
        "--num-experts 128 --moe-router-topk 6 --moe-ffn-hidden-size 1856 --moe-shared-expert-intermediate-size 3712 "
        "--moe-grouped-gemm",
        31.58e9,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_published_models(name: str) -> None:
    pattern, sizes, published = MODELS[name]
    line = f"--num-layers {len(pattern)} --hybrid-override-pattern {pattern} {sizes} {COMMON}"
    found = predict(job_of(line, gpus=1)).ranks[0].parameters
    assert found == pytest.approx(published, rel=1e-3)


def test_a_stage_without_attention_has_the_table_of_rotary_positions_from_its_first_layer_on() -> None:
    """`MambaModel.forward` computes it before the layers: 2048 positions of 64 elements in fp32."""
    job = job_of(
        "--is-hybrid-model --hybrid-override-pattern MM-*-M --num-layers 6 --pipeline-model-parallel-size 2 "
        "--position-embedding-type rope --disable-bias-linear",
        release="0.16.1",
    )
    first, second = ({each.name: each for each in workspaces(job, stage.trees)} for stage in stage_models(job))
    name = "RoPE frequency table"
    assert (first[name].bytes, second[name].bytes) == (4 * 2048 * 64, 4 * 2048 * 64)
    assert ModuleKind.MIXER_IN in first[name].kinds
