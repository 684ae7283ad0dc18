"""The Python API. The command line uses the same steps.

`analyze` turns a launch into a report, and `analyze_config` a configuration of Megatron-Bridge. `search` finds faster layouts,
`analyze_inference` and `analyze_offload` are for generation.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analyzer.errors import AnalyzerError, InputError, UnsupportedError
from analyzer.launch.python_words import Word, words_of

if TYPE_CHECKING:
    from analyzer.frameworks.prepare import Prepared
    from analyzer.inference.offload.estimate import OffloadReport
    from analyzer.inference.reading import InferenceLaunch
    from analyzer.inference.results import InferenceReport
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.info_options import InfoOptions
    from analyzer.launch.megatron_words import LayoutSettings
    from analyzer.layout_search.problem import Problem
    from analyzer.layout_search.result import SearchResult
    from analyzer.layout_search.search import Progress
    from analyzer.results import Report
    from analyzer.specs import HardwareSpec, TrainingJob
    from analyzer.time.estimate import TimeInputs

OF_COMMAND_LINE: Final = (
    "json", "detail", "record", "allocator", "check", "rank", "layers", "launch", "print_options", "fail_on", "against", "log",
    "dry", "run_all", "calibrate", "calibrate_disk", "html", "timeline", "search", "search_over",
    "keep", "search_gpus", "search_max",
    "faster", "search_fewest_gpus", "search_days", "search_thorough", "search_time", "search_csv", "workers",
)  # fmt: skip
"""Fields of `InfoOptions` that ask the command line to print, record or start something."""
ORDERED_BY: Final = "H100-80GB"
"""The GPU whose speeds order the advice for a GPU whose speeds are not known."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch that was read."""

    job: TrainingJob
    options: InfoOptions
    note: str
    """About the GPU; empty if it is known."""
    time: TimeInputs | None = None
    """Inputs of the time model; None if the speeds of the GPU are not known."""
    arguments: Arguments
    environ: Mapping[str, str]
    folder: Path
    command: tuple[str, ...]
    """The words of the launch."""
    framework: str | None = None
    """The framework that the launch is one of, by its module in `analyzer.frameworks`."""
    settings: LayoutSettings | None = None
    """Where the configuration of the framework has the layout."""


