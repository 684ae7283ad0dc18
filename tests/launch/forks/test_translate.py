"""Readings of fork options, with expectations from the source of each fork and from published models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from analyzer.api import analyze
from analyzer.errors import UnsupportedError
from analyzer.launch.forks.guess import guess_fork
from analyzer.launch.forks.translate import Translation, has_fork_value, translate, world_of


def options(line: str) -> dict[str, list[str]]:
    """The options of a line, by flag with their values."""
    found: dict[str, list[str]] = {}
    for word in line.split():
        if word.startswith("--"):
            found[word] = []
            values = found[word]
        else:
            values.append(word)
    return found


def read(given: str, others: str = "", *, world: int | None = None) -> Translation:
    """The translation of two lines of options."""
    return translate(options(given), options(others), world=world)


def words(given: str, others: str = "", *, world: int | None = None) -> str:
    """The words of a translation as a line."""
    return " ".join(read(given, others, world=world).words)


def named(sentences: Sequence[str], flag: str) -> bool:
    """Whether one of the sentences is about the option."""
    return any(sentence.startswith(flag) for sentence in sentences)


STARCODER_PLUS = "--attention-head-type multiquery --structured-logs --valid-num-workers 0 --wandb-entity-name me"
BLOOM = (
    "--pp-partition-method type:transformer|embedding --pad-vocab-size-to 250880 --embed-layernorm --zero-stage 0 --deepspeed "
    "--deepspeed_config ds.json --deepspeed-activation-checkpointing"
)
BLOOM_MEGATRON = (
    "--num-layers 70 --hidden-size 14336 --num-attention-heads 112 --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 12 --bf16 --position-embedding-type alibi --tokenizer-type PretrainedFromHF "
    "--checkpoint-activations"
)


def test_multiquery_is_one_query_group() -> None:
    """StarCoder has one key and value head (Li et al. 2023, section 5)."""
    translation = read(STARCODER_PLUS)
    assert " ".join(translation.words) == "--group-query-attention --num-query-groups 1"
    assert translation.notes == ("--attention-head-type multiquery is read as --group-query-attention --num-query-groups 1.",)
    assert translation.warnings == ()
    assert words("--attention-head-type multihead") == ""


def test_bloom_176b() -> None:
    """BLOOM: 70 layers and two embeddings on 12 stages, 250880 rows, sharded BF16 optimizer, full recomputation."""
    translation = read(BLOOM, BLOOM_MEGATRON)
    line = " ".join(translation.words)
    assert "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split" in line
    assert "--tokenizer-type NullTokenizer --vocab-size 250879 --make-vocab-size-divisible-by 1" in line
    assert "--use-distributed-optimizer" in line
    assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" in line
    assert "--position-embedding-type none" in line
    assert {"--checkpoint-activations", "--position-embedding-type", "--tokenizer-type"} <= set(translation.dropped)
    assert named(translation.warnings, "--embed-layernorm: ")
    assert named(translation.warnings, "--position-embedding-type alibi: ")


def parameters(given: str, others: str) -> int:
    """Number of parameters of the model that a translated launch trains, on one node with an 80 GiB GPU for each rank."""
    translation = read(given, others)
    megatron = [(flag, values) for flag, values in options(others).items() if flag not in translation.dropped]
    line = [word for flag, values in megatron for word in (flag, *values)]
    return analyze(
        ["--nproc_per_node", "8", "--nnodes", "48", "pretrain_gpt.py", *line, *translation.words], gpu="A100-80GB"
    ).parameters


def test_parameters_of_bloom() -> None:
    """bigscience/bloom has 176,247,271,424 parameters, of which weight and bias of the norm after the embedding are not counted."""
    others = f"{BLOOM_MEGATRON} --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 2048"
    assert parameters(BLOOM, others) == 176_247_271_424 - 2 * 14336


def test_parameters_of_starcoder() -> None:
    """bigcode/starcoderbase has 15,517,456,384 parameters."""
    others = (
        "--num-layers 40 --hidden-size 6144 --num-attention-heads 48 --seq-length 8192 --max-position-embeddings 8192 --bf16 "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --sequence-parallel --micro-batch-size 1 "
        "--global-batch-size 384 --tokenizer-type NullTokenizer --vocab-size 49151 --make-vocab-size-divisible-by 1"
    )
    assert parameters(STARCODER_PLUS, others) == 15_517_456_384


@pytest.mark.parametrize(
    ("line", "megatron", "expected", "warned"),
    [
        ("--zero-stage 1 --deepspeed", "--fp16", "--use-distributed-optimizer", False),
        ("--zero-stage 0 --deepspeed", "--fp16", "", False),
        ("--zero-stage 0 --deepspeed", "--bf16", "--use-distributed-optimizer", False),
        ("--zero-stage 2 --deepspeed", "--fp16", "--use-distributed-optimizer", True),
        ("--zero-stage 3 --deepspeed", "--bf16", "--use-distributed-optimizer", True),
        ("--zero-stage 3", "--bf16", "", False),
    ],
)
def test_zero_stage(line: str, megatron: str, expected: str, warned: bool) -> None:
    """Stage 1 shards optimizer states, stages 2 and 3 also gradients and parameters; nothing without --deepspeed."""
    translation = read(line, megatron)
    assert " ".join(translation.words) == expected
    assert named(translation.warnings, "--zero-stage") == warned


def test_stage_in_a_file_is_not_read() -> None:
    """Without --zero-stage a sentence says that the configuration file is not read."""
    assert named(read("--deepspeed --deepspeed_config ds.json").warnings, "--deepspeed_config: ")
    assert read("--deepspeed --deepspeed_config ds.json --zero-stage 1").warnings == ()


def test_deepspeed_experts() -> None:
    """Megatron-DeepSpeed: top-1 gating, experts in every second layer (layers 2, 4, ...), capacity 1.0, padded."""
    line = words("--moe-expert-parallel-size 64 --create-moe-param-group", "--num-experts 128 --num-layers 24")
    assert "--moe-router-pre-softmax --moe-router-topk 1" in line
    assert "--moe-layer-freq ([0]*1+[1])*12" in line
    assert "--moe-expert-capacity-factor 1.0 --moe-token-dispatcher-type alltoall --moe-pad-expert-input-to-capacity" in line
    assert "--expert-model-parallel-size 64" in line


def test_one_deepspeed_expert_is_a_dense_model() -> None:
    """Megatron-DeepSpeed builds an ordinary FFN for one expert."""
    translation = read("--moe-expert-parallel-size 1 --create-moe-param-group --topk 1", "--num-experts 1 --num-layers 24")
    assert translation.dropped == ("--num-experts",)
    assert "--expert-model-parallel-size" not in translation.words


def test_several_numbers_of_experts() -> None:
    """The largest number is counted, with a warning."""
    others = {"--num-experts": ["64", "64", "128"], "--num-layers": ["6"]}
    translation = translate(options("--create-moe-param-group --moe-expert-parallel-size 4"), others)
    assert " ".join(translation.words).startswith("--num-experts 128 ")
    assert translation.dropped == ("--num-experts",)
    assert named(translation.warnings, "--num-experts: ")


def test_residual_experts_have_a_dense_ffn_beside_them() -> None:
    """PR-MoE (Rajbhandari et al. 2022): a dense FFN of the same width is added to the output of the experts."""
    line = words("--mlp-type residual --create-moe-param-group", "--num-experts 16 --num-layers 4 --hidden-size 1024")
    assert "--moe-shared-expert-intermediate-size 4096" in line


def test_llama_in_megatron_deepspeed() -> None:
    """examples_deepspeed/pretrain_llama2_distributed.sh: four key and value heads, RMSNorm in lower case."""
    line = words("--num-key-value-heads 4 --zero-stage=0".replace("=", " "), "--normalization rmsnorm")
    assert line == "--normalization RMSNorm --group-query-attention --num-query-groups 4"


def test_ulysses() -> None:
    """DeepSpeed's sequence parallelism exchanges heads and tokens by all-to-all."""
    assert words("--ds-sequence-parallel-size 4") == "--context-parallel-size 4 --cp-comm-type a2a"
    assert words("--ds-sequence-parallel-size 1") == ""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--activations-checkpoint-method uniform", "full --recompute-method uniform --recompute-num-layers 1"),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 3",
            "full --recompute-method block --recompute-num-layers 3",
        ),
        ("--checkpoint-num-layers 2", None),
        ("--activations-checkpoint-granularity selective", "selective"),
    ],
)
def test_recomputation_before_2023(line: str, expected: str | None) -> None:
    """Megatron-LM of 2021 and 2022: the method enables full recomputation, with one layer by default."""
    assert words(line) == ("" if expected is None else f"--recompute-granularity {expected}")


