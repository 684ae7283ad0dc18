"""The smallest number of GPUs for a layout, for launches that do not give the number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from analyzer.launch.derive.reading import size
from analyzer.launch.launchers.world import World

if TYPE_CHECKING:
    from analyzer.launch.derive.launch_input import LaunchInput

OPTION: Final = "--info-world-size"


def smallest_world(launch: LaunchInput) -> World:
    """The smallest number of GPUs that the sizes of parallelism allow. The report begins with the assumption.

    Megatron splits the ranks twice (`initialize_model_parallel`): into tensor × context × pipeline, and into expert tensor ×
    expert × pipeline. In both, the data-parallel ranks must be a multiple of the optimizer instances.
    """
    arguments = launch.arguments
    tensor, pipeline = (size(arguments, f"{name}_model_parallel_size") for name in ("tensor", "pipeline"))
    dense = tensor * pipeline * size(arguments, "context_parallel_size")
    expert_tensor = size(arguments, "expert_tensor_parallel_size") if arguments.get("expert_tensor_parallel_size") else tensor
    sparse = expert_tensor * pipeline * size(arguments, "expert_model_parallel_size")
    instances = size(arguments, "num_distributed_optimizer_instances")
    count = math.lcm(dense * instances, sparse * instances)
    analyzed = f"{count} {'is' if count == 1 else 'are'} analyzed"
    launch.state_unknown(
        f"No number of GPUs is given, so {analyzed}, the smallest number that the layout allows. "
        f"Add {OPTION} N, or --info-search-fewest-gpus to find how many are enough."
    )
    return World.of(count)
