"""Advice for launches that do not fit, with a simplified prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import UnsupportedError
from analyzer.predict.advice import advise
from analyzer.specs import PipelineSpec, TrainingJob
from tests.fake_report import make_job

PREDICTED: list[TrainingJob] = []


def _predict(device: Callable[[TrainingJob], float]) -> Callable[[TrainingJob], int]:
    """Return a prediction of `device(job)` bytes that appends its jobs to `PREDICTED`."""
    PREDICTED.clear()

    def predict(job: TrainingJob) -> int:
        PREDICTED.append(job)
        return int(device(job))

    return predict


def _model(job: TrainingJob) -> float:
    """Return model states and activations as in the papers, in arbitrary units."""
    p = job.parallel
    states = 1000 * (6 + 12 / (p.data_with_context if job.optimizer.distributed else 1)) / (p.tensor * p.pipeline)
    saved = {None: 34, "selective": 30, "full": 2}[job.recompute.granularity]
    split = p.tensor if p.sequence_parallel else 1 + (p.tensor - 1) / 2
    return states + 100 * saved * job.batch.micro_batch_size / split


def _launch(capacity: int, **parallel: int) -> TrainingJob:
    job = make_job(**parallel)
    return replace(job, hardware=replace(job.hardware, capacity_bytes=capacity))


def test_there_is_no_advice_if_the_launch_fits_or_the_capacity_is_not_known() -> None:
    assert advise(_launch(10**9), predict=_predict(_model)) == ()
    unknown = make_job()
    assert advise(replace(unknown, hardware=replace(unknown.hardware, capacity_bytes=None)), predict=_predict(_model)) == ()


def test_single_changes_are_ordered_by_their_effect_on_speed_and_list_their_savings() -> None:
    job = _launch(11_600)
    before = _model(job)
    advice = advise(job, predict=_predict(_model))
    # TP4 would fit too, but it enables sequence parallelism, which is sufficient alone
    assert [a.change for a in advice] == [
        "--use-distributed-optimizer",
        "--sequence-parallel",
        "--micro-batch-size 2",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--pipeline-model-parallel-size 4",
    ]
    assert all(a.fits and a.device_bytes <= 11_600 and abs(a.saves_bytes + a.device_bytes - before) <= 1 for a in advice)


def test_pairs_are_listed_only_if_no_single_change_fits() -> None:
    job = _launch(2_600)
    advice = advise(job, predict=_predict(_model))
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert [a.change for a in advice] == [
        "--micro-batch-size 2 --tensor-model-parallel-size 8 --sequence-parallel",
        f"{full} --tensor-model-parallel-size 4 --sequence-parallel",
        f"{full} --pipeline-model-parallel-size 8",
    ]
    assert all(a.fits for a in advice)


def test_recomputation_of_the_ffn_comes_before_full_recomputation() -> None:
    """Only for dense models of releases with --recompute-modules: in MoE models `mlp` applies to the dense layers only."""

    def by_modules(job: TrainingJob) -> float:
        recompute = job.recompute
        return 100 if recompute.granularity == "full" else 500 if "mlp" in recompute.modules else 1000

    def advised(job: TrainingJob) -> set[str]:
        return {a.change.split(" --recompute-modules ")[-1] for a in advise(job, predict=_predict(by_modules)) if a.fits}

    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert advised(_launch(600)) == {"core_attn mlp"}
    assert advised(_launch(200)) == {full}
    assert advised(replace(_launch(600), megatron="2023")) == {full}


def test_if_no_pair_fits_the_changes_that_save_most_are_listed() -> None:
    advice = advise(_launch(1), predict=_predict(_model))
    assert 0 < len(advice) <= 3
    assert not any(a.fits for a in advice)
    assert [a.device_bytes for a in advice] == sorted(a.device_bytes for a in advice)


def test_changes_with_an_input_error_are_skipped() -> None:
    def device(job: TrainingJob) -> float:
        if job.recompute.granularity == "full":
            raise UnsupportedError("--recompute-granularity", "full is not modelled", "leave it out")
        return _model(job)

    assert not any("full" in a.change for a in advise(_launch(1), predict=_predict(device)))


def test_changes_that_save_no_memory_are_not_listed() -> None:
    advice = advise(_launch(5_000), predict=_predict(lambda job: 10_000 if job.batch.micro_batch_size > 1 else 4_000))
    assert [a.change for a in advice] == ["--micro-batch-size 1"]


def test_tensor_parallelism_stays_within_a_node_and_changes_padding_and_expert_parallelism() -> None:
    job = _launch(1, tensor=1, pipeline=1, expert_tensor=1)
    advise(job, predict=_predict(_model))
    wider = [changed for changed in PREDICTED if changed.parallel.tensor == 8]
    assert wider
    assert max(changed.parallel.tensor for changed in PREDICTED) == 8
    for changed in wider:
        assert changed.model.padded_vocab_size % (8 * 128) == 0 or changed.model.padded_vocab_size == job.model.padded_vocab_size
        assert changed.parallel.expert_tensor == 8


def test_a_custom_pipeline_layout_is_not_changed() -> None:
    job = _launch(1)
    uneven = replace(job, parallel=replace(job.parallel, pipeline_layout=PipelineSpec(num_layers_in_first=10)))
    advise(uneven, predict=_predict(_model))
    assert {changed.parallel.pipeline for changed in PREDICTED} == {2}


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 3, 4]),
    nodes=st.sampled_from([1, 2, 3, 6]),
    virtual=st.sampled_from([None, 2]),
    micro=st.integers(1, 6),
    per_replica=st.integers(1, 8),
)
def test_only_launches_that_megatron_accepts_are_predicted(
    tensor: int, pipeline: int, nodes: int, virtual: int | None, micro: int, per_replica: int
) -> None:
    world = 8 * nodes * pipeline
    job = make_job(
        world_size=world,
        nodes=world // 8,
        tensor=tensor,
        pipeline=pipeline,
        expert_tensor=tensor,
        virtual_pipeline=virtual if pipeline > 1 else None,
    )
    m = per_replica * pipeline
    batch = replace(
        job.batch,
        micro_batch_size=micro,
        microbatches=m,
        first_microbatches=m,
        global_batch_size=m * micro * job.parallel.data,
    )
    job = replace(job, batch=batch, hardware=replace(job.hardware, capacity_bytes=1))
    advise(job, predict=_predict(_model))
    for changed in PREDICTED:
        p, b = changed.parallel, changed.batch
        assert p.world_size == world
        assert p.tensor * p.pipeline * p.context * p.data == world
        assert p.expert_tensor * p.expert * p.pipeline * p.expert_data == world
        assert b.microbatches * b.micro_batch_size * p.data == b.global_batch_size == batch.global_batch_size
        assert changed.model.num_layers % (p.pipeline * p.chunks) == 0 or p.pipeline == pipeline
        assert changed.model.num_attention_heads % p.tensor == 0
        assert changed.model.padded_vocab_size % p.tensor == 0
        assert p.sequence_parallel is False or p.tensor > 1
        assert (p.virtual_pipeline is None) or b.microbatches % p.pipeline == 0


def test_the_distributed_optimizer_is_suggested_only_for_adam() -> None:
    job = _launch(1)
    advise(replace(job, optimizer=replace(job.optimizer, name="sgd")), predict=_predict(_model))
    assert not any(changed.optimizer.distributed for changed in PREDICTED)
