"""The options of this program. All begin with --info-, so they cannot clash with options of Megatron or torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from analyzer.errors import InputError
from analyzer.launch.argv_parser import is_option
from analyzer.launch.inference.offload_options import Offload, offload
from analyzer.launch.inference.options import Generation, Quantization, generation, quantization
from analyzer.launch.inference.serving_options import Serving, ServingTarget, serving, target
from analyzer.launch.info_files import check_files
from analyzer.launch.info_values import (
    Margin,
    choice,
    count,
    flag,
    integer,
    integers,
    lora,
    margin,
    number_from,
    options_of_launch,
    positive,
    several,
    share,
    shares,
    size,
    version,
    word,
    words,
)
from analyzer.specs.serving import ENGINE_NAMES, EngineName

PREFIX: Final = "--info-"
MODEL: Final = "--info-model"
GPU: Final = "--info-gpu"
LORA: Final = "--info-lora"
IMAGE_TOKENS: Final = "--info-image-tokens"
NO_IMAGES: Final = "the launch trains no vision-language model that a framework builds"
LORA_REGATHER: Final = "--info-lora-regather"
SAMPLE_LENGTH: Final = "--info-sample-length"
SET: Final = "--info-set"
UNSET: Final = "--info-unset"
ASKING: Final = ("--info-search", "--info-search-gpus", "--info-search-fewest-gpus", "--info-search-max")
"""Options that ask for a search."""
OF_SEARCH: Final = (
    "--info-search-over", "--info-search-days", "--info-keep", "--info-search-thorough", "--info-search-time", "--info-search-csv",
    "--info-workers",
)  # fmt: skip
"""Options that only a search uses."""
SCRIPT_ENDINGS: Final = (".sh", ".slurm", ".sbatch")
"""Endings of names that are taken for launch scripts even if there is no such file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoOptions:
    """Values of the --info options, one field each."""

    engine: Literal["formula", "shadow", "both"] = "formula"
    gpu: str | None = None
    gpu_memory: int | None = None
    """Bytes."""
    json: str | None = None
    """A file, or '-' for standard output."""
    detail: tuple[str, ...] = ()
    """Sections of the console report to print in full."""
    fail_on: tuple[str, ...] = ()
    """Verdicts that end with exit status 1 beside "does not fit": "tight", and "unknown" if there is none."""
    margin: Margin | None = None
    """Memory that should remain free; a launch that leaves less is tight."""
    against: tuple[str, ...] = ()
    """JSON reports to compare the report with."""
    log: str | None = None
    """The log of a run of the launch, to compare the report with."""
    html: str | None = None
    """A file for the report as a page for a browser."""
    timeline: str | None = None
    """A file for the timeline of an iteration."""
    record: str | None = None
    allocator: Literal["pool", "malloc"] | None = None
    """Allocation function of the CUDA recorder: cudaMallocAsync (pool, and the default) or cudaMalloc (malloc)."""
    check: str | None = None
    allow_truncated: bool = False
    """Compare with a trace whose recorder did not finish."""
    tolerance: float = 0.01
    rank: int | None = None
    """The global rank to record; None for the highest-memory rank."""
    layers: int | None = None
    """Number of decoder layers to record; None for all."""
    moe_imbalance: float = 1.0
    """Tokens of the experts of the highest-memory rank, relative to the mean."""
    network: float | None = None
    """Gigabytes per second of the network of one GPU in one direction; None for that of the GPU's usual machine."""
    hardware: str | None = None
    """A file with the speeds of a GPU."""
    calibration: tuple[str, ...] = ()
    """A file with measured efficiencies, and logs of runs of the launch."""
    calibrate: str | None = None
    """A file for the efficiencies of this machine, which are measured."""
    calibrate_disk: str | None = None
    """A folder on the disk that is measured, too."""
    efficiency: tuple[tuple[str, float], ...] = ()
    """Shares of the peaks that replace the efficiencies: flops and memory."""
    tokens: int | None = None
    """Tokens of the training."""
    price: float | None = None
    """Price of a GPU-hour."""
    faster: bool = False
    """Look for changes of one dimension that make the launch faster."""
    search: bool = False
    """Look for the fastest layouts that fit."""
    search_over: tuple[str, ...] = ()
    """Dimensions that the search changes; all usual ones if empty."""
    keep: tuple[str, ...] = ()
    """Options that the search must not change."""
    search_gpus: tuple[int, ...] = ()
    """Numbers of GPUs to search for."""
    search_fewest_gpus: bool = False
    """Look for the smallest number of GPUs."""
    search_days: float | None = None
    """Most days that the training may take with it."""
    search_max: str | None = None
    """An option whose largest value that fits is asked for."""
    search_thorough: bool = False
    """Prove all layouts of the result of a search, not only the first."""
    search_time: float | None = None
    """Seconds after which a search ends with what it has found; None for no limit."""
    search_csv: str | None = None
    """A file for the layouts that the search finds."""
    workers: str | None = None
    """Processes, or the address of a Dask scheduler; None for one process for each processor."""
    inference: Generation | None = None
    """What is generated; None for a training, and for what an inference script tells."""
    quantize: Quantization | None = None
    """Bits of weights, activations and cache of inference."""
    offload: Offload | None = None
    """Where weights, cache and activations of inference are, or a search for it; None for all on the GPU."""
    serving_engine: EngineName | None = None
    """The engine that serves requests; None for Megatron-LM."""
    serving: Serving | None = None
    """How requests are served; None for the defaults of the engine."""
    serving_search: ServingTarget | None = None
    """Look for the cheapest layouts that meet these times."""
    launch: bool = False
    set: tuple[str, ...] = ()
    """Words of options of Megatron that replace those of the launch."""
    unset: tuple[str, ...] = ()
    """Options of the launch that are left out."""
    lora: tuple[int, tuple[str, ...]] | None = None
    """Rank of adapters, and the linear layers that have one; all if none is named."""
    image_tokens: int | None = None
    """The most tokens of a sequence that are those of images; None if that is not known."""
    lora_regather: bool = False
    """Adapters gather their inputs again in the backward."""
    sample_length: int | None = None
    """Tokens of a sample of which several are packed into a sequence; None if a sequence is one sample."""
    megatron: str | None = None
    te: str | None = None
    """The version of Transformer Engine, or none; None for what `software.software_of` finds."""
    torch: str | None = None
    world_size: int | None = None
    """Number of GPUs; None for what the launcher gives."""
    gpus_per_node: int | None = None
    model: str | None = None
    """The name of a published model, or the path of its config.json."""
    print_options: bool = False
    strict: bool = False
    """Unknown options and an unknown vocabulary size are errors."""
    debug: bool = False
    """Internal errors are raised."""
    dry: bool = False
    """Print the launch commands of a script."""
    run_all: bool = False
    """Run a script without isolation, and also the commands that stand-ins replace, except launchers."""


