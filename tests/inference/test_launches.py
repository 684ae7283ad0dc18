"""Inference on the command line: the report, exit status, errors, and Megatron's inference scripts."""

from __future__ import annotations

import json

import pytest

from analyzer.launch.inference.options import (
    DYNAMIC_SCRIPTS,
    ONLY_TRAINING,
    STATIC_SCRIPTS,
    asks_for_inference,
    script_of,
    without_script_options,
)
from analyzer.launch.info_options import FLAGS
from analyzer.script.stand_ins.python_command import GENERATES
from tests.command import assert_refused, report, run
from tests.inference.job_of import BATCH, launch_of

LLAMA = "--info-model meta-llama/Llama-3.1-8B"
GPU = "--info-gpu H100-80GB"
SERVER = (
    "--nproc_per_node 1 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6000 tools/run_text_generation_server.py "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 24 --hidden-size 1024 --load checkpoint "
    "--num-attention-heads 16 --max-position-embeddings 1024 --tokenizer-type NullTokenizer --vocab-size 50256 --fp16 "
    "--micro-batch-size 1 --seq-length 1024 --seed 42"
)
"""examples/inference/run_text_generation_server_345M.sh of Megatron-LM."""
ROTARY = SERVER.replace("--max-position-embeddings 1024", "--max-position-embeddings 8192 --position-embedding-type rope")


DYNAMIC = "--inference-dynamic-batching"
"""The beginning of the options of the dynamic engine."""


def of_script(script: str, options: str = "", *, line: str = ROTARY) -> str:
    return f"{line} {options}".replace("tools/run_text_generation_server.py", script)


def test_fields_of_the_report() -> None:
    found = report(*f"{LLAMA} {BATCH} {GPU} --info-price 2.5 --info-world-size 2 --tensor-model-parallel-size 2".split())
    inference = found["inference"]
    assert inference["kv_cache_bytes"] == 8 * 2304 * 131072 // 2
    assert inference["kv_cache_bytes_per_token"] == 131072
    assert inference["weights_bytes"] == found["ranks"][0]["memory"]["weights_bytes"]
    assert inference["prefill_seconds"] == pytest.approx(sum(inference["prefill_parts_seconds"].values()))
    assert inference["decode_seconds_per_token"] == pytest.approx(sum(inference["decode_parts_seconds"].values()))
    given = next(each for each in inference["batches"] if each["batch_size"] == 8)
    assert given["tokens_per_second"] == inference["tokens_per_second"] > 0
    assert given["cost_per_million_tokens"] == inference["cost_per_million_tokens"] > 0
    assert inference["batches"][-1]["batch_size"] == inference["max_batch"] > 8
    assert inference["max_sequence_length"] > 2304
    assert inference["policy"] is None
    assert found["verdict"]["fits"] is True
    assert found["parallel"]["tensor"] == 2


def test_the_console_report() -> None:
    outcome = run(*f"{LLAMA} {BATCH} {GPU} --info-quantize w4a16kv8 --info-world-size 1".split())
    assert outcome.status == 0
    text = " ".join(outcome.out.split())
    for part in ("It fits: rank 0", "weights 4 bits, activations 16 bits, cache 8 bits", "time to the first token", "tokens/s"):
        assert part in text


def test_without_a_gpu_there_is_no_verdict_and_no_time() -> None:
    found = report(*f"{LLAMA} {BATCH} --info-world-size 1".split())
    assert found["verdict"]["fits"] is None
    assert found["inference"]["prefill_seconds"] is None
    assert found["inference"]["max_batch"] is None
    assert found["inference"]["batches"] == []


def test_exit_status() -> None:
    large = f"--info-model meta-llama/Llama-3.1-70B {BATCH} {GPU} --info-world-size 1"
    assert run(*large.split()).status == 1
    assert run(*f"{LLAMA} {BATCH} --info-fail-on unknown".split()).status == 1
    assert run(*f"{LLAMA} {BATCH} {GPU} --info-margin 90% --info-fail-on tight".split()).status == 1


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("batch=8,prompt=2048", "does not give generate"),
        ("batch=0,prompt=2048,generate=1", "'batch=0'"),
        ("batch=8,batch=8,prompt=1,generate=1", "'batch=8'"),
        ("tokens=8", "'tokens=8'"),
    ],
)
def test_wrong_values_of_the_batch(value: str, part: str) -> None:
    outcome = run(*f"{LLAMA} --info-inference {value}".split())
    assert_refused(outcome, "--info-inference")
    assert part in outcome.err


