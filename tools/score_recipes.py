"""Counts the answers for recipes of Megatron-Bridge, and compares each with the values in its container.

    python tools/score_recipes.py OUT [--only TEXT] [--show]

OUT is a folder that `tools/bridge_containers.py` has written. Each container is read as it is after the setup of the training, and
as the recipe returns it: parameters and the peak must be the same. The sizes of parallelism, the micro-batch, the global batch and
the sequence length are compared with the values in the file. Exit status 1: an answer is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import analyzer  # noqa: E402
from analyzer.errors import AnalyzerError  # noqa: E402
from analyzer.results import Report  # noqa: E402
from tools.bridge_containers import gpus_of  # noqa: E402

_GPUS: Final = {
    "_h100_": "H100-80GB", "_b200_": "B200-192GB", "_b300_": "B300-288GB", "_gb200_": "GB200-192GB", "_gb300_": "GB300-288GB",
}  # fmt: skip
_SIZES: Final = {
    "tensor_model_parallel_size": "tensor", "pipeline_model_parallel_size": "pipeline", "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
}  # fmt: skip


def _report(path: Path) -> Report | str:
    """The report of a container, or why it is refused."""
    gpu = next((each for text, each in _GPUS.items() if text in path.stem), None)
    try:
        return analyzer.analyze([str(path), "--info-world-size", str(gpus_of(path.stem))], gpu=gpu, environ={})
    except AnalyzerError as error:
        return str(error)


def _values(path: Path) -> Mapping[str, Any]:
    """The values of a container. Fields of nested configurations of a model stand beside its own."""
    tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    model = dict(tree["model"])
    return {**tree, "model": {**(model.get("transformer") or {}), **model}}


def _differences(path: Path, report: Report) -> list[str]:
    """What the report has otherwise than the file."""
    tree, parallel, batch = _values(path), report.job.parallel, report.job.batch
    pairs = [(name, tree["model"].get(name) or 1, getattr(parallel, attribute)) for name, attribute in _SIZES.items()]
    pairs += [(name, tree["train"][name], getattr(batch, name)) for name in ("micro_batch_size", "global_batch_size")]
    length = tree["dataset"].get("seq_length") or tree["dataset"].get("sequence_length") or tree["model"].get("seq_length")
    if not (tree["dataset"].get("offline_packing_specs") or {}).get("packed_sequence_size"):
        pairs.append(("seq_length", length, batch.seq_length))
    return [f"{name} {found} instead of {given}" for name, given, found in pairs if given != found]


def _peak(report: Report) -> int:
    return max(each.memory.peak_allocated_bytes for each in report.ranks)


def _of_recipe(path: Path, after: Report) -> list[str]:
    """What the container has otherwise before the setup."""
    before = _report(path.parent.parent / "recipe" / path.name)
    if isinstance(before, str):
        return [f"refused before the setup: {before}"]
    pairs = (("parameters", before.parameters, after.parameters), ("peak", _peak(before), _peak(after)))
    return [f"{name} {first} before the setup and {then} after it" for name, first, then in pairs if first != then]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the counts. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="recipes whose name has this text")
    parser.add_argument("--show", action="store_true", help="print each recipe that is refused or differs")
    args = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    wrong = 0
    for path in sorted(path for path in (args.out / "setup").glob("*.yaml") if args.only in path.name):
        report = _report(path)
        if isinstance(report, str):
            counts["refused"] += 1
            lines = [f"refused: {report}"]
        else:
            unknown = "no verdict" if report.verdict.withheld else "without a GPU in its name"
            counts[report.verdict.state or unknown] += 1
            lines = [*_differences(path, report), *_of_recipe(path, report)]
            wrong += bool(lines)
        if args.show and lines:
            print(path.stem, *lines, sep="\n    ")
    print(f"{counts.total()} recipes: {', '.join(f'{number} {state}' for state, number in counts.most_common())}; {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