def test_checkpoint_activations_among_the_options_of_megatron() -> None:
    """The catalogue has it, because later releases parse it to refuse it."""
    translation = read("--checkpoint-num-layers 4", "--checkpoint-activations")
    assert " ".join(translation.words) == "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4"
    assert translation.dropped == ("--checkpoint-activations",)


@pytest.mark.parametrize(
    ("tokenizer", "extra", "rows"),
    [
        ("LLama3Tokenizer", 256, 128256),
        ("Qwen2Tokenizer", 421, 152064),
        ("Qwen2Tokenizer", 293, 151936),
        ("QwenTokenizer", 85, 151936),
        ("DeepSeekV2Tokenizer", 2400, 102400),
        ("DeepSeekV2Tokenizer", 467, 129280),
        ("DeepSeekV2Tokenizer", 0, 163840),
        ("MixtralTokenizer", 0, 32000),
        ("LLamaTokenizer", 0, 32000),
        ("BloomTokenizerFromHF", 0, 250880),
    ],
)
def test_vocabulary_of_pai_megatron_patch(tokenizer: str, extra: int, rows: int) -> None:
    """`vocab_size` in the config.json of the published models that the scripts of Pai-Megatron-Patch train.

    Llama 3.1, Qwen2-7B and -1.5B, Qwen-7B, DeepSeek-V2, -V3, Moonlight, Mixtral, Llama 2, and BLOOM.
    """
    line = words(f"--patch-tokenizer-type {tokenizer} --extra-vocab-size {extra}")
    assert line == f"--tokenizer-type NullTokenizer --vocab-size {rows - 1} --make-vocab-size-divisible-by 1"