@pytest.mark.parametrize("value", ["", "g64", "w4a3", "w2a16", "a16w4", "w4a16kv8g0", "w4a16kv"])
def test_wrong_values_of_quantization(value: str) -> None:
    assert_refused(run(*f"{LLAMA} {BATCH} --info-quantize {value}".split()), "--info-quantize")


def test_values_of_quantization() -> None:
    spec = launch_of(f"{LLAMA} {BATCH} --info-quantize w4a8kv4g128").job.inference.quantization
    assert (spec.weight_bits, spec.activation_bits, spec.cache_bits, spec.group_size) == (4, 8, 4, 128)


@pytest.mark.parametrize(("value", "bits"), [("kv8", (16, 16, 8)), ("w8", (8, 16, 16)), ("w4kv8", (4, 16, 8)), ("a8", (16, 8, 16))])
def test_parts_of_quantization_that_are_left_out_have_16_bits(value: str, bits: tuple[int, int, int]) -> None:
    spec = launch_of(f"{LLAMA} {BATCH} --info-quantize {value}").job.inference.quantization
    assert (spec.weight_bits, spec.activation_bits, spec.cache_bits) == bits


@pytest.mark.parametrize(("written", "tokens"), [("32k", 32768), ("1K", 1024), ("1m", 1048576), ("2048", 2048)])
def test_k_of_a_length_is_1024_tokens(written: str, tokens: int) -> None:
    spec = launch_of(f"{LLAMA} --info-inference batch=2,prompt={written},generate={written}").job.inference
    assert (spec.prompt_tokens, spec.generated_tokens) == (tokens, tokens)


def test_the_largest_batch_fits_and_one_more_request_does_not() -> None:
    """Through the command `serve`, whose options are parts of --info-inference."""
    words = "meta-llama/Llama-3.1-8B --gpu H100-80GB --gpus 1 --prompt 32k --generate 1k --json - --batch"
    found = json.loads(run("serve", *words.split(), "max").out)
    batch = found["inference"]["batch_size"]
    assert batch == found["inference"]["max_batch"]
    states = [json.loads(run("serve", *words.split(), str(size)).out)["verdict"]["fits"] for size in (batch, batch + 1)]
    assert states == [True, False]


def test_the_largest_batch_is_at_least_one_request() -> None:
    assert launch_of(f"{LLAMA} --info-inference batch=max,prompt=2048,generate=256 --info-gpu T4").job.inference.batch_size == 1


def test_the_largest_batch_needs_a_gpu() -> None:
    assert_refused(run(*f"{LLAMA} --info-inference batch=max,prompt=2048,generate=256".split()), "--info-inference")


@pytest.mark.parametrize(
    "option",
    ["--info-search", "--info-tokens 15T", "--info-record trace", "--info-engine shadow", "--info-launch", "--info-check x"],
)
def test_options_of_a_training_are_refused(option: str) -> None:
    outcome = run(*f"{LLAMA} {BATCH} {option}".split())
    assert_refused(outcome, option.split()[0])
    assert "inference" in outcome.err


def test_every_option_is_used_or_refused() -> None:
    """An option that is new is refused, or listed here because inference uses it."""
    used = (
        "inference quantize offload gpu gpu-memory json fail-on margin moe-imbalance network hardware calibration efficiency price "
    )
    used += "serving serving-engine serving-search megatron te torch world-size gpus-per-node model set unset strict debug dry "
    used += "run-all html"
    assert {*FLAGS} - {*ONLY_TRAINING} == {f"--info-{name}" for name in used.split()}


def test_options_of_inference_are_refused_in_a_training() -> None:
    assert_refused(run(*f"{LLAMA} --info-quantize w4a16".split()), "--info-quantize")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--context-parallel-size 2 --info-world-size 2", "--context-parallel-size"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 --info-world-size 2",
            "--num-layers-per-virtual",
        ),
    ],
)
def test_layouts_that_megatron_does_not_generate_with(options: str, named: str) -> None:
    """They are replaced in the launch of a training, and refused in that of an inference script."""
    found = report(*f"{LLAMA} {BATCH} {options}".split())
    (warning,) = (each for each in found["warnings"] if each.startswith(named))
    assert "Megatron-LM generates without" in warning
    assert found["parallel"]["data"] * found["parallel"]["pipeline"] == 2
    refused = run(*f"{LLAMA} {options} --seq-length 4096 gpt_static_inference.py".split())
    assert refused.status == 2
    assert refused.err.startswith(f"get-training-info: {named}")


