"""The upper bound of the memory for images: it covers what the code of transformers stores, and decides verdicts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.vision import vision_weights
from analyzer.memory.images import after_layers, before_layers, image_bytes, of_layer
from analyzer.predict.formula import predict
from analyzer.specs import HardwareSpec, TrainingJob
from analyzer.units import GIB
from tests.data_files import data_file
from tests.frameworks.files import job

COUNTED: list[dict[str, Any]] = json.loads(data_file("vision_activations.json").read_text())["encoders"]
LORA = "megatron sft --model Qwen/Qwen2.5-VL-7B-Instruct --tuner_type lora --packing true --max_length 2048 --info-world-size 2"


WITH_PROJECTION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
"""Types whose module in transformers has the projection too."""


def of_launch(folder: Path, command: str = LORA, *, gib: float = 80) -> TrainingJob:
    found = job(folder, *command.split(), "--micro_batch_size", "1", "--global_batch_size", "4")
    return replace(found, hardware=HardwareSpec(name="GPU", capacity_bytes=int(gib * GIB)))


@pytest.mark.parametrize("counted", COUNTED, ids=lambda each: each["model_type"])
def test_layer_stores_and_allocates_no_more_than_its_bound(counted: dict[str, Any]) -> None:
    config = Configuration({"model_type": counted["model_type"], "vision_config": counted["vision_config"]}, "a model")
    weights = vision_weights(config, width=4096)
    encoder = [each for each in weights.weights if not each.name.startswith(weights.projection)]
    layer, patches = of_layer(encoder), counted["patches"]
    assert 1 <= layer.stored * patches / counted["stored_by_layer"] < 1.4
    assert layer.made * patches >= counted["made_by_layer"]
    before = before_layers(encoder, layer.width) * patches
    assert before >= counted["stored_outside"]
    projected = [each for each in weights.weights if each.name.startswith(weights.projection)]
    tokens = patches // 4 if counted["model_type"] in WITH_PROJECTION else 0
    assert before + after_layers(encoder, projected) * tokens >= counted["made_outside"]


def test_trained_encoder_stores_its_layers(tmp_path: Path) -> None:
    """In full fine-tuning the layers of 8,192 patches are stored, and with a frozen encoder those of one layer are temporary."""
    frozen = of_launch(tmp_path)
    trained = of_launch(tmp_path, LORA.replace("lora", "full") + " --freeze_vit false")
    counted = next(each for each in COUNTED if each["model_type"] == "qwen2_5_vl")
    layers, patches = 32, 4 * 2048
    of_layers = layers * counted["stored_by_layer"] * patches // counted["patches"]
    assert image_bytes(trained) - image_bytes(frozen) >= of_layers


def test_images_of_microbatches_in_flight_are_stored(tmp_path: Path) -> None:
    one = of_launch(tmp_path)
    four = replace(one, parallel=replace(one.parallel, pipeline=4), batch=replace(one.batch, micro_batch_size=1, microbatches=64))
    eight = replace(four, parallel=replace(one.parallel, pipeline=8))
    added = image_bytes(four) - image_bytes(one)
    assert added > 0
    assert image_bytes(eight) - image_bytes(four) == added * 4 / 3  # 1, 4 and 8 microbatches
    interleaved = replace(four, parallel=replace(four.parallel, virtual_pipeline=2))
    assert image_bytes(interleaved) - image_bytes(one) == added * 7 / 3  # 8 of chunk 0, after 7 and 4 at the end of the warm-up


def test_launch_fits_with_the_bound_of_its_images(tmp_path: Path) -> None:
    found = predict(of_launch(tmp_path)).verdict
    needed = predict(of_launch(tmp_path)).ranks[0].memory.device_bytes
    assert found.state == "fits"
    assert found.images_bytes == image_bytes(of_launch(tmp_path))
    assert found.headroom_bytes == 80 * GIB - needed - found.images_bytes


def test_no_verdict_between_text_and_the_bound_of_images(tmp_path: Path) -> None:
    launch = of_launch(tmp_path)
    needed, images = predict(launch).ranks[0].memory.device_bytes, image_bytes(launch)
    between = predict(of_launch(tmp_path, gib=(needed + images / 2) / GIB)).verdict
    assert between.fits is None
    assert "with which it may not fit; --info-image-tokens N bounds them" in between.withheld
    below = predict(of_launch(tmp_path, gib=(needed - GIB) / GIB)).verdict
    assert below.state == "does not fit"
    assert below.images_bytes == 0