def test_unknown_tokenizer_of_pai_megatron_patch() -> None:
    """Without a known size a sentence says so; --padded-vocab-size gives it."""
    assert named(read("--patch-tokenizer-type Qwen3Tokenizer").warnings, "--patch-tokenizer-type")
    assert "--vocab-size 151935" in words("--patch-tokenizer-type Qwen3Tokenizer", "--padded-vocab-size 151936")


def test_deepseek_in_mindspeed() -> None:
    """DeepSeek-V2-Lite in MindSpeed-LLM: 27 layers, the first dense, two shared experts of width 1408."""
    line = words(
        "--multi-head-latent-attention --qk-rope-head-dim 64 --qk-nope-head-dim 128 --moe-intermediate-size 1408 "
        "--n-shared-experts 2 --first-k-dense-replace 1",
        "--num-layers 27 --num-experts 64 --moe-layer-freq 1",
    )
    assert "--multi-latent-attention" in line
    assert "--qk-pos-emb-head-dim 64 --qk-head-dim 128" in line
    assert "--moe-ffn-hidden-size 1408" in line
    assert "--moe-shared-expert-intermediate-size 2816" in line
    assert "--moe-layer-freq [0]*1+[1]*26" in line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--context-parallel-algo megatron_cp_algo", "--cp-comm-type p2p"),
        ("--context-parallel-algo ulysses_cp_algo", "--cp-comm-type a2a"),
        (
            "--context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2",
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
        ),
        ("--use-fused-rmsnorm", "--cp-comm-type a2a"),
    ],
)
def test_context_parallelism_of_mindspeed(line: str, expected: str) -> None:
    """A ring, all-to-all, or both; all-to-all is MindSpeed's default."""
    assert words(f"{line} --use-ascend-mc2", "--context-parallel-size 8") == expected
    assert words(line) == ""


