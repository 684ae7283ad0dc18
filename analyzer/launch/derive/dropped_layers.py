"""Layers that do not divide over the pipeline, which Megatron-LM before core 0.11 leaves out without a message.

Up to 0.10, `get_num_layers_to_build` (megatron/core/transformer/transformer_block.py) rounds the layers of a pipeline rank down.
Later releases, and the legacy models, refuse such a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from analyzer.launch.derive.reading import RELEASE_2023, since, size, switched_on
from analyzer.specs.release import release_number

if TYPE_CHECKING:
    from analyzer.launch.derive.launch_input import LaunchInput

_OTHER_SPLITS = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)  # fmt: skip


def drops_layers(release: str) -> bool:
    """Whether models of Megatron core in `release` leave out layers that do not divide."""
    return release != RELEASE_2023 and release_number(release) < release_number("0.11")


def splits_layers(values: Mapping[str, object], release: str) -> bool:
    """Whether `release` accepts the number of layers and of pipeline ranks in `values`, arguments by dest."""
    layers, stages = values.get("num_layers"), values.get("pipeline_model_parallel_size", 1)
    if drops_layers(release) or any(values.get(dest) for dest in _OTHER_SPLITS):
        return True
    return not isinstance(layers, int) or not isinstance(stages, int) or stages < 1 or layers % stages == 0


def layers_built(launch: LaunchInput, num_layers: int) -> int:
    """`num_layers`, or the smaller number that the release builds. The report then begins with a statement."""
    arguments = launch.arguments
    stages = size(arguments, "pipeline_model_parallel_size")
    legacy = not since(arguments, "0.8") and not switched_on(arguments, "use_mcore_models")
    if not drops_layers(arguments.release) or legacy or num_layers < stages or num_layers % stages == 0:
        return num_layers
    if any(arguments.get(dest) for dest in _OTHER_SPLITS):
        return num_layers
    built = num_layers // stages * stages
    release = arguments.release
    release = arguments.release
    launch.state_unknown(
        f"--num-layers {num_layers} does not divide over {stages} pipeline ranks: Megatron-LM {release} builds {built} layers "
        "without a message, and releases since 0.11 refuse it."
    )
    return built
