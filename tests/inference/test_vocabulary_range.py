"""What a report of inference says if the vocabulary size is not known, as in a training."""

from __future__ import annotations

import pytest

from tests.command import report, run

MODEL = (
    "--nproc-per-node 2 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --bf16 --untie-embeddings-and-output-weights "
    "--pipeline-model-parallel-size 2"
)
UNKNOWN = f"{MODEL} --tokenizer-type HuggingFaceTokenizer --tokenizer-model nobody/nothing"
BATCH = "--info-inference batch=4,prompt=256,generate=16"
GPU = "--info-gpu H100-80GB"
ONE = UNKNOWN.replace("--nproc-per-node 2", "--nproc-per-node 1").replace(" --pipeline-model-parallel-size 2", "")
OFFLOAD = "--info-gpu T4 --info-offload weights=0/100/0,cache=0/100/0"


def known(size: int, *, launch: str = UNKNOWN) -> str:
    return f"{launch} --vocab-size {size}"


def device_bytes(line: str) -> list[int]:
    return [rank["memory"]["device_bytes"] for rank in report(*f"{line} {BATCH}".split())["ranks"]]


def test_the_range_covers_small_and_large_vocabularies() -> None:
    found = report(*f"{UNKNOWN} {BATCH}".split())
    sizes = [device_bytes(known(size)) for size in (32_000, 128_000, 256_000)]
    assert sizes[0] < sizes[1] < sizes[2]
    for rank, small, same, large in zip(found["ranks"], *sizes, strict=True):
        assert rank["memory"]["device_bytes"] == same
        assert rank["memory"]["device_range_bytes"] == [small, large]
    rank = report(*f"{known(128_000)} {BATCH}".split())["ranks"][0]["memory"]
    assert rank["device_range_bytes"] == [rank["device_bytes"]] * 2


@pytest.mark.parametrize("options", [BATCH, f"{BATCH} {OFFLOAD}"])
def test_the_report_begins_with_the_assumption_and_its_effect(options: str) -> None:
    launch = ONE if "offload" in options else UNKNOWN
    text = " ".join(run(*f"{launch} {options}".split()).out.split())
    assert text.startswith("The vocabulary size is not known (nobody/nothing is neither")
    for part in ("128,000 tokens are assumed", "less with 32,000", "more with 256,000", "--vocab-size"):
        assert part in text
    assert report(*f"{launch} {options}".split())["warnings"][0].startswith("The vocabulary size is not known")
    assert "vocabulary size is not known" not in run(*f"{known(128_000, launch=launch)} {options}".split()).out


@pytest.mark.parametrize("size", [32_000, 256_000])
def test_a_capacity_between_the_sizes_is_tight(size: int) -> None:
    needed = max(device_bytes(known(size)))
    outcome = run(*f"{UNKNOWN} {BATCH} {GPU} --info-gpu-memory {needed - (size > 32_000)}".split())
    assert outcome.out.split("\n\n")[1].startswith("It is tight: ")
    assert "the estimate ranges from" in " ".join(outcome.out.split())
    assert outcome.status == int(size == 32_000), "by the estimate"
    verdict = report(*f"{UNKNOWN} {BATCH} {GPU} --info-gpu-memory {min(device_bytes(known(32_000))) // 2}".split())["verdict"]
    assert verdict["state"] == "does not fit"


def test_a_host_between_the_sizes_is_tight() -> None:
    def tier(line: str) -> int:
        return int(report(*f"{line} {BATCH} {OFFLOAD}".split())["inference"]["policy"]["tiers"][1]["total_bytes"])

    small, assumed, large = (tier(known(size, launch=ONE)) for size in (32_000, 128_000, 256_000))
    assert small < assumed < large
    for memory, state, status in (
        (small - 10**7, "does not fit", 1),
        ((small + assumed) // 2, "tight", 1),
        ((assumed + large) // 2, "tight", 0),
        (large + 10**7, "fits", 0),
    ):
        line = f"{ONE} {BATCH} {OFFLOAD},host-memory={memory / 1e9}"
        assert report(*line.split())["verdict"]["state"] == state
        assert run(*line.split()).status == status
