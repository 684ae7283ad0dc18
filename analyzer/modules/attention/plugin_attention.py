"""Attention that a plugin of a framework builds, or adds modules to: its weights. Their activations are not counted.

Source: slime_plugins/models/{qwen3_5,qwen3_next}.py and slime_plugins/models/glm5/glm5.py of slime, August 2026.
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Parameter


def with_plugin(shapes: Shapes, own: Module) -> Module:
    """The attention of a layer in `PluginLayers.layers`. `own`: that of the model, which the plugin replaces or extends."""
    plugin = shapes.model.plugin
    if plugin is None:
        raise ValueError("the model has no attention of a plugin")
    weights = Module(
        name="plugin",
        kind=ModuleKind.PLUGIN_WEIGHTS,
        function=True,
        parameters=tuple(
            Parameter(name=name, shape=shape, dtype=shapes.dtype, sequence_parallel=plugin.summed and shapes.sp)
            for name, shape in plugin.weights
        ),
        source=plugin.plugin,
    )
    if plugin.replaces:
        return Module(name=own.name, kind=ModuleKind.ATTENTION, children=(weights,), source=plugin.plugin)
    return replace(own, children=(*own.children, weights))
