"""Buffers of `--tp-comm-overlap`: twelve products of a layer, each with the gathered hidden states of a microbatch."""

from __future__ import annotations

from analyzer.memory.device_overhead import outside_allocator_bytes
from analyzer.memory.userbuffers import GATHERING, SCATTERING, userbuffer_bytes
from tests.job_of import job_of

LINE = "--tensor-model-parallel-size 4 --sequence-parallel --micro-batch-size 2"
STATES = 2 * 2048 * 1024
"""Elements of [s, b, h]."""


def test_twelve_buffers_of_the_whole_sequence() -> None:
    """`initialize_ub`: (s·b, h) for each name of its methods, in 16 bit; whole granules of the driver here."""
    assert len({*GATHERING, *SCATTERING}) == 12
    job = job_of(f"{LINE} --tp-comm-overlap")
    assert userbuffer_bytes(job) == 12 * 2 * STATES
    assert outside_allocator_bytes(job) - outside_allocator_bytes(job_of(LINE)) == 12 * 2 * STATES


def test_what_is_gathered_in_fp8_takes_a_byte() -> None:
    """`fp8_buf` of the eight that gather."""
    assert userbuffer_bytes(job_of(f"{LINE} --tp-comm-overlap --fp8-format hybrid")) == (8 + 4 * 2) * STATES


def test_context_parallel_ranks_hold_their_part() -> None:
    assert userbuffer_bytes(job_of(f"{LINE} --tp-comm-overlap --context-parallel-size 2")) == 12 * STATES


def test_nothing_is_there_without_the_flag() -> None:
    assert userbuffer_bytes(job_of(LINE)) == 0


def test_it_is_said_how_it_is_counted() -> None:
    assert any("--tp-comm-overlap" in each and "too high" in each for each in job_of(f"{LINE} --tp-comm-overlap").assumptions)
