"""The memory of the phases of reinforcement learning, against figures worked out by hand.

The model is Qwen2.5-1.5B: 1,543,714,304 parameters, hidden size 1536, 151,936 tokens, which verl does not pad. Sources of verl:
workers/engine/megatron/transformer_impl.py and workers/engine_workers.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.api import analyze, read_launch, report_of
from analyzer.memory.device_overhead import CONTEXT, outside_allocator_bytes, outside_allocator_range
from analyzer.memory.ranks import rank_classes
from analyzer.results import PhaseMemory, Report
from analyzer.units import GIB, MIB

ENGINE = "actor_rollout_ref.actor.megatron."
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
PARAMETERS = 1_543_714_304
TOKENS, HIDDEN, VOCABULARY = 16384, 1536, 151_936
SETTINGS = (
    "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B",
    "actor_rollout_ref.actor.use_dynamic_bsz=True", f"{ENGINE}tensor_model_parallel_size=1",
    f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={TOKENS}",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6", "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "trainer.n_gpus_per_node=8",
)  # fmt: skip
ON_HOST = (f"{ENGINE}param_offload=True", f"{ENGINE}optimizer_offload=True")


def report(*more: str) -> Report:
    words = ["-m", "verl.trainer.main_ppo", *SETTINGS, *more, "--info-gpu-memory", "80GiB"]
    return report_of(read_launch(words, environ={}, folder=Path("/nowhere")))


def phases(found: Report) -> dict[str, PhaseMemory]:
    return {phase.name: phase for phase in found.phases}


def test_the_pass_for_log_probabilities_has_three_fp32_tensors_of_all_logits() -> None:
    """The logits, a copy for the log-probabilities, and the exponentials of the entropy."""
    found = report()
    phase = phases(found)["log-probabilities"]
    assert phase.forward_bytes == TOKENS * VOCABULARY * 12
    memory = found.ranks[0].memory
    states = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.runtime_bytes
    assert phase.states_bytes == states
    assert phase.device_bytes == outside_allocator_bytes(found.job) + states + phase.forward_bytes


def test_chunks_of_the_entropy_need_no_tensor_of_all_logits() -> None:
    phase = phases(report(f"{ENGINE}entropy_from_logits_with_chunking=True"))["log-probabilities"]
    assert phase.forward_bytes == TOKENS * VOCABULARY * 8


def test_the_pass_of_a_long_context_is_that_of_a_context_parallel_rank() -> None:
    phase = phases(report(f"{ENGINE}context_parallel_size=2"))["log-probabilities"]
    assert phase.forward_bytes == TOKENS * VOCABULARY * 12


def test_the_rollout_has_its_share_of_the_gpu_beside_what_stays() -> None:
    """Without offloading the states of the training stay; with it they are in host memory, and gradients are freed."""
    stays, moved = report(), report(*ON_HOST)
    for found in (stays, moved):
        assert phases(found)["rollout"].engine_bytes == int(0.6 * 80 * GIB)
    memory = moved.ranks[0].memory
    assert phases(moved)["rollout"].states_bytes == memory.runtime_bytes
    assert phases(moved)["rollout"].host_bytes == memory.parameters_bytes + memory.optimizer_bytes
    assert phases(moved)["log-probabilities"].host_bytes == memory.optimizer_bytes
    assert phases(stays)["rollout"].states_bytes == phases(stays)["log-probabilities"].states_bytes
    assert phases(stays)["rollout"].host_bytes == 0


def test_an_engine_that_keeps_its_memory_is_there_during_the_update() -> None:
    kept = phases(report("actor_rollout_ref.rollout.free_cache_engine=False"))["update"]
    freed = phases(report())["update"]
    assert kept.device_bytes - freed.device_bytes == int(0.6 * 80 * GIB)


def test_a_refit_has_the_weights_of_both_and_a_bucket() -> None:
    """Half of the weights in bf16 for each of two ranks of the engine, and update_weights_bucket_megabytes."""
    phase = phases(report())["refit"]
    assert phase.engine_bytes == PARAMETERS * 2 // 2 + 2048 * MIB


@pytest.mark.parametrize(("offload", "copies", "weights"), [((), 1, 0), (ON_HOST, 0, 2 * PARAMETERS)])
def test_a_reference_model_is_on_the_gpu_or_on_the_host(offload: tuple[str, ...], copies: int, weights: int) -> None:
    """Its parameters are moved with those of the actor, unless ref.megatron.param_offload says otherwise."""
    found = report("actor_rollout_ref.actor.use_kl_loss=True", *offload)
    assert len(found.job.tuning.beside) == copies
    assert phases(found)["update"].host_bytes == pytest.approx(weights, abs=512 * 1000)
    reference = phases(found)["reference"]
    assert reference.forward_bytes == TOKENS * VOCABULARY * 6


CRITIC = (
    "algorithm.adv_estimator=gae", "model_engine=megatron", "critic.model.path=Qwen/Qwen2.5-1.5B",
    "critic.ppo_infer_max_token_len_per_gpu=4096",
)  # fmt: skip
VALUES = PARAMETERS + HIDDEN  # tied embeddings: the head is a row beside them


@pytest.mark.parametrize("offload", [(), ("critic.megatron.param_offload=True", "critic.megatron.optimizer_offload=True")])
def test_the_states_of_a_critic_are_on_the_gpu_or_on_the_host(offload: tuple[str, ...]) -> None:
    """bf16 weights, fp32 gradients, and 12 bytes of states on one of eight ranks; `MegatronEngine.to` moves them."""
    alone, found = report(), report(*CRITIC, *offload)
    more = found.ranks[0].memory.runtime_bytes - alone.ranks[0].memory.runtime_bytes
    assert more == (0 if offload else pytest.approx((2 + 4 + 12 / 8) * VALUES, rel=0.001))
    host = phases(found)["update"].host_bytes
    assert host == (pytest.approx((2 + 12 / 8) * VALUES, rel=0.001) if offload else 0)
    peak = found.ranks[0].memory.peak_allocated_bytes - alone.ranks[0].memory.peak_allocated_bytes
    assert peak == more


def test_the_phases_of_a_critic_have_the_states_of_the_actor_beside_its_own() -> None:
    found = report(*CRITIC)
    moved = report(*CRITIC, *ON_HOST)
    ((_, _, critic),) = found.job.tuning.in_turns
    own, memory = rank_classes(critic)[0].memory, found.ranks[0].memory
    actor = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert phases(found)["critic update"].device_bytes == own.device_bytes + actor
    assert phases(moved)["critic update"].device_bytes == own.device_bytes
    assert phases(moved)["critic update"].host_bytes == memory.parameters_bytes + memory.optimizer_bytes
    states = own.parameters_bytes + own.gradients_bytes + own.optimizer_bytes + own.runtime_bytes
    values = phases(found)["critic values"]
    assert values.states_bytes == states + actor
    assert values.forward_bytes < phases(found)["critic update"].forward_bytes


def test_a_critic_on_the_host_has_its_weights_on_the_gpu_for_its_values() -> None:
    offload = ("critic.megatron.param_offload=True", "critic.megatron.optimizer_offload=True")
    found = report(*CRITIC, *offload, *ON_HOST)
    ((_, _, critic),) = found.job.tuning.in_turns
    own, memory = rank_classes(critic)[0].memory, found.ranks[0].memory
    values = phases(found)["critic values"]
    assert values.states_bytes == own.parameters_bytes + own.runtime_bytes
    assert values.host_bytes == own.optimizer_bytes + memory.parameters_bytes + memory.optimizer_bytes


def test_the_verdict_is_that_of_the_phase_that_needs_the_most() -> None:
    """Without offloading the rollout has its share beside all states: it fits with 0.4 of the GPU, and not with 0.9."""
    fits, above = report(f"{SHARE}=0.4"), report(f"{SHARE}=0.9")
    update = phases(above)["update"].device_bytes
    assert update < 80 * GIB
    assert (fits.verdict.fits, fits.verdict.state, fits.verdict.phase) == (True, "tight", "update")
    assert above.verdict.fits is False
    assert (above.verdict.phase, above.verdict.state) == ("rollout", "does not fit")
    assert above.verdict.headroom_bytes == 80 * GIB - phases(above)["rollout"].device_bytes


def test_a_launch_fits_if_every_phase_fits_with_what_it_needs_at_most() -> None:
    found = report(*ON_HOST, f"{ENGINE}tensor_model_parallel_size=4", f"{SHARE}=0.6")
    assert found.verdict.state == "fits"
    assert all(each.device_range_bytes[0] <= each.device_bytes <= each.device_range_bytes[1] for each in found.phases)
    rollout = phases(found)["rollout"]
    assert rollout.device_range_bytes[1] - rollout.device_bytes >= 6 * GIB
    assert report(*ON_HOST, f"{ENGINE}tensor_model_parallel_size=4", f"{SHARE}=0.92").verdict.state == "tight"


def test_sglang_needs_more_beside_its_share_than_vllm() -> None:
    """Its share is that of weights and cache; a prompt of 8,192 tokens needs 12 GiB beside it (server_args.py)."""
    name = "actor_rollout_ref.rollout.name"
    of_vllm, of_sglang = (phases(report(*ON_HOST, f"{name}={each}"))["rollout"] for each in ("vllm", "sglang"))
    assert of_sglang.device_bytes == of_vllm.device_bytes
    assert of_sglang.device_range_bytes[1] - of_vllm.device_range_bytes[1] == 13.5 * GIB + 2 * 128 * MIB - 6 * GIB


def test_the_weights_of_an_engine_are_not_more_than_its_share() -> None:
    """It may have quantized weights: else it could not start."""
    refit = phases(report(f"{SHARE}=0.01"))["refit"]
    assert refit.engine_bytes == int(0.01 * 80 * GIB) + 2048 * MIB


MANY_TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=655360"
BILLIONS = "actor_rollout_ref.model.path=Qwen/Qwen2.5-32B"


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_responses_that_may_be_shorter_are_not_judged_not_to_fit(estimator: str) -> None:
    """A microbatch has at most the given tokens. A critic that is not counted only adds memory."""
    found = report(MANY_TOKENS, f"algorithm.adv_estimator={estimator}")
    assert found.verdict.fits is None
    assert "microbatches are counted with the most tokens, with which the update phase would not fit" in found.verdict.withheld
    found = report(BILLIONS, f"algorithm.adv_estimator={estimator}")  # 64 GB of weights and 128 GB of gradients
    assert found.verdict.state == "does not fit"


def test_what_is_not_counted_is_named_beside_the_most_tokens() -> None:
    withheld = report(MANY_TOKENS, "algorithm.adv_estimator=gae").verdict.withheld
    assert "with the most tokens" in withheld
    assert "not the critic" in withheld


def test_an_engine_that_keeps_its_memory_is_beside_every_phase() -> None:
    found = report("actor_rollout_ref.rollout.free_cache_engine=False", "actor_rollout_ref.actor.use_kl_loss=True", f"{SHARE}=0.3")
    assert {each.name: each.engine_bytes for each in found.phases if each.name != "refit"} == dict.fromkeys(
        ("update", "log-probabilities", "rollout", "reference"), int(0.3 * 80 * GIB)
    )


def test_a_launch_is_tight_by_the_phase_whose_range_exceeds_the_capacity() -> None:
    """The rollout needs the most, and fits with the most that it may need; the update needs less, and may need more."""
    found = report(*ON_HOST, f"{SHARE}=0.86")
    by_name = phases(found)
    assert by_name["update"].device_bytes < by_name["rollout"].device_bytes
    assert by_name["rollout"].device_range_bytes[1] < 80 * GIB < by_name["update"].device_range_bytes[1]
    assert (found.verdict.state, found.verdict.phase) == ("tight", "update")


def test_the_weights_of_an_engine_may_be_quantized() -> None:
    refit = phases(found := report(*ON_HOST))["refit"]
    assert refit.device_range_bytes[0] == outside_allocator_range(found.job)[0] + refit.states_bytes + PARAMETERS * 2 // 2 // 4


@pytest.mark.parametrize(("words", "counted"), [((), False), (("reward.reward_model.enable_resource_pool=True",), True)])
def test_a_reward_model_on_the_same_gpus_is_not_counted(words: tuple[str, ...], counted: bool) -> None:
    """verl/trainer/config/reward/reward.yaml: without a pool of its own it shares the GPUs."""
    verdict = report("reward.reward_model.enable=True", *words).verdict
    assert ("not the reward model" in verdict.withheld) is not counted
    assert ("reward" in verdict.note) is counted


def test_phases_that_are_not_counted_only_add_memory() -> None:
    assert "not the critic" in report("algorithm.adv_estimator=gae").verdict.withheld


def test_gpus_of_a_separate_rollout_are_named() -> None:
    assert report("actor_rollout_ref.hybrid_engine=False").verdict.note == "The GPUs of the rollout are not checked."


def test_other_trainings_have_no_phases() -> None:
    words = ["pretrain_gpt.py", "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"]
    words += [
        "--max-position-embeddings",
        "64",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "512",
        "--micro-batch-size",
        "1",
    ]
    assert report_of(read_launch(words, environ={}, folder=Path("/nowhere"))).phases == ()


def test_the_groups_of_the_training_are_destroyed_while_an_engine_of_slime_generates() -> None:
    """slime, backends/megatron_utils/actor.py `sleep`: the CUDA context remains beside the engine and what the training keeps."""
    script = Path(__file__).resolve().parents[3] / "examples" / "frameworks" / "slime_qwen3_8b_grpo.sh"
    found = analyze([script], gpu="H100-80GB", environ={})
    rollout, refit = phases(found)["rollout"], phases(found)["refit"]
    assert rollout.device_bytes == CONTEXT + rollout.states_bytes + rollout.forward_bytes + rollout.engine_bytes
    stays = outside_allocator_bytes(found.job)
    assert stays > CONTEXT
    assert refit.device_bytes == stays + refit.states_bytes + refit.forward_bytes + refit.engine_bytes
