"""Sums over a module tree, and the names of equal siblings."""

from __future__ import annotations

from analyzer.modules.tree import Module, Parameter, Tensor
from analyzer.report.tree_sums import parameters, runs


def linear(name: str, *, recomputed: bool = False, children: tuple[Module, ...] = ()) -> Module:
    """A module with a weight of 6 elements that saves 512 bytes."""
    return Module(
        name=name,
        parameters=(Parameter(name="weight", shape=(2, 3), dtype="bf16"),),
        saved=(Tensor(name="input", shape=(256,), dtype="bf16"),),
        children=children,
        recomputed=recomputed,
    )


def test_a_checkpoint_saves_its_own_tensors_only() -> None:
    """`CheckpointFunction` saves its inputs; what its children would save is freed (core/tensor_parallel/random.py)."""
    children = (linear("a"), linear("b"))
    plain, checkpoint = (linear("mlp", recomputed=each, children=children) for each in (False, True))
    assert (plain.retained_bytes, checkpoint.retained_bytes) == (3 * 512, 512)
    assert parameters(plain) == parameters(checkpoint) == 3 * 6


def test_equal_siblings_are_one_run() -> None:
    """Numbers start at 0, as in `torch.nn.ModuleList`."""
    last = linear("layers", recomputed=True)
    found = [(run.name, run.length) for run in runs((linear("norm"), linear("layers"), linear("layers"), last))]
    assert found == [("norm", 1), ("layers.0–1", 2), ("layers.2", 1)]
