"""Which layers have a sliding window: `is_layer_window_attention` (core/transformer/utils.py, 0.15 and 0.16)."""

from __future__ import annotations

import pytest

from analyzer.errors import InputError
from tests.job_of import job_of

MTP = "--num-layers 4 --position-embedding-type rope --mtp-num-layers 2 --window-size 128,0 --window-attn-skip-freq"


def test_layer_numbers_of_mtp_layers_follow_those_of_the_decoder() -> None:
    assert job_of(f"{MTP} 2").model.windowed == (True, False, True, False, True, False)
    assert job_of(f"{MTP} [1,0,0,1,0,1]").model.windowed == (True, False, False, True, False, True)


def test_mtp_layers_have_no_number_of_their_own_before_0_16() -> None:
    assert job_of(f"{MTP} [1,0,0,1]", release="0.15.3").model.windowed == (True, False, False, True)


def test_a_list_without_the_mtp_layers_is_refused() -> None:
    with pytest.raises(InputError, match=r"^--window-attn-skip-freq: lists 4 layers, and the model has 6, MTP layers included"):
        job_of(f"{MTP} [1,0,0,1]")
