"""First states of the explorer: the examples of the page, and a layout for the name of a model without options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Final, NamedTuple

from analyzer.cli.explorer.launch_text import LaunchText
from analyzer.cli.explorer.state import USUAL_GPU, Read, State, Value, options_in_text, read
from analyzer.errors import AnalyzerError
from analyzer.launch.info_options import separated, value_of
from analyzer.launch.launchers.world import USUAL_GPUS_PER_NODE

BATCH: Final = 1024
"""Sequences of a global batch that a model gets, as the commands of the program assume."""
SHARE: Final = 0.5
"""Share of the GPU that weights, gradients and optimizer states may take in a first layout, so that activations fit beside them."""
LAYOUT: Final = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--expert-model-parallel-size")
MOST_STAGES: Final = 24


def _model(name: str, gpus: int, options: str, batch: int = BATCH) -> State:
    return State(launch=f"{name} {options} --global-batch-size {batch}".replace("  ", " "), gpu=USUAL_GPU, gpus=gpus)


EXAMPLES: Final[Mapping[str, State]] = {
    "Llama 3.1 70B on 64 GPUs": _model(
        "meta-llama/Llama-3.1-70B", 64, "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4", 256
    ),
    "Llama 3.1 8B on 8 GPUs": _model("meta-llama/Llama-3.1-8B", 8, "--tensor-model-parallel-size 2 --sequence-parallel", 128),
    "Mixtral 8x7B on 32 GPUs": _model(
        "mistralai/Mixtral-8x7B-v0.1", 32, "--expert-model-parallel-size 8 --pipeline-model-parallel-size 4", 256
    ),
    "Qwen3 30B-A3B on 16 GPUs": _model("Qwen/Qwen3-30B-A3B", 16, "--expert-model-parallel-size 8", 256),
}
"""Launches of the page by their names."""


class _Size(NamedTuple):
    """A model as far as a first layout depends on it."""

    shared: int
    """Parameters outside of routed experts."""
    routed: int
    """Those of routed experts."""
    layers: int
    experts: int
    capacity: int


class _Layout(NamedTuple):
    gpus: int
    tensor: int
    pipeline: int
    expert: int


def first_state(state: State, text: LaunchText) -> State:
    """The state of a text that was pasted: for the name of a model without a layout, one whose model states fit."""
    given = options_in_text(text)
    if text.kind != "model" or state.set or any(flag in given for flag in LAYOUT):
        return state
    batch: dict[str, Value] = {} if "--global-batch-size" in given else {"--global-batch-size": BATCH}
    gpus = state.gpus or _number(value_of("--info-world-size", separated(text.words)[0]))
    start = replace(state, gpus=gpus or USUAL_GPUS_PER_NODE, set=batch)
    try:
        model = _size(read(start))
    except AnalyzerError:
        return start
    for layout in _layouts(model, gpus):
        found = replace(start, gpus=layout.gpus, set={**batch, **_options(layout)})
        if _bytes_of_states(model, layout) <= SHARE * model.capacity and _is_legal(found):
            return found
    return start


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _size(found: Read) -> _Size:
    from analyzer.predict import predict

    job = found.launch.job
    report = predict(job)
    routed = report.parameters_routed_experts
    experts = 1 if job.model.moe is None else job.model.moe.num_experts
    return _Size(report.parameters - routed, routed, job.model.num_layers, experts, job.hardware.capacity_bytes or 0)


def _layouts(model: _Size, gpus: int | None) -> Iterator[_Layout]:
    """Layouts in the order in which they are tried: few GPUs first, and for each number little communication first."""
    stages = [each for each in range(1, MOST_STAGES + 1) if model.layers % each == 0]
    tensors = (1, 2, 4, 8)
    experts = [each for each in (1, 2, 4, 8, 16, 32, 64) if model.experts % each == 0]
    nodes = sorted({number << power for number in stages for power in range(8)})
    for size in [gpus] if gpus else [USUAL_GPUS_PER_NODE * each for each in nodes]:
        for tensor, pipeline, expert in sorted(product(tensors, stages, experts), key=lambda each: (each[0] * each[1], each[2])):
            if size % (tensor * pipeline) == 0 and size % (tensor * pipeline * expert) == 0:
                yield _Layout(size, tensor, pipeline, expert)


def _bytes_of_states(model: _Size, layout: _Layout) -> float:
    """Bytes of bf16 weights, fp32 gradients and the states of Adam on a rank, with the distributed optimizer.

    Source: the table in the documentation of the distributed optimizer of Megatron-LM, 6 + 12 / d bytes for each parameter.
    """
    ranks = layout.tensor * layout.pipeline
    of_rank = model.shared / ranks + model.routed / (ranks * layout.expert)
    return 6 * of_rank + 12 * (model.shared + model.routed) / layout.gpus


def _options(layout: _Layout) -> dict[str, Value]:
    found: dict[str, Value] = {}
    if layout.tensor > 1:
        found |= {"--tensor-model-parallel-size": layout.tensor, "--sequence-parallel": True}
    if layout.pipeline > 1:
        found["--pipeline-model-parallel-size"] = layout.pipeline
    if layout.expert > 1:
        found["--expert-model-parallel-size"] = layout.expert
    return found


def _is_legal(state: State) -> bool:
    try:
        read(state)
    except AnalyzerError:
        return False
    return True
