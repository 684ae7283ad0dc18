"""Counts the bytes that encoders of images of transformers store and allocate for a patch, and prints them as JSON.

    python tools/vision_activations.py > tests/data/vision_activations.json

It needs torch and transformers. Each encoder runs with two and with three layers of its published width, on the CPU in bf16, with
an attention that stores queries, keys, values, its output and a value for each row of scores. The difference is a layer, and the
rest what is outside them. stored: what is saved for the backward, other than weights. made: all tensors of a forward.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import torch
import transformers  # type: ignore[import-not-found]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # type: ignore[import-not-found]

_PATCHES: Final = 1024
_SIDE: Final = 32
_IMAGE: Final = 448


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(query)
        ctx.save_for_backward(query, key, value, output, torch.empty(query.shape[:-1]))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError


def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any) -> tuple[Any, None]:
    del module, attention_mask, kwargs
    queries, keys, values = (each.transpose(1, 2).contiguous() for each in (query, key, value))
    return _Attention.apply(queries, keys, values), None  # type: ignore[no-untyped-call]


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the sizes of storages that operations create."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                self.bytes += each.untyped_storage().nbytes()
        return result


def _count(model: Any, inputs: dict[str, Any]) -> tuple[int, int]:
    """Bytes stored, and bytes made, in a forward."""
    model = model.to(torch.bfloat16).train()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "flash_counted"
    weights = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
    stored: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            stored[storage._cdata] = storage
        return tensor

    made = _Made()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), made:
        model(**inputs)
    return sum(each.nbytes() for each in stored.values()), made.bytes


def _row(model_type: str, fields: dict[str, Any], classes: tuple[Any, Any], depth: str, inputs: dict[str, Any]) -> dict[str, Any]:
    config, model = classes
    two, three = (_count(model(config(**fields, **{depth: layers})), inputs) for layers in (2, 3))
    row: dict[str, Any] = {"model_type": model_type, "vision_config": fields, "patches": _PATCHES}
    for name, first, second in zip(("stored", "made"), two, three, strict=True):
        row |= {f"{name}_by_layer": second - first, f"{name}_outside": 3 * first - 2 * second}
    return row


def _grid(patch: int) -> dict[str, Any]:
    """Pixels of patches of two frames, and the grid of patches."""
    return {"hidden_states": torch.zeros(_PATCHES, 6 * patch**2), "grid_thw": torch.tensor([[1, _SIDE, _SIDE]])}


def rows() -> list[dict[str, Any]]:
    """The bytes of each encoder."""
    models = transformers.models
    tile = {"pixel_values": torch.zeros(1, 3, _IMAGE, _IMAGE, dtype=torch.bfloat16)}
    sized = {"image_size": _IMAGE, "patch_size": 14}
    qwen2, qwen2_5, qwen3, glm = models.qwen2_vl, models.qwen2_5_vl, models.qwen3_vl, models.glm4v
    intern, siglip, pixtral = models.internvl, models.siglip, models.pixtral
    of_qwen2_5 = (
        qwen2_5.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig,
        qwen2_5.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel,
    )
    of_qwen2 = (
        qwen2.configuration_qwen2_vl.Qwen2VLVisionConfig,
        qwen2.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel,
    )
    of_qwen3 = (qwen3.configuration_qwen3_vl.Qwen3VLVisionConfig, qwen3.modeling_qwen3_vl.Qwen3VLVisionModel)
    of_glm = (glm.configuration_glm4v.Glm4vVisionConfig, glm.modeling_glm4v.Glm4vVisionModel)
    of_intern = (intern.configuration_internvl.InternVLVisionConfig, intern.modeling_internvl.InternVLVisionModel)
    of_siglip = (siglip.configuration_siglip.SiglipVisionConfig, siglip.modeling_siglip.SiglipVisionModel)
    of_pixtral = (pixtral.configuration_pixtral.PixtralVisionConfig, pixtral.modeling_pixtral.PixtralVisionModel)
    wide = {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "fullatt_block_indexes": [1]}
    deep = {"hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096, "deepstack_visual_indexes": [0]}
    gated = {"hidden_size": 1536, "out_hidden_size": 4096, "intermediate_size": 10944}
    large = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, **sized}
    return [
        _row("qwen2_vl", {"embed_dim": 1280, "hidden_size": 3584}, of_qwen2, "depth", _grid(14)),
        _row("qwen2_5_vl", wide, of_qwen2_5, "depth", _grid(14)),
        _row("qwen3_vl", deep, of_qwen3, "depth", _grid(16)),
        _row("glm4v", gated, of_glm, "depth", _grid(14)),
        _row("internvl", {}, of_intern, "num_hidden_layers", tile),
        _row("gemma3", large, of_siglip, "num_hidden_layers", tile),
        _row("mistral3", sized, of_pixtral, "num_hidden_layers", {**tile, "image_sizes": torch.tensor([[_IMAGE, _IMAGE]])}),
    ]


if __name__ == "__main__":
    ALL_ATTENTION_FUNCTIONS.register("flash_counted", _attention)
    found = {"torch": torch.__version__, "transformers": transformers.__version__, "encoders": rows()}
    json.dump(found, sys.stdout, indent=1)
    print()
