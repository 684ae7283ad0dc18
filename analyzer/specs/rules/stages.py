"""Rules for the distribution of layers over pipeline stages.

Source: `TransformerConfig.__post_init__`, `get_num_layers_to_build` (core/transformer/transformer_block.py) and
`PipelineParallelLayerLayout.validate_layer_layout`, 0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from analyzer.specs.parallel import ParallelSpec
from analyzer.specs.rules.violation import Violation


def stage_violations(num_layers: int, parallel: ParallelSpec, *, mtp_layers: int = 0) -> Iterator[Violation]:
    """Layers that cannot be distributed over the pipeline as asked."""
    split = parallel.pipeline_layout
    uneven = split.num_layers_in_first is not None or split.num_layers_in_last is not None
    if (split.layout is not None) + uneven + (split.account_for_embedding or split.account_for_loss) > 1:
        named = "pipeline_model_parallel_layout" if split.layout is not None else _uneven_dest(parallel)
        yield Violation((named,), "contradicts another option that distributes layers", "keep one of them")
    elif split.layout is not None:
        yield from _layout(split.layout, num_layers, parallel, mtp_layers=mtp_layers)
    elif uneven:
        yield from _uneven_stages(num_layers, parallel)
    else:
        yield from even_stage_violations(num_layers, parallel)


def counted_layers(num_layers: int, parallel: ParallelSpec) -> int:
    """Layers to be split evenly: the embedding and the loss count as one each if asked."""
    return num_layers + parallel.pipeline_layout.account_for_embedding + parallel.pipeline_layout.account_for_loss


def even_stage_violations(num_layers: int, parallel: ParallelSpec) -> Iterator[Violation]:
    """Layers that do not divide into equal pipeline stages."""
    counted, pipeline = counted_layers(num_layers, parallel), parallel.pipeline
    if counted % pipeline:
        extra = "" if counted == num_layers else f" ({num_layers} and {counted - num_layers} for embedding and loss)"
        yield Violation(
            ("pipeline_model_parallel_size",),
            f"{counted} layers{extra} cannot be split over {pipeline} pipeline ranks (--num-layers)",
            _uneven_remedy(num_layers, pipeline) if not extra else "leave out what counts embedding or loss as a layer",
        )
        return
    yield from _virtual_stages(counted // pipeline, parallel, "a pipeline rank")


def _uneven_remedy(num_layers: int, pipeline: int) -> str:
    """An uneven split of the same layers, with a shorter or longer last stage; other pipeline sizes if there are too few layers."""
    each = -(-num_layers // pipeline)
    last = num_layers - each * (pipeline - 1)
    if last < 1:
        last = num_layers - num_layers // pipeline * (pipeline - 1)
    even = max(size for size in range(1, pipeline) if num_layers % size == 0)
    other = f"--pipeline-model-parallel-size {even}"
    if num_layers < pipeline:
        return f"use {other}"
    return f"add --decoder-last-pipeline-num-layers {last} for an uneven split, or use {other}"


def _uneven_dest(parallel: ParallelSpec) -> str:
    first = parallel.pipeline_layout.num_layers_in_first is not None
    return "decoder_first_pipeline_num_layers" if first else "decoder_last_pipeline_num_layers"


def _uneven_stages(num_layers: int, parallel: ParallelSpec) -> Iterator[Violation]:
    first, last = parallel.pipeline_layout.num_layers_in_first, parallel.pipeline_layout.num_layers_in_last
    named = (_uneven_dest(parallel),)
    if any(layers is not None and layers < 1 for layers in (first, last)):
        yield Violation(named, "a pipeline rank needs a layer", "give 1 or more")
        return
    middle_ranks = parallel.pipeline - (first is not None) - (last is not None)
    middle = num_layers - (first or 0) - (last or 0)
    if middle < 0 or middle_ranks < 0 or bool(middle) != bool(middle_ranks):
        yield Violation(
            named,
            f"{middle} of {num_layers} layers would be left for {max(middle_ranks, 0)} middle pipeline ranks",
            "change it, or the pipeline size, so that both are left or neither is",
        )
        return
    if middle_ranks and middle % middle_ranks:
        yield Violation(
            named,
            f"the {middle} layers between cannot be split over {middle_ranks} pipeline ranks",
            f"leave a multiple of {middle_ranks} layers for them",
        )
        return
    if not middle_ranks and parallel.virtual_pipeline is not None:  # get_transformer_layer_offset divides by middle_ranks
        yield Violation(named, "virtual stages need a pipeline rank between the first and the last", "leave the virtual stages out")
        return
    counts = (
        (first, "the first rank"),
        (last, "the last rank"),
        (middle // middle_ranks if middle_ranks else None, "a middle rank"),
    )
    for layers, where in counts:
        if layers is not None:
            yield from _virtual_stages(layers, parallel, where)


def _virtual_stages(layers: int, parallel: ParallelSpec, where: str) -> Iterator[Violation]:
    if layers % parallel.chunks:
        yield Violation(
            ("num_virtual_stages_per_pipeline_rank",),
            f"{layers} layers on {where} cannot be split over {parallel.chunks} virtual stages",
            f"use a divisor of {layers}",
        )


def _layout(layout: tuple[str, ...], num_layers: int, parallel: ParallelSpec, *, mtp_layers: int) -> Iterator[Violation]:
    """`PipelineParallelLayerLayout.validate_layer_layout`; the letters themselves are checked when the layout is read."""
    named = ("pipeline_model_parallel_layout",)
    letters = "".join(layout)
    if len(layout) != parallel.pipeline * parallel.chunks:
        yield Violation(
            named,
            f"has {len(layout)} stages, which {parallel.pipeline} pipeline ranks cannot share equally",
            f"write a multiple of {parallel.pipeline} stages",
        )
    elif not (letters.startswith("E") and letters.endswith("L") and letters.count("E") == letters.count("L") == 1):
        yield Violation(named, "does not start with its only E and end with its only L", "begin with E and end with L, once each")
    elif letters.count("t") != num_layers:
        yield Violation(
            named,
            f"has {letters.count('t')} decoder layers, and --num-layers is {num_layers}",
            f"write {num_layers} t, or set --num-layers {letters.count('t')}",
        )
    elif letters.count("m") != mtp_layers:
        yield Violation(named, f"has {letters.count('m')} m, and --mtp-num-layers is {mtp_layers}", f"write {mtp_layers} m")
    else:
        yield from _mtp_in_layout(layout, parallel)


def _mtp_in_layout(layout: tuple[str, ...], parallel: ParallelSpec) -> Iterator[Violation]:
    """MTP layers: all in one stage, after every decoder layer, in the last round of virtual stages."""
    named = ("pipeline_model_parallel_layout",)
    letters = "".join(layout)
    if "m" not in letters:
        return
    holding = [number for number, stage in enumerate(layout) if "m" in stage]
    if "t" in letters[letters.index("m") :]:
        yield Violation(named, "has a decoder layer after an m", "write every t before the first m")
    elif len(holding) > 1:
        yield Violation(named, f"has m in {len(holding)} stages", "write every m in one stage")
    elif holding[0] < len(layout) - parallel.pipeline:
        yield Violation(
            named, f"has m before the last {parallel.pipeline} stages", f"write m in one of the last {parallel.pipeline} stages"
        )
