"""Print the errors of predicted generation with offloading as the tables of docs/offloading.md: `python tools/score_offload.py`.

Each run of tests/data/flexllmgen.json is predicted with the shipped rates: FlexLLMGen with OPT-6.7B and OPT-30B on an NVIDIA T4.
For runs whose policy is not published, the policy that the search finds for the size of the block is compared. `--runs` prints
every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from analyzer.inference.offload.machine import Machine, machine_of  # noqa: E402
from analyzer.inference.offload.policy import Lengths, Placement, Schedule, Shares  # noqa: E402
from analyzer.inference.offload.search import Problem, search  # noqa: E402
from analyzer.inference.offload.steps import block  # noqa: E402
from analyzer.inference.offload.tensors import sub_layers  # noqa: E402
from analyzer.inference.offload.work import Case  # noqa: E402
from analyzer.specs.model import ModelSpec  # noqa: E402

RECORDS: Final = ROOT / "tests/data/flexllmgen.json"
SIZES: Final = {"opt-6.7b": (32, 4096, 32), "opt-30b": (48, 7168, 56)}
"""Layers, hidden size and heads (OPT, arXiv 2205.01068, table 1)."""
VOCABULARY: Final = 50272
POSITIONS: Final = 2050
"""Rows of the table of positions: two more than tokens in a sequence."""
TESTED: Final = 512
"""Prompt of the runs of OPT-30B that no rate was fitted on."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Score:
    """A run, and its predicted tokens per second."""

    record: Record
    predicted: float

    @property
    def error(self) -> float:
        """Relative; above 0 where too much is predicted."""
        return self.predicted / float(self.record["measured_tok_s"]) - 1


@cache
def model(name: str) -> ModelSpec:
    """An OPT model."""
    layers, hidden, heads = SIZES[name]
    return ModelSpec(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        position_embedding="learned_absolute",
    )


def records(*, published: bool) -> list[Record]:
    """The runs whose policy is published, or the others."""
    return [
        each for each in json.loads(RECORDS.read_text(encoding="utf-8"))["records"] if (each["percent"] is not None) == published
    ]


def placement(record: Record) -> Placement:
    """The shares of a run as its options give them."""
    percent = record["percent"]
    pairs = [(percent[place] / 100, percent[place + 1] / 100) for place in (0, 2, 4)]
    return Placement(*(Shares(gpu, host, max(0.0, 1 - gpu - host)) for gpu, host in pairs))


def case(record: Record, machine: Machine) -> Case:
    """The formulas' inputs for a run whose policy is published."""
    return Case(
        model=model(record["model"]),
        layers=sub_layers(model(record["model"])),
        schedule=Schedule(
            batch_size=record["gpu_batch_size"],
            batches=record["num_gpu_batches"],
            compressed_weights=record["compress_weight"],
            compressed_cache=record["compress_cache"],
            attention_on_cpu=record["cpu_cache_compute"],
            overlapped=record["overlap"],
            pinned_weights=record["pin_weight"],
        ),
        lengths=Lengths(prompt=record["prompt_len"], generated=record["gen_len"]),
        machine=machine,
    )


def score(record: Record, machine: Machine) -> Score:
    """The prediction for a run whose policy is published."""
    inputs = case(record, machine)
    tokens = inputs.lengths.generated + (inputs.lengths.prompt if record["metric"] == "input_plus_output_tok_s" else 0)
    return Score(record, inputs.schedule.block_size * tokens / block(inputs).actual_seconds(placement(record)).total)


def score_of_best(record: Record, machine: Machine) -> Score:
    """The throughput of the best policy that the search finds for the block of a run. Needs scipy."""
    problem = Problem(
        model=model(record["model"]),
        layers=sub_layers(model(record["model"])),
        lengths=Lengths(prompt=record["prompt_len"], generated=record["gen_len"]),
        machine=machine,
        compress_cache=record["compress_cache"],
    )
    return Score(record, search(problem, [record["block_size"]])[0].throughput)


def of_group(scores: Iterable[Score], model_name: str, *, tested: bool | None = None) -> list[Score]:
    """The runs of a model; `tested`: only those with the prompt of the test, or only the others."""
    return [each for each in scores if each.record["model"] == model_name and tested in (None, each.record["prompt_len"] == TESTED)]


def quantile(errors: Sequence[float], part: float) -> float:
    """A quantile of the absolute errors: the value that this part of them is at or below."""
    ordered = sorted(map(abs, errors))
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def loss_of_first(scores: Sequence[Score]) -> float:
    """How much slower the policy with the highest prediction is than the policy with the highest measured throughput."""
    first = max(scores, key=lambda each: each.predicted)
    return 1 - float(first.record["measured_tok_s"]) / max(float(each.record["measured_tok_s"]) for each in scores)


def _row(name: str, scores: Sequence[Score]) -> str:
    errors = [each.error for each in scores]
    tail = quantile(errors, 0.9)
    return f"| {name} | {len(errors)} | {statistics.median(map(abs, errors)):.1%} | {tail:.1%} | {statistics.median(errors):+.1%} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", action="store_true", help="print every run")
    arguments = parser.parse_args()
    machine = machine_of("T4")
    known = [score(each, machine) for each in records(published=True)]
    searched = [score_of_best(each, machine) for each in records(published=False)]
    print("| runs | number | median error | 90th percentile | median of signed errors |")
    print("| --- | ---: | ---: | ---: | ---: |")
    print(_row("OPT-6.7B (fitted: GPU)", of_group(known, "opt-6.7b")))
    print(_row("OPT-30B, other prompts (fitted: host)", of_group(known, "opt-30b", tested=False)))
    print(_row("OPT-30B, prompt of 512 (not fitted)", of_group(known, "opt-30b", tested=True)))
    print(_row("all with a published policy", known))
    print(_row("OPT-30B, policy by the search (not fitted)", searched))
    print(_row("all", [*known, *searched]))
    ranked = [*of_group(known, "opt-30b", tested=True), *searched]
    loss = f"{loss_of_first(ranked):.1%} slower than the fastest of {len(ranked)}"
    print(f"\nOPT-30B, prompt of 512: the policy ranked first is {loss}.")
    for each in [*known, *searched] if arguments.runs else []:
        row = each.record
        run = f"{row['id']:4} {row['model']} {row['percent'] or 'policy not published'} prompt {row['prompt_len']}"
        print(f"{run}: measured {row['measured_tok_s']:.4g}, predicted {each.predicted:.4g}, {each.error:+.1%}")


if __name__ == "__main__":
    main()