def test_learned_positions_bound_prompt_and_generation() -> None:
    outcome = run(*f"--info-model facebook/opt-6.7b {BATCH}".split())
    assert_refused(outcome, "--info-inference")
    assert "2304 tokens" in outcome.err


def test_scripts_with_these_launches_are_analyzed() -> None:
    assert {*STATIC_SCRIPTS, *DYNAMIC_SCRIPTS} == GENERATES


def test_which_launches_are_inference() -> None:
    assert asks_for_inference([*LLAMA.split(), *BATCH.split()])
    assert asks_for_inference(SERVER.split())
    assert not asks_for_inference("--nproc-per-node 8 pretrain_gpt.py --num-layers 8".split())
    assert script_of(["-m", "examples.inference.gpt.gpt_dynamic_inference"]) == "gpt_dynamic_inference"
    assert script_of(["examples/inference/gpt/gpt_static_inference.py"]) == "gpt_static_inference"
    assert script_of(["--load", "pretrain_gpt.py"]) is None


def test_options_of_the_script_are_not_megatron_s() -> None:
    words = of_script(
        "examples/inference/gpt/gpt_static_inference.py", "--prompts one two --temperature 1.0 --top_k=1 --bf16"
    ).split()
    kept, script = without_script_options(words)
    assert script.values == {"--prompts": ("one", "two"), "--temperature": ("1.0",), "--top_k": ("1",)}
    assert kept == [
        *ROTARY.replace("tools/run_text_generation_server", "examples/inference/gpt/gpt_static_inference").split(),
        "--bf16",
    ]


def test_the_static_engine_before_core_0_16() -> None:
    """All requests and tokens of `--inference-max-batch-size` (8) and `--inference-max-seq-length` (2560) in 24 layers."""
    job = launch_of(f"{ROTARY} --info-megatron 0.15.3").job
    spec = job.inference
    assert (spec.cache, spec.cache_requests, spec.cache_tokens, spec.batch_size) == ("static", 8, 2560, 8)
    assert (spec.prompt_tokens, spec.generated_tokens) == (2560 - 30, 30)
    found = report(*f"{ROTARY} --info-megatron 0.15.3".split())
    assert found["inference"]["kv_cache_bytes"] == 24 * 2 * 8 * 2560 * 1024 * 2


def test_the_static_engine_uses_the_dynamic_one_from_core_0_16_on() -> None:
    found = report(*f"{ROTARY} --info-megatron 0.16.1".split())
    block = 24 * 2 * 256 * 1024 * 2
    assert found["inference"]["cache"] == "dynamic"
    assert found["inference"]["kv_cache_bytes"] == 40 * 2**30 // block * block
    assert found["inference"]["batch_size"] == 8
    legacy = launch_of(f"{ROTARY} --info-megatron 0.16.1 --use-legacy-static-engine").job
    assert legacy.inference.cache == "static"


def test_learned_positions_shorten_the_cache() -> None:
    job = launch_of(f"{SERVER} --info-megatron 0.16.1 --use-legacy-static-engine").job
    assert job.inference.cache_tokens == 1024


def test_a_benchmark() -> None:
    line = of_script(
        "tools/run_inference_performance_test.py",
        "--inference-max-requests 4 --inference-max-seq-length 600 --num-input-tokens 512 --num-tokens-to-generate 64 "
        "--use-legacy-static-engine --info-megatron 0.17.1",
    )
    spec = launch_of(line).job.inference
    assert (spec.batch_size, spec.prompt_tokens, spec.generated_tokens, spec.cache_tokens) == (4, 512, 64, 600)