class InfoOption(NamedTuple):
    """How one option is written and read."""

    value: str
    """What follows the option in `--help`; empty if it takes no value."""
    help: str
    """One line for `--help`."""
    read: Callable[[str, str | None], Any]
    """Converts the value, called with the option and its word. Raises InputError."""
    repeats: bool = False
    """The option may be given several times; its field has all values."""


OPTIONS: Final[dict[str, InfoOption]] = {
    "engine": InfoOption(
        "formula|shadow|both",
        "formulas (default), a run of megatron-core on tensors without data, or a comparison of both",
        choice("formula", "shadow", "both"),
    ),
    "gpu": InfoOption(
        "NAME",
        "target GPU, such as H100-80GB (default: the local GPU); list prints the known GPUs; several with --info-search",
        word,
    ),
    "gpu_memory": InfoOption("SIZE", "memory of the target GPU, such as 80GiB", size),
    "json": InfoOption("FILE", "write the report as JSON to this file; - is standard output", word),
    "detail": InfoOption(
        "LIST",
        "sections of the report to print in full, separated by commas",
        several("summary", "memory", "time", "groups", "communication", "tree", "full", "line", none="summary"),
    ),
    "fail_on": InfoOption(
        "LIST",
        "also exit with status 1 for these verdicts, separated by commas: tight, unknown",
        several("tight", "unknown", what="verdict that can be named here"),
    ),
    "margin": InfoOption("SIZE", "memory that should remain free, such as 5% or 4GiB; with less the launch is tight", margin),
    "against": InfoOption("FILE", "print what changed since the JSON report in this file; may be repeated", word, repeats=True),
    "log": InfoOption("FILE", "print what the log of a run of the launch measured beside the prediction, with likely causes", word),
    "html": InfoOption("FILE", "write the report as a page for a browser, with charts", word),
    "timeline": InfoOption("FILE", "write an iteration as a timeline for ui.perfetto.dev or chrome://tracing", word),
    "record": InfoOption("FILE", "run training steps of one rank and write the trace to this file", word),
    "allocator": InfoOption(
        "pool|malloc", "allocation function for --info-record on a GPU (default: pool)", choice("pool", "malloc")
    ),
    "check": InfoOption("FILE", "compare the formulas with the trace in this file", word),
    "allow_truncated": InfoOption("", "let --info-check use a trace whose recorder did not finish", flag),
    "tolerance": InfoOption("X", "relative difference above which a check fails (default: 0.01)", share),
    "rank": InfoOption("N", "rank for --info-record (default: the highest-memory rank)", integer(0)),
    "layers": InfoOption("N", "number of decoder layers for --info-record (default: all)", integer(1)),
    "moe_imbalance": InfoOption(
        "X", "tokens of the experts of the highest-memory rank, relative to the mean (default: 1)", number_from(1)
    ),
    "network": InfoOption(
        "GB/S", "network bandwidth of each GPU in GB/s, in one direction (default: that of a usual server with the GPU)", positive
    ),
    "hardware": InfoOption("FILE", "JSON file with the speeds of a GPU that is not known", word),
    "calibration": InfoOption(
        "FILE",
        "efficiencies of --info-calibrate, or the log of a run, to which they are fitted; may be repeated",
        word,
        repeats=True,
    ),
    "calibrate": InfoOption("FILE", "measure this machine, with the kernels of the launch, and write its efficiencies", word),
    "calibrate_disk": InfoOption("FOLDER", "with --info-calibrate: measure the disk of this folder as well, for offloading", word),
    "efficiency": InfoOption(
        "LIST",
        "simple time model: shares of the peak rates that are reached, such as flops=0.5,memory=0.9",
        shares("flops", "memory"),
    ),
    "tokens": InfoOption(
        "N", "tokens of the training, such as 15T or 300B, K is 1,000 (default: --train-iters or --train-samples)", count
    ),
    "price": InfoOption("X", "price of a GPU-hour, for the cost of the training", positive),
    "faster": InfoOption("", "name changes of one option that make a launch that fits faster (about a second)", flag),
    "search": InfoOption("", "list the fastest layouts of the launch that fit, with the same GPUs and global batch size", flag),
    "search_over": InfoOption(
        "LIST", "dimensions to search, such as tp,pp,cp,micro-batch,recompute (default: the usual ones)", words
    ),
    "keep": InfoOption("LIST", "options of Megatron that the search must not change, such as micro-batch-size", words),
    "search_gpus": InfoOption("LIST", "search for each of these numbers of GPUs, such as 64,128,256", integers(1)),
    "search_fewest_gpus": InfoOption("", "search for the smallest number of GPUs with which a layout fits", flag),
    "search_days": InfoOption("N", "with --info-search-fewest-gpus: the training takes at most so many days", positive),
    "search_max": InfoOption(
        "WHAT",
        "largest micro-batch-size or seq-length with which the launch fits; with --info-search in any layout",
        choice("micro-batch-size", "seq-length"),
    ),
    "search_thorough": InfoOption(
        "", "prove all layouts of the list, not only the first (default where it takes a few seconds)", flag
    ),
    "search_time": InfoOption(
        "SECONDS", "end the search after so many seconds, with the layouts found and a proven bound", positive
    ),
    "search_csv": InfoOption("FILE", "write the layouts that the search finds to this file", word),
    "workers": InfoOption("N|ADDRESS", "processes of the search, or tcp://HOST:PORT of a Dask scheduler", word),
    "inference": InfoOption(
        "LIST",
        "analyze inference with the model and layout: batch=8,prompt=2k,generate=256 for each replica; batch=max is the largest",
        generation,
    ),
    "quantize": InfoOption(
        "BITS", "bits of weights, activations and cache of inference, such as w4a16kv8; kv8 for the cache alone", quantization
    ),
    "offload": InfoOption(
        "LIST|search",
        "where inference has its tensors: weights=20/80/0,cache=0/100/0,activations=0/100/0 percent on GPU, host, disk",
        offload,
    ),
    "serving_engine": InfoOption(
        "|".join(ENGINE_NAMES),
        "engine of inference (default: megatron); the others batch continuously, and batch is the number of clients",
        choice(*ENGINE_NAMES),
    ),
    "serving": InfoOption(
        "LIST", "of a serving engine: requests of a client, prefix, chunk, draft, memory=0.9; see docs/serving.md", serving
    ),
    "serving_search": InfoOption(
        "LIST", "look for the cheapest layouts and batches with these mean times: first=500ms,token=30ms", target
    ),
    "set": InfoOption(
        "OPTIONS", "options of Megatron in the place of those of the launch, such as '--micro-batch-size 2'", options_of_launch
    ),
    "unset": InfoOption("LIST", "options of the launch to leave out, such as sequence-parallel", words),
    "lora": InfoOption(
        "RANK[:LIST]", "train LoRA adapters beside frozen weights, such as 16 or 16:linear_qkv,linear_proj (default: all)", lora
    ),
    "lora_regather": InfoOption(
        "", "with --info-lora and sequence parallelism: gather inputs of adapters again in the backward, do not keep them", flag
    ),
    "image_tokens": InfoOption(
        "N", "of a vision-language model: tokens of each sequence that are those of images, at most (default: all)", integer(0)
    ),
    "sample_length": InfoOption(
        "N", "tokens of each sample packed into a sequence: sum of their squares / sum of lengths (default: 512)", integer(1)
    ),
    "launch": InfoOption("", "start the training if the launch fits (not with a script)", flag),
    "megatron": InfoOption("VERSION", "Megatron-LM release such as 0.16.1 or 2023, or a checkout, whose parser is executed", word),
    "te": InfoOption(
        "VERSION|none",
        "Transformer Engine of the training (default: the installed one, or that of the NGC container of the release)",
        version("Transformer Engine", "2.11", newest=2, none=True),
    ),
    "torch": InfoOption("VERSION", "PyTorch of the training (default: as for --info-te)", version("PyTorch", "2.10", newest=2)),
    "world_size": InfoOption("N", "number of GPUs (default: what the launcher or the environment gives)", integer(1)),
    "gpus_per_node": InfoOption("N", "GPUs per node, with --info-world-size (default: 8 or fewer)", integer(1)),
    "model": InfoOption("NAME|FILE", "model by its Hugging Face name, such as meta-llama/Llama-3.1-70B, or config.json", word),
    "print_options": InfoOption("", "print the options of Megatron-LM, with those of --info-model, and stop", flag),
    "strict": InfoOption("", "unknown options and an unknown vocabulary size are errors", flag),
    "debug": InfoOption("", "print the traceback of an internal error", flag),
    "dry": InfoOption("", "print the launches of a script without analyzing them; the script itself runs", flag),
    "run_all": InfoOption("", "run a script without isolation: its commands change this machine, and pip, git and ssh run", flag),
}
"""By field of `InfoOptions`."""
FLAGS: Final = {PREFIX + field.replace("_", "-"): field for field in OPTIONS}


