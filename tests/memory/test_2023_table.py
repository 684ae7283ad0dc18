"""The memory table and the sample layout of the 2023 proposal, with Megatron-LM of 2023.

The model is a 7B GPT with biases and learned positions. Measured peaks are
`torch.cuda.max_memory_allocated()` on 80 GB GPUs, in GiB, as printed in the proposal.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.command import report

TOLERANCE = 0.02
GIB = 2**30
MIB = 2**20
MODEL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
    "--train-iters 10 --lr 1e-4 --use-flash-attn --use-distributed-optimizer --swiglu --bf16 --info-gpu A100-80GB "
    "--vocab-file gpt2-vocab.json"
)
CODE_OF_2023 = ("--info-megatron", "2023")

TABLE = [  # micro-batch size, global batch size, DP, PP, TP, measured peak in GiB
    (2, 2048, 8, 1, 1, 69.1),
    (4, 512, 4, 1, 2, 55.7),
    (2, 2048, 4, 2, 1, 49.8),
    (4, 128, 1, 1, 8, 28.8),
]
LAYER_MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def report_of(
    *, nodes: int = 1, micro: int, batch: int, tensor: int, pipeline: int, code: tuple[str, ...] = CODE_OF_2023
) -> dict[str, Any]:
    layout = f"--micro-batch-size {micro} --global-batch-size {batch} --tensor-model-parallel-size {tensor}"
    pipelining = ("--pipeline-model-parallel-size", str(pipeline))
    torchrun = ("--nnodes", str(nodes), "--nproc-per-node", "8", "pretrain_gpt.py")
    return report(*torchrun, *MODEL.split(), *layout.split(), *pipelining, *code)


@pytest.mark.parametrize(("micro", "batch", "data", "pipeline", "tensor", "measured"), TABLE)
def test_peaks_agree_with_the_measured_table(
    micro: int, batch: int, data: int, pipeline: int, tensor: int, measured: float
) -> None:
    result = report_of(micro=micro, batch=batch, tensor=tensor, pipeline=pipeline)
    assert result["megatron"] == "2023"
    assert result["parallel"]["data"] == data
    assert result["verdict"]["fits"]
    highest = max(rank["memory"]["peak_allocated_bytes"] for rank in result["ranks"])
    assert highest / GIB == pytest.approx(measured, rel=TOLERANCE)


def test_the_parameter_count_is_that_of_the_proposal_with_its_omissions_added() -> None:
    """The proposal prints 6,642,245,632: 50,432 vocabulary rows, a QKV bias of h instead of 3h, and no final norm."""
    result = report_of(micro=4, batch=512, tensor=2, pipeline=1)
    assert result["model"]["padded_vocab_size"] == 50432
    assert result["model"]["parameters"] == 6_642_245_632 + 32 * 2 * 4096 + 2 * 4096


def test_the_ffn_size_of_a_gated_mlp_in_2023_was_two_thirds_of_4h() -> None:
    """The size was rounded down to a multiple of 64: fc1 has 2 × 10,880 rows."""
    weights = [weight for node in nodes(report_of(micro=4, batch=512, tensor=1, pipeline=1)["model"]["tree"]) for weight in node]
    assert [21760, 4096] in weights
    assert [4096, 10880] in weights


def nodes(tree: dict[str, Any]) -> list[list[list[int]]]:
    """Return the weight shapes of each module."""
    own = [weight["shape"] for weight in tree.get("weights", ())]
    return [own, *(below for child in tree.get("children", ()) for below in nodes(child))]


@pytest.mark.parametrize("code", [CODE_OF_2023, ()], ids=["2023", "now"])
def test_collectives_of_the_sample_layout(code: tuple[str, ...]) -> None:
    """Two nodes, TP2 PP2: four all-reduces of [2048, 4, 4096] in bf16 per layer and microbatch."""
    result = report_of(nodes=2, micro=4, batch=512, tensor=2, pipeline=2, code=code)
    assert result["batch"]["microbatches"] == 32
    for stage in (0, 1):
        rows = [row for row in result["communication"] if row["pipeline_rank"] == stage]
        of_layers = [row for row in rows if row["group"] == "tp" and row["module"].split(".")[-1] in LAYER_MODULES]
        assert {row["message_bytes"] for row in of_layers} == {64 * MIB}
        assert {row["kind"] for row in of_layers} == {"all_reduce"}
        assert sum(row["calls_per_microbatch"] for row in of_layers) == 4 * 16
        between = [row for row in rows if row["group"] == "pp" and row["message_bytes"] > 64]
        assert {row["message_bytes"] for row in between} == {64 * MIB}
        assert sum(row["calls_per_iteration"] for row in between) == 32


def test_groups_of_the_sample_layout() -> None:
    """As printed in the proposal, where n0_g0 is rank 0 and n1_g0 is rank 8."""
    groups = report_of(nodes=2, micro=4, batch=512, tensor=2, pipeline=2)["groups"]
    assert groups["pp"] == [[rank, rank + 8] for rank in range(8)]
    assert groups["dp"] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert groups["tp"] == [[rank, rank + 1] for rank in range(0, 16, 2)]
