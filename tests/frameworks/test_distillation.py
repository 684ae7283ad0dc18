"""Distillation with a teacher, against figures worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.api import read_launch, report_of
from analyzer.errors import InputError
from analyzer.memory.ranks import highest_rank
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import total_bytes
from analyzer.passes.stages import stage_models
from tests.frameworks.files import job, write

GKD = (
    "megatron rlhf --rlhf_type gkd --model Qwen/Qwen3-8B --micro_batch_size 1 --global_batch_size 16 --max_length 2048 "
    "--packing true --use_vllm false --info-world-size 8 --info-gpu H200-141GB"
)
FULL = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1".split()


def test_a_teacher_has_its_weights_and_the_logits_of_all_microbatches(tmp_path: Path) -> None:
    """Qwen3-32B has 32,762,123,264 parameters, and both models 151,936 tokens. Each rank has 2 of the 16 samples of an iteration.

    At its peak the loss needs for each logit: fp32 logits, those of responses, and those by temperature (12 bytes), two copies of
    the teacher's in bf16 (4), and in all chunks fp32 log-probabilities of the student, of both models, and of the mixture (16), the
    probabilities of both (6), and their differences (4); in the last chunk of 512 tokens also a product and log-probabilities (6).
    """
    found = job(tmp_path, *GKD.split(), "--teacher_model", "Qwen/Qwen3-32B", *FULL)
    assert found.withheld == ()
    memory = highest_rank(found).memory
    parts = {part.name: part.bytes for part in memory.runtime_parts}
    assert parts["weights of the teacher model"] == pytest.approx(2 * 32_762_123_264, abs=512 * 1000)
    assert parts["logits of the teacher for all microbatches"] == 2 * 2048 * 151936 * 2
    saved = found.model.distillation
    assert saved is not None
    tree = stage_models(found)[0].trees[0]
    loss = next(module for _, module in tree.walk() if module.kind is ModuleKind.LOSS)
    assert total_bytes(loss.saved) == 26 * 2048 * 151936
    assert total_bytes(loss.forward_workspace) == 16 * 2048 * 151936 + 6 * 512 * 151936


def test_a_teacher_on_the_host_comes_to_the_gpu_in_its_phase(tmp_path: Path) -> None:
    """`load_teacher_model_context` of swift/megatron/trainers/rollout_mixin.py."""
    words = [*GKD.split(), "--teacher_model", "Qwen/Qwen3-32B", "--offload_teacher_model", "true", "--gkd_logits_topk", "64"]
    found = report_of(read_launch(words, environ={}, folder=tmp_path))
    update, teacher = found.phases
    assert teacher.states_bytes - update.states_bytes == pytest.approx(2 * 32_762_123_264, abs=512 * 1000)
    assert (teacher.host_bytes, update.host_bytes) == (0, teacher.states_bytes - update.states_bytes)
    assert (found.verdict.fits, found.verdict.phase) == (True, "teacher")
    parts = {part.name: part.bytes for part in highest_rank(found.job).memory.runtime_parts}
    assert parts["logits of the teacher for all microbatches"] == 2 * 2048 * 64 * (2 + 8)


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        ("--teacher_model Qwen/Qwen3-8B --tuner_type lora", "shared"),
        ("--teacher_model Qwen/Qwen3-8B", "own"),
        ("", "shared"),
        ("--teacher_model_server http://localhost:8000 --gkd_logits_topk 64", None),
    ],
)
def test_a_teacher_may_be_the_trained_model(tmp_path: Path, words: str, weights: str | None) -> None:
    """`_check_teacher` of swift/megatron/arguments/megatron_args.py: with LoRA the same model is that without its adapters."""
    found = job(tmp_path, *GKD.split(), *words.split())
    assert [each.weights for each in found.tuning.phases if each.name == "teacher"] == [weights]
    assert found.withheld == ()


@pytest.mark.parametrize(
    ("words", "divergence"),
    [("--beta 0", "forward"), ("--beta 1", "reverse"), ("", "Jensen-Shannon"), ("--beta 0.9", "Jensen-Shannon")],
)
def test_beta_selects_the_divergence(tmp_path: Path, words: str, divergence: str) -> None:
    """`jsd_loss` of swift/rlhf_trainers/gkd_loss.py. The default of `--beta` is 0.5 (`default_beta`)."""
    found = job(tmp_path, *GKD.split(), *words.split(), "--steps_per_generation", "4").model.distillation
    assert found is not None
    assert (found.divergence, found.iterations) == (divergence, 4)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--sft_alpha 0.1", "the loss of GKD is counted as that of a language model with a term of the labels"),
        ("--teacher_model Qwen/Qwen2.5-7B", "the loss of GKD is counted as that of a language model with another vocabulary"),
        ("--mtp_num_layers 1", "the loss of GKD is counted as that of a language model with MTP layers"),
        ("--teacher_model nobody/Nothing-1B", "the sizes of nobody/Nothing-1B are not known"),
    ],
)
def test_other_distillations_get_no_verdict(tmp_path: Path, words: str, reason: str) -> None:
    assert any(each.startswith(reason) for each in job(tmp_path, *GKD.split(), *words.split()).withheld)


def test_a_student_that_learns_from_its_own_responses_has_a_rollout(tmp_path: Path) -> None:
    """`_init_rollout_engine` of swift/megatron/trainers/rollout_mixin.py: not with `--lmbda 0`. By default there is one."""
    words = GKD.replace("--use_vllm false ", "").split()
    found = job(tmp_path, *words)
    assert [each.name for each in found.tuning.phases] == ["teacher", "rollout", "refit"]
    assert found.withheld == found.not_counted == ()
    assert job(tmp_path, *words, "--lmbda", "0").withheld == ()


def test_layouts_that_a_teacher_cannot_have_are_refused(tmp_path: Path) -> None:
    """`_load_teacher_model` asserts that there are no virtual stages. Qwen3-32B has 64 layers and 8 query groups."""
    words = "--teacher_model Qwen/Qwen3-32B --pipeline_model_parallel_size 2 --num_layers_per_virtual_pipeline_stage 9".split()
    with pytest.raises(InputError, match="ms-swift refuses a local teacher with interleaved stages"):
        job(tmp_path, *GKD.split(), *words)
    words = GKD.replace("Qwen/Qwen3-8B", "Qwen/Qwen2.5-7B").replace("--info-world-size 8", "--info-world-size 7").split()
    with pytest.raises(InputError, match=r"Qwen/Qwen2.5-0.5B: cannot have this layout"):
        job(tmp_path, *words, "--teacher_model", "Qwen/Qwen2.5-0.5B", "--pipeline_model_parallel_size", "7")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--teacher_model_server http://localhost:8000", "ms-swift refuses it without --gkd_logits_topk"),
        ("--gkd_logits_topk 0", "0 is not a number from 1 to 151,936"),
        ("--gkd_logits_topk 80000 --tensor_model_parallel_size 2", "80000 is not a number from 1 to 75,968"),
    ],
)
def test_numbers_of_logits_that_cannot_be_compared_are_refused(tmp_path: Path, words: str, message: str) -> None:
    """`__post_init__` of swift/megatron/arguments/megatron_args.py, and `vocab_parallel_topk`, which selects them on each rank."""
    with pytest.raises(InputError, match=message):
        job(tmp_path, *GKD.split(), *words.split())


def test_a_teacher_of_nemo_rl_has_a_layout_of_its_own_and_comes_from_the_host(tmp_path: Path) -> None:
    """`get_topk_logits` and `offload_after_refit` of megatron_policy_worker.py. Logits are in bf16, and then in fp32.

    Qwen3-4B has 3,633,511,936 parameters in 36 layers and a final norm, and tied embeddings of 151,936 tokens. The last of two
    stages has half of the layers, the norm, and a copy of the embedding, nearly all of it split over tensor-parallel ranks.
    """
    pytest.importorskip("omegaconf")
    write(tmp_path, {"distillation.yaml": NEMO_RL})
    words = ["examples/run_distillation.py", "--config", "distillation.yaml", "--info-gpu", "H100-80GB"]
    found = report_of(read_launch(words, environ={}, folder=tmp_path))
    teacher = {each.name: each for each in found.phases}["teacher"]
    weights = teacher.states_bytes - found.ranks[0].memory.runtime_bytes
    assert weights == pytest.approx((3_633_511_936 / 2 + 151936 * 2560) / 2 * 2, rel=1e-3)
    assert teacher.forward_bytes == 4096 * 151936 // 2 * 6 + 4096 * 2560 * 2
    assert (found.verdict.state, found.verdict.phase) == ("fits", "rollout")


@pytest.mark.parametrize(
    ("words", "gradients"),
    [
        ([], 4),
        (["policy.sequence_packing.enabled=true"], 4 + 4 + 1),
        (["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=4096"], 4 + 4 + 1),
    ],
)
def test_a_student_of_nemo_rl_has_a_gradient_of_all_logits_for_each_packed_sequence(
    tmp_path: Path, words: list[str], gradients: int
) -> None:
    """`torch.gather` in `gather_logits_at_global_indices` saves the fp32 logits, and its gradient has their size: 4 bytes each.

    `narrow` of `SequencePackingLossWrapper` has the size of all sequences. Its gradient is added to that of the others, while the
    gradient of its own sequence, one of four, exists. With 64 chosen logits for each token: their indices (8), those of other ranks
    (4), fp32 log-probabilities (4), and for both divergences probabilities of both (8) and differences (4).
    """
    pytest.importorskip("omegaconf")
    write(tmp_path, {"distillation.yaml": NEMO_RL})
    found = job(tmp_path, "examples/run_distillation.py", "--config", "distillation.yaml", *words)
    tokens = found.batch.seq_length
    trees = [module for tree in stage_models(found)[0].trees for _, module in tree.walk()]
    choice = next(module for module in trees if module.kind is ModuleKind.LOSS)
    divergence = next(module for module in trees if module.name == "divergence")
    assert total_bytes((*choice.saved, *divergence.saved)) == 4 * tokens * 151936 + 28 * 64 * tokens
    assert total_bytes(choice.backward_workspace) == pytest.approx(gradients * tokens * 151936, rel=2e-3)
    parts = {part.name: part.bytes for part in highest_rank(found).memory.runtime_parts}
    assert parts["largest logits of the teacher for a microbatch"] == tokens * 64 * (4 + 8)


@pytest.mark.parametrize(
    ("words", "divergence", "whole"),
    [
        ([], "mixed", False),
        (["+loss_fn.kl_type=forward"], "forward", False),
        (["+loss_fn.kl_type=reverse", "+loss_fn.zero_outside_topk=true"], "reverse", True),
    ],
)
def test_the_loss_of_nemo_rl_is_read(tmp_path: Path, words: list[str], divergence: str, whole: bool) -> None:
    """`DistillationLossConfig` of nemo_rl/algorithms/loss/loss_functions.py has the defaults."""
    pytest.importorskip("omegaconf")
    write(tmp_path, {"distillation.yaml": NEMO_RL})
    found = job(tmp_path, "examples/run_distillation.py", "--config", "distillation.yaml", *words).model.distillation
    assert found is not None
    assert (found.divergence, found.whole_vocabulary, found.topk, found.sequences) == (divergence, whole, 64, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+loss_fn.kl_type=both"], "loss_fn.kl_type: 'both' is not known; use one of forward, reverse, mixed"),
        (["distillation.topk_logits_k=0"], "distillation.topk_logits_k: 0 is not a number of 1 or more"),
        (
            ["policy.sequence_packing.enabled=true", "+policy.sequence_packing.fuse_loss=true"],
            "policy.sequence_packing.fuse_loss: NeMo-RL refuses it in distillation",
        ),
    ],
)
def test_losses_that_nemo_rl_refuses_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    """`DistillationLossFn.__init__`, `get_distillation_topk_logprobs_from_logits` and `prepare_packed_loss_input`."""
    pytest.importorskip("omegaconf")
    write(tmp_path, {"distillation.yaml": NEMO_RL})
    with pytest.raises(InputError, match=message):
        job(tmp_path, "examples/run_distillation.py", "--config", "distillation.yaml", *words)


def test_probabilities_of_the_whole_vocabulary_are_counted_in_chunks(tmp_path: Path) -> None:
    """`ChunkedDistributedGatherLogprob` and `ChunkedDistributedEntropy`: fp32 gradients of both, and three tensors of a chunk."""
    pytest.importorskip("omegaconf")
    write(tmp_path, {"distillation.yaml": NEMO_RL})
    words = ["examples/run_distillation.py", "--config", "distillation.yaml", "+loss_fn.zero_outside_topk=true"]
    for kind, gradients in (("forward", 1), ("reverse", 2)):
        found = job(tmp_path, *words, f"+loss_fn.kl_type={kind}")
        trees = [module for tree in stage_models(found)[0].trees for _, module in tree.walk()]
        choice = next(module for module in trees if module.kind is ModuleKind.LOSS)
        expected = 4 * 151936 * (gradients * 2048 + 3 * 1024)
        assert total_bytes(choice.backward_workspace) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(("words", "stays"), [((), True), (("+is_offload_states=true",), False)])
def test_a_teacher_of_roll_stays_on_the_gpu_unless_states_are_offloaded(
    tmp_path: Path, words: tuple[str, ...], stays: bool
) -> None:
    """`state_offload_manger` of roll/utils/context_managers.py.

    Qwen2.5-7B has 7,615,616,512 parameters, a hidden size of 3,584, and 152,064 tokens. The pass has 2 samples of 2,048 tokens.
    """
    pytest.importorskip("omegaconf")
    write(tmp_path, {"distill.yaml": ROLL})
    found = report_of(read_launch(["distill.yaml", *words, "--info-gpu", "H200-141GB"], environ={}, folder=tmp_path))
    update, teacher = found.phases
    weights = next((each.bytes for each in found.ranks[0].memory.runtime_parts if each.name == "weights of the teacher model"), 0)
    assert weights == pytest.approx(2 * 7_615_616_512 if stays else 0, abs=512 * 1000)
    assert update.host_bytes == pytest.approx(0 if stays else 2 * 7_615_616_512, abs=512 * 1000)
    assert teacher.forward_bytes == 2 * 2048 * 152064 * 12
    assert "the loss of distillation" in found.verdict.withheld


@pytest.mark.parametrize(
    ("words", "each"), [((), 64), (("logits_topk=128",), 128), (("teacher.device_mapping=list(range(8,16))",), 64)]
)
def test_the_last_stage_of_a_student_of_roll_has_the_probabilities_of_all_microbatches(
    tmp_path: Path, words: tuple[str, ...], each: int
) -> None:
    """`StudentWorker.train_step` of roll/pipeline/distill/distill_worker.py, and `op_compute_topk_probs_and_indices`.

    For each token and chosen logit: a probability in fp32, its logarithm in the dtype of the logits, an index and a bool. A rank
    has 4 microbatches of 2 samples with 2,048 tokens.
    """
    pytest.importorskip("omegaconf")
    write(tmp_path, {"distill.yaml": ROLL})
    layout = "student.strategy_args.strategy_config.pipeline_model_parallel_size=2"
    found = report_of(read_launch(["distill.yaml", *words, layout, "--info-gpu", "H200-141GB"], environ={}, folder=tmp_path))
    name = "probabilities of the teacher for all microbatches"
    of_stages = [{part.name: part.bytes for part in rank.memory.runtime_parts}.get(name, 0) for rank in found.ranks]
    assert [of_stages[0], of_stages[-1]] == [0, 4 * 2 * 2048 * each * (4 + 2 + 8 + 1)]


ROLL = """
student_pretrain: Qwen/Qwen2.5-1.5B
teacher_pretrain: Qwen/Qwen2.5-7B
logits_topk: 64
sequence_length: 2048
student:
  model_args: {dtype: bf16}
  training_args: {per_device_train_batch_size: 2, gradient_accumulation_steps: 4}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, use_distributed_optimizer: true}
  device_mapping: list(range(0,8))
teacher:
  training_args: {per_device_train_batch_size: 2}
  strategy_args:
    strategy_name: megatron_infer
    strategy_config: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1}
  device_mapping: list(range(0,8))
"""
NEMO_RL = """
distillation: {topk_logits_k: 64}
policy: &policy
  model_name: Qwen/Qwen3-1.7B
  train_global_batch_size: 64
  train_micro_batch_size: 1
  sequence_packing: {enabled: false, train_mb_tokens: 2048, logprob_mb_tokens: 4096}
  logprob_batch_size: 2
  max_total_sequence_length: 2048
  precision: bfloat16
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1}
  generation: {backend: vllm, vllm_cfg: {gpu_memory_utilization: 0.6}}
teacher:
  <<: *policy
  model_name: Qwen/Qwen3-4B
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
