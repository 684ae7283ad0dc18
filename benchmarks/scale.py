"""Launches of extreme size, and launches that do not fit.

    python benchmarks/scale.py [--runs 3]

The exit status is 1 if one of two bounds is exceeded:
- each of four launches of extreme size takes at most 5 s and 500 MB;
- Llama 3.1 405B on 8 GPUs, which is far from fitting, takes at most four times as long as with unlimited GPU memory.
Each time is the smallest CPU time of the runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.startup import PROGRAM, Run, run

TIME_BOUND: Final = 5.0
MEMORY_BOUND: Final = 500_000_000
RATIO_BOUND: Final = 4.0

SMALL: Final = (
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 32000 --info-gpu H100-80GB --info-gpu-memory 1TiB"
)
EXTREME: Final = {
    "1,000 pipeline stages": (1000, "--num-layers 1000 --pipeline-model-parallel-size 1000 --global-batch-size 1000"),
    "64 stages with 16 virtual stages": (
        64,
        "--num-layers 1024 --pipeline-model-parallel-size 64 --num-virtual-stages-per-pipeline-rank 16 --global-batch-size 128",
    ),
    "10,000 layers": (8, "--num-layers 10000 --global-batch-size 64"),
    "8,388,608 GPUs": (1 << 20, "--num-layers 8 --global-batch-size 8388608 --tensor-model-parallel-size 1"),
}
"""Nodes of 8 GPUs and options of each launch. Tensor parallel size 8 unless given."""
LLAMA_405B: Final = (
    "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --bf16 --micro-batch-size 1 --global-batch-size 64 "
    "--tokenizer-type NullTokenizer --vocab-size 128256"
)


def command(nodes: int, options: str) -> tuple[str, ...]:
    """The arguments of the interpreter for a launch on nodes of 8 GPUs."""
    return (str(PROGRAM), "--nnodes", str(nodes), "--nproc-per-node", "8", "pretrain_gpt.py", *options.split())


def smallest(runs: list[Run]) -> float:
    return min(each.seconds for each in runs)


def main() -> int:
    """Measures, prints and compares with the bounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="number of runs of each command (default: 3)")
    count = parser.parse_args().runs
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, (nodes, options) in EXTREME.items():
            words = command(nodes, f"{SMALL} --tensor-model-parallel-size 8 {options}")
            runs = [run(words, folder) for _ in range(count)]
            seconds, memory = smallest(runs), max(each.bytes for each in runs)
            print(f"{name:34} {seconds:6.2f} s {memory / 1e6:6.0f} MB")
            status |= seconds > TIME_BOUND or memory > MEMORY_BOUND
        sizes = ("1000TiB", "80GiB")
        pairs = [
            [run(command(1, f"{LLAMA_405B} --info-gpu-memory {size}"), folder, (0, 1)) for size in sizes] for _ in range(count)
        ]
        fits, too_large = (smallest([pair[index] for pair in pairs]) for index in range(2))
        print(f"405B on 8 GPUs, does not fit / fits {too_large / fits:5.2f}x  bound {RATIO_BOUND}x")
        status |= too_large > RATIO_BOUND * fits
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
