"""The table and the sample layout of the 2023 proposal, with the code of that year: a GPT of 7B with biases and learned positions.

Measured is `torch.cuda.max_memory_allocated()` on GPUs of 80 GB, in GiB, as the proposal prints it.
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
    "--train-iters 10 --lr 1e-4 --use-flash-attn --use-distributed-optimizer --swiglu --bf16 --info-gpu A100-80GB"
)
CODE_OF_2023 = ("--info-megatron", "2023")

TABLE = [  # micro-batch, global batch, data, pipeline, tensor, measured peak in GiB
    (2, 2048, 8, 1, 1, 69.1),
    (4, 512, 4, 1, 2, 55.7),
    (2, 2048, 4, 2, 1, 49.8),
    (4, 128, 1, 1, 8, 28.8),
]
LAYER_MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def told(
    *, nodes: int = 1, micro: int, batch: int, tensor: int, pipeline: int, code: tuple[str, ...] = CODE_OF_2023
) -> dict[str, Any]:
    layout = f"--micro-batch-size {micro} --global-batch-size {batch} --tensor-model-parallel-size {tensor}"
    pipelining = ("--pipeline-model-parallel-size", str(pipeline))
    torchrun = ("--nnodes", str(nodes), "--nproc-per-node", "8", "pretrain_gpt.py")
    return report(*torchrun, *MODEL.split(), *layout.split(), *pipelining, *code)


@pytest.mark.parametrize(("micro", "batch", "data", "pipeline", "tensor", "measured"), TABLE)
def test_table(micro: int, batch: int, data: int, pipeline: int, tensor: int, measured: float) -> None:
    answer = told(micro=micro, batch=batch, tensor=tensor, pipeline=pipeline)
    assert answer["megatron"] == "2023"
    assert answer["parallel"]["data"] == data
    assert answer["verdict"]["fits"]
    fullest = max(rank["memory"]["peak_allocated_bytes"] for rank in answer["ranks"])
    assert fullest / GIB == pytest.approx(measured, rel=TOLERANCE)


def test_parameters_are_those_it_prints_and_those_it_forgets() -> None:
    """It prints 6,642,245,632 with a vocabulary of 50,432 rows, a QKV bias of h instead of 3h, and no final norm."""
    answer = told(micro=4, batch=512, tensor=2, pipeline=1)
    assert answer["model"]["padded_vocab_size"] == 50432
    assert answer["model"]["parameters"] == 6_642_245_632 + 32 * 2 * 4096 + 2 * 4096


def test_feed_forward_of_that_year() -> None:
    """A gated layer was two thirds of 4h wide, rounded down to a multiple of 64: its fc1 has 2 × 10,880 rows."""
    weights = [weight for node in nodes(told(micro=4, batch=512, tensor=1, pipeline=1)["model"]["tree"]) for weight in node]
    assert [21760, 4096] in weights
    assert [4096, 10880] in weights


def nodes(tree: dict[str, Any]) -> list[list[list[int]]]:
    """Shapes of the weights of every module."""
    own = [weight["shape"] for weight in tree.get("weights", ())]
    return [own, *(below for child in tree.get("children", ()) for below in nodes(child))]


@pytest.mark.parametrize("code", [CODE_OF_2023, ()], ids=["2023", "now"])
def test_messages_of_its_sample_layout(code: tuple[str, ...]) -> None:
    """Two nodes, tensor 2, pipeline 2: messages of [2048, 4, 4096] in bf16, four of a layer and microbatch."""
    answer = told(nodes=2, micro=4, batch=512, tensor=2, pipeline=2, code=code)
    assert answer["batch"]["microbatches"] == 32
    for stage in (0, 1):
        rows = [row for row in answer["communication"] if row["pipeline_rank"] == stage]
        of_layers = [row for row in rows if row["group"] == "tp" and row["module"].split(".")[-1] in LAYER_MODULES]
        assert {row["message_bytes"] for row in of_layers} == {64 * MIB}
        assert {row["kind"] for row in of_layers} == {"all_reduce"}
        assert sum(row["calls_per_microbatch"] for row in of_layers) == 4 * 16
        between = [row for row in rows if row["group"] == "pp" and row["message_bytes"] > 64]
        assert {row["message_bytes"] for row in between} == {64 * MIB}
        assert sum(row["calls_per_iteration"] for row in between) == 32


def test_groups_of_its_sample_layout() -> None:
    """As it prints them: n0_g0 is rank 0 and n1_g0 is rank 8."""
    groups = told(nodes=2, micro=4, batch=512, tensor=2, pipeline=2)["groups"]
    assert groups["pp"] == [[rank, rank + 8] for rank in range(8)]
    assert groups["dp"] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert groups["tp"] == [[rank, rank + 1] for rank in range(0, 16, 2)]
