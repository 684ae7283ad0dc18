"""Megatron-LM's own estimate on measured runs, to stand beside ours.

    python benchmarks/megatron_estimate.py RECORDS.json [...]

Formulas of megatron/training/theoretical_memory_usage.py (0.16.1) for dense models: weights and optimizer of the fullest shard,
and activations, with the vocabulary padded. Each record has the launch's `argv`, `nodes`, `gpus_per_node`, and `measured` or
`measured_per_rank` with `peak_allocated_bytes`. Prints the median and the 90 % quantile of the relative error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


class Words:
    """A launch command, asked for one option at a time."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv

    def has(self, flag: str) -> bool:
        return flag in self._argv

    def number(self, flag: str, default: int = 1) -> int:
        return int(self._argv[self._argv.index(flag) + 1]) if flag in self._argv else default


def estimate(record: dict[str, Any]) -> float:
    """Bytes that Megatron's estimate gives for the fullest rank."""
    words = Words(record["argv"])
    layers, h, heads = words.number("--num-layers"), words.number("--hidden-size"), words.number("--num-attention-heads")
    s, b = words.number("--seq-length"), words.number("--micro-batch-size")
    t, p = words.number("--tensor-model-parallel-size"), words.number("--pipeline-model-parallel-size")
    context = words.number("--context-parallel-size")
    data = record["nodes"] * record["gpus_per_node"] // (t * p * context)
    groups = words.number("--num-query-groups", heads) if words.has("--group-query-attention") else heads
    ratio = words.number("--kv-channels", h // heads) * heads / h
    gated = words.has("--swiglu")
    f = words.number("--ffn-hidden-size", int(h * 8 / 3) // 64 * 64 if gated else 4 * h)
    step = 128 * t
    vocabulary = -(-(words.number("--vocab-size", 50256) + 1) // step) * step
    of_layer = 2 * h * h * ((1 + groups / heads) * ratio + f / h * (1.5 if gated else 1) + 3 / h)
    shard = (of_layer * layers / p + h * vocabulary + h) / t
    if words.has("--untie-embeddings-and-output-weights") and p == 1:
        shard += h * vocabulary / t
    weights = shard * (6 + 12 / data if words.has("--use-distributed-optimizer") else 18)
    return weights + _activations(words, layers=layers, h=h, f=f, s=s, b=b, t=t, p=p, data=data, vocabulary=vocabulary)


def _activations(words: Words, *, layers: int, h: int, f: int, s: int, b: int, t: int, p: int, data: int, vocabulary: int) -> float:
    split = words.has("--sequence-parallel") and t > 1
    selective = words.has("--recompute-activations")
    kept = s * b * h * layers * (18 + 4 * f / h if split and selective else 10 + 24 / t) + 8 * s * b * p + s * b * h * p
    per_chunk = words.number("--num-layers-per-virtual-pipeline-stage", 0)
    if per_chunk:
        kept *= 1 + (p - 1) / (p * (layers // p // per_chunk))
    elif p > 1:
        kept *= min(1.0, words.number("--global-batch-size") // (b * data) / p)
    if split and selective:
        return (kept + (4 * s * b * h * (1 + vocabulary / h) if p == 1 else 0)) / t
    return 1.05 * (kept + (2 * s * b * (vocabulary / t + h) if p == 1 else 0))


def main(paths: list[str]) -> int:
    errors = []
    try:
        records = [record for path in paths for record in json.loads(Path(path).read_text())]
    except (OSError, ValueError) as error:
        print(f"records cannot be read: {error}", file=sys.stderr)
        return 2
    for record in records:
        if record["kind"] != "dense" or record["rare"] or "--multi-latent-attention" in record["argv"]:
            continue
        runs = [record["measured"]] if "measured" in record else record["measured_per_rank"].values()
        errors += [abs(estimate(record) / run["peak_allocated_bytes"] - 1) for run in runs]
    if not errors:
        print("name files of measured runs", file=sys.stderr)
        return 2
    errors.sort()
    print(f"{len(errors)} peaks: median {errors[len(errors) // 2]:.1%}, 90 % within {errors[int(0.9 * len(errors))]:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
