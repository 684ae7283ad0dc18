"""`--pipeline-model-parallel-layout`: a string such as `Et*3|(tt|)*29,m|L`, unrolled into stages.

Megatron: `PipelineParallelLayerLayout` (megatron/core/transformer/pipeline_parallel_layer_layout.py, 0.16.1).
E is the embedding, t a decoder layer, m a multi-token prediction layer, L the loss; `|` ends a stage.
"""

from __future__ import annotations

import re
from typing import Final

from analyzer.errors import InputError

LETTERS: Final = "EtmL"
MAX_LETTERS: Final = 100_000
"""More than any model has: a longer layout is a typing error."""

_REPETITIONS: Final = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
"""Groups first, then single letters: the order in which Megatron unrolls them."""


def unroll(layout: str, *, option: str = "--pipeline-model-parallel-layout") -> tuple[str, ...]:
    """The stages in model order, each a string of letters. Raises InputError for what is not a layout.

    Whether the letters fit the model is checked by `analyzer.specs.rules.stages`.
    """
    written = layout.replace("\\", "").replace(",", "")  # backslashes: left over from shell quoting
    for pattern in _REPETITIONS:
        if sum(len(group) * int(count) for group, count in pattern.findall(written)) > MAX_LETTERS:
            raise InputError(option, f"{layout!r} unrolls to more than {MAX_LETTERS} letters", "check the numbers after *")
        written = pattern.sub(lambda match: match[1] * int(match[2]), written)
    strange = next((letter for letter in written if letter not in LETTERS + "|"), None)
    if strange is not None:
        raise InputError(
            option, f"{strange!r} in {layout!r} is not a kind of layer", "use E, t, m, L, | and repetitions such as t*3 or (tt|)*4"
        )
    return tuple(written.split("|"))