def usage(commands: Sequence[str]) -> str:
    """The text of `--help`. `commands`: its lines about the commands."""
    lines = [
        "Usage: get-training-info COMMAND TARGET [options]",
        "       get-training-info SCRIPT.sh [arguments] [--info options]",
        "       get-training-info [torchrun options] [pretrain_gpt.py] [Megatron options] [--info options]",
        "",
        "Predicts the memory of each GPU of a Megatron-LM launch, whether it fits, how long it takes, and which ranks communicate.",
        "",
        *commands,
        "",
        "Without a command:",
        "",
        "A launch script runs with its launchers replaced: torchrun, deepspeed, accelerate and python with a training script,",
        "also under srun, mpirun, ray, nsys and containers. It runs in a copy of the file system that is thrown away, with its",
        "own processes and without a network (Linux namespaces, or a preloaded library; SECURITY.md has conditions and limits).",
        "Without a script, options of torchrun and Megatron keep their meaning.",
        "The argument parser of a Megatron-LM checkout in the working folder, next to the training script or on PYTHONPATH is",
        "executed. --info-megatron RELEASE avoids that.",
        "",
        "Options of this program:",
        "",
    ]
    lines += [f"  {_shown(name):<38} {OPTIONS[field].help}" for name, field in FLAGS.items()]
    lines += [
        "",
        "Also: --help, --version, --info-gpu list, --info-model list.",
        "",
        "A trace of --info-record for PyTorch's memory viewer: python -m allocator_hook.visualizer TRACE FILE.",
        "",
        "Exit status: 0 the launch fits or no GPU is known, 1 it does not fit (or --info-fail-on), 2 invalid or unsupported input,",
        "3 a check failed, 70 an error of this program, 130 interrupted.",
    ]
    return "\n".join(lines)