def test_the_dynamic_engine() -> None:
    """Blocks of 128 tokens of 24 layers with 1,024 elements of keys and of values: 12 MiB each. One of the 853 is a dummy."""
    options = "--inference-dynamic-batching-buffer-size-gb 10 --inference-dynamic-batching-block-size 128 --info-megatron 0.16.1"
    for script in ("tools/run_dynamic_text_generation_server.py", "examples/inference/gpt/gpt_dynamic_inference.py"):
        found = report(*of_script(script, f"{options} --num-tokens-to-generate 100 --num-tokens-to-prompt 64 412").split())
        assert found["inference"]["kv_cache_bytes"] == 853 * 12 * 2**20
        assert found["inference"]["cache_requests"] == 852 // 4
        assert found["inference"]["batch_size"] == 852 // 4
        assert (found["inference"]["prompt_tokens"], found["inference"]["generated_tokens"]) == (412, 100)


def test_graphs_of_decode_are_those_of_the_launch() -> None:
    line = f"{ROTARY} --info-megatron 0.16.1"
    assert not launch_of(line).job.inference.decode_graphs
    assert launch_of(f"{line} --cuda-graph-impl local").job.inference.decode_graphs


def test_requests_that_the_engine_is_not_allocated_for() -> None:
    line = f"{ROTARY} --info-megatron 0.15.3"
    outcome = run(*f"{line} --info-inference batch=9,prompt=512,generate=32".split())
    assert_refused(outcome, "--inference-max-batch-size")
    outcome = run(*f"{line} --info-inference batch=8,prompt=2600,generate=32".split())
    assert_refused(outcome, "--inference-max-seq-length")
    dynamic = of_script("gpt_dynamic_inference.py", "--inference-dynamic-batching-buffer-size-gb 1 --info-megatron 0.16.1")
    outcome = run(*f"{dynamic} --info-inference batch=800,prompt=512,generate=32".split())
    assert_refused(outcome, "--inference-dynamic-batching-buffer-size-gb")


LATENT = "--nproc_per_node 1 {} --bf16 --seq-length 4096 --info-model deepseek-ai/DeepSeek-V2-Lite"
GQA = "--nnodes 2 --nproc_per_node 8 {} --bf16 --seq-length 4096 --info-model meta-llama/Llama-3.1-8B"
"""8 groups of keys and values; a token has 128 KiB of them, a block of 256 tokens 32 MiB."""


def test_offloading_is_not_for_the_dynamic_engine() -> None:
    line = "--info-model facebook/opt-30b --info-gpu T4 --info-inference batch=144,prompt=512,generate=32"
    asked = run(*f"{line} --info-offload weights=20/80/0 --inference-dynamic-batching".split())
    assert_refused(asked, "--info-offload")
    assert "leave out --inference-dynamic-batching" in asked.err


def test_latents_in_the_dynamic_engine_need_their_option() -> None:
    line = f"{LATENT.format('gpt_dynamic_inference.py')} --info-megatron 0.15.3"
    assert_refused(run(*line.split()), "--cache-mla-latents")
    wide = run(*f"{line} --cache-mla-latents".split())
    assert_refused(wide, "--inference-dynamic-batching-block-size")
    found = report(*f"{line} --cache-mla-latents --inference-dynamic-batching-block-size 64".split())
    assert found["inference"]["kv_cache_bytes_per_token"] == 27 * 576 * 2


@pytest.mark.parametrize("release", ["0.16.1", "0.17.1", "0.18.2", "0.19.0"])
def test_latent_attention_in_a_dynamic_engine_that_fails_with_it(release: str) -> None:
    """`flash_decode_and_prefill` has ten parameters without defaults, of which `MultiLatentAttention.forward` gives nine."""
    latents = "--cache-mla-latents --inference-dynamic-batching-block-size 64"
    for script in ("gpt_dynamic_inference.py", "gpt_static_inference.py", "tools/run_text_generation_server.py"):
        outcome = run(*f"{LATENT.format(script)} {latents} --info-megatron {release}".split())
        assert_refused(outcome, "--multi-latent-attention")
        assert "0.16 to 0.19" in outcome.err
        assert "--use-legacy-static-engine" in outcome.err
    legacy = f"{LATENT.format('gpt_static_inference.py')} --use-legacy-static-engine --info-megatron {release}"
    assert report(*legacy.split())["inference"]["kv_cache_bytes_per_token"] == 27 * 16 * (192 + 128) * 2
    assert_refused(run(*f"{legacy} --cache-mla-latents".split()), "--cache-mla-latents")


