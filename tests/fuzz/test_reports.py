"""Properties of the reports of random launches."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, event, given
from hypothesis import strategies as st

from tests.command import run
from tests.fuzz.budget import examples
from tests.fuzz.invariants import check_outcome, check_report, parsed
from tests.fuzz.strategies import Launch, launches


def report_of(launch: Launch) -> dict[str, Any] | None:
    """The JSON report of a launch; None if it is refused."""
    outcome = run(*launch.words, "--info-json", "-")
    check_outcome(outcome)
    event("refused" if outcome.status == 2 else "accepted")
    return None if outcome.status == 2 else parsed(outcome.out)


@examples(1)
@given(launches())
def test_the_figures_of_a_report_agree(launch: Launch) -> None:
    document = report_of(launch)
    if document is not None:
        check_report(document)


@examples(0.25)
@given(launches(), st.data())
def test_the_order_of_options_changes_nothing(launch: Launch, data: st.DataObject) -> None:
    flags = [phrase[0] for phrase in launch.options]
    assume(len(set(flags)) == len(flags))
    shuffled = Launch(launch.launcher, tuple(data.draw(st.permutations(launch.options))))
    one, other = report_of(shuffled), report_of(launch)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert {**one, "command": other["command"]} == other


def tensors_at_peak(launch: Launch) -> int | None:
    """Bytes of the highest-memory rank at its peak; None if the launch is refused."""
    document = report_of(launch)
    return None if document is None else max(entry["memory"]["peak_allocated_bytes"] for entry in document["ranks"])


@examples(0.25)
@given(launches(features=1), st.sampled_from(("seq_length", "micro_batch_size", "num_layers", "hidden_size")))
def test_a_larger_model_or_batch_needs_more_memory(launch: Launch, name: str) -> None:
    before = int(launch.value("--" + name.replace("_", "-")))
    changes = {name: 2 * before}
    if name == "seq_length":
        changes["max_position_embeddings"] = 2 * before
    if name == "micro_batch_size":  # the number of microbatches stays the same
        changes["global_batch_size"] = 2 * int(launch.value("--global-batch-size"))
    smaller, larger = tensors_at_peak(launch), tensors_at_peak(launch.changed(**changes))
    if smaller is not None and larger is not None:
        assert larger >= smaller
