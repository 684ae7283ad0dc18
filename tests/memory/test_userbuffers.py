"""Buffers of `--tp-comm-overlap`: one for each of twelve GEMMs of a layer, with the gathered hidden states of a microbatch."""

from __future__ import annotations

from analyzer.memory.device_overhead import outside_allocator_bytes
from analyzer.memory.userbuffers import GATHERING, SCATTERING, userbuffer_bytes
from tests.job_of import job_of

LINE = "--tensor-model-parallel-size 4 --sequence-parallel --micro-batch-size 2"
STATES = 2 * 2048 * 1024
"""Elements of [s, b, h]."""


def test_there_are_twelve_buffers_of_the_full_sequence() -> None:
    """`initialize_ub`: (s·b, h) in 16 bit for each name in its methods. Sizes here are multiples of the driver's granularity."""
    assert len({*GATHERING, *SCATTERING}) == 12
    job = job_of(f"{LINE} --tp-comm-overlap")
    assert userbuffer_bytes(job) == 12 * 2 * STATES
    assert outside_allocator_bytes(job) - outside_allocator_bytes(job_of(LINE)) == 12 * 2 * STATES


def test_fp8_all_gather_buffers_have_one_byte_per_element() -> None:
    """`fp8_buf` is set for the eight all-gathers."""
    assert userbuffer_bytes(job_of(f"{LINE} --tp-comm-overlap --fp8-format hybrid")) == (8 + 4 * 2) * STATES


def test_buffers_have_the_sequence_part_of_the_context_parallel_rank() -> None:
    assert userbuffer_bytes(job_of(f"{LINE} --tp-comm-overlap --context-parallel-size 2")) == 12 * STATES


def test_there_are_no_buffers_without_the_flag() -> None:
    assert userbuffer_bytes(job_of(LINE)) == 0


def test_the_assumption_about_the_buffers_is_reported() -> None:
    assert any("--tp-comm-overlap" in each and "too high" in each for each in job_of(f"{LINE} --tp-comm-overlap").assumptions)