@pytest.mark.parametrize(
    ("release", "script", "options", "named"),
    [
        ("0.16.1", "gpt_dynamic_inference.py", "--tensor-model-parallel-size 16", "--tensor-model-parallel-size"),
        ("0.16.1", "gpt_static_inference.py", "--tensor-model-parallel-size 16", "--tensor-model-parallel-size"),
        ("0.16.1", "gpt_dynamic_inference.py", f"{DYNAMIC}-max-requests 16385", f"{DYNAMIC}-max-requests"),
        ("0.17.1", "gpt_dynamic_inference.py", f"{DYNAMIC}-max-requests 16385", f"{DYNAMIC}-max-requests"),
        ("0.16.1", "gpt_dynamic_inference.py", f"{DYNAMIC}-max-tokens 1024", f"{DYNAMIC}-max-tokens"),
        ("0.16.1", "gpt_dynamic_inference.py", f"{DYNAMIC}-block-size 16", f"{DYNAMIC}-buffer-size-gb"),
        (
            "0.17.1",
            "gpt_dynamic_inference.py",
            f"--tensor-model-parallel-size 8 {DYNAMIC}-max-requests 12",
            f"{DYNAMIC}-max-requests",
        ),
        ("0.17.1", "gpt_static_inference.py", "--tensor-model-parallel-size 16", "--inference-max-requests"),
        ("0.16.1", "gpt_dynamic_inference.py", f"{DYNAMIC}-buffer-size-gb nan", f"{DYNAMIC}-buffer-size-gb"),
        ("0.16.1", "gpt_static_inference.py", f"{DYNAMIC}-buffer-size-gb -4", f"{DYNAMIC}-buffer-size-gb"),
    ],
)
def test_what_the_dynamic_engine_refuses(release: str, script: str, options: str, named: str) -> None:
    """The assertions and divisions of `DynamicInferenceContext.__init__`, and buffers that have no size."""
    outcome = run(*f"{GQA.format(script)} {options} --info-megatron {release}".split())
    assert_refused(outcome, named)
    assert ("--use-legacy-static-engine" in outcome.err) == ("static" in script and "buffer" not in named)


@pytest.mark.parametrize(
    ("release", "options"),
    [
        ("0.17.1", f"--tensor-model-parallel-size 16 {DYNAMIC}-max-requests 16"),
        ("0.16.1", f"--tensor-model-parallel-size 8 {DYNAMIC}-max-requests 12"),
        ("0.16.1", f"{DYNAMIC}-max-requests 1024 {DYNAMIC}-max-tokens 1024"),
        ("0.15.3", f"{DYNAMIC}-max-requests-override 16385"),
    ],
)
def test_what_the_dynamic_engine_of_a_release_accepts(release: str, options: str) -> None:
    report(*f"{GQA.format('gpt_dynamic_inference.py')} {options} --info-megatron {release}".split())


def test_the_option_with_too_few_requests_is_named() -> None:
    line = f"{GQA.format('gpt_dynamic_inference.py')} {DYNAMIC}-max-requests 4 {BATCH} --info-megatron 0.16.1"
    assert_refused(run(*line.split()), f"{DYNAMIC}-max-requests")


def test_options_of_the_dynamic_engine_do_not_reach_it_through_the_static_one() -> None:
    """`StaticInferenceEngine.__init__` gives the buffer size, and from core 0.17 on the requests, with blocks of 256 tokens."""
    options = f"{DYNAMIC}-block-size 64 {DYNAMIC}-max-tokens 2048 {DYNAMIC}-max-requests 4"
    for release, rows in (("0.16.1", None), ("0.17.1", 8)):
        job = launch_of(f"{GQA.format('gpt_static_inference.py')} {options} --info-megatron {release}").job
        dynamic = job.inference.dynamic
        assert dynamic is not None
        assert (dynamic.block_tokens, dynamic.max_tokens) == (256, 16384)
        assert (None if dynamic.in_static_engine else dynamic.max_requests) == rows
        assert sum("has no effect" in each for each in job.warnings) == 3
    alone = launch_of(f"{LLAMA} {BATCH} --inference-max-requests 4 --info-megatron 0.17.1").job
    assert sum("has no effect" in each for each in alone.warnings) == 1


def test_other_models_are_refused() -> None:
    assert_refused(run(*of_script("gpt_static_inference.py", "--model-provider mamba").split()), "--model-provider")
