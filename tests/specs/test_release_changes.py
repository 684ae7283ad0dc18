"""The table of what releases after 0.16 change."""

from __future__ import annotations

from dataclasses import fields

import pytest

from analyzer.specs.release import release_number
from analyzer.specs.release_changes import CHANGES, LIKE_0_16, MTP_LAYERS, CoreBehavior, behavior


def test_each_release_has_the_changes_of_those_before_it() -> None:
    assert list(CHANGES) == sorted(CHANGES, key=release_number)
    names = {field.name for field in fields(CoreBehavior)}
    assert {name for changes in CHANGES.values() for name in changes} <= names
    newest = behavior("0.99")
    for changes in CHANGES.values():
        assert all(getattr(newest, name) == value != getattr(LIKE_0_16, name) for name, value in changes.items())


@pytest.mark.parametrize("release", ["2023", "0.8.0", "0.16.1"])
def test_older_releases_are_like_0_16(release: str) -> None:
    assert behavior(release) == LIKE_0_16


@pytest.mark.parametrize(
    ("release", "layer"), [("0.16.1", "transformer_layer"), ("0.17.1", "mtp_model_layer"), ("0.20.0", "mtp_model_layer")]
)
def test_the_layer_in_an_mtp_layer_has_the_name_of_its_release(release: str, layer: str) -> None:
    assert behavior(release).mtp_layer == layer
    assert layer in MTP_LAYERS
