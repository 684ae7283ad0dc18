"""Serving engines on the command line: the report, its search, and refused input."""

from __future__ import annotations

import pytest

from tests.command import assert_refused, report, run

LLAMA = "--info-model meta-llama/Llama-3.1-8B --info-gpu H100-80GB --info-world-size 2"
BATCH = "--info-inference batch=16,prompt=1024,generate=128"
ENGINE = "--info-serving-engine vllm"


def test_fields_of_the_report() -> None:
    found = report(*f"{LLAMA} {BATCH} {ENGINE} --info-price 2.5".split())["inference"]
    serving = found["serving"]
    assert serving["engine"] == "vllm"
    assert serving["memory_share"] == 0.9
    assert serving["given"]["clients"] == 16
    assert [each["clients"] for each in serving["clients"]][:5] == [1, 2, 4, 8, 16]
    assert serving["cache_requests"] == serving["cache_tokens"] // 1152
    times = [each["token_seconds"] for each in serving["clients"]]
    assert times == sorted(times)
    rates = [each["tokens_per_second"] for each in serving["clients"]]
    assert rates == sorted(rates)
    assert serving["given"]["cost_per_million_tokens"] == pytest.approx(
        2.5 * 2 / 3600 / serving["given"]["tokens_per_second"] * 1e6
    )
    assert found["prefill_seconds"] is None


def test_the_console_report() -> None:
    serving = "prefix=0.5,draft=2,acceptance=0.5,wait=20,receive=10,captured=2k"
    outcome = run(*f"{LLAMA} {BATCH} {ENGINE} --info-serving {serving}".split())
    text = " ".join(outcome.out.split())
    assert outcome.status == 0
    for part in (
        "16 clients of each replica",
        "90% of the memory is used",
        "50% of each prompt",
        "1.75 tokens",
        "not counted",
        "at most 20 steps",
        "every 10 steps",
        "at most 2,048 tokens are CUDA graphs",
    ):
        assert part in text


def test_the_largest_number_of_clients() -> None:
    found = report(*f"{LLAMA} {ENGINE} --info-inference batch=max,prompt=4096,generate=1024".split())["inference"]["serving"]
    assert found["given"]["clients"] == found["cache_requests"] > 16


def test_a_model_that_does_not_fit() -> None:
    outcome = run(*f"{LLAMA} {BATCH} {ENGINE}".replace("Llama-3.1-8B", "Llama-3.1-70B").split())
    assert outcome.status == 1


def test_the_search_meets_its_target_the_cheapest_first() -> None:
    line = f"{LLAMA} {BATCH} {ENGINE} --info-serving-search first=400ms,token=12ms"
    serving = report(*line.split())["inference"]["serving"]
    costs = [each["gpus"] / each["time"]["tokens_per_second"] for each in serving["choices"]]
    assert costs == sorted(costs)
    assert costs
    for each in serving["choices"]:
        assert each["time"]["first_seconds"] <= 0.4
        assert each["time"]["token_seconds"] <= 0.012
    assert {each["tensor"] for each in serving["choices"]} == {1, 2}
    front = serving["front"]
    assert [each["time"]["token_seconds"] for each in front] == sorted(each["time"]["token_seconds"] for each in front)
    rates = [each["time"]["tokens_per_second"] / each["gpus"] for each in front]
    assert rates == sorted(rates)


def test_the_cost_of_the_same_tokens_on_all_tensor_parallel_ranks_of_megatron() -> None:
    line = (
        "--info-model Qwen/Qwen3-30B-A3B --info-gpu H100-80GB --info-world-size 4 --tensor-model-parallel-size 4 "
        f"--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 {BATCH}"
    )
    text = " ".join(run(*line.split()).out.split())
    assert "each of the 4 tensor-parallel ranks sends the same tokens to the experts" in text
    assert "--tensor-model-parallel-size 1 --expert-tensor-parallel-size 1 avoids it" in text
    assert "sends the same tokens" not in run(*line.replace("parallel-size 4", "parallel-size 1").split()).out


@pytest.mark.parametrize(
    ("options", "named", "fault"),
    [
        ("--info-serving requests=3", "--info-serving", "is about serving engines"),
        (f"{ENGINE} --info-serving requests=0", "--info-serving", "is not a number"),
        (f"{ENGINE} --info-serving memory=1.5", "--info-serving", "is not a share"),
        (f"{ENGINE} --info-serving draft=2", "--info-serving", "needs the probability"),
        (f"{ENGINE} --info-serving acceptance=0.5", "--info-serving", "needs the number of proposed tokens"),
        (f"{ENGINE} --info-serving fill=0.5", "--info-serving", "needs the steps"),
        (f"{ENGINE} --info-serving chunk=8k,chunk=4k", "--info-serving", "is given twice"),
        (f"{ENGINE} --info-serving speed=1", "--info-serving", "is not one of"),
        (f"{ENGINE} --info-serving-search first=1s", "--info-serving-search", "does not give token"),
        (f"{ENGINE} --info-serving-search first=1,token=2ms", "--info-serving-search", "is not a time"),
        (f"{ENGINE} --info-efficiency flops=1", "--info-efficiency", "is not used with"),
        (f"{ENGINE} --pipeline-model-parallel-size 2", "--pipeline-model-parallel-size", "without pipeline stages"),
        (f"{ENGINE} --info-offload weights=0/100/0", "--info-offload", "are modelled without it"),
        (f"{ENGINE} --info-inference batch=90000,prompt=1024,generate=128", "--info-serving-engine", "are more than"),
        ("--info-serving-engine other", "--info-serving-engine", "megatron"),
    ],
)
def test_refused(options: str, named: str, fault: str) -> None:
    outcome = run(*f"{LLAMA} {BATCH} {options}".split())
    assert_refused(outcome, named)
    assert fault in outcome.err


def test_without_a_gpu() -> None:
    assert_refused(
        run(*f"--info-model meta-llama/Llama-3.1-8B --info-world-size 1 {BATCH} {ENGINE}".split()), "--info-serving-engine"
    )