def analyze(
    argv: str | Sequence[Word],
    *,
    gpu: str | None = None,
    environ: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Report:
    """The report of a launch, computed by formula.

    `argv` is what follows `torchrun` in a launch script, as one string or as a list of words, numbers and paths: options of
    torchrun, the training script, and options of Megatron-LM; or a launch script with its arguments, such as "train.sh", which is
    run as on the command line and starts one launch. `--info-gpu`, `--info-gpu-memory`, `--info-margin`,
    `--info-megatron`, `--info-te`, `--info-torch`, `--info-model` and `--info-moe-imbalance` may be among them. `gpu` is the
    target GPU, such as "H100-80GB"; without it the verdict is for the local GPU, if there is one. `environ` and `folder` stand for
    the environment variables and the working directory of the launch. They are those of this process if not given.

    The process is left unchanged, and nothing is printed. Sizes in the report are in bytes. Raises
    `analyzer.errors.AnalyzerError` for input that is invalid or not supported.
    """
    launch = _read_training(argv, gpu=gpu, environ=environ, folder=folder)
    _refuse_command_line(launch.options)
    return report_of(launch)


def analyze_config(
    config: object,
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    options: str | Sequence[Word] = (),
    environ: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Report:
    """The report of a training with Megatron-Bridge, given its ConfigContainer.

    `config` is the object, which is read by its fields and not changed, or a mapping with the keys of its YAML. Megatron-Bridge is
    not imported. `gpus`: the number of GPUs; without it that of the processes of this launch (WORLD_SIZE), or the smallest one that
    the layout allows. `options`: --info options, such as "--info-margin 5%". `gpu`, `environ` and `folder` are those of `analyze`.

    The process is left unchanged, and nothing is printed. Sizes in the report are in bytes. Raises
    `analyzer.errors.AnalyzerError` for a configuration that is invalid or not supported.
    """
    from analyzer.frameworks.bridge import given_gpus, own_words
    from analyzer.frameworks.containers import from_container
    from analyzer.frameworks.prepare import Prepared

    words = [*words_of(options, gpu), *(["--info-world-size", str(gpus)] if gpus is not None else [])]
    variables = dict(os.environ if environ is None else environ)
    own = own_words(from_container(config), gpus=given_gpus(words, variables))
    prepared = Prepared(tuple(words), variables, own)
    place = Path.cwd() if folder is None else Path(folder)
    launch = _read_prepared(prepared, words, folder=place, default_gpu=None)
    _refuse_command_line(launch.options)
    return report_of(launch)


def analyze_inference(
    argv: str | Sequence[Word],
    *,
    batch: int | str | None = None,
    prompt: int | str | None = None,
    generate: int | str | None = None,
    quantize: str | None = None,
    gpu: str | None = None,
    environ: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> InferenceReport:
    """The report of text generation with the model and layout of a launch, as of `--info-inference`.

    `argv`, `gpu`, `environ` and `folder` are those of `analyze`, and `argv` may have `--info-serving-engine`, whose result is in
    `serving`. `batch`: requests of one replica of the model, or "max" for the
    most that fit. `prompt`: tokens of each request. `generate`: tokens that are generated for each. Texts such as "32k" are read,
    with 1,024 tokens for each k. All three are given, or none if `argv` has `--info-inference` or
    names an inference script of Megatron. `quantize`: bits of weights, activations and cache, such as "w4a16kv8". `argv` may also
    have `--info-hardware`, `--info-calibration`, `--info-network`, `--info-efficiency` and `--info-price`.

    The process is left unchanged, and nothing is printed. Sizes in the report are in bytes, times in seconds; `stages` has one
    entry for each pipeline rank, and `time.others` one for each batch size. `limits` is None without a GPU, `time` is None if its
    speeds are not known. `analyzer.report.json.inference.inference_json` converts the report to the document of `--info-json`.

    Raises `analyzer.errors.AnalyzerError` for input that is invalid or not supported.
    """
    from analyzer.inference.estimate import inference_report

    options = {"--info-inference": _generation(batch, prompt, generate), "--info-quantize": quantize}
    launch = _read_inference(argv, options, gpu=gpu, environ=environ, folder=folder)
    if launch.options.offload is not None:
        raise InputError("--info-offload", "has a report of its own", "call analyze_offload, or leave it out")
    return inference_report(launch.job, launch.time, note=launch.note, command=launch.command, target=launch.options.serving_search)


def analyze_offload(
    argv: str | Sequence[Word],
    *,
    policy: str | None = None,
    batch: int | None = None,
    prompt: int | None = None,
    generate: int | None = None,
    gpu: str | None = None,
    environ: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> OffloadReport:
    """The report of text generation on one GPU with tensors in host memory and on disk, as of `--info-offload`.

    `policy`: the value of that option, such as "weights=20/80/0,cache=0/100/0,batches=3" (percent on GPU, host and disk), or
    "search" for the policy with the highest throughput, which needs scipy. None if `argv` has the option. The other arguments are
    those of `analyze_inference`; `batch` is the number of requests of a block.

    Sizes in the report are in bytes, times in seconds. `tiers` are GPU, host and disk; `front` is empty without a search.
    `analyzer.report.json.offload.offload_json` converts the report to the document of `--info-json`.

    Raises `analyzer.errors.AnalyzerError` for input that is invalid or not supported, and if a search finds nothing that fits.
    """
    from analyzer.inference.offload.estimate import report_of_launch

    options = {"--info-inference": _generation(batch, prompt, generate), "--info-offload": policy}
    launch = _read_inference(argv, options, gpu=gpu, environ=environ, folder=folder)
    if launch.options.offload is None:
        raise InputError("--info-offload", "it is not given", "give policy, such as policy='search'")
    return report_of_launch(launch, launch.options.offload)


def _generation(batch: int | str | None, prompt: int | str | None, generate: int | str | None) -> str | None:
    """The value of `--info-inference`; None without arguments."""
    given = {"batch": batch, "prompt": prompt, "generate": generate}
    parts = [f"{name}={value}" for name, value in given.items() if value is not None]
    return ",".join(parts) or None


def _read_inference(
    argv: str | Sequence[Word],
    given: Mapping[str, str | None],
    *,
    gpu: str | None,
    environ: Mapping[str, str] | None,
    folder: str | os.PathLike[str] | None,
) -> InferenceLaunch:
    """Reads the words of an inference launch, with options that are given as arguments. Raises AnalyzerError."""
    from analyzer.inference.reading import read_inference
    from analyzer.launch.inference.options import asks_for_inference

    words = words_of(argv, gpu)
    names = {word.partition("=")[0] for word in words}
    for option, value in given.items():
        if value is not None:
            if option in names:
                raise InputError(option, "is given in argv and as an argument", "leave one of the two out")
            words += [option, value]
    if not asks_for_inference(words):
        raise InputError("--info-inference", "it is not given", "give batch, prompt and generate")
    launch = read_inference(
        words,
        environ=dict(os.environ if environ is None else environ),
        folder=Path.cwd() if folder is None else Path(folder),
    )
    _refuse_command_line(launch.options)
    return launch


def _refuse_command_line(options: InfoOptions) -> None:
    """Raises InputError for options that ask the command line to print, record or start something."""
    given = [field for field in OF_COMMAND_LINE if getattr(options, field)]
    if given or options.engine != "formula":
        option = f"--info-{given[0] if given else 'engine'}".replace("_", "-")
        raise InputError(option, "belongs to the command line", "leave it out, and use the report that is returned")


def read_launch(argv: Sequence[str], *, environ: Mapping[str, str], folder: Path, default_gpu: str | None = None) -> Launch:
    """Reads the words of a launch. `default_gpu` is the target if the options name none. Raises AnalyzerError."""
    try:
        return _read(argv, environ=environ, folder=folder, default_gpu=default_gpu)
    except UnsupportedError:
        raise
    except InputError:
        from analyzer.frameworks.recognize import recognize
        from analyzer.launch.entry_script import refuse_other_program

        if recognize(argv) is None:
            refuse_other_program(argv)
        raise


def _read(argv: Sequence[str], *, environ: Mapping[str, str], folder: Path, default_gpu: str | None) -> Launch:
    from analyzer.frameworks.prepare import prepare

    return _read_prepared(prepare(argv, environ=environ, folder=folder), argv, folder=folder, default_gpu=default_gpu)


def _read_prepared(prepared: Prepared, argv: Sequence[str], *, folder: Path, default_gpu: str | None) -> Launch:
    """Reads the words. Options of a configuration that are not modelled are left out, with a statement, without --info-strict."""
    from analyzer.frameworks.prepare import with_later_releases

    try:
        return _read_words(prepared, argv, folder=folder, default_gpu=default_gpu)
    except InputError as error:
        for newer in with_later_releases(prepared, error):
            with suppress(AnalyzerError):
                return _read_words(newer, argv, folder=folder, default_gpu=default_gpu)
        if prepared.own is None or "--info-strict" in argv:
            raise
        from analyzer.frameworks.not_modelled import without_option  # for such launches only

        own = without_option(prepared.own, error)
        if own is None:
            raise
    return _read_prepared(prepared._replace(own=own), argv, folder=folder, default_gpu=default_gpu)


def _read_words(prepared: Prepared, argv: Sequence[str], *, folder: Path, default_gpu: str | None) -> Launch:
    from analyzer.hardware.gpus import hardware
    from analyzer.launch.build import build
    from analyzer.launch.parse import parse

    environ = prepared.environ
    arguments, world, options = parse(prepared.argv, environ=environ, folder=folder, own=prepared.own, later=prepared.later)
    for field in ("rank", "layers", "allocator"):
        if getattr(options, field) is not None and options.record is None:
            raise InputError(f"--info-{field}", "is only used with --info-record", "add --info-record FILE, or leave it out")
    if options.calibrate_disk is not None and options.calibrate is None:
        remedy = "add --info-calibrate FILE, or leave it out"
        raise InputError("--info-calibrate-disk", "is only used with --info-calibrate", remedy)
    gpu, notes = hardware(options.gpu or default_gpu, options.gpu_memory)
    if options.margin is not None and gpu.capacity_bytes is not None:
        gpu = replace(gpu, margin_bytes=options.margin.of(gpu.capacity_bytes))
    job = build(
        arguments, world, environ=environ, gpu=gpu, folder=folder, moe_imbalance=options.moe_imbalance, strict=options.strict
    )
    return Launch(
        job=job,
        options=options,
        note=" ".join(notes),
        time=_time_inputs(options, arguments, gpu, folder, job),
        arguments=arguments,
        environ=environ,
        folder=folder,
        command=tuple(argv),
        framework=prepared.framework,
        settings=None if prepared.own is None else prepared.own.layout,
    )


def report_of(launch: Launch) -> Report:
    """The report of a launch that was read, with its time and advice, computed by formula. Raises AnalyzerError."""
    from analyzer.predict import predict

    report = replace(predict(launch.job, note=launch.note), command=launch.command)
    return with_advice(with_time(with_phases(report), launch), launch)


def with_phases(report: Report) -> Report:
    """The report with the memory of the phases of reinforcement learning and distillation."""
    if report.job.tuning.objective not in ("reinforcement", "distillation"):
        return report
    from analyzer.inference.phases.estimate import with_phases as estimated  # imported for such launches only

    return estimated(report)


def with_time(report: Report, launch: Launch) -> Report:
    """The report with the time of an iteration, if the speeds of the GPU are known."""
    if launch.time is None:
        name = report.job.hardware.name
        if name is None:
            return report
        sentence = f"The time is not predicted, because the speeds of {name} are not known; give them with --info-hardware FILE."
        return replace(report, warnings=(*report.warnings, sentence))
    from analyzer.time.estimate import time_estimate

    time = time_estimate(report, launch.time)
    warnings = report.warnings
    if launch.time.price is not None and time.training is None:
        warnings = (*warnings, "There is no cost, because the length of the training is not known; give it with --info-tokens.")
    return replace(report, time=time, warnings=warnings)


def problem_of(launch: Launch) -> Problem:
    """The problem of a search for a launch that was read. Raises InputError without a GPU whose memory and speeds are known."""
    inputs, job = launch.time, launch.job
    if inputs is None or job.hardware.capacity_bytes is None:
        what = "none is named" if job.hardware.name is None else f"those of {job.hardware.name} are not known"
        remedy = "add --info-gpu NAME, such as H100-80GB; --info-gpu list prints the known GPUs"
        raise InputError("--info-search", f"a search needs the memory and the speeds of a GPU, and {what}", remedy)
    if inputs.flops_share is not None:
        raise InputError("--info-search", "does not use the simple time model of --info-efficiency", "leave one of the two out")
    return _problem(launch, inputs)


def _problem(launch: Launch, inputs: TimeInputs) -> Problem:
    from analyzer.launch.launchers.world import World
    from analyzer.layout_search.problem import Problem, with_changes
    from analyzer.time.efficiencies import efficiencies_of

    job = launch.job
    arguments = replace(launch.arguments, values=dict(launch.arguments.values), spelled=dict(launch.arguments.spelled))
    batch = {} if arguments.get("global_batch_size") else {"global_batch_size": job.batch.global_batch_size}
    arguments = with_changes(arguments, batch)
    return Problem(
        arguments=arguments,
        world=World(nodes=job.parallel.nodes, gpus_per_node=job.parallel.gpus_per_node),
        environ=dict(launch.environ),
        folder=launch.folder,
        gpu=job.hardware,
        speed=inputs.speed,
        rates=inputs.rates or efficiencies_of(inputs.speed),
        moe_imbalance=launch.options.moe_imbalance,
        given=job,
        with_any_change=batch,
    )


def layout_problem(launch: Launch) -> Problem:
    """The problem of other layouts of a launch. The speeds of `ORDERED_BY` stand for those of a GPU whose speeds are not known."""
    from analyzer.hardware.speeds import speed_of
    from analyzer.time.estimate import TimeInputs

    inputs = launch.time
    if inputs is None:
        speed = speed_of(ORDERED_BY)
        if speed is None:
            raise AssertionError(f"no speeds of {ORDERED_BY}")
        inputs = TimeInputs(speed=speed)
    return _problem(launch, inputs)


def search(
    argv: str | Sequence[Word],
    *,
    over: Sequence[str] = (),
    keep: Sequence[str] = (),
    gpu: str | None = None,
    thorough: bool | None = None,
    seconds: float | None = None,
    workers: str | int | None = 1,
    progress: Callable[[Progress], None] | None = None,
    environ: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> SearchResult:
    """The fastest layouts of a launch that fit its GPU, with the same model, GPUs and global batch size.

    `argv`, `gpu`, `environ` and `folder` are those of `analyze`. `over`: the dimensions to search (`--info-search-over`), all usual
    ones if empty. `keep`: options of Megatron that must not change. The first layout of the result is proven to be the fastest that
    fits; with `thorough` the ten fastest and the front of memory and time are proven as well (None: if that takes a few seconds).
    `seconds` limits the duration: the result then has what was found, and `gap`, the share of the time by which another layout
    could be faster. `workers`: a number of processes, None for one per processor, or the address of a Dask scheduler. `progress` is
    called from time to time. A KeyboardInterrupt ends the search; the result then has what was found, and `complete` is False.
    Iterating over the result gives its layouts, the fastest first.

    Raises `analyzer.errors.AnalyzerError` for input that is invalid or not supported.
    """
    from analyzer.layout_search.dimensions import space_of
    from analyzer.layout_search.executors import workers as workers_of
    from analyzer.layout_search.search import aim_of, search_space

    launch = _read_training(argv, gpu=gpu, environ=environ, folder=folder)
    space = space_of(problem_of(launch), over=over, keep=keep)
    with workers_of(None if workers is None else str(workers)) as found:
        limit = math.inf if seconds is None else seconds
        return search_space(space, found, aim=aim_of(space, thorough=thorough), seconds=limit, progress=progress)


def with_advice(report: Report, launch: Launch) -> Report:
    """The report with changes of options that make the launch fit, if it does not."""
    if report.verdict.fits is not False or report.phases:
        return report
    from analyzer.layout_search.advice import advise

    timed = launch.time is not None and launch.time.flops_share is None
    before = max(rank.memory.device_bytes for rank in report.ranks)
    return replace(report, advice=advise(layout_problem(launch), before=before, timed=timed, keep=launch.options.keep))


def with_faster(report: Report, launch: Launch) -> Report:
    """The report with changes of one dimension that make the launch faster, if it fits and its time is known."""
    inputs = launch.time
    if not report.verdict.fits or report.time is None or inputs is None or inputs.flops_share is not None:
        return report
    from analyzer.layout_search.advice import faster

    before = max(rank.memory.device_bytes for rank in report.ranks)
    seconds = report.time.iteration_seconds
    return replace(report, advice=faster(_problem(launch, inputs), before=before, seconds=seconds, keep=launch.options.keep))


def _read_training(
    argv: str | Sequence[Word], *, gpu: str | None, environ: Mapping[str, str] | None, folder: str | os.PathLike[str] | None
) -> Launch:
    """Reads the words of a launch. Raises InputError if they ask for inference."""
    from analyzer.frameworks.script_words import words_of_script
    from analyzer.launch.inference.options import INFERENCE, asks_for_inference, script_of

    words = words_of(argv, gpu)
    if asks_for_inference(words):
        raise InputError(script_of(words) or INFERENCE, "asks for inference", "call analyze_inference or analyze_offload")
    variables = dict(os.environ if environ is None else environ)
    place = Path.cwd() if folder is None else Path(folder)
    with words_of_script(words, environ=variables, folder=place) as found:
        return read_launch(found.words, environ=found.environ, folder=found.folder)


def _time_inputs(
    options: InfoOptions, arguments: Arguments, gpu: HardwareSpec, folder: Path, job: TrainingJob
) -> TimeInputs | None:
    if gpu.name is None and options.hardware is None:
        for field in ("network", "calibration", "efficiency", "tokens", "price"):
            if getattr(options, field):
                raise InputError(f"--info-{field}", "needs a GPU", "add --info-gpu NAME or --info-hardware FILE")
        return None
    from analyzer.time.inputs import time_inputs

    return time_inputs(options, arguments, gpu=gpu.name, folder=folder, job=job)
