"""`--info-search` and its related questions: searches layouts, prints them, and returns the exit status."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analyzer.api import problem_of, read_launch, report_of, with_time
from analyzer.cli.output import standard_output, write_json
from analyzer.errors import DOES_NOT_FIT, FITS, INTERRUPTED, InputError, UnsupportedError
from analyzer.launch.info_options import FLAGS, GPU, OF_SEARCH, value_of
from analyzer.predict import predict

if TYPE_CHECKING:
    from analyzer.api import Launch
    from analyzer.launch.info_options import InfoOptions
    from analyzer.layout_search.dimensions import Space
    from analyzer.layout_search.evaluation import Evaluation
    from analyzer.layout_search.executors import Workers
    from analyzer.layout_search.problem import Problem
    from analyzer.layout_search.related import Limit, Question
    from analyzer.layout_search.result import SearchResult
    from analyzer.layout_search.search import Progress
    from analyzer.results import Report, TrainingTime

BETWEEN_LINES: Final = 5.0
"""Seconds between two lines about a search whose output is no terminal."""
EXCLUDED: Final = ("record", "check", "calibrate", "launch", "against", "log", "fail_on", "timeline")
"""Fields of `InfoOptions` that cannot be used with a search."""


def search_launch(argv: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> int:
    """Searches the layouts of a launch. Raises AnalyzerError.

    Exit status: 0 if a layout that fits was found, 1 if none was, 130 if the search was interrupted.
    """
    names = list(dict.fromkeys(each.strip() for each in (value_of(GPU, argv) or "").split(",")))
    if len(names) > 1 and "" in names:
        raise InputError(GPU, "has an empty name", "write names separated by commas, such as H100-80GB,B200")
    launches = [read_launch([*argv, *((GPU, name) if name else ())], environ=environ, folder=folder) for name in names]
    options = launches[0].options
    _check(options)
    if launches[0].job.model.compressed_attention is not None:
        fault = "layouts of DeepSeek-V4 are not searched, because the time of its layers is not known well"
        raise UnsupportedError("--info-search", fault, "analyze the layouts one by one")
    if options.search_days is not None and not options.search_fewest_gpus:
        remedy = "add --info-search-fewest-gpus, or leave it out"
        raise InputError("--info-search-days", "is only used with --info-search-fewest-gpus", remedy)
    if options.search_fewest_gpus or (options.search and options.search_max is not None):
        return _extreme(argv, launches, options)
    if len(launches) > 1 or options.search_gpus:
        for field in ("search_csv", "search_max", "html"):
            if getattr(options, field):
                option = f"--info-{field}".replace("_", "-")
                raise InputError(option, "is about one search, and several are asked for", "name one GPU and one number of GPUs")
        return _several(argv, launches, options)
    _check_files(options)
    if options.search_max is not None and not options.search:
        for option in (*OF_SEARCH, "--info-html"):
            if getattr(options, FLAGS[option]):
                raise InputError(option, "is only used with --info-search", "add --info-search, or leave it out")
        return _only_limit(argv, launches[0], options)
    return _one(argv, launches[0], options)


def _check(options: InfoOptions) -> None:
    for field in EXCLUDED:
        if getattr(options, field):
            raise InputError(f"--info-{field}".replace("_", "-"), "cannot be used with a search", "leave one of the two out")
    if options.engine != "formula":
        raise InputError("--info-engine", "a search uses the formulas", "leave it out")


def _check_files(options: InfoOptions) -> None:
    """Raises InputError for files that cannot be written, before the search."""
    from analyzer.files import check_writable

    if options.search_csv == "-":
        raise InputError("--info-search-csv", "cannot be standard output", "name a file")
    named = ((options.search_csv, "--info-search-csv"), (options.json, "--info-json"), (options.html, "--info-html"))
    for path, option in named:
        if path is not None and path != "-":
            check_writable(path, option)


def _one(argv: Sequence[str], launch: Launch, options: InfoOptions) -> int:
    from analyzer.layout_search.command_line import COMMANDS

    problem = problem_of(launch)
    space = _space(problem, options)
    with _workers(options, space) as workers, _progress() as show:
        result = _searched(space, workers, show, options)
    report = replace(report_of(launch), command=tuple(argv))
    commands = tuple(_command(argv, launch, each.options) for each in result.best[:COMMANDS])
    result = replace(result, commands=commands)
    if options.html is not None:
        from analyzer.cli.html import write_html

        write_html(report, launch, options.html, argv=argv, search=result)
    _write(report, result, options)
    return _status([result])


def _command(argv: Sequence[str], launch: Launch, options: Mapping[str, object]) -> str:
    """The launch with changed options, by flag: with overrides of its framework, or as options of Megatron-LM."""
    from analyzer.layout_search.command_line import command_line, dests_of

    if launch.framework is not None or launch.arguments.fork is not None:
        from analyzer.frameworks.overrides import command

        dests = dests_of(launch.arguments)
        found = command(launch, argv, {dests.get(flag, flag): value for flag, value in options.items()})
        if found is not None:
            return found
    return command_line(argv, launch.arguments, options)


def _write(report: Report, result: SearchResult, options: InfoOptions) -> None:
    from analyzer.report.console.report import print_report
    from analyzer.report.console.search_section import print_search
    from analyzer.report.json.document import to_json, write_text
    from analyzer.report.json.search import as_csv, search_json

    if options.search_csv is not None:
        write_text(as_csv(result), options.search_csv, option="--info-search-csv")
    if options.json is not None and write_json({**to_json(report), "search": search_json(result)}, options.json):
        return
    with standard_output() as stream:
        if options.detail:
            print_report(report, detail=options.detail, stream=stream)
        print_search(result, report, stream=stream)


def _extreme(argv: Sequence[str], launches: Sequence[Launch], options: InfoOptions) -> int:
    """Prints the smallest number of GPUs, or the largest value of an option, over all layouts: one answer for each GPU."""
    from analyzer.layout_search.extremes import Answers, Extreme
    from analyzer.report.console.extreme_section import print_extremes
    from analyzer.report.json.document import head
    from analyzer.report.json.search import extremes_json

    for field in ("search_csv", "html", "search_gpus", "search_thorough", "search_time", "detail"):
        if getattr(options, field):
            option = f"--info-{field}".replace("_", "-")
            raise InputError(option, "cannot be used with a question over all layouts", "leave it out, or leave out the question")
    if options.search_fewest_gpus and options.search_max is not None:
        fault = "cannot be used with --info-search-fewest-gpus"
        raise InputError("--info-search-max", fault, "ask one question, then the other with that number of GPUs")
    found: list[tuple[str, Extreme]] = []
    with _workers(options, _space(problem_of(launches[0]), options)) as workers, _progress() as show:
        for launch in launches:
            answers = Answers(
                problem_of(launch),
                workers,
                partial(_training, launch),
                over=options.search_over,
                keep=options.keep,
                iterations=_least_iterations(launch),
                progress=show,
            )
            if options.search_fewest_gpus:
                answer = answers.fewest_gpus(days=options.search_days)
            else:
                answer = answers.largest("seq-length" if options.search_max == "seq-length" else "micro-batch-size")
            found.append((launch.job.hardware.name or "", answer))
    if options.json is None or not write_json({**head(argv), "extremes": extremes_json(found)}, options.json):
        with standard_output() as stream:
            print_extremes(found, days=options.search_days, stream=stream)
    return FITS if any(answer.value is not None for _, answer in found) else DOES_NOT_FIT


def _several(argv: Sequence[str], launches: Sequence[Launch], options: InfoOptions) -> int:
    """One search for each GPU and number of GPUs."""
    from analyzer.layout_search.related import Question, with_world
    from analyzer.report.console.search_section import print_questions
    from analyzer.report.json.document import head
    from analyzer.report.json.search import questions_json

    questions: list[Question] = []
    with _workers(options, _space(problem_of(launches[0]), options)) as workers, _progress() as show:
        for launch, gpus in product(launches, tuple(dict.fromkeys(options.search_gpus)) or (None,)):
            problem = problem_of(launch)
            if gpus is not None:
                problem = with_world(problem, gpus, over=options.search_over, keep=options.keep)
            space = _space(problem, options)
            result = _searched(space, workers, show, options)
            name = launch.job.hardware.name or ""
            training = _training(launch, space, result.best[0]) if result.best else None
            questions.append(Question(name, problem.world.size, result, training))
            if not result.complete:
                break
    document = {**head(argv), "searches": questions_json(questions)}
    if options.json is None or not write_json(document, options.json):
        with standard_output() as stream:
            print_questions(questions, stream=stream)
    return _status([each.result for each in questions])


def _status(results: Sequence[SearchResult]) -> int:
    """The exit status of searches. A lost cluster is an error, after the layouts that were found are printed."""
    from analyzer.layout_search.result import INTERRUPTED as BY_USER
    from analyzer.layout_search.result import LIMIT

    ended = next((each.ended for each in results if each.ended), "")
    if ended == BY_USER:
        return INTERRUPTED
    if ended and not ended.startswith(LIMIT):
        raise InputError("--info-workers", f"the search ended early: {ended}", "start the workers again, or use fewer of them")
    return FITS if any(each.best for each in results) else DOES_NOT_FIT


def _training(launch: Launch, space: Space, layout: Evaluation) -> TrainingTime | None:
    """The whole training with a layout; None if its length is not known."""
    from analyzer.layout_search.split_jobs import job_of_layout

    job = job_of_layout(space, layout.layout)
    if job is None:
        return None
    time = with_time(predict(job), replace(launch, job=job)).time
    return None if time is None else time.training


def _least_iterations(launch: Launch) -> int:
    """Iterations of the training with the whole batch, at least; 0 if its length is not known."""
    from analyzer.time.training import least_iterations

    inputs = launch.time
    return 0 if inputs is None else least_iterations(launch.job, inputs.run, tokens=inputs.tokens)


def _space(problem: Problem, options: InfoOptions) -> Space:
    from analyzer.layout_search.dimensions import space_of

    return space_of(problem, over=options.search_over, keep=options.keep)


def _searched(space: Space, workers: Workers, show: Callable[[Progress], None] | None, options: InfoOptions) -> SearchResult:
    from analyzer.layout_search.search import aim_of, search_space

    aim = aim_of(space, thorough=options.search_thorough or None)
    return search_space(space, workers, aim=aim, seconds=options.search_time or inf, progress=show)


def _only_limit(argv: Sequence[str], launch: Launch, options: InfoOptions) -> int:
    """Prints the answer to `--info-search-max`. Returns the exit status: 1 if no value fits."""
    from analyzer.report.console.search_section import print_limit
    from analyzer.report.json.document import head
    from analyzer.report.json.search import limit_json

    problem = problem_of(launch)
    limit = _largest(problem, options)
    if options.json is None or not write_json({**head(argv), "largest": limit_json(limit)}, options.json):
        with standard_output() as stream:
            phases = bool(launch.job.tuning.phases)
            print_limit(limit, problem.capacity, flag=_flag(problem, limit), phases=phases, stream=stream)
    return DOES_NOT_FIT if limit.value is None else FITS


def _flag(problem: Problem, limit: Limit) -> str:
    """The option of a limit: of encoders with their own length, that one."""
    from analyzer.layout_search.related import length_changes
    from analyzer.specs.option_names import flag_of

    return f"--{limit.option}" if limit.option == "micro-batch-size" else flag_of(next(iter(length_changes(problem, 0))))


def _largest(problem: Problem, options: InfoOptions) -> Limit:
    from analyzer.layout_search.related import largest

    return largest(problem, "seq-length" if options.search_max == "seq-length" else "micro-batch-size")


@contextmanager
def _workers(options: InfoOptions, space: Space) -> Iterator[Workers]:
    """The workers that the options name. Without the option, small searches do not start processes."""
    from analyzer.layout_search.executors import workers
    from analyzer.layout_search.search import SMALL

    where = "1" if options.workers is None and space.candidates < SMALL else options.workers
    with workers(where) as found:
        yield found


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None] | None]:
    """A progress bar on standard error; a line from time to time if that is no terminal."""
    if sys.stderr is None:
        yield None
        return
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("search"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[best]}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("search", total=None, rate="", best="")

        def show(progress: Progress) -> None:
            rate = f"{progress.expanded / max(1e-3, bar.tasks[0].elapsed or 1):,.0f}/s"
            best = "" if progress.best_seconds is None else f"fastest {progress.best_seconds:.2f} s"
            bar.update(task, completed=progress.expanded, total=progress.expanded + progress.open, rate=rate, best=best)

        yield show


def _lines() -> Callable[[Progress], None]:
    """Prints a line about the search every `BETWEEN_LINES` seconds."""
    from analyzer.cli.output import print_message

    started = shown = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal shown
        now = time.monotonic()
        if now < shown + BETWEEN_LINES:
            return
        shown = now
        best = (
            "no layout fits so far" if progress.best_seconds is None else f"the fastest so far takes {progress.best_seconds:.2f} s"
        )
        print_message(f"searching for {now - started:.0f} s: {progress.evaluated:,} layouts evaluated, {best}")

    return show
