"""Launches that were answered or refused wrongly, with the behavior that the sources of Megatron-LM and of the frameworks have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from analyzer.api import analyze, read_launch
from analyzer.cli.predict import fails
from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.launchers.world import World
from analyzer.launch.options import choose_release
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.options.option_table import Option, OptionTable
from analyzer.launch.other_models import kind_of_checkpoint
from analyzer.specs import TrainingJob
from analyzer.specs.adapters import DEFAULT_TARGETS
from tests.job_of import BASE, job_of

MODEL = BASE.replace("--bf16", "--bf16 --global-batch-size 64 --train-iters 10 --lr 1e-4")
TORCHRUN = "--nproc-per-node 8 pretrain_gpt.py"
SLIME = "--nproc-per-node 8 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-batch-size 64"
VERL = (
    "-m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.model.path=Qwen/Qwen3-8B "
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 trainer.n_gpus_per_node=8"
)


def launch(line: str, folder: Path = Path("/nowhere"), environ: Mapping[str, str] | None = None) -> TrainingJob:
    return read_launch(line.split(), environ=environ or {}, folder=folder).job


# adapters


@pytest.mark.parametrize(
    "line",
    [
        f"{TORCHRUN} {MODEL} --use-lora --lora-dim 16",
        f"{TORCHRUN} {MODEL} --peft-scheme lora",
        f"{TORCHRUN} {MODEL} --lora-target-modules linear_qkv",
    ],
)
def test_adapters_with_unknown_options_get_no_verdict(line: str) -> None:
    report = analyze(f"{line} --info-gpu H100-80GB --info-gpu-memory 1GiB".split(), environ={}, folder=Path("/nowhere"))
    assert report.verdict.fits is None
    assert "trains adapters, whose options are not known" in report.verdict.withheld
    assert not fails(report.verdict, ())


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        (f"{SLIME} {MODEL} --lora-rank 32 --lora-alpha 32 --target-modules all-linear", 32),
        (f"{SLIME} {MODEL} --lora_rank 32 --lora_alpha 32", 32),
        ("--nproc-per-node 8 --train_type lora --model Qwen/Qwen3-8B --max_length 2048", 8),
        ("--nproc-per-node 8 --tuner_type lora --lora_rank 16 --model Qwen/Qwen3-8B --max_length 2048", 16),
        (f"{VERL} actor_rollout_ref.model.lora.rank=16", 16),
    ],
)
def test_adapters_of_frameworks_are_modelled(line: str, rank: int) -> None:
    job = launch(line)
    assert job.model.adapters is not None
    assert (job.model.adapters.rank, job.model.adapters.targets) == (rank, DEFAULT_TARGETS)


def test_supervised_training_of_adapters_has_a_verdict() -> None:
    line = "--nproc-per-node 8 --tuner_type lora --model Qwen/Qwen3-8B --max_length 2048 --info-gpu H100-80GB"
    report = analyze(line.split(), environ={}, folder=Path("/nowhere"))
    assert report.verdict.fits is True


@pytest.mark.parametrize(
    ("tuner", "frozen"), [("lora", False), ("full", True), ("full --freeze_parameters_ratio 0", True), ("lora_llm", False)]
)
def test_parameters_are_frozen_by_name_in_a_training_of_all_parameters_only(tuner: str, frozen: bool) -> None:
    """`prepare_mcore_model` of ms-swift (swift/megatron/utils/utils.py) reads these options for `--tuner_type full`."""
    line = f"--nproc-per-node 8 --tuner_type {tuner} --freeze_parameters decoder.layers.0. --model Qwen/Qwen3-8B --max_length 2048"
    job = launch(line)
    assert not any("freeze" in reason for reason in job.withheld)
    assert (job.model.frozen_parameters is not None) == frozen


def test_frozen_parameters_have_no_gradients_and_states() -> None:
    """By hand for Qwen3-8B on one GPU, of whose 36 layers of 192,946,432 parameters the last one is trained, without its norms."""
    line = (
        "--nproc-per-node 1 --tuner_type full --freeze_parameters_ratio 1 --trainable_parameters decoder.layers.35.mlp "
        "--trainable_parameters_regex layers.35.*linear_proj --model Qwen/Qwen3-8B --max_length 2048 --info-gpu-memory 200GiB"
    )
    memory = analyze(line.split(), environ={}, folder=Path("/nowhere")).ranks[0].memory
    trained = 3 * 4096 * 12288 + 4096 + 4096 * 4096
    rounded = 36 * 2 * 256  # those of the norms of queries and keys have 256 bytes, and an allocation has 512
    assert memory.parameters_bytes == 2 * 8_190_735_360 + rounded
    assert memory.gradients_bytes == 4 * trained
    assert memory.optimizer_bytes == 12 * trained


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--freeze_parameters embedding --cuda_graph_impl local", "not modelled with CUDA graphs"),
        ("--freeze_parameters_regex experts.*weight3", "not modelled for single experts"),
    ],
)
def test_there_is_no_verdict_where_frozen_parameters_are_not_modelled(line: str, reason: str) -> None:
    job = launch(f"--nproc-per-node 8 --tuner_type full --model Qwen/Qwen3-8B --max_length 2048 {line}")
    assert job.model.frozen_parameters is None
    assert any(reason in each for each in job.withheld)


def test_a_ratio_is_refused_with_pipeline_stages() -> None:
    """`MegatronTunerMixin.__post_init__` of ms-swift."""
    line = (
        "--nproc-per-node 8 --freeze_parameters_ratio 0.5 --model Qwen/Qwen3-8B --max_length 2048 --pipeline_model_parallel_size 2"
    )
    with pytest.raises(InputError, match="ms-swift refuses it with 2 pipeline stages"):
        launch(line)


SWIFT_LORA = "--nproc-per-node 8 --tuner_type lora --max_length 2048 --model"


def test_trained_embeddings_beside_adapters_have_a_copy_gradients_and_optimizer_states() -> None:
    """`ModulesToSaveWrapper` of PEFT keeps the original, frozen, and trains a copy of it. Qwen3-8B: 151,936 × 4,096, twice."""
    line = f"{SWIFT_LORA} Qwen/Qwen3-8B"
    report = analyze(f"{line} --modules_to_save word_embeddings output_layer".split(), environ={}, folder=Path("/nowhere"))
    plain = analyze(line.split(), environ={}, folder=Path("/nowhere"))
    elements = 2 * 151936 * 4096
    memory, without = report.ranks[0].memory, plain.ranks[0].memory
    assert memory.parameters_bytes - without.parameters_bytes == pytest.approx(2 * elements, abs=4096)
    assert memory.gradients_bytes - without.gradients_bytes == pytest.approx(4 * elements, abs=8192)
    assert memory.optimizer_bytes - without.optimizer_bytes == pytest.approx(12 * elements // 8, abs=8192)
    assert (report.parameters, report.parameters_adapters) == (plain.parameters, plain.parameters_adapters)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("Qwen/Qwen3-8B --modules_to_save router", "with other trained modules (router)"),
        ("Qwen/Qwen3-8B --modules_to_save embed_tokens lm_head", "with other trained modules (embed_tokens, lm_head)"),
        ("Qwen/Qwen3-4B --modules_to_save output_layer", "with trained output_layer and tied embeddings"),
        (
            "Qwen/Qwen3-4B --modules_to_save word_embeddings --pipeline_model_parallel_size 2",
            "with trained word_embeddings and tied embeddings",
        ),
        ("Qwen/Qwen3-8B --modules_to_save word_embeddings --mtp_num_layers 1", "with trained word_embeddings and MTP layers"),
    ],
)
def test_other_trained_modules_beside_adapters_get_no_verdict(line: str, reason: str) -> None:
    assert reason in launch(f"{SWIFT_LORA} {line}").withheld[0]


@pytest.mark.parametrize(
    "line",
    [
        f"{TORCHRUN} {MODEL} --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64",
        f"{SLIME} {MODEL} --lora_rank 0",
        "--nproc-per-node 8 --tuner_type full --lora_rank 8 --model Qwen/Qwen3-8B --max_length 2048",
        f"{VERL} actor_rollout_ref.model.lora.rank=0",
    ],
)
def test_other_ranks_and_switched_off_adapters_leave_the_verdict(line: str) -> None:
    assert not any("adapters" in reason for reason in launch(line).withheld)


# other models


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("/data/models/Qwen3-VL-8B-Instruct", "vision"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "vision"),
        ("Qwen/Qwen2VL-7B", "vision"),
        ("OpenGVLab/InternVL3-8B/", "vision"),
        ("meta-llama/Llama-3.2-11B-Vision", "vision"),
        ("Qwen/Qwen3-ASR-1.7B", "multimodal"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Mamba"),
        ("google/t5-v1_1-large", "encoder"),
    ],
)
def test_names_of_checkpoints_of_other_models(name: str, kind: str) -> None:
    assert kind in (kind_of_checkpoint(name) or "")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "moonshotai/Moonlight-16B-A3B", "/ckpt/avl/gpt2-vlad", "zai-org/GLM-4.5-Air"])
def test_names_of_checkpoints_of_gpts(name: str) -> None:
    assert kind_of_checkpoint(name) is None


@pytest.mark.parametrize(
    ("line", "option"),
    [
        (f"{SLIME} {MODEL} --hf-checkpoint /data/Qwen3-VL-8B-Instruct --megatron-to-hf-mode bridge", "--hf-checkpoint"),
        (f"{SLIME} {MODEL} --multimodal-keys image", "--multimodal-keys"),
        (VERL.replace("Qwen3-8B", "Qwen2-Audio-7B"), "actor_rollout_ref.model.path"),
        ("--nproc-per-node 8 --model Qwen/Qwen3-ASR-1.7B --tuner_type full --max_length 2048", "--model"),
        (f"--nproc-per-node 8 tasks/main.py {MODEL} --task WIKITEXT103", "tasks/main.py"),
        (f"--nproc-per-node 8 main.py {MODEL.replace('--train-iters 10', '')} --task WIKITEXT103", "--task"),
        (f"--nproc-per-node 8 tools/merge_datasets.py {MODEL}", "tools/merge_datasets.py"),
        (f"--nproc-per-node 8 examples/post_training/modelopt/prune.py {MODEL}", "examples/post_training/modelopt/prune.py"),
    ],
)
def test_what_trains_no_gpt_is_refused_by_name(line: str, option: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        launch(line)
    assert refused.value.option == option


# vocabularies and frameworks


def test_gpt2_files_and_type_mean_its_tokens() -> None:
    """`vocab_size` of GPT2BPETokenizer with the files of GPT-2."""
    own = MODEL.replace("--tokenizer-type NullTokenizer --vocab-size 32000", "")
    assert launch(f"{TORCHRUN} {own} --vocab-file datasets/vocab.json --merge-file datasets/merges.txt").model.vocab_size == 50257
    assert launch(f"{TORCHRUN} {own} --tokenizer-type GPT2BPETokenizer --vocab-file /d/v.json").model.vocab_size == 50257
    codeparrot = f"{TORCHRUN} {own} --vocab-file /w/vocab.json --merge-file /w/merges.txt --load /w/codeparrot-small"
    assert launch(codeparrot).model.vocab_size == 32768  # vocab_size in config.json of codeparrot/codeparrot-small
    other = launch(f"{TORCHRUN} {own} --vocab-file europa-tokenizer/vocab.json --merge-file europa-tokenizer/merges.txt")
    assert other.assumed_vocabulary is not None


def test_verl_pads_no_vocabulary_and_makes_no_mask() -> None:
    job = launch(VERL)
    assert job.model.padded_vocab_size == 151936
    assert not job.flags.attention_mask_in_dataloader
    assert launch(f"{VERL} actor_rollout_ref.model.use_remove_padding=False").flags.attention_mask_in_dataloader


def test_verl_trains_supervised_with_megatron() -> None:
    line = (
        "-m verl.trainer.sft_trainer engine=megatron optim=megatron model.path=Qwen/Qwen3-8B engine.tensor_model_parallel_size=2 "
        "engine.pipeline_model_parallel_size=2 data.max_token_len_per_gpu=4096 trainer.n_gpus_per_node=8 trainer.nnodes=2"
    )
    job = launch(line)
    assert (job.parallel.world_size, job.parallel.tensor, job.parallel.pipeline, job.batch.seq_length) == (16, 2, 2, 4096)
    with pytest.raises(UnsupportedError, match="FSDP"):
        launch(line.replace("=megatron", "=fsdp"))


def test_verl_offloads_the_optimizer_by_its_override() -> None:
    offload = "actor_rollout_ref.actor.optim.override_optimizer_config"
    aware = f"+{offload}.use_precision_aware_optimizer=True"
    job = launch(f"{VERL} +{offload}.optimizer_cpu_offload=True +{offload}.optimizer_offload_fraction=1.0 {aware}")
    assert job.optimizer.offload is not None
    assert job.optimizer.offload.fraction == 1.0


SWIFT = (
    "--nproc-per-node 8 --model Qwen/Qwen3-30B-A3B --tuner_type full --max_length 2048 --tensor_model_parallel_size 2 "
    "--sequence_parallel true"
)


def test_defaults_of_ms_swift() -> None:
    """`expert_tensor_parallel_size` 1, no mask with padding_free, and Muon without the distributed optimizer (megatron_args.py)."""
    job = launch(f"{SWIFT} --expert_model_parallel_size 2 --loss_scale ignore_empty_think")
    assert job.parallel.expert_tensor == 1
    assert not job.flags.attention_mask_in_dataloader
    muon = launch(f"{SWIFT} --expert_model_parallel_size 2 --optimizer muon --use_distributed_optimizer true")
    assert not muon.optimizer.distributed


def test_the_bridge_gives_the_model_of_a_known_checkpoint() -> None:
    """`provider` of Megatron-Bridge: the options for the model have no effect."""
    line = f"{SLIME} {MODEL} --hf-checkpoint /data/models/gpt-oss-20b --megatron-to-hf-mode bridge --swiglu"
    assert launch(line).model.num_layers == 24
    assert launch(line.replace("bridge", "raw")).model.num_layers == 8


# checks that Megatron does not have


def test_communication_types_are_read_with_several_context_ranks_only() -> None:
    assert job_of("--cp-comm-type allgather").parallel.context == 1
    with pytest.raises(InputError, match="--cp-comm-type"):
        job_of("--cp-comm-type allgather --context-parallel-size 2", gpus=2)


def test_megatron_fsdp_turns_the_distributed_optimizer_on_from_0_18_on() -> None:
    """`args.use_distributed_optimizer = True` in validate_args, core 0.18."""
    line = (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion"
    )
    assert job_of(line, release="0.18.2").optimizer.distributed
    with pytest.raises(UnsupportedError, match="--use-distributed-optimizer"):
        job_of(line, release="0.17.1")


def test_an_elastic_launch_uses_the_smallest_number_if_the_largest_cannot_divide_the_batch() -> None:
    job = launch(f"--nnodes 1:16 {TORCHRUN} {MODEL}")
    assert job.parallel.world_size == 8
    assert job.unknown[0] == "--nnodes 1:16 is analyzed with 1 node, the smallest number. --info-world-size chooses another."
    larger = launch(f"--nnodes 1:4 {TORCHRUN} {MODEL}")
    assert larger.parallel.world_size == 32
    assert "4 nodes, the largest number" in larger.unknown[0]


def test_a_checkout_of_megatron_deepspeed_is_read_by_translation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its parser has defaults, such as moe_token_dropping, that mean something else in Megatron-LM."""
    flag = choose_release.OF_DEEPSPEED
    own = Option((flag,), "deepspeed_activation_checkpointing", "true", 0, True, False)
    table = OptionTable(release="2023", source="checkout", options={flag: own}, defaults={"moe_token_dropping": True})
    monkeypatch.setattr(choose_release, "load_table", lambda *_, **__: table)
    monkeypatch.setattr(choose_release, "find_checkout", lambda *_, **__: tmp_path)
    choice = choose_release.chosen_table(None, load_catalogue(), {}, tmp_path, entry="pretrain_gpt.py")
    assert choice.table is None
    assert "Megatron-DeepSpeed" in choice.reason


