"""What counts as a misspelled option: one letter that is inserted, removed, replaced or transposed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.spelling import is_misspelling
from analyzer.launch.unknown_options import not_counted, refuse_misspelled

WORDS = st.text(alphabet="abc-", min_size=2, max_size=8)


def distance(word: str, other: str) -> int:
    """The optimal string alignment distance, by its textbook recursion."""
    rows = [[max(i, j) if min(i, j) == 0 else 0 for j in range(len(other) + 1)] for i in range(len(word) + 1)]
    for i in range(1, len(word) + 1):
        for j in range(1, len(other) + 1):
            best = min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (word[i - 1] != other[j - 1]))
            if min(i, j) > 1 and word[i - 2 : i] == other[j - 2 : j][::-1]:
                best = min(best, rows[i - 2][j - 2] + 1)
            rows[i][j] = best
    return rows[-1][-1]


@given(WORDS, WORDS)
def test_it_is_an_edit_distance_of_one(word: str, other: str) -> None:
    assert is_misspelling("--x" + word, "--x" + other) == (distance(word, other) == 1)


@pytest.mark.parametrize(
    "word", ["--hidden_size", "--hiden-size", "--hidden-sizes", "--hiddne-size", "-hidden-size", "--Hidden-Size"]
)
def test_misspellings(word: str) -> None:
    assert is_misspelling(word, "--hidden-size")


@pytest.mark.parametrize(("word", "known"), [("--use-mpi", "--use-mup"), ("--bf16", "--bf16"), ("--num-lay", "--num-layers")])
def test_other_words(word: str, known: str) -> None:
    assert not is_misspelling(word, known)


def test_options_of_an_unknown_fork_are_not_misspelled() -> None:
    """An option is not misspelled if others share its first word, which that of Megatron-LM does not have."""
    known = ("--lion-beta1", "--micro-batch-size")
    refuse_misspelled(("--dion-beta1", "--dion-momentum"), known, strict=False)
    with pytest.raises(InputError, match="did you mean --lion-beta1"):
        refuse_misspelled(("--dion-beta1",), known, strict=False)
    with pytest.raises(InputError, match="did you mean --enable-msc"):
        refuse_misspelled(("--enable-mhc",), ("--enable-msc",), strict=False)
    refuse_misspelled(("--enable-mhc",), ("--enable-msc",), strict=False, fork=True)
    with pytest.raises(InputError, match="did you mean --num-layers"):
        refuse_misspelled(("--num-layerz",), ("--num-layers",), strict=False, fork=True)
    with pytest.raises(InputError, match="did you mean --micro-batch-size"):
        refuse_misspelled(("--micro-bach-size", "--micro-fork"), known, strict=False)


@pytest.mark.parametrize(("word", "meant"), [("--tp", "tensor-model-parallel-size"), ("--MBS", "micro-batch-size")])
def test_an_abbreviation_is_named_with_its_option(word: str, meant: str) -> None:
    """They are options of other programs, and of no release of Megatron-LM."""
    known = load_catalogue().newest
    assert word not in known
    assert f"--{meant}" in known
    (sentence,) = not_counted([word], known)
    assert sentence.endswith(f"Did you mean --{meant}?")
