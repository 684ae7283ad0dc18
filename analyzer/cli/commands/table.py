"""The commands: the question of each, its options, and the options of the drop-in form that it stands for.

The options of a command are `--info` options without that prefix. `NAMES` has those with another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

Target = Literal["launch", "two launches", "none"]


class Command(NamedTuple):
    """A command."""

    help: str
    """The question that it answers, as one line."""
    words: tuple[str, ...]
    """The `--info` options that it stands for."""
    options: tuple[str, ...]
    """Fields of `InfoOptions` that are options of the command, beside `COMMON`."""
    example: str
    """Words of an example, after the name of the command."""
    target: Target = "launch"
    common: bool = True
    """Whether the command has the options in `COMMON`."""


COMMON: Final = (
    "gpu", "gpu_memory", "world_size", "gpus_per_node", "margin", "network", "hardware", "calibration", "moe_imbalance", "set",
    "unset", "lora", "lora_regather", "sample_length", "image_tokens",
    "megatron", "te", "torch", "json", "strict", "debug",
)  # fmt: skip
"""Options of every command that analyzes a launch."""
_SEARCH: Final = ("search_over", "keep", "workers")
NAMES: Final[Mapping[str, str]] = {
    "world_size": "--gpus",
    "search_over": "--over",
    "search_gpus": "--compare-gpus",
    "search_days": "--days",
    "search_thorough": "--thorough",
    "search_time": "--seconds",
    "search_csv": "--csv",
}
"""The names of options that are not the field with dashes."""
GENERATION: Final = ("batch", "prompt", "generate")
"""The options of `serve` that are parts of `--info-inference`."""
OF_EXPLORE: Final[Mapping[str, tuple[str, str]]] = {
    "--port": ("N", "the port of the local server; a free one if it is left out"),
    "--no-browser": ("", "print the address of the page and open no browser"),
}
"""The options of `explore` that are no `--info` options, with the name of their value and their help."""
COMMANDS: Final[Mapping[str, Command]] = {
    "fit": Command(
        "Does the launch fit, and what needs the memory?",
        ("--info-faster", "--info-detail", "memory"),
        ("detail", "fail_on", "engine", "against", "log", "html", "timeline"),
        "train.sh --gpu H100-80GB",
    ),
    "time": Command(
        "How long does the training take, and what does it cost?",
        ("--info-faster", "--info-detail", "time"),
        ("tokens", "price", "efficiency", "detail", "against", "log", "html", "timeline"),
        "train.sh --gpu H100-80GB --tokens 15T --price 2.5",
    ),
    "search": Command(
        "Which layout is the fastest that fits?",
        ("--info-search",),
        (*_SEARCH, "search_gpus", "search_thorough", "search_time", "search_csv", "tokens", "price", "html"),
        "train.sh --gpu H100-80GB --over tp,pp,recompute",
    ),
    "gpus": Command(
        "How many GPUs are needed, for any layout or for a training of so many days?",
        ("--info-search-fewest-gpus",),
        ("search_days", *_SEARCH, "tokens", "price"),
        "meta-llama/Llama-3.1-70B --gpu H100-80GB --tokens 1T --days 30",
    ),
    "context": Command(
        "How long can sequences be, in any layout?",
        ("--info-search", "--info-search-max", "seq-length"),
        _SEARCH,
        "meta-llama/Llama-3.1-70B --gpu H100-80GB --gpus 64",
    ),
    "batch": Command(
        "How large can the micro-batch be, in any layout?",
        ("--info-search", "--info-search-max", "micro-batch-size"),
        _SEARCH,
        "train.sh --gpu H100-80GB",
    ),
    "serve": Command(
        "How much memory and time does generating text take?",
        (),
        ("quantize", "offload", "serving_engine", "serving", "serving_search", "price", "html"),
        "meta-llama/Llama-3.1-8B --gpu H100-80GB --gpus 1 --batch 8 --prompt 2048 --generate 256",
    ),
    "compare": Command(
        "What changes from one launch, or its JSON report, to another?",
        ("--info-detail", "line"),
        ("detail", "html"),
        "old.sh new.sh --gpu H100-80GB",
        target="two launches",
    ),
    "explore": Command(
        "What changes if the launch does? A page in the browser shows it at once.",
        (),
        ("tokens", "price"),
        "train.sh --gpu H100-80GB",
    ),
    "models": Command("Which models are known by name?", ("--info-model", "list"), (), "", target="none", common=False),
    "hardware": Command("Which GPUs are known?", ("--info-gpu", "list"), (), "", target="none", common=False),
}


EXPLORE: Final = "explore"
"""The command that serves a page."""
COMPLETION: Final = "completion"
"""The command that prints the completion of a shell."""


def flag_of_field(field: str) -> str:
    """The option of a command for a field of `InfoOptions`."""
    return NAMES.get(field, "--" + field.replace("_", "-"))


def fields_of(name: str) -> tuple[str, ...]:
    """The fields that are options of a command."""
    command = COMMANDS[name]
    return (*command.options, *(each for each in COMMON if command.common and each not in command.options))