def test_stages_of_mindspeed() -> None:
    """--num-layer-list gives the layers of each stage."""
    line = words("--num-layer-list 3,5,4,4", "--pipeline-model-parallel-size 4 --num-layers 16")
    assert line == "--pipeline-model-parallel-layout Et*3|t*5|t*4|t*4L"


def test_stages_of_flagscale() -> None:
    """Aquila-70B: one stage of 20 layers on the first kind of device, and three on the second."""
    line = words("--hetero-pipeline-stages 1 20 3 20 20 20 --hetero-mode pp", "--pipeline-model-parallel-size 4 --num-layers 80")
    assert line == "--pipeline-model-parallel-layout Et*20|t*20|t*20|t*20L"


def test_layers_without_function_in_mindspeed() -> None:
    """DeepSeek-V3 in MindSpeed-LLM: 61 layers and three empty ones on 8 stages, one MTP layer, the first three layers dense."""
    translation = read(
        "--noop-layers 61,62,63 --first-k-dense-replace 3",
        "--num-layers 64 --pipeline-model-parallel-size 8 --mtp-num-layers 1 --num-experts 256 --moe-layer-freq 1",
    )
    line = " ".join(translation.words)
    assert "--num-layers 61 --pipeline-model-parallel-layout Et*8|t*8|t*8|t*8|t*8|t*8|t*8|t*5mL" in line
    assert "--moe-layer-freq [0]*3+[1]*58" in line
    assert {"--num-layers", "--moe-layer-freq"} <= set(translation.dropped)
    assert words("--noop-layers 0,3", "--num-layers 4") == "--num-layers 2"


def test_experts_over_tensor_parallel_ranks() -> None:
    """--moe-tp-extend-ep: tensor-parallel ranks hold different experts."""
    line = words("--moe-tp-extend-ep", "--num-experts 64 --tensor-model-parallel-size 4 --expert-model-parallel-size 2")
    assert line == "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1"


def test_layers_of_plugins_of_slime_get_no_verdict() -> None:
    """Linear attention and indexers of slime_plugins/models have other weights than the attention of the options."""
    translation = read("--rollout-batch-size 8", "--spec slime_plugins.models.qwen3_5 get_qwen3_5_spec")
    assert translation.dropped == ("--spec",)
    assert translation.withheld == (
        "--spec slime_plugins has layers of a plugin, which are counted as those of a GPT with the given options",
    )


def test_specifications_of_mindspeed_are_left_out() -> None:
    """--spec with a module of MindSpeed-LLM builds the layers that the other options describe."""
    translation = read("--use-fused-rmsnorm", "--spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec")
    assert translation.dropped == ("--spec",)
    assert translation.words == ()


def test_megatron_llm() -> None:
    """Megatron-LLM spells options with underscores, and has biases only with --use_bias."""
    line = words(
        "--tensor_model_parallel_size 8 --num_attention_heads_kv 8 --use_rms_norm --glu_activation swiglu --no_tie_embed_logits "
        "--position_embedding_type rotary --sequence_parallel --ffn_hidden_size 28672 --use_flash_attn"
    )
    for expected in (
        "--tensor-model-parallel-size 8",
        "--group-query-attention --num-query-groups 8",
        "--normalization RMSNorm",
        "--swiglu",
        "--untie-embeddings-and-output-weights",
        "--position-embedding-type rope",
        "--sequence-parallel",
        "--ffn-hidden-size 28672",
        "--use-flash-attn",
        "--disable-bias-linear",
    ):
        assert expected in line
    assert "rotary" not in line
    assert "--disable-bias-linear" not in words("--use_bias --num_attention_heads_kv 8 --use_rms_norm")


