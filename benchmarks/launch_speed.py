"""How long reading a launch command takes: `python benchmarks/launch_speed.py [--runs 15]`.

Each time is compared with a baseline that is measured in alternation. The exit status is 1 if a bound is exceeded:
- reading 60 options against argparse with a parser that has just those options;
- reading 120 options against 60;
- the job of 131,072 GPUs against that of 64.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer.launch.build import build
from analyzer.launch.parse import parse
from analyzer.specs import HardwareSpec, TrainingJob
from benchmarks.paired import Paired, paired, report

NOWHERE: Final = Path("/nowhere")
OPTIONS: Final = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --bf16 "
    "--micro-batch-size 1 --global-batch-size {batch} --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer "
    "--vocab-size 128256 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8"
)
GPU: Final = HardwareSpec(name="H100-80GB", compute_capability=(9, 0))


def words(count: int) -> list[str]:
    """The same option `count` times."""
    return [word for index in range(count) for word in ("--num-layers", str(index))]


def read(count: int) -> None:
    parse(words(count), environ={}, folder=NOWHERE)


def read_by_argparse(count: int) -> None:
    parser = argparse.ArgumentParser()
    for index in range(count):
        parser.add_argument(f"--option-{index}", type=int)
    parser.parse_args([word for index in range(count) for word in (f"--option-{index}", "1")])


def job(nodes: int) -> TrainingJob:
    options = OPTIONS.format(batch=8 * nodes)
    launch = ["--nnodes", str(nodes), "--nproc-per-node", "8", "pretrain_gpt.py", *options.split()]
    arguments, world, _ = parse(launch, environ={}, folder=NOWHERE)
    return build(arguments, world, environ={}, gpu=GPU, folder=NOWHERE)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15, help="of each (default 15)")
    runs = parser.parse_args().runs
    results: list[Paired] = [
        paired("read 60 options / argparse with 60 options", lambda: read(60), lambda: read_by_argparse(60), bound=2, runs=runs),
        paired("read 120 options / read 60", lambda: read(120), lambda: read(60), bound=2.5, runs=runs),
        paired("job of 131,072 GPUs / job of 64", lambda: job(16384), lambda: job(8), bound=1.5, runs=runs),
    ]
    return report(results)


if __name__ == "__main__":
    sys.exit(main())
