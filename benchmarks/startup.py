"""Run time and memory of the complete program, compared with Python that imports the same libraries.

    python benchmarks/startup.py [--runs 15]

The exit status is 1 if one of three bounds is exceeded:
- the analysis of 8 GPUs takes at most 5 times as long as a Python that imports json, argparse and the used modules of rich;
- 131,072 GPUs take at most twice as long as 8;
- no run takes more than 100 MB of memory.
The runs of the commands are interleaved. Each time is the smallest CPU time of the runs: other programs can only add to it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROGRAM: Final = Path(__file__).resolve().parent.parent / "get_training_info.py"
START_BOUND: Final = 5.0
"""Times the baseline."""
SCALE_BOUND: Final = 2.0
"""Maximum time for 131,072 GPUs, as a multiple of that for 8 GPUs."""
MEMORY_BOUND: Final = 100_000_000
"""Maximum resident set size in bytes."""

LLAMA: Final = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --normalization "
    "RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer "
    "--sequence-parallel --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 1 --train-iters "
    "10 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 128256 --info-gpu H100-80GB"
)
BASELINE: Final = ("-c", "import json, argparse, rich.console, rich.table, rich.tree, rich.panel")


@dataclass(frozen=True)
class Run:
    """One run of a command."""

    seconds: float
    """CPU time."""
    bytes: int
    """Maximum resident set size."""


def commands() -> dict[str, tuple[str, ...]]:
    """Return the interpreter arguments of each measured command."""
    named: dict[str, tuple[str, ...]] = {"baseline": BASELINE}
    for gpus in (8, 131_072):
        job = ("--nnodes", str(gpus // 8), "--nproc-per-node", "8", "pretrain_gpt.py", *LLAMA.split())
        job = (str(PROGRAM), *job, "--global-batch-size", str(4 * gpus))
        named[f"{gpus:,} GPUs, console"] = job
        named[f"{gpus:,} GPUs, JSON"] = (*job, "--info-json", "-")
    return named


def run(arguments: tuple[str, ...], byte_code: str, accepted: tuple[int, ...] = (0,)) -> Run:
    """Run the interpreter with `arguments` with byte code in the folder `byte_code`, and discard its output.

    Other exit statuses than `accepted` end the benchmark.
    """
    environ = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPYCACHEPREFIX": byte_code}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    nowhere = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    process = os.posix_spawn(sys.executable, [sys.executable, *arguments], environ, file_actions=nowhere)
    _, status, usage = os.wait4(process, 0)
    if os.waitstatus_to_exitcode(status) not in accepted:
        sys.exit(f"exit {os.waitstatus_to_exitcode(status)}: {' '.join(arguments)}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit)


def exceeded(seconds: dict[str, float], memory: dict[str, int]) -> list[str]:
    """Return one line for each bound that is exceeded."""
    faults = []
    for output in ("console", "JSON"):
        small, large = seconds[f"8 GPUs, {output}"], seconds[f"131,072 GPUs, {output}"]
        if small > START_BOUND * seconds["baseline"]:
            faults.append(f"8 GPUs, {output}: {small / seconds['baseline']:.2f} times the baseline, bound {START_BOUND}")
        if large > SCALE_BOUND * small:
            faults.append(f"131,072 GPUs, {output}: {large / small:.2f} times 8 GPUs, bound {SCALE_BOUND}")
    for name, used in memory.items():
        if used > MEMORY_BOUND:
            faults.append(f"{name}: {used / 1e6:.0f} MB, bound {MEMORY_BOUND / 1e6:.0f}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15, help="number of runs of each command (default: 15)")
    count = parser.parse_args().runs
    named = commands()
    runs: dict[str, list[Run]] = {name: [] for name in named}
    with tempfile.TemporaryDirectory() as folder:
        for arguments in named.values():
            run(arguments, folder)  # writes the byte code
        for _ in range(count):
            for name, arguments in named.items():
                runs[name].append(run(arguments, folder))
    seconds = {name: min(each.seconds for each in own) for name, own in runs.items()}
    memory = {name: max(each.bytes for each in own) for name, own in runs.items()}
    print(f"{'smallest of ' + str(count) + ' runs':24} {'time':>9} {'baseline':>9} {'memory':>9}")
    for name in named:
        print(f"{name:24} {seconds[name] * 1e3:6.0f} ms {seconds[name] / seconds['baseline']:8.2f}x {memory[name] / 1e6:6.0f} MB")
    for output in ("console", "JSON"):
        print(f"131,072 GPUs to 8, {output}: {seconds[f'131,072 GPUs, {output}'] / seconds[f'8 GPUs, {output}']:.2f}x")
    faults = exceeded(seconds, memory)
    for fault in faults:
        print(f"exceeded: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