@pytest.mark.parametrize(
    "line",
    [
        "--num-layers 2 --hidden-size 4096 --num-attention-heads 32 --seq-length 512 --max-position-embeddings 512 "
        "--micro-batch-size 1 --ffn-hidden-size 11008 --swiglu --num-key-value-heads 4 --zero-stage 0 --data-impl mmap",
        "--num-layers 2 --hidden-size 4096 --num-attention-heads 32 --seq-length 512 --max-position-embeddings 512 "
        "--micro-batch-size 1 --ffn-hidden-size 11008 --swiglu --use-lf-gate --data-impl mmap",
        "--num_layers 2 --hidden_size 4096 --num_attention_heads 32 --seq_length 512 --max_position_embeddings 512 "
        "--micro_batch_size 1 --ffn_hidden_size 11008 --glu_activation swiglu --use_rms_norm --data_impl mmap",
    ],
    ids=["Megatron-DeepSpeed", "Yuan 2.0", "Megatron-LLM"],
)
def test_forks_of_the_2023_code_that_keep_the_given_ffn_width(line: str) -> None:
    """Llama-2-7B has 11008. `validate_args` of Megatron-LM in August 2023 overrides it with 10880, that of these forks does not."""
    report = analyze(f"pretrain_gpt.py {line}", environ={}, folder="/nowhere")
    assert report.job.megatron == "2023"
    assert report.job.model.ffn_hidden_size == 11008


def test_biases_that_forks_lack_are_named() -> None:
    """Experts and routers of MegaBlocks have no biases, and routers of DeepSpeed neither."""
    assert named(read("--moe-num-experts 8 --moe-top-k 1").warnings, "--moe-num-experts: ")
    assert not read("--moe-num-experts 8 --moe-top-k 1", "--disable-bias-linear").warnings
    deepspeed = "--deepspeed --zero-stage 0 --topk 1"
    assert named(read(deepspeed, "--num-experts 16 --num-layers 24").notes, "--num-experts: ")
    assert not named(read(deepspeed, "--num-experts 16 --num-layers 24 --disable-bias-linear").notes, "--num-experts: ")


def test_values_of_flags_in_ms_swift() -> None:
    """ms-swift writes true and false; a dest that a flag turns off is found by its name."""
    line = words(
        "--tuner_type full --sequence_parallel true --bias_dropout_fusion false --apply_rope_fusion true --moe_grouped_gemm false"
    )
    assert "--sequence-parallel" in line
    assert "--no-bias-dropout-fusion" in line
    assert "rope-fusion" not in line
    assert "--moe-grouped-gemm" not in line
    assert read("--tuner_type lora --model Qwen/Qwen3-8B").withheld == ()


def test_megablocks() -> None:
    """dMoE: no capacity; experts over the data-parallel ranks, and split over ranks if there are more ranks than experts."""
    line = "--moe-num-experts 8 --moe-top-k 2 --moe-loss-weight 0.1 --moe-expert-model-parallelism"
    translated = words(line, world=16)
    assert "--num-experts 8 --moe-router-pre-softmax" in translated
    assert "--moe-router-topk 2" in translated
    assert "--moe-aux-loss-coeff 0.1" in translated
    assert "--expert-model-parallel-size 8 --expert-tensor-parallel-size 2" in translated
    assert "capacity" not in translated
    assert "--moe-expert-capacity-factor 1" in words(f"{line} --moe-capacity-factor 1", world=8)
    assert words("--moe-num-experts 1 --moe-top-k 1") == "--moe-router-topk 1"


def test_third_state_of_ademamix() -> None:
    """AdEMAMix (Pagliardini et al. 2024) has two momenta and one second moment."""
    translation = read("--ademamix-alpha 8 --xielu --goldfish-loss", "--optimizer ademamix")
    assert " ".join(translation.words) == "--optimizer adam"
    assert translation.dropped == ("--optimizer",)
    assert named(translation.warnings, "--optimizer ademamix: the third optimizer state")
    assert named(translation.warnings, "--xielu: ")
    assert len(translation.warnings) == 2


def test_slime() -> None:
    """Microbatches of slime have up to a number of tokens for each context-parallel rank; the rollout is not counted."""
    line = "--hf-checkpoint m --use-dynamic-batch-size --max-tokens-per-gpu 4096 --actor-num-nodes 2 --actor-num-gpus-per-node 8"
    translated = words(f"{line} --rollout-batch-size 32", "--context-parallel-size 2 --vocab-size 151936")
    assert "--micro-batch-size 1 --seq-length 8192" in translated
    assert "--vocab-size 151935" in translated
    assert world_of(options(line)) == 16
    assert world_of({}) is None


