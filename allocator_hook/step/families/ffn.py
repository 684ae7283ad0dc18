"""The FFN in the spec of a layer, whose form depends on the release of megatron-core."""

from __future__ import annotations

from functools import partial
from typing import Any


def submodules_of_ffn(submodules: Any) -> Any:
    """The submodules of the FFN of a layer with these `submodules`."""
    ffn = submodules.mlp
    return ffn.keywords["submodules"] if isinstance(ffn, partial) else ffn.submodules


def replace_ffn(submodules: Any, ffn: Any) -> None:
    """Make `ffn`, a subclass of `MLP`, the FFN of a layer with these `submodules`.

    From core 0.19 on the spec has a partial function that builds the FFN, before that a `ModuleSpec`.
    """
    if isinstance(submodules.mlp, partial):
        submodules.mlp = partial(ffn.as_mlp_submodule, **submodules.mlp.keywords)
    else:
        submodules.mlp.module = ffn