def _shown(name: str) -> str:
    value = OPTIONS[FLAGS[name]].value
    return f"{name} {value}" if value else name


def takes_value(name: str) -> bool:
    """Whether the option `name` takes a value. Raises InputError for an unknown --info option."""
    if name not in FLAGS:
        raise InputError(name, "is not an option", f"did you mean {_nearest(name)}?")
    return OPTIONS[FLAGS[name]].value != ""


def separated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The --info options with their values, and the other words. Raises InputError for an unknown --info option."""
    own: list[str] = []
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not name.startswith(PREFIX):
            others.append(word)
            continue
        own.append(word)
        if takes_value(name) and not equals and rest:
            own.append(rest.pop(0))
    return own, others


def has_value_after(name: str, following: Sequence[str]) -> bool:
    """Whether the first of the following words is the value of an option; options of the launch begin with dashes."""
    return bool(following) and (name in (SET, UNSET) or not is_option(following[0]))


def value_of(name: str, argv: Sequence[str]) -> str | None:
    """The value of an option in `argv`, of several the last; None if it is not given or has no value."""
    value = None
    for position, text in enumerate(argv):
        given, equals, attached = text.partition("=")
        if given == name:
            value = attached if equals else next(iter(argv[position + 1 :]), None)
    return value


def asks_for_search(argv: Sequence[str]) -> bool:
    """Whether the words of a launch ask for a search. Raises InputError for options of a search without one."""
    names = {word.partition("=")[0] for word in argv}
    if names.intersection(ASKING):
        return True
    for option in OF_SEARCH:
        if option in names:
            raise InputError(option, "is only used with --info-search", "add --info-search, or leave it out")
    if "," in (value_of(GPU, argv) or ""):
        raise InputError(GPU, "several GPUs are compared by a search only", "name one GPU, or add --info-search")
    return False


def read_info_options(pairs: Iterable[tuple[str, str | None]]) -> InfoOptions:
    """Reads (option, value) pairs. Of equal options that do not repeat the last one wins.

    Raises InputError for a missing or invalid value, and for a file that two options name.
    """
    options = InfoOptions()
    for name, text in pairs:
        option = OPTIONS[FLAGS[name]]
        if option.value and not text:
            raise InputError(name, "has no value", f"write {_shown(name)}")
        field, value = FLAGS[name], option.read(name, text)
        if option.repeats:
            value = (*getattr(options, field), value)
        options = replace(options, **{field: value})
    check_files(options)
    return options


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    shorter = max((flag for flag in FLAGS if name.startswith(flag)), key=len, default=None)
    longer = next((flag for flag in FLAGS if flag.startswith(name)), None)
    return shorter or longer or (get_close_matches(name, FLAGS, n=1, cutoff=0.0) or [PREFIX + "detail"])[0]
