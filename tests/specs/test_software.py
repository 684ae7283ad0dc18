"""Versions of Transformer Engine and PyTorch, and how they compare."""

from __future__ import annotations

import pytest

from analyzer.specs import SoftwareSpec
from analyzer.specs.software import version_number


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("2.11", (2, 11)),
        ("2.11.0+c188b533", (2, 11, 0)),
        ("2.10.0a0+a36e1d39eb.nv26.01.42222806", (2, 10, 0)),
        ("1.13.0.post1", (1, 13, 0)),
    ],
)
def test_the_release_of_a_version(version: str, number: tuple[int, ...]) -> None:
    assert version_number(version) == number


def test_versions_are_compared_by_number() -> None:
    software = SoftwareSpec(te="2.3.0", torch="2.12.0a0+0291f960b6.nv26.04")
    assert software.te_is_before("2.10")
    assert not software.te_is_before("2.3")
    assert not software.te_is_before("1.13")
    assert not software.torch_is_before("2.12")
    assert software.torch_is_before("2.13")


def test_no_transformer_engine_is_before_every_version() -> None:
    assert SoftwareSpec(te=None, torch="2.8").te_is_before("0.1")
