"""Changes of flags that make a launch fit, with a prediction made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import UnsupportedError
from analyzer.search.advice import advise
from analyzer.specs import PipelineSpec, TrainingJob
from tests.fake_report import make_job

SEEN: list[TrainingJob] = []


def _predict(device: Callable[[TrainingJob], float]) -> Callable[[TrainingJob], int]:
    """A prediction of `device(job)` bytes. `SEEN` collects the jobs that it is called with."""
    SEEN.clear()

    def predict(job: TrainingJob) -> int:
        SEEN.append(job)
        return int(device(job))

    return predict


def _model(job: TrainingJob) -> float:
    """States and activations as the papers have them, in units that do not matter: more of anything takes more."""
    p = job.parallel
    states = 1000 * (6 + 12 / (p.data_with_context if job.optimizer.distributed else 1)) / (p.tensor * p.pipeline)
    kept = {None: 34, "selective": 30, "full": 2}[job.recompute.granularity]
    split = p.tensor if p.sequence_parallel else 1 + (p.tensor - 1) / 2
    return states + 100 * kept * job.batch.micro_batch_size / split


def _launch(capacity: int, **parallel: int) -> TrainingJob:
    job = make_job(**parallel)
    return replace(job, hardware=replace(job.hardware, capacity_bytes=capacity))


def test_nothing_is_advised_where_it_fits_or_no_capacity_is_known() -> None:
    assert advise(_launch(10**9), predict=_predict(_model)) == ()
    unknown = make_job()
    assert advise(replace(unknown, hardware=replace(unknown.hardware, capacity_bytes=None)), predict=_predict(_model)) == ()


def test_what_fits_alone_comes_mildest_first_with_what_it_saves() -> None:
    job = _launch(11_600)
    before = _model(job)
    advice = advise(job, predict=_predict(_model))
    # tensor parallelism 4 would fit too, but it brings the sequence parallelism that is enough by itself
    assert [a.change for a in advice] == [
        "--use-distributed-optimizer",
        "--sequence-parallel",
        "--micro-batch-size 2",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--pipeline-model-parallel-size 4",
    ]
    assert all(a.fits and a.device_bytes <= 11_600 and abs(a.saves_bytes + a.device_bytes - before) <= 1 for a in advice)


def test_pairs_are_named_only_where_nothing_fits_alone() -> None:
    job = _launch(2_600)
    advice = advise(job, predict=_predict(_model))
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert [a.change for a in advice] == [
        "--micro-batch-size 2 --tensor-model-parallel-size 8 --sequence-parallel",
        f"{full} --tensor-model-parallel-size 4 --sequence-parallel",
        f"{full} --pipeline-model-parallel-size 8",
    ]
    assert all(a.fits for a in advice)


def test_recompute_of_the_feed_forward_comes_before_that_of_all() -> None:
    """Dense models of releases that know --recompute-modules; a mixture's `mlp` would be its dense layers alone."""

    def by_modules(job: TrainingJob) -> float:
        recompute = job.recompute
        return 100 if recompute.granularity == "full" else 500 if "mlp" in recompute.modules else 1000

    def advised(job: TrainingJob) -> set[str]:
        return {a.change.split(" --recompute-modules ")[-1] for a in advise(job, predict=_predict(by_modules)) if a.fits}

    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert advised(_launch(600)) == {"core_attn mlp"}
    assert advised(_launch(200)) == {full}
    assert advised(replace(_launch(600), megatron="2023")) == {full}


def test_where_nothing_is_enough_the_best_come_and_say_so() -> None:
    advice = advise(_launch(1), predict=_predict(_model))
    assert 0 < len(advice) <= 3
    assert not any(a.fits for a in advice)
    assert [a.device_bytes for a in advice] == sorted(a.device_bytes for a in advice)


def test_a_change_that_the_engine_refuses_is_passed_over() -> None:
    def device(job: TrainingJob) -> float:
        if job.recompute.granularity == "full":
            raise UnsupportedError("--recompute-granularity", "full is not modelled", "leave it out")
        return _model(job)

    assert not any("full" in a.change for a in advise(_launch(1), predict=_predict(device)))


def test_a_change_that_saves_nothing_is_not_named() -> None:
    advice = advise(_launch(5_000), predict=_predict(lambda job: 10_000 if job.batch.micro_batch_size > 1 else 4_000))
    assert [a.change for a in advice] == ["--micro-batch-size 1"]


def test_tensor_parallelism_stays_in_a_node_and_brings_the_vocabulary_and_batch_with_it() -> None:
    job = _launch(1, tensor=1, pipeline=1, expert_tensor=1)
    advise(job, predict=_predict(_model))
    wider = [seen for seen in SEEN if seen.parallel.tensor == 8]
    assert wider
    assert max(seen.parallel.tensor for seen in SEEN) == 8
    for seen in wider:
        assert seen.model.padded_vocab_size % (8 * 128) == 0 or seen.model.padded_vocab_size == job.model.padded_vocab_size
        assert seen.parallel.expert_tensor == 8


def test_a_custom_layout_of_the_pipeline_is_left_alone() -> None:
    job = _launch(1)
    uneven = replace(job, parallel=replace(job.parallel, pipeline_layout=PipelineSpec(num_layers_in_first=10)))
    advise(uneven, predict=_predict(_model))
    assert {seen.parallel.pipeline for seen in SEEN} == {2}


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 3, 4]),
    nodes=st.sampled_from([1, 2, 3, 6]),
    virtual=st.sampled_from([None, 2]),
    micro=st.integers(1, 6),
    per_replica=st.integers(1, 8),
)
def test_only_launches_that_megatron_takes_are_tried(
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
    for seen in SEEN:
        p, b = seen.parallel, seen.batch
        assert p.world_size == world
        assert p.tensor * p.pipeline * p.context * p.data == world
        assert p.expert_tensor * p.expert * p.pipeline * p.expert_data == world
        assert b.microbatches * b.micro_batch_size * p.data == b.global_batch_size == batch.global_batch_size
        assert seen.model.num_layers % (p.pipeline * p.chunks) == 0 or p.pipeline == pipeline
        assert seen.model.num_attention_heads % p.tensor == 0
        assert seen.model.padded_vocab_size % p.tensor == 0
        assert p.sequence_parallel is False or p.tensor > 1
        assert (p.virtual_pipeline is None) or b.microbatches % p.pipeline == 0


def test_the_distributed_optimizer_is_for_adam() -> None:
    job = _launch(1)
    advise(replace(job, optimizer=replace(job.optimizer, name="sgd")), predict=_predict(_model))
    assert not any(seen.optimizer.distributed for seen in SEEN)