def test_gpt_oss_sets_no_sizes() -> None:
    """--enable-gpt-oss sets YaRN's parameters (megatron/post_training/model_builder.py); the sizes are given by options."""
    assert read("--enable-gpt-oss --export-force-local-attention") == Translation()
    assert named(read("--modelopt-enabled --export-force-local-attention").warnings, "--export-force-local-attention: ")


def test_vision_models_are_refused() -> None:
    """A vision-language model is not analysed as its language model."""
    with pytest.raises(UnsupportedError, match="vision-language models are not modelled"):
        read("--language-model-type mistral_7b --freeze-LM")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (STARCODER_PLUS, "Megatron-LM (BigCode)"),
        (BLOOM, "Megatron-DeepSpeed (BigScience)"),
        ("--num-key-value-heads 4 --zero-stage 0 --deepspeed", "Megatron-DeepSpeed (Microsoft)"),
        ("--use-fused-swiglu --use-cp-send-recv-overlap", "MindSpeed-LLM (Ascend)"),
        ("--patch-tokenizer-type LLama3Tokenizer --extra-vocab-size 256", "Pai-Megatron-Patch (Alibaba)"),
        ("--use-mpi --use-z-loss", "Megatron-LM (LLM-jp)"),
        ("--xielu --trigger-path t", "Megatron-LM (Swiss AI)"),
        ("--use_rms_norm --num_attention_heads_kv 8", "Megatron-LLM (EPFL)"),
        ("--moe-num-experts 8 --moe-top-k 1", "Megatron-LM with MegaBlocks"),
        ("--actor-num-nodes 1 --advantage-estimator grpo", "slime (THUDM)"),
    ],
)
def test_guess(line: str, name: str) -> None:
    """The fork whose parser has the options."""
    guess = guess_fork(options(line))
    assert guess is not None
    assert guess.fork.name == name
    assert guess.reason.endswith(f"of {name}.")


def test_no_guess() -> None:
    """Options that no fork has."""
    assert guess_fork(["--no-such-option"]) is None


@pytest.mark.parametrize(
    ("others", "expected"),
    [({"--position-embedding-type": ["alibi"]}, True), ({"--optimizer": ["adam"]}, False), ({"--bf16": []}, False)],
)
def test_values_that_only_forks_accept(others: Mapping[str, Sequence[str]], expected: bool) -> None:
    """ALiBi is a position embedding of forks."""
    assert has_fork_value(others) == expected


def test_layers_that_are_padded() -> None:
    """`get_offset` of zero-bubble-pipeline-parallelism: the last chunk has one layer less, then the first ones have."""
    assert words("--allow-padding-num-layers", "--num-layers 22 --pipeline-model-parallel-size 4") == (
        "--pipeline-model-parallel-layout Et*5|t*6|t*6|t*5L"
    )
    chunks = "--num-layers 6 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
    assert words("--allow-padding-num-layers", chunks) == "--pipeline-model-parallel-layout E|t*1|t*1|t*1|t*1|t*1|t*1|L"
    assert words("--allow-padding-num-layers", "--num-layers 24 --pipeline-model-parallel-size 4") == ""


def test_groups_of_a_token_without_groups() -> None:
    """pretrain_deepseek2_lite_16b of MindSpeed-LLM gives `--topk-group 1` and no `--n-group`."""
    assert "--moe-router-group-topk" not in words("--topk-group 1 --moe-intermediate-size 1408")
    assert "--moe-router-num-groups 8 --moe-router-group-topk 4" in words("--n-group 8 --topk-group 4")


def test_local_layers_of_mindspeed() -> None:
    """MindSpeed runs latent attention and context parallelism with `--transformer-impl local`."""
    translation = read("--moe-fb-overlap --noop-layers 7", "--transformer-impl local --use-flash-attn")
    assert translation.words[-2:] == ("--transformer-impl", "transformer_engine")
    assert "--transformer-impl" in translation.dropped
    assert not read("--moe-fb-overlap", "--transformer-impl local").words