# YAML

YAML = """
language_model:
  num_layers: 24
  hidden_size: 1024
  num_attention_heads: 16
  activation_func: swiglu
  add_bias_linear: False
  layernorm_epsilon: 1.e-5
  num_moe_experts: null
model_parallel:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: ${PP}
  sequence_parallel: True
  bf16: True
  perform_initialization: True
micro_batch_size: 2
global_batch_size: 128
seq_length: 4096
max_position_embeddings: 4096
position_embedding_type: rope
untie_embeddings_and_output_weights: True
swiglu: True
tokenizer_type: NullTokenizer
vocab_size: 32000
use_distributed_optimizer: True
new_feature: 3
train_iters: 10
lr: 2.5e-4
"""
"""Some keys of examples/gpt3/gpt_config.yaml, core 0.16.1."""


def test_a_yaml_file_replaces_the_options(tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text(YAML)
    job = launch(f"{TORCHRUN} --yaml-cfg gpt.yaml --num-layers 4", tmp_path, {"PP": "2"})
    model, parallel = job.model, job.parallel
    assert (model.num_layers, model.hidden_size, job.batch.seq_length) == (24, 1024, 4096)
    assert (parallel.tensor, parallel.pipeline, parallel.sequence_parallel) == (2, 2, True)
    assert model.ffn_hidden_size == 2688  # int(4 · 1024 · 2 / 3 / 64) · 64
    assert any("new_feature" in each for each in job.unknown)
    assert any(each.startswith("--num-layers: Megatron-LM ignores options beside --yaml-cfg") for each in job.unknown)


@pytest.mark.parametrize(
    ("text", "environ", "fault"),
    [
        (YAML, {}, "environment variable PP"),
        ("language_model: {}", {}, "no section model_parallel"),
        ("a: [", {}, "is not YAML in line"),
        ("[]", {}, "has no keys"),
        (YAML.replace("swiglu\n", "foo\n", 1), {"PP": "1"}, "activation_func 'foo'"),
    ],
)
def test_wrong_yaml_files_are_named(text: str, environ: dict[str, str], fault: str, tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text(text)
    with pytest.raises(InputError, match=fault) as refused:
        launch(f"{TORCHRUN} --yaml-cfg gpt.yaml", tmp_path, environ)
    assert refused.value.option == "--yaml-cfg"


# messages


@pytest.mark.parametrize(
    ("word", "fault", "remedy"),
    [
        ("config.json", "is a JSON file, not a launch script", "--info-model"),
        ("README.md", "is a text, not a launch script", "launch command"),
        ("setup.yaml", "cannot be read", "configuration of a framework"),
    ],
)
def test_a_file_that_is_no_script_is_named(word: str, fault: str, remedy: str) -> None:
    with pytest.raises(InputError, match=fault) as refused:
        launch(word)
    assert remedy in refused.value.remedy


def test_a_short_name_of_a_model_suggests_the_longer_one() -> None:
    with pytest.raises(InputError) as refused:
        launch("--info-model Qwen3-30B --info-world-size 8")
    assert "use Qwen/Qwen3-30B-A3B or" in refused.value.remedy


def test_the_world_of_the_smallest_number_has_whole_nodes() -> None:
    assert World(4, 8, (), ("--nnodes 1:4", 1)).size == 32


@pytest.mark.parametrize(
    "line",
    [
        "--nproc-per-node 8 fairseq_cli/train.py /data --arch transformer --lr 1e-4",
        "--nproc-per-node 8 scripts/train_own.py --model_name llama3 --gpu h100",
        "--nproc-per-node 8 train.py --num-tokens 16384 --output_directory x",
    ],
)
def test_a_program_of_its_own_is_named(line: str) -> None:
    with pytest.raises(UnsupportedError, match="is no launch of Megatron-LM"):
        launch(line)


def test_a_launch_of_megatron_without_sizes_names_the_option() -> None:
    with pytest.raises(InputError, match=r"^--num-layers: is missing"):
        launch("--nproc-per-node 8 pretrain_gpt.py --lr 1e-4")


def test_of_equal_options_the_last_one_counts() -> None:
    """As in argparse. Scripts with "$@" after their options depend on it."""
    job = launch(
        "--nproc-per-node 8 --model Qwen/Qwen3-8B --max_length 2048 --micro_batch_size 1 --max_length 4096 --micro_batch_size 2"
    )
    assert (job.batch.seq_length, job.batch.micro_batch_size) == (4096, 2)
