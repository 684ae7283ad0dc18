#!/usr/bin/env python3
"""What a Megatron-LM launch will hold on each GPU, whether it fits and who talks to whom.

Put `python get_training_info.py` where `torchrun … pretrain_gpt.py` stands in a launch script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from analyzer.errors import DOES_NOT_FIT, FITS, AnalyzerError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 fits or no capacity known, 1 a rank does not fit, 2 wrong or unsupported input, 3 a check failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return run(arguments)
    except AnalyzerError as error:
        print(f"get_training_info: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        return FITS


def run(argv: list[str]) -> int:
    """Reads the launch, predicts, reports; starts the training where `--info-launch` asks for it and it fits."""
    from analyzer.launch.build import build

    from analyzer.gpus import hardware
    from analyzer.launch.parse import parse
    from analyzer.predict import predict
    from analyzer.report.console import print_report
    from analyzer.report.json_report import write_json

    environ = dict(os.environ)
    folder = Path.cwd()
    arguments, world, options = parse(argv, environ=environ, folder=folder)
    gpu, notes = hardware(options.gpu, options.gpu_memory)
    launch = build(arguments, world, environ=environ, gpu=gpu, folder=folder)
    report = predict(launch, note=" ".join(notes))
    if options.json is not None:
        write_json(report, options.json)
    if options.json != "-":
        print_report(report, detail=options.detail, stream=sys.stdout)
    if report.verdict.fits is False:
        return DOES_NOT_FIT
    return FITS


if __name__ == "__main__":
    sys.exit(main())
