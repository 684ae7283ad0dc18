"""A small launch whose search takes about a second."""

from __future__ import annotations

from pathlib import Path

from analyzer.api import problem_of, read_launch
from analyzer.layout_search.dimensions import Space, space_of

ARGV = (
    "--nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024"
    " --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 16 --vocab-size 32000 --tokenizer-type NullTokenizer"
    " --bf16 --lr 1e-4 --train-iters 10 --mock-data --tensor-model-parallel-size 2 --info-gpu H100-80GB"
)


def tiny_space() -> Space:
    """The layouts of the launch."""
    return space_of(problem_of(read_launch(ARGV.split(), environ={}, folder=Path("/"))))