def test_settings_of_torch_fsdp2() -> None:
    """Parameters are sharded if `--use-torch-fsdp2` is given as well."""
    assert "without sharding" in read("--fsdp2-config-path a.yaml").warnings[0]
    assert "without sharding" not in read("--fsdp2-config-path a.yaml", "--use-torch-fsdp2").warnings[0]


def test_tokenizers_of_megatron_llm() -> None:
    """megatron/tokenizer/tokenizer.py: that of Falcon-40B, and SentencePiece with five special tokens and those of the list."""
    assert "--tokenizer-model tiiuae/falcon-40b" in words("--use_bias --tokenizer_type FalconTokenizer")
    line = "--use_bias --tokenizer_type SentencePieceTokenizer --vocab_file /llama/tokenizer.model"
    assert "--tokenizer-model /llama/tokenizer.model --vocab-size 32005" in words(line)
    assert "--vocab-size 32007" in words(f"{line} --vocab_extra_ids_list <a>,<b>")


def test_options_with_underscores_have_one_note() -> None:
    """A launch of Megatron-LLM has dozens of them."""
    notes = read("--use_bias --num_layers 2 --hidden_size 64 --num_attention_heads 4").notes
    assert len(notes) == 1
    assert notes[0].startswith("3 options with underscores, such as --num_layers,")


def test_yuan() -> None:
    """Yuan 2.0 102B has 102.6 billion parameters; without its convolutions (2 h² in each of 84 layers) these are 91.3 billion."""
    report = analyze(
        "pretrain_yuan.py --num-layers 84 --hidden-size 8192 --num-attention-heads 64 --use-lf-gate --position-embedding-type rope "
        "--norm-dtype RMSNorm --disable-bias-linear --swiglu --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
        "--bf16 --tokenizer-type YuanTokenizer --tokenizer-model-path x",
        environ={},
        folder="/nowhere",
    )
    assert report.job.model.ffn_hidden_size == 4 * 8192
    assert report.parameters_unpadded + 84 * 2 * 8192**2 == pytest.approx(102.6e9, rel=0.002)


def test_dion() -> None:
    """`--dion-beta1` of Megatron-Dion is one letter from `--lion-beta1`."""
    translation = read("--dion-beta1 0.9 --dion-momentum 0.95", "--optimizer dion")
    assert " ".join(translation.words) == "--optimizer adam"
    assert named(translation.warnings, "--optimizer dion: ")


def test_defaults_of_slime() -> None:
    """`_set_default_megatron_args` of slime: "always use zero optimizer", bf16, and sequences of 4,096 tokens."""
    line = words("--actor-num-nodes 1 --rollout-batch-size 8 --n-samples-per-prompt 1")
    assert "--bf16 --no-create-attention-mask-in-dataloader --seq-length 4096 --max-position-embeddings 4096" in line
    packed = words("--actor-num-nodes 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216", "--fp16")
    assert "--use-distributed-optimizer" in packed
    assert "--bf16" not in packed
    assert "4096" not in packed


def test_unknown_optimizers_of_forks() -> None:
    """argonne-lcf/Megatron-DeepSpeed has `--optimizer sophiag`. Without options of a fork the value is left to Megatron-LM."""
    translation = read("--deepspeed --zero-stage 1", "--optimizer sophiag --lr-decay-style trapezoid")
    assert "--optimizer adam --lr-decay-style linear" in " ".join(translation.words)
    assert translation.dropped == ("--optimizer", "--lr-decay-style")
    assert len(translation.warnings) == 1
    assert named(translation.warnings, "--optimizer sophiag: ")
    assert not read("--deepspeed --zero-stage 1", "--optimizer adma").dropped
    assert not read("", "--optimizer sophiag").dropped


def test_recomputation_in_scripts_of_2023() -> None:
    """examples/aquila of FlagScale gives a method and no number of layers; `--recompute-num-layers` was 1 by default."""
    line = "--recompute-granularity full --recompute-method uniform"
    assert "--recompute-num-layers 1" in words("--apply-layernorm-rms --rampup-save-interval 5", line)
    assert "--recompute-num-layers" not in words(
        "--apply-layernorm-rms --rampup-save-interval 5", f"{line} --recompute-num-layers 2"
    )
