"""Inference jobs and reports for tests, from a line of options."""

from __future__ import annotations

from pathlib import Path

from analyzer.inference.estimate import inference_report
from analyzer.inference.reading import InferenceLaunch, read_inference
from analyzer.inference.results import InferenceReport

BATCH = "--info-inference batch=8,prompt=2048,generate=256"


def launch_of(line: str) -> InferenceLaunch:
    """The inference launch of a command line."""
    return read_inference(line.split(), environ={}, folder=Path(__file__).parent)


def report_of(line: str) -> InferenceReport:
    """The report of a command line."""
    launch = launch_of(line)
    return inference_report(launch.job, launch.time, note=launch.note)
