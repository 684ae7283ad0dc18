"""Plants single-line faults, one at a time, and prints which of them the fast tests catch.

    python tools/mutants.py [NAME ...]

It takes a minute or two per fault. The tests run in a temporary copy of the repository, without the golden outputs and
without the shadow engine. Exit status 1: a fault survives. 2: the tests do not run, or fail without a fault.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
TESTS: Final = [
    *(sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--tb=no", "-rfE", "-m", "not slow and not shadow and not cuda"),
    *("--ignore", "tests/tools/test_mutants.py"),  # fails for every fault
]


class Fault(NamedTuple):
    """A line of a file, and what replaces it. Indentation does not count."""

    name: str
    file: str
    old: str
    new: str


FAULTS: Final = (
    Fault(
        "column-parallel backward without its input gradient",
        "analyzer/modules/linear.py",
        '*(() if in_buffers else (shapes.hidden("input gradient", gathered=True),)),',
        "",
    ),
    Fault(
        "statistics of RMSNorm and LayerNorm swapped",
        "analyzer/modules/norm.py",
        'if shapes.model.normalization == "LayerNorm":',
        'if shapes.model.normalization != "LayerNorm":',
    ),
    Fault(
        "FSDP prefetches a full communication unit",
        "analyzer/buffers/fsdp_gathering.py",
        "while extra < self.unit_size // 2:",
        "while extra < self.unit_size:",
    ),
    Fault(
        "gradient shard not divided by the ranks",
        "analyzer/communication/data_parallel.py",
        "shard = (bucket.numel // ranks,)",
        "shard = (bucket.numel,)",
    ),
    Fault(
        "half of the capture's cuBLAS workspaces",
        "analyzer/memory/graphs/kept.py",
        "workspace = 2 * cublas_workspace_bytes(job)  # each of two threads has a handle",
        "workspace = cublas_workspace_bytes(job)",
    ),
    Fault(
        "no unused segments",
        "analyzer/memory/allocator/replay.py",
        "unused=allocator.peak_reserved_bytes - allocator.peak_allocated_bytes,",
        "unused=0,",
    ),
    Fault(
        "1F1B frees the input of the previous microbatch",
        "analyzer/memory/pipeline_tensors.py",
        "tensors = PipelineTensors(forward=(*sent, *old, *received), backward=sent, exchanged=exchanged)",
        "tensors = PipelineTensors(forward=(*sent, *received), backward=sent, exchanged=exchanged)",
    ),
    Fault(
        "logits of the z-loss not saved",
        "analyzer/modules/moe/router.py",
        "*((logits,) if moe.z_loss_coeff else ()),  # saved by logsumexp",
        "",
    ),
    Fault(
        "square of Muon's iterate on the other side",
        "analyzer/states/muon.py",
        "squared = n if partition == 0 else m",
        "squared = m if partition == 0 else n",
    ),
    Fault(
        "overlapped microbatches without the experts' backward",
        "analyzer/memory/overlapped/microbatches.py",
        "feed_forward = self._run_backward(of_experts[len(reading) :], None, (*rows, *permuted, *shared, *held))",
        "feed_forward = self._run_backward((), None, (*rows, *permuted, *shared, *held))",
    ),
)


def line_of(fault: Fault, text: str) -> int:
    """The index of the line that a fault replaces. It must be there once."""
    found = [index for index, line in enumerate(text.splitlines()) if line.strip() == fault.old]
    if len(found) != 1:
        raise ValueError(f"{fault.file} has {len(found)} lines {fault.old!r}")
    return found[0]


def with_fault(fault: Fault, text: str) -> str:
    """The text of the file with the fault in it."""
    lines = text.splitlines(keepends=True)
    index = line_of(fault, text)
    lines[index] = lines[index].replace(fault.old, fault.new)
    return "".join(lines)


def copy_repository(folder: Path) -> None:
    """Copies the files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def first_failure(folder: Path) -> str | None:
    """Runs the fast tests of a copy. Returns the first test that fails, or None."""
    done = subprocess.run(TESTS, cwd=folder, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not failed:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(2)
    return failed[0].partition(" ")[2].partition(" - ")[0]


def main(names: list[str]) -> int:
    """Prints one line per fault; returns the exit status."""
    chosen = [fault for fault in FAULTS if not names or any(name in fault.name for name in names)]
    survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_repository(folder)
        failure = first_failure(folder)
        if failure is not None:
            print(f"{failure} fails without a fault", file=sys.stderr)
            return 2
        for fault in chosen:
            file = folder / fault.file
            file.write_text(with_fault(fault, file.read_text()))
            failure = first_failure(folder)
            survivors += failure is None
            print(f"{'survives' if failure is None else 'caught  '}  {fault.name}: {failure or fault.file}", flush=True)
            shutil.copy2(ROOT / fault.file, file)
    return 1 if survivors else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only faults whose name contains one of these")
    sys.exit(main(parser.parse_args().names))
