#!/usr/bin/env python3
"""What a Megatron-LM launch will hold on each GPU, whether it fits and who talks to whom.

Put `python get_training_info.py` where `torchrun … pretrain_gpt.py` stands in a launch script.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from analyzer.errors import CHECK_FAILED, DOES_NOT_FIT, FITS, AnalyzerError, InputError

if TYPE_CHECKING:
    from analyzer.cli.shadow_report import Compared
    from analyzer.launch.info_options import InfoOptions
    from analyzer.results import Report
    from analyzer.trace.reader import Trace


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 fits or no capacity known, 1 a rank does not fit, 2 wrong or unsupported input, 3 a check failed."""
    gc.disable()  # the program ends before a collection could pay
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--help" in arguments or "-h" in arguments:
        from analyzer.launch.info_options import usage

        print(usage())
        return FITS
    try:
        return run(arguments)
    except AnalyzerError as error:
        print(f"get_training_info: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        gc.freeze()  # nor the collection of the interpreter's own end


def run(argv: list[str]) -> int:
    """Reads the launch, predicts, reports; starts the training where `--info-launch` asks for it and it fits."""
    from analyzer.hardware.gpus import hardware
    from analyzer.launch.build import build
    from analyzer.launch.parse import parse, words_of_launch
    from analyzer.predict import predict

    environ = dict(os.environ)
    folder = Path.cwd()
    trace = _trace_to_check(argv)
    if trace is not None:
        argv = words_of_launch(argv, recorded=trace.header.argv)
    arguments, world, options = parse(argv, environ=environ, folder=folder)
    for field in ("rank", "layers", "allocator"):
        if getattr(options, field) is not None and options.record is None:
            raise InputError(f"--info-{field}", "says how a step is recorded, and none is", "give --info-record FILE with it")
    recorded_gpu = trace.header.gpu if trace is not None and trace.header.gpu else None
    gpu, notes = hardware(options.gpu or recorded_gpu, options.gpu_memory)
    job = build(arguments, world, environ=environ, gpu=gpu, folder=folder, moe_imbalance=options.moe_imbalance)
    if trace is not None:
        if options.record is not None or options.engine != "formula":
            raise InputError("--info-check", "goes neither with --info-record nor with an engine", "give it alone")
        from analyzer.trace.check import as_recorded

        return _check(predict(as_recorded(job, trace.header)), trace, options)
    report = predict(job, note=" ".join(notes))
    if options.record is not None:
        _record(report, options, argv)
    compared: tuple[Compared, ...] = ()
    if options.engine != "formula":
        from analyzer.cli.engines import run_engine

        report, compared = run_engine(
            report, engine=options.engine, argv=_command(argv), environ=environ, tolerance=options.tolerance
        )
    _write(report, options, compared)
    if any(each.comparison.failures for each in compared):
        return CHECK_FAILED
    if report.verdict.fits is False:
        return DOES_NOT_FIT
    if options.launch:
        _launch(argv, folder=folder, known=report.verdict.fits is not None)
    return FITS


def _trace_to_check(argv: list[str]) -> Trace | None:
    """The trace that `--info-check` names, or None."""
    from analyzer.launch.info_options import value_of

    path = value_of("--info-check", argv)
    if path is None:
        return None
    from analyzer.trace.reader import read_trace

    try:
        return read_trace(path)
    except OSError as error:
        raise InputError(
            "--info-check", f"cannot read '{path}' ({error.strerror})", "name a trace that --info-record wrote"
        ) from None


def _check(report: Report, trace: Trace, options: InfoOptions) -> int:
    """Prints what a check found; exit status 3 where it failed."""
    from analyzer.report.console.comparison_section import print_comparison, write_comparison
    from analyzer.trace.check import check

    found = check(report, trace, tolerance=options.tolerance)
    with _standard_output() as stream:
        if options.json == "-":
            stream.write(write_comparison(found, trace.header))
        else:
            print_comparison(found, trace.header, stream=stream)
    if options.json not in (None, "-"):
        from analyzer.report.json.document import write_text

        write_text(write_comparison(found, trace.header), str(options.json))
    return CHECK_FAILED if found.failures else FITS


def _command(argv: list[str]) -> tuple[str, ...]:
    """The whole command, the program first: what a trace's header holds."""
    return ("get_training_info.py", *argv)


def _record(report: Report, options: InfoOptions, argv: list[str]) -> None:
    """Writes the trace that `--info-record` asks for, of the highest-memory rank unless `--info-rank` names one."""
    from analyzer.cli.record import record
    from analyzer.trace.check import shortened

    job = report.job if options.layers is None else shortened(report.job, options.layers)
    rank = options.rank if options.rank is not None else report.verdict.tightest_rank
    path = Path(str(options.record))
    recorder = record(job, rank=rank, path=path, argv=_command(argv), allocator=options.allocator)
    print(f"{path}: rank {rank}, recorded by the {recorder} recorder", file=sys.stderr)


def _write(report: Report, options: InfoOptions, compared: tuple[Compared, ...]) -> None:
    """The JSON report where it was asked for, and the console's unless standard output is taken by the JSON."""
    if options.json is not None:
        from analyzer.report.json.document import dumps, to_json, write_text

        document = dumps({**to_json(report), **_comparisons(compared)})
        if options.json == "-":
            with _standard_output() as stream:
                stream.write(document)
            return
        write_text(document, options.json)
    from analyzer.report.console.report import print_report

    with _standard_output() as stream:
        print_report(report, detail=options.detail, stream=stream)
        if compared:
            from analyzer.report.console.comparison_section import print_comparison

            for each in compared:
                print_comparison(each.comparison, each.header, stream=stream)


def _comparisons(compared: tuple[Compared, ...]) -> dict[str, Any]:
    """What `--info-engine both` adds to the JSON report."""
    if not compared:
        return {}
    from analyzer.report.console.comparison_section import comparison_json

    return {"comparisons": [comparison_json(each.comparison, each.header) for each in compared]}


@contextmanager
def _standard_output() -> Iterator[TextIO]:
    """Standard output. A reader that has seen enough is no fault; a full disk is one (InputError)."""
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again when it exits
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InputError("standard output", f"cannot be written ({error.strerror})", "make room, or send it elsewhere") from None


def _launch(argv: list[str], *, folder: Path, known: bool) -> None:
    """Becomes the real training. Raises InputError where there is no verdict, or nothing to start it with."""
    from analyzer.launch.training_command import training_command

    if not known:
        raise InputError("--info-launch", "nobody knows whether it fits", "name the GPU with --info-gpu or --info-gpu-memory")
    command = training_command(argv, folder=folder)
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise InputError("--info-launch", f"{command[0]} cannot be started ({error.strerror})", "install PyTorch here") from None


if __name__ == "__main__":
    sys.exit(main())
