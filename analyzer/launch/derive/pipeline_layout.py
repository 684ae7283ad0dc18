"""`--pipeline-model-parallel-layout`: a string such as `Et*3|(tt|)*29,m|L`, unrolled into stages.

Megatron: `PipelineParallelLayerLayout` (megatron/core/transformer/pipeline_parallel_layer_layout.py, 0.16.1).
E is the embedding, t a decoder layer, m a multi-token prediction layer, L the loss; `|` ends a stage.
"""

from __future__ import annotations

import re
from typing import Final

from analyzer.errors import InputError

LETTERS: Final = "EtmL"
MOST_LETTERS: Final = 100_000
"""More than any model has; a repetition beyond it is a slip."""

_REPETITIONS: Final = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
"""Groups first, then single letters: the order in which Megatron unrolls them."""


def unroll(layout: str, *, option: str = "--pipeline-model-parallel-layout") -> tuple[str, ...]:
    """The stages in model order, each a string of letters. Raises InputError for what is not a layout."""
    written = layout.replace("\\", "").replace(",", "")  # backslashes are what a shell around the script left of its quoting
    for pattern in _REPETITIONS:
        if sum(len(group) * int(count) for group, count in pattern.findall(written)) > MOST_LETTERS:
            raise InputError(option, f"{layout!r} unrolls to more than {MOST_LETTERS} letters", "check the numbers after *")
        written = pattern.sub(lambda match: match[1] * int(match[2]), written)
    strange = next((letter for letter in written if letter not in LETTERS + "|"), None)
    if strange is not None:
        raise InputError(
            option, f"{strange!r} in {layout!r} is no kind of layer", "use E, t, m, L, | and repetitions such as t*3 or (tt|)*4"
        )
    return tuple(written.split("|"))


def check_layout(
    layout: str, *, num_layers: int, pipeline: int, mtp_layers: int = 0, option: str = "--pipeline-model-parallel-layout"
) -> tuple[str, ...]:
    """The stages of a layout that fits the model. Raises InputError with the numbers that do not agree."""
    stages = unroll(layout, option=option)
    letters = "".join(stages)
    if len(stages) % pipeline:
        raise InputError(
            option,
            f"{layout!r} has {len(stages)} stages, which {pipeline} pipeline ranks cannot share",
            f"write a multiple of {pipeline} stages",
        )
    for letter, what, place in (("E", "embedding", 0), ("L", "loss", -1)):
        if letters.count(letter) != 1 or letters[place] != letter:
            where = "first" if place == 0 else "last"
            raise InputError(
                option, f"{layout!r} does not have one {letter} ({what}) in {where} place", "begin with E and end with L, once each"
            )
    if letters.count("t") != num_layers:
        raise InputError(
            option,
            f"{layout!r} holds {letters.count('t')} decoder layers and --num-layers is {num_layers}",
            f"write {num_layers} t, or set --num-layers {letters.count('t')}",
        )
    _check_mtp(layout, stages, pipeline=pipeline, mtp_layers=mtp_layers, option=option)
    return stages


def _check_mtp(layout: str, stages: tuple[str, ...], *, pipeline: int, mtp_layers: int, option: str) -> None:
    """Multi-token prediction layers: all in one stage, after every decoder layer, in the last round of virtual stages."""
    letters = "".join(stages)
    if "m" in letters and not mtp_layers:
        raise InputError(option, f"{layout!r} holds m and there is no --mtp-num-layers", "take the m out")
    if letters.count("m") != mtp_layers:
        raise InputError(
            option, f"{layout!r} holds {letters.count('m')} m and --mtp-num-layers is {mtp_layers}", f"write {mtp_layers} m"
        )
    if not mtp_layers:
        return
    if "t" in letters[letters.index("m") :]:
        raise InputError(option, f"{layout!r} has a decoder layer after an m", "write every t before the first m")
    holding = [number for number, stage in enumerate(stages) if "m" in stage]
    if len(holding) > 1:
        raise InputError(option, f"{layout!r} spreads m over {len(holding)} stages", "write every m in one stage")
    if holding[0] < len(stages) - pipeline:
        raise InputError(
            option, f"{layout!r} has m before the last {pipeline} stages", f"write m in one of the last {pipeline} stages"
        )
