"""Every bound of a search is at most what it bounds, and the quick jobs that bounds are computed from are those of the launch."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.api import problem_of, read_launch
from analyzer.layout_search.bounds import Plan, _passes
from analyzer.layout_search.dimensions import Space, space_of
from analyzer.layout_search.nodes import Cutoffs, Expander, Node, root_nodes
from analyzer.layout_search.split_jobs import base_recompute, job_of_split, with_stages
from analyzer.memory.screen import microbatches_in_flight, screen
from analyzer.program.schedule.pipeline import steps
from analyzer.specs import TrainingJob
from analyzer.time import pipeline
from tests.examples import examples
from tests.layout_search.every_layout import UNLIMITED, Every
from tests.layout_search.random_spaces import NOWHERE
from tests.small_job import job as small_job

EVERYTHING = Cutoffs(inf, inf)
"""No bound is too high."""


class Tree:
    """The nodes of a space on a GPU with enough memory, without pruning."""

    def __init__(self, space: Space) -> None:
        problem = space.problem
        gpu = replace(problem.gpu, capacity_bytes=UNLIMITED)
        self.space = replace(space, problem=replace(problem, gpu=gpu))
        self._expander = Expander(self.space)
        self.roots = {(node.setting, node.split): node for node in root_nodes(self.space)}
        nodes = (each for node in self.roots.values() for each in ([node] if node.counts_experts else self._nodes(node)))
        self.splits = {(node.setting, node.split): node for node in nodes}
        self.distributions = {node[2:5]: node for split in self.splits.values() for node in self._nodes(split)}
        self.layouts = {node[2:6]: node for distribution in self.distributions.values() for node in self._nodes(distribution)}

    def _nodes(self, node: Node) -> list[Node]:
        found = self._expander.expand(node, EVERYTHING)
        assert isinstance(found, list)
        return found


@pytest.fixture(scope="module")
def tree(every: Every) -> Tree:
    return Tree(every.space)


def test_every_bound_is_at_most_what_it_bounds(every: Every, tree: Tree) -> None:
    for each in every.searched:
        layout, seconds = each.layout, each.evaluation.iteration_seconds
        split, distribution, complete = tree.splits[layout[:2]], tree.distributions[layout[:3]], tree.layouts[layout]
        assert tree.roots[layout[:2]].seconds <= distribution.seconds, layout
        assert split.seconds <= distribution.seconds <= complete.seconds <= seconds, layout
        assert split.device_bytes <= distribution.device_bytes <= complete.device_bytes <= each.evaluation.device_bytes, layout


def test_splits_without_room_for_the_states_are_left_out() -> None:
    """Weights, gradients, master weights and moments of bf16 training have 18 bytes of memory for each parameter, on any layout."""
    words = (
        "--nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 "
        "--max-position-embeddings 1024 --bf16 --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 16 --lr 1e-4 "
        "--train-iters 10 --tokenizer-type NullTokenizer --vocab-size 31999 --num-experts 8 --disable-bias-linear "
        "--moe-token-dispatcher-type alltoall --sequence-parallel --info-gpu H100-80GB --info-gpu-memory"
    )
    of_layer = 4 * 4096**2 + 8 * 2 * 4 * 4096**2  # attention, and two matrices of eight experts
    states = 18 * 8 * of_layer // 8

    def roots(memory: int) -> list[Node]:
        launch = read_launch([*words.split(), f"{memory}B"], environ={}, folder=NOWHERE)
        return list(root_nodes(space_of(problem_of(launch), over=("tp", "pp", "ep", "etp", "cp")), timed=False))

    assert roots(states + 2**24)
    assert not roots(states - 2**24)


def test_the_bounds_of_a_layout_hold_for_it_without_overlaps(every: Every, tree: Tree) -> None:
    """So that no layout is lost that fits only without them."""
    known = {each.layout: each for each in every.layouts}
    for each in every.searched:
        fallback = every.space.settings[each.layout.setting].fallback
        other = known.get(each.layout._replace(setting=-1 if fallback is None else fallback))
        if other is not None:
            complete = tree.layouts[each.layout]
            assert complete.seconds <= other.evaluation.iteration_seconds, each.layout
            assert complete.device_bytes <= other.evaluation.device_bytes, each.layout


def test_the_screened_memory_is_at_most_the_exact_one(every: Every) -> None:
    for each in every.layouts:
        assert screen(each.job).device_bytes <= each.evaluation.device_bytes, each.layout


def without_texts(job: TrainingJob) -> TrainingJob:
    """A job without its texts, and without a variable of the environment that no formula reads."""
    flags = replace(job.flags, cuda_device_max_connections=None)
    return replace(job, assumptions=(), warnings=(), unknown=(), flags=flags)


def test_the_quick_job_of_a_distribution_is_that_of_the_launch(every: Every) -> None:
    space = every.space
    for each in every.searched:
        setting, split, stages, recompute = each.layout
        if recompute == base_recompute(space):
            found = job_of_split(space, setting, split)
            assert found is not None
            assert without_texts(with_stages(space, setting, found.job, stages)) == without_texts(each.job)


@settings(max_examples=examples(100))
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 6), st.integers(0, 4), st.data())
def test_microbatches_in_flight_are_those_of_the_schedule(
    pipeline: int, chunks: int, groups: int, more: int, data: st.DataObject
) -> None:
    if pipeline == 1:
        chunks = 1
    group = pipeline + more if chunks > 1 else None
    microbatches = groups * group if group else groups * pipeline - min(more, groups * pipeline - 1)
    rank = data.draw(st.integers(0, pipeline - 1))
    plain = small_job()
    parallel = replace(
        plain.parallel,
        world_size=pipeline,
        pipeline=pipeline,
        virtual_pipeline=chunks if chunks > 1 else None,
        microbatch_group_size=group,
    )
    job = replace(plain, parallel=parallel, batch=replace(plain.batch, microbatches=microbatches))
    order = steps(pipeline=pipeline, pipeline_rank=rank, chunks=chunks, microbatches=microbatches, group_size=group)
    first = next(place for place, step in enumerate(order) if step.kind == "backward")
    counts = [sum(step.chunk == chunk for step in order[:first]) for chunk in range(chunks)]
    assert list(microbatches_in_flight(job, rank)) == counts


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_bubble_of_large_pipelines_is_divided_by_the_chunks(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2: 16 microbatches of 3 s, and (p - 1)/v microbatches of bubble."""
    parallel = replace(small_job().parallel, pipeline=8, virtual_pipeline=chunks if chunks > 1 else None)
    job = replace(small_job(), parallel=parallel, batch=replace(small_job().batch, microbatches=16))
    monkeypatch.setattr(pipeline, "MOST_STEPS", 10)
    plan = Plan(kinds=(), ranks=((0,) * chunks,) * 8, first=(0,))
    assert _passes(job, plan, [3 / chunks]) == pytest.approx(16 * 3 + 7 * 3 / chunks)
