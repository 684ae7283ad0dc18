"""Layers of each chunk, compared with those of Megatron 0.16.1 (tests/data/truth/parameters.json), and their properties."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.layout.stages import Chunk, chunks
from analyzer.specs import ParallelSpec, PipelineSpec
from tests.data_files import truth_records


@cache
def records() -> list[dict[str, Any]]:
    return truth_records("parameters.json")


def spec(pipeline: int, virtual: int | None = None, **layout: Any) -> ParallelSpec:
    return ParallelSpec(
        world_size=pipeline,
        nodes=1,
        gpus_per_node=pipeline,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        pipeline_layout=PipelineSpec(**layout),
    )


def number(argv: list[str], name: str) -> int | None:
    return int(argv[argv.index(name) + 1]) if name in argv else None


def layers(model_layers: int, parallel: ParallelSpec) -> list[list[list[int]]]:
    return [[list(chunk.layers) for chunk in rank] for rank in chunks(model_layers, parallel)]


def test_the_number_of_records() -> None:
    assert len(records()) == 53


@pytest.mark.parametrize("index", range(53))
def test_chunks_are_those_of_megatron(index: int) -> None:
    record = records()[index]
    argv = record["argv"]
    parallel = spec(
        number(argv, "--pipeline-model-parallel-size") or 1,
        number(argv, "--num-virtual-stages-per-pipeline-rank"),
        num_layers_in_first=number(argv, "--decoder-first-pipeline-num-layers"),
        num_layers_in_last=number(argv, "--decoder-last-pipeline-num-layers"),
        account_for_embedding="--account-for-embedding-in-pipeline-split" in argv,
        account_for_loss="--account-for-loss-in-pipeline-split" in argv,
    )
    expected = [
        [(c["vp_stage"] or 0, c["layers"], c["pre_process"], c["post_process"]) for c in rank["chunks"]]
        for rank in record["per_pp_rank"]
    ]
    assert [rank["pp_rank"] for rank in record["per_pp_rank"]] == list(range(parallel.pipeline))
    assert [
        [(c.virtual_stage, list(c.layers), c.pre_process, c.post_process) for c in rank]
        for rank in chunks(number(argv, "--num-layers") or 0, parallel)
    ] == expected


def test_interleaving_of_the_megatron_docstring() -> None:
    """8 layers on 2 ranks: the examples in `get_num_layers_to_build`, with layers numbered from 1."""
    assert layers(8, spec(2, 4)) == [[[1], [3], [5], [7]], [[2], [4], [6], [8]]]
    assert layers(8, spec(2, 2)) == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]


def test_uneven_and_interleaved() -> None:
    """Computed by hand from `get_transformer_layer_offset`: blocks of 2/2 + 8/2 + 4/2 layers."""
    parallel = spec(4, 2, num_layers_in_first=2, num_layers_in_last=4)
    assert layers(14, parallel) == [
        [[1], [8]],
        [[2, 3], [9, 10]],
        [[4, 5], [11, 12]],
        [[6, 7], [13, 14]],
    ]


def test_layout_letters() -> None:
    """Stage s = vp·pp + r: the stages Et | tt | t | L on two ranks with two chunks each."""
    made = chunks(4, spec(2, 2, layout=("Et", "tt", "t", "L")))
    assert made == (
        (
            Chunk(virtual_stage=0, layers=(1,), pre_process=True, post_process=False),
            Chunk(virtual_stage=1, layers=(4,), pre_process=False, post_process=False),
        ),
        (
            Chunk(virtual_stage=0, layers=(2, 3), pre_process=False, post_process=False),
            Chunk(virtual_stage=1, layers=(), pre_process=False, post_process=True),
        ),
    )


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, ParallelSpec]:
    """A number of layers and a distribution over stages that Megatron accepts."""
    pipeline = draw(st.integers(1, 8))
    virtual = draw(st.sampled_from([None, 2, 3])) if pipeline > 1 else None
    each = st.integers(1, 4).map(lambda n: n * (virtual or 1))
    way = draw(st.sampled_from(["even", "ends", "accounts", "layout"]))
    if way == "ends" and pipeline > 2:
        first, middle, last = draw(each), draw(each), draw(each)
        use_first, use_last = draw(st.booleans()), draw(st.booleans())
        total = middle * (pipeline - use_first - use_last) + first * use_first + last * use_last
        return total, spec(
            pipeline, virtual, num_layers_in_first=first if use_first else None, num_layers_in_last=last if use_last else None
        )
    if way == "accounts" and pipeline > 1:
        embedding, loss = draw(st.booleans()), draw(st.booleans())
        total = draw(each) * pipeline - embedding - loss
        if total:
            return total, spec(pipeline, virtual, account_for_embedding=embedding, account_for_loss=loss)
    if way == "layout":
        counts = draw(st.lists(st.integers(0, 3), min_size=pipeline * (virtual or 1), max_size=pipeline * (virtual or 1)))
        stages = ["t" * count for count in counts]
        stages[0] = "E" + stages[0]
        stages[-1] += "L"
        return sum(counts), spec(pipeline, virtual, layout=tuple(stages))
    return draw(each) * pipeline, spec(pipeline, virtual)


@given(splits())
def test_layers_are_a_partition_in_model_order(split: tuple[int, ParallelSpec]) -> None:
    total, parallel = split
    made = chunks(total, parallel)
    assert [len(rank) for rank in made] == [parallel.chunks] * parallel.pipeline
    in_model_order = [made[rank][vp] for vp in range(parallel.chunks) for rank in range(parallel.pipeline)]
    assert [layer for chunk in in_model_order for layer in chunk.layers] == list(range(1, total + 1))
    assert [chunk.pre_process for chunk in in_model_order].index(True) == 0
    assert [chunk.post_process for chunk in in_model_order].index(True) == len(in_model_order) - 1


def test_mtp_layers_are_in_the_last_stage_or_that_of_the_layout() -> None:
    def depths(parallel: ParallelSpec) -> list[list[int]]:
        return [[chunk.mtp_layers for chunk in rank] for rank in chunks(4, parallel, mtp_layers=2)]

    assert depths(spec(2)) == [[0], [2]]
    assert depths(spec(2, 2)) == [[0, 0], [0, 2]]
    assert depths(spec(4, layout=("Ett", "tt", "mm", "L"))) == [[0], [0], [2], [0]]
    assert depths(spec(2, 2, layout=("Et", "tt", "tmm", "L"))) == [[0, 2], [0, 0]]
