"""The error of Megatron-LM's own memory estimate on measured runs, for comparison.

    python benchmarks/megatron_estimate.py RECORDS.json [...]

Formulas of megatron/training/theoretical_memory_usage.py (0.16.1) for dense models: weights and optimizer states of the largest
shard, and activations, with a padded vocabulary. Each record has the launch's `argv`, `nodes`, `gpus_per_node`, and `measured` or
`measured_per_rank` with `peak_allocated_bytes`. Prints the median and the 90 % quantile of the relative error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


class Options:
    """Access to the options of a launch command."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv

    def has(self, flag: str) -> bool:
        return flag in self._argv

    def number(self, flag: str, default: int = 1) -> int:
        return int(self._argv[self._argv.index(flag) + 1]) if flag in self._argv else default


def estimate(record: dict[str, Any]) -> float:
    """Return Megatron's estimate for the highest-memory rank, in bytes."""
    options = Options(record["argv"])
    layers, h, heads = options.number("--num-layers"), options.number("--hidden-size"), options.number("--num-attention-heads")
    s, b = options.number("--seq-length"), options.number("--micro-batch-size")
    t, p = options.number("--tensor-model-parallel-size"), options.number("--pipeline-model-parallel-size")
    context = options.number("--context-parallel-size")
    data = record["nodes"] * record["gpus_per_node"] // (t * p * context)
    groups = options.number("--num-query-groups", heads) if options.has("--group-query-attention") else heads
    ratio = options.number("--kv-channels", h // heads) * heads / h
    gated = options.has("--swiglu")
    f = options.number("--ffn-hidden-size", int(h * 8 / 3) // 64 * 64 if gated else 4 * h)
    step = 128 * t
    vocabulary = -(-(options.number("--vocab-size", 50256) + 1) // step) * step
    layer_parameters = 2 * h * h * ((1 + groups / heads) * ratio + f / h * (1.5 if gated else 1) + 3 / h)
    shard = (layer_parameters * layers / p + h * vocabulary + h) / t
    if options.has("--untie-embeddings-and-output-weights") and p == 1:
        shard += h * vocabulary / t
    weights = shard * (6 + 12 / data if options.has("--use-distributed-optimizer") else 18)
    return weights + _activations(options, layers=layers, h=h, f=f, s=s, b=b, t=t, p=p, data=data, vocabulary=vocabulary)


def _activations(
    options: Options, *, layers: int, h: int, f: int, s: int, b: int, t: int, p: int, data: int, vocabulary: int
) -> float:
    split = options.has("--sequence-parallel") and t > 1
    selective = options.has("--recompute-activations")
    kept = s * b * h * layers * (18 + 4 * f / h if split and selective else 10 + 24 / t) + 8 * s * b * p + s * b * h * p
    per_chunk = options.number("--num-layers-per-virtual-pipeline-stage", 0)
    if per_chunk:
        kept *= 1 + (p - 1) / (p * (layers // p // per_chunk))
    elif p > 1:
        kept *= min(1.0, options.number("--global-batch-size") // (b * data) / p)
    if split and selective:
        return (kept + (4 * s * b * h * (1 + vocabulary / h) if p == 1 else 0)) / t
    return 1.05 * (kept + (2 * s * b * (vocabulary / t + h) if p == 1 else 0))


def main(paths: list[str]) -> int:
    errors = []
    try:
        records = [record for path in paths for record in json.loads(Path(path).read_text())]
    except (OSError, ValueError) as error:
        print(f"cannot read the records: {error}", file=sys.stderr)
        return 2
    for record in records:
        if record["kind"] != "dense" or record["rare"] or "--multi-latent-attention" in record["argv"]:
            continue
        runs = [record["measured"]] if "measured" in record else record["measured_per_rank"].values()
        errors += [abs(estimate(record) / run["peak_allocated_bytes"] - 1) for run in runs]
    if not errors:
        print("no measured runs of dense models; give files with such records", file=sys.stderr)
        return 2
    errors.sort()
    print(f"{len(errors)} peaks: median {errors[len(errors) // 2]:.1%}, 90 % within {errors[int(0.9 * len(errors))]:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
