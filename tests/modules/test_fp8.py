"""FP8: saved tensors, workspaces and collectives, compared with Transformer Engine's Python code and with measured runs.

The recorded bytes are those of one layer of megatron-core 0.16.1 with the Python code of Transformer Engine 2.11. Functions
that allocate the same tensors as `csrc/quantizer.cpp` replaced its compiled quantizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import analyzer
from analyzer.communication.data_parallel import data_parallel_calls
from analyzer.errors import InputError, UnsupportedError
from analyzer.memory.chunk_memory import Situation, chunk_memory
from analyzer.memory.workspaces import workspaces
from analyzer.modules.quantized import scales
from analyzer.modules.tree import Module, parameters
from analyzer.passes.stages import stage_models
from analyzer.predict import predict
from analyzer.specs import HardwareSpec, TrainingJob
from analyzer.specs.option_names import flag_of
from analyzer.specs.rules.quantized import quantized_violations
from analyzer.states.buffers.of_stage import stage_buffers
from analyzer.states.bytes_per_parameter import adam_stores_master_weights
from analyzer.states.fp8_weights import cast_bytes, scaling_bytes
from tests.command import report
from tests.data_files import measured_records
from tests.job_of import AMPERE, BLACKWELL, HOPPER, job_of, states_of

ONE_LAYER = (
    "--num-layers 1 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 4096 --seq-length 2048 --micro-batch-size 2 "
    "--max-position-embeddings 2048 --bf16 --tokenizer-type NullTokenizer --vocab-size 511 --make-vocab-size-divisible-by 1 "
    "--no-create-attention-mask-in-dataloader --no-masked-softmax-fusion --no-gradient-accumulation-fusion "
    "--attention-backend fused"
)
SMALL = 64 * 1024
"""Tolerance in bytes for tensors that the formulas omit: scalars and routing maps."""
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
)
WORKSPACES = (
    "Transformer Engine GEMM workspace",
    "grouped GEMM workspaces of 4 streams",
    "FP8 copies of weights",
    "FP8 scaling factors",
)


LATENT = "--multi-latent-attention --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --position-embedding-type rope"


def fp8(recipe: str, rest: str = "", *, blackwell: bool = False) -> TrainingJob:
    line = f"--fp8-format hybrid --fp8-recipe {recipe} {rest}"
    return job_of(line, base=ONE_LAYER, gpu=BLACKWELL if blackwell else HOPPER)


def counted(trees: Sequence[Module]) -> list[tuple[Module, int]]:
    return [(tree, 1) for tree in trees]


def workspace_bytes(job: TrainingJob) -> int:
    return sum(item.bytes for item in workspaces(job, stage_models(job)[0].trees) if item.name in WORKSPACES)


def retained(job: TrainingJob) -> int:
    [tree] = stage_models(job)[0].trees
    return chunk_memory(tree).retained + workspace_bytes(job)


RETAINED = [
    ("delayed", "", False, 210_145_280),
    ("tensorwise", "", False, 205_976_064),
    ("blockwise", "", False, 206_730_240),
    ("delayed", "", True, 197_562_368),
    ("tensorwise", "", True, 193_393_152),
    ("mxfp8", "", True, 207_509_504),
    ("delayed", SPLIT, False, 130_310_144 - 8_388_608),  # without Megatron's global buffer, which the output layer gathers into
    ("tensorwise", SPLIT, False, 128_238_080 - 8_388_608),
    ("blockwise", SPLIT, False, 128_595_968 - 8_388_608),
    ("tensorwise", SPLIT, True, 121_946_624 - 8_388_608),
    ("mxfp8", SPLIT, True, 128_985_088 - 8_388_608),
    ("tensorwise", EXPERTS, False, 378_656_256),
]


@pytest.mark.parametrize(("recipe", "line", "blackwell", "recorded"), RETAINED)
def test_bytes_after_forward_match_recordings(recipe: str, line: str, blackwell: bool, recorded: int) -> None:
    assert retained(fp8(recipe, line, blackwell=blackwell)) == pytest.approx(recorded, abs=SMALL)


BACKWARD = [
    ("tensorwise", "", False, {"linear_fc2": 244_688_896, "linear_fc1": 224_802_304, "linear_qkv": 155_306_496}),
    ("delayed", "", False, {"linear_fc2": 248_858_112, "linear_proj": 150_258_176}),
    ("blockwise", "", False, {"linear_fc2": 245_704_704, "linear_proj": 150_775_808}),
    ("tensorwise", "", True, {"linear_fc2": 227_911_680, "linear_fc1": 195_573_248, "linear_proj": 133_506_560}),
    ("mxfp8", "", True, {"linear_fc2": 246_483_968, "linear_proj": 151_555_072}),
    ("tensorwise", SPLIT, False, {"linear_fc2": 151_762_944, "linear_fc1": 151_762_432, "linear_qkv": 117_014_016}),
    ("tensorwise", SPLIT, True, {"linear_fc2": 141_277_184, "linear_fc1": 132_888_064, "linear_proj": 94_074_368}),
    ("mxfp8", SPLIT, True, {"linear_fc2": 152_771_584, "linear_fc1": 148_708_352, "linear_proj": 105_307_136}),
    ("tensorwise", EXPERTS, False, {"experts.linear_fc2": 425_122_304, "experts.linear_fc1": 433_424_384}),
]


@pytest.mark.parametrize(("recipe", "line", "blackwell", "recorded"), BACKWARD)
def test_peaks_of_backward_match_the_recording(recipe: str, line: str, blackwell: bool, recorded: dict[str, int]) -> None:
    job = fp8(recipe, line, blackwell=blackwell)
    [tree] = stage_models(job)[0].trees
    constant = workspace_bytes(job) + (8_388_608 if SPLIT in line else 0)
    points = {point.path: point.bytes + constant for point in chunk_memory(tree).points(Situation(backward=True))}
    for layer, peak in recorded.items():
        [found] = [bytes_ for path, bytes_ in points.items() if path.endswith(layer)]
        assert found == pytest.approx(peak, abs=2 * SMALL), layer


def test_stored_parameters() -> None:
    """Recorded bytes, minus the 16-bit copies that are on the host until master weights exist, and the quantizer states."""
    line = "--fp8-param-gather --use-distributed-optimizer"
    host, quantizers = 25_165_824, 20_480
    for recipe, blackwell, recorded in (
        ("tensorwise", False, 55_627_776 - quantizers),
        ("tensorwise", True, 43_044_864 - quantizers),
        ("blockwise", False, 55_612_416),
    ):
        job = fp8(recipe, line, blackwell=blackwell)
        states = states_of(job, stage_models(job)[0])
        assert states.parameters == pytest.approx(recorded - host, abs=8192), (recipe, blackwell)
    mxfp8 = fp8("mxfp8", f"{line} --reuse-grad-buf-for-mxfp8-param-ag", blackwell=True)
    embeddings_and_norms = 5_273_600  # a second time, in the parameter buffer that they are gathered through
    assert states_of(mxfp8, stage_models(mxfp8)[0]).parameters == pytest.approx(56_391_680 - host + embeddings_and_norms, abs=8192)


@pytest.mark.parametrize("gpu", ["gb200", "h100"])
def test_measured_steady_state_and_peak(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[dict[str, Any]] = measured_records("megatron_ci.json")
    [record] = [each for each in records if "current_scaling" in each["id"] and gpu in each["id"]]
    for name, value in record["env"].items():
        monkeypatch.setenv(name, value)
    nodes = ["--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"])]
    ranks = report(*nodes, *record["argv"], "--info-gpu", record["gpu"])["ranks"]
    [rank] = [each for each in ranks if any(first <= record["rank"] <= last for first, last in each["ranks"])]
    assert rank["memory"]["allocated_bytes"] == pytest.approx(record["measured"]["allocated_bytes"], rel=2e-3)
    assert rank["memory"]["peak_allocated_bytes"] == pytest.approx(record["measured"]["peak_allocated_bytes"], rel=0.02)


def test_weights_have_one_fp8_copy_if_it_serves_all_gemms() -> None:
    weights = 12 * 1024 * 1024
    hopper, blackwell = fp8("tensorwise"), fp8("tensorwise", blackwell=True)
    assert cast_bytes(hopper, counted(stage_models(hopper)[0].trees)) == 2 * weights + 4 * 512
    assert cast_bytes(blackwell, counted(stage_models(blackwell)[0].trees)) == weights + 4 * 512
    # four linear layers, and three GEMMs of attention (DotProductAttention.forward): five quantizers each, with scale and amax
    assert scaling_bytes(hopper, counted(stage_models(hopper)[0].trees)) == (4 + 3) * 5 * 2 * 512


def test_first_and_last_layers_stay_in_16_bit() -> None:
    job = job_of(
        "--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 2 "
        "--num-layers-at-end-in-bf16 1"
    )
    [tree] = stage_models(job)[0].trees
    assert [_quantized(layer) for layer in _layers(tree)] == [0, 0, 4, 4, 4, 4, 4, 0]


def _layers(tree: Module) -> list[Module]:
    return [module for path, module in tree.walk() if path == "gpt_model.decoder.layers"]


def _quantized(module: Module) -> int:
    return sum(parameter.quantized for parameter in parameters(module))


def test_all_gathers_are_in_fp8_and_reduce_scatters_in_16_bit() -> None:
    job = fp8("tensorwise", f"{SPLIT} --fp8-param-gather --use-distributed-optimizer")
    rows = [row for row in predict(job).communication if row.group == "tp" and "layers" in row.module]
    assert {row.dtype for row in rows if row.kind == "all_gather"} == {"fp8"}
    assert {row.dtype for row in rows if row.kind == "reduce_scatter"} == {"bf16"}
    head = [row for row in predict(job).communication if row.module.endswith("output_layer")]
    assert {row.dtype for row in head} == {"bf16"}
    data = [row for row in predict(job).communication if row.group == "dp_cp" and row.kind == "all_gather"]
    assert {row.dtype for row in data} == {"uint8", "bf16"}


def test_the_precision_aware_adam_stores_master_weights_only_with_delayed_scaling() -> None:
    line = "--use-precision-aware-optimizer --use-distributed-optimizer"
    assert adam_stores_master_weights(job_of(line))
    assert adam_stores_master_weights(fp8("delayed", line))
    assert not adam_stores_master_weights(fp8("tensorwise", line))


@given(rows=st.integers(1, 64).map(lambda n: 128 * n), columns=st.integers(1, 64).map(lambda n: 128 * n))
def test_there_is_one_scale_per_block(rows: int, columns: int) -> None:
    for recipe, block, size in (("blockwise", 128, 4), ("mxfp8", 32, 1)):
        for axis in ("row", "column"):
            shape, dtype = scales(recipe, rows, columns, axis)  # type: ignore[arg-type]
            assert shape[0] * shape[1] == rows * columns // block
            assert dtype == ("fp32" if size == 4 else "uint8")


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--fp8-param-gather", "--fp8-param-gather"),
        ("--fp8-format hybrid --fp8-param-gather", "--fp8-param-gather"),
        ("--reuse-grad-buf-for-mxfp8-param-ag", "--reuse-grad-buf-for-mxfp8-param-ag"),
        ("--fp8-format hybrid --first-last-layers-bf16", "--first-last-layers-bf16"),
        (
            "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 9",
            "--num-layers-at-end-in-bf16",
        ),
        ("--fp8-format hybrid --fp8-recipe mxfp8", "--fp8-recipe mxfp8"),
        ("--fp8-format hybrid --transformer-impl local", "--fp8-format"),
        ("--fp8-format hybrid --recompute-granularity selective --recompute-modules layernorm", "--recompute-modules"),
        ("--num-experts 8 --disable-bias-linear --moe-router-padding-for-quantization", "--moe-router-padding-for-quantization"),
    ],
)
def test_unsupported_combinations_are_rejected(line: str, option: str) -> None:
    with pytest.raises(InputError) as caught:
        job_of(line)
    assert str(caught.value).startswith(option + ":")


def test_ampere_and_custom_quantizers_are_rejected() -> None:
    with pytest.raises(InputError, match=r"compute capability 8\.9"):
        job_of("--fp8-format hybrid", gpu=AMPERE)
    with pytest.raises(UnsupportedError, match="custom"):
        job_of("--fp8-format hybrid --fp8-recipe custom --fp8-quantizer-factory a.b")


def fp4(rest: str = "") -> TrainingJob:
    return job_of(f"--fp4-format e2m1 {rest}", base=ONE_LAYER, gpu=BLACKWELL)


@given(rows=st.integers(1, 40).map(lambda n: 16 * n), columns=st.integers(1, 40).map(lambda n: 16 * n))
def test_fp4_has_one_scale_for_sixteen_values(rows: int, columns: int) -> None:
    """`NVFP4Quantizer.get_scale_shape`: tiles of 128 × 4 for cuBLAS; column-wise those of the transpose."""
    (outer, inner), dtype = scales("nvfp4", rows, columns, "row")
    assert dtype == "uint8"
    assert outer % 128 == 0 <= outer - rows < 128
    assert inner % 4 == 0 <= inner - columns / 16 < 4
    assert scales("nvfp4", rows, columns, "column") == scales("nvfp4", columns, rows, "row")


def test_weights_have_two_fp4_copies_of_half_a_byte() -> None:
    """Row-wise and column-wise, each with 1/16 byte of scales per value: two times 9/16 bytes. Each of 4 has an amax in a block."""
    job = fp4()
    trees = stage_models(job)[0].trees
    numel = sum(parameter.numel for parameter in parameters(trees[0]) if parameter.quantized)
    assert numel == 12 * 1024 * 1024
    assert cast_bytes(job, counted(trees)) == numel * 2 * 9 // 16 + 4 * 2 * 512


def stored_in_fp4(rest: str = "", *, te: str = "2.16", gpus: int = 8) -> TrainingJob:
    line = f"--fp4-format e2m1 --fp4-param-gather --use-distributed-optimizer {rest}"
    job = job_of(line, base=ONE_LAYER, gpu=BLACKWELL, release="0.19.0", gpus=gpus)
    return replace(job, software=replace(job.software, te=te))


def test_parameters_that_are_stored_in_fp4_have_a_buffer_of_half_a_byte() -> None:
    """Beside it are the row-wise scales and the column-wise copy with its scales: 9/16 bytes of each copy, and an amax."""
    states = states_of(stored_in_fp4(), stage_models(stored_in_fp4())[0])
    weights, in_16_bit = 12 * 1024 * 1024, 2 * (511 * 1024 + 2048 * 1024 + 13 * 1024)
    assert states.parameters == pytest.approx(weights * 2 * 9 / 16 + 4 * 2 * 512 + in_16_bit, rel=1e-3)


def test_shards_of_parameters_in_fp4_are_gathered_as_half_as_many_bytes() -> None:
    """Weights of 12 Mi elements; gradients have one element for each."""
    job = stored_in_fp4()
    [buffers] = stage_buffers(job, stage_models(job)[0])
    stored = next(buffer for buffer in buffers if buffer.parameter_dtype == "uint8")
    assert (stored.numel, stored.parameter_bytes) == (12 * 1024 * 1024, 6 * 1024 * 1024)
    gathered = [call for call in data_parallel_calls(job, 0, (buffers,)) if call.kind == "all_gather"]
    assert {call.shape for call in gathered if call.dtype == "uint8"} == {(6 * 1024 * 1024,)}


def test_parameters_in_fp4_match_the_recording() -> None:
    """Recorded by the shadow engine with megatron-core 0.19.0 and Transformer Engine 2.16."""
    line = (
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
        "--micro-batch-size 2 --global-batch-size 16 --tokenizer-type NullTokenizer --vocab-size 500 --use-distributed-optimizer "
        "--bf16 --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
        "--num-query-groups 4 --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --fp4-format e2m1 "
        "--fp4-param-gather"
    )
    job = job_of(line, base="", gpu=BLACKWELL, release="0.19.0")
    job = replace(job, software=replace(job.software, te="2.16"))
    assert states_of(job, stage_models(job)[0]).parameters == 13_911_040


def test_earlier_releases_cannot_cast_to_stored_fp4() -> None:
    """`quantize_nvfp4_param_shard` needs `quantize_master_weights` of Transformer Engine 2.14."""
    assert not list(quantized_violations(stored_in_fp4()))
    (found,) = quantized_violations(stored_in_fp4(te="2.11"))
    assert (found.options, found.library) == (("fp4_param_gather",), "Transformer Engine 2.11")


@pytest.mark.parametrize(
    ("recipe", "rest", "dest"),
    [
        ("delayed", "--ffn-hidden-size 4090", "ffn_hidden_size"),
        ("tensorwise", "--ffn-hidden-size 4112 --tensor-model-parallel-size 2", "ffn_hidden_size"),  # 2056 of a rank
        ("delayed", "--seq-length 2044 --micro-batch-size 1", "seq_length"),
        ("blockwise", "--seq-length 2036 --micro-batch-size 1", "seq_length"),
        ("mxfp8", "--seq-length 2040", "seq_length"),  # 4080 tokens
        ("mxfp8", "--kv-channels 33", "kv_channels"),
        ("delayed", "--hidden-size 1032 --kv-channels 64", "hidden_size"),
        ("tensorwise", f"{LATENT} --kv-lora-rank 520", "kv_lora_rank"),
        ("tensorwise", f"{LATENT} --q-lora-rank 1544", "q_lora_rank"),
        ("tensorwise", f"{EXPERTS} --moe-shared-expert-intermediate-size 1032", "moe_shared_expert_intermediate_size"),
        ("mxfp8", f"{EXPERTS} --moe-ffn-hidden-size 1040", "moe_ffn_hidden_size"),
    ],
)
def test_sizes_that_have_no_kernel(recipe: str, rest: str, dest: str) -> None:
    """`assert_dim_for_fp8_exec`: 8 and 16; `create_tensor` of the MXFP8 quantizer: 32 and 32."""
    with pytest.raises(InputError, match=flag_of(dest)):
        fp8(recipe, rest, blackwell=recipe == "mxfp8")


def test_fp4_of_overlapped_microbatches_needs_no_sizes() -> None:
    """Their layers run in 16 bit."""
    line = (
        f"{EXPERTS} --fp4-format e2m1 --seq-length 2044 --micro-batch-size 1 --expert-model-parallel-size 2 --global-batch-size 8"
    )
    job = job_of(f"{line} --overlap-moe-expert-parallel-comm", base=ONE_LAYER, gpu=BLACKWELL)
    assert not list(quantized_violations(job))
    with pytest.raises(InputError, match="2044 tokens of a rank cannot be multiplied in FP4"):
        job_of(line, base=ONE_LAYER, gpu=BLACKWELL)


def test_a_generation_has_tokens_of_its_own() -> None:
    line = f"{ONE_LAYER} --fp8-format hybrid --fp8-recipe tensorwise --seq-length 2044 --micro-batch-size 1 --info-gpu H100-80GB"
    report = analyzer.analyze_inference(line.split(), batch=1, prompt=128, generate=8, environ={})
    assert report.limits is not None


@pytest.mark.parametrize("task", ["sft", "pt"])
def test_ms_swift_pads_for_fp8(task: str) -> None:
    """`get_padding_to` of swift/megatron/utils: a multiple of 16 tokens for each of 4 ranks, so that 4100 tokens become 4160."""
    words = (
        f"megatron {task} --model Qwen/Qwen3-8B --max_length 4100 --micro_batch_size 1 --global_batch_size 32 --info-world-size 8 "
        "--tensor_model_parallel_size 4 --sequence_parallel true --fp8_format hybrid --fp8_recipe tensorwise --info-gpu H100-80GB"
    )
    assert analyzer.analyze(words.split(), environ={}).job.batch.seq_length == 4160


@pytest.mark.parametrize(
    ("recipe", "rest"),
    [
        ("delayed", "--ffn-hidden-size 4112"),
        ("tensorwise", "--ffn-hidden-size 4128 --tensor-model-parallel-size 2"),
        ("delayed", "--seq-length 2044"),  # 4088 tokens of both sequences
        ("mxfp8", "--seq-length 2032"),
        ("delayed", "--ffn-hidden-size 4090 --num-experts 8 --moe-ffn-hidden-size 1024 --disable-bias-linear"),  # no dense layer
        ("tensorwise", f"{EXPERTS} --moe-ffn-hidden-size 1032"),  # grouped, without blocks
        (
            "tensorwise",  # the dense layer is in 16 bit
            f"{EXPERTS} --num-layers 2 --moe-layer-freq [0,1] --ffn-hidden-size 4090 --first-last-layers-bf16 "
            "--num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 0",
        ),
    ],
)
def test_sizes_that_have_a_kernel(recipe: str, rest: str) -> None:
    assert not list(quantized_violations(fp8(recipe, rest, blackwell=recipe == "mxfp8")))


def test_a_linear_layer_saves_its_input_in_fp4() -> None:
    """The column-wise copy, for the weight gradient: 9/16 byte per value instead of two bytes."""
    saved, plain = (
        {
            module.name: sum(tensor.bytes for tensor in module.saved if "statistics" not in tensor.name)
            for _, module in stage_models(job)[0].trees[0].walk()
        }
        for job in (fp4(), job_of("", base=ONE_LAYER, gpu=BLACKWELL))
    )
    assert plain["linear_fc2"] - saved["linear_fc2"] == 2 * 2048 * 4096 * (2 - 9 / 16)


@pytest.mark.parametrize(
    ("line", "gpu", "option", "remedy"),
    [
        ("--fp4-format e2m1", HOPPER, "--fp4-format", "another GPU"),
        ("--fp4-format e2m1 --fp8-format hybrid", BLACKWELL, "--fp4-format", "keep one"),
        ("--fp4-format e2m1 --fp4-param-gather", BLACKWELL, "--fp4-param-gather", "leave it out"),
        ("--fp4-format e2m1 --fp4-recipe custom", BLACKWELL, "--fp4-recipe custom", "nvfp4"),
    ],
)
def test_options_incompatible_with_fp4_are_rejected(line: str, gpu: HardwareSpec, option: str, remedy: str) -> None:
    with pytest.raises(InputError) as rejected:
        job_of(line, base=ONE_LAYER, gpu=gpu)
    assert option in str(rejected.value)
    assert remedy in str(rejected.value)


@pytest.mark.parametrize(
    ("line", "in_fp4"),
    [
        ("--position-embedding-type rope --mtp-num-layers 1", True),
        (
            "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear "
            "--overlap-moe-expert-parallel-comm",
            False,
        ),
    ],
)
def test_fp4_is_not_applied_to_mtp_layers_and_overlapped_microbatches(line: str, in_fp4: bool) -> None:
    """`_proj_and_transformer_layer` and `TransformerLayerSchedulePlan.get_fp8_context` have no FP4 (megatron-core 0.16.1)."""
    job = job_of(f"{line} --fp4-format e2m1", gpu=BLACKWELL)
    (tree,) = stage_models(job)[0].trees
    quantized = {child.name: any(each.quantized for each in parameters(child)) for child in tree.children}
    assert quantized["decoder"] == in_fp4
    assert not quantized.get("mtp")


def test_untrained_mtp_layers_are_warned_of() -> None:
    line = "--position-embedding-type rope --mtp-num-layers 1 --recompute-granularity full --recompute-num-layers 1"
    found = [job_of(f"{line} --recompute-method {method} --fp8-format e4m3").warnings for method in ("uniform", "block")]
    assert [any("does not train MTP layers" in each for each in warnings) for warnings in found] == [True, False]
