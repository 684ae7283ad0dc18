"""The catalogue of published models, and configurations in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.model_config.published import CATALOGUE, published_model, published_names, read_configuration
from analyzer.launch.model_config.refused import refusal_of_name
from tests.launch.model_config.configurations import NOWHERE, published, write_config


@pytest.mark.parametrize(
    "reference",
    ["meta-llama/Llama-3.1-70B", "META-LLAMA/llama-3.1-70b", "llama-3.1-70b", "meta-llama/Llama-3.3-70B-Instruct"],
)
def test_names_in_any_case_and_without_organization(reference: str) -> None:
    config = read_configuration(reference, folder=NOWHERE)
    assert config.values == published()["meta-llama/Llama-3.1-70B"]["config"]


def test_every_name_is_found_and_stands_for_one_model() -> None:
    entries = published()
    names = [each for name, entry in entries.items() for each in (name, *entry["aliases"])]
    assert len({name.rpartition("/")[2].lower() for name in names}) == len(names)
    for name, entry in entries.items():
        for each in (name, *entry["aliases"]):
            assert read_configuration(each, folder=NOWHERE).values == entry["config"], each


def test_every_model_has_a_source() -> None:
    sources = json.loads(CATALOGUE.read_text())["sources"]
    assert {entry["source"] for entry in published().values()} == set(sources)
    assert all("https://" in text for text in sources.values())
    assert len(published()) >= 40


def test_paths_are_relative_to_the_folder_of_the_launch(tmp_path: Path) -> None:
    write_config(tmp_path, "google/gemma-2b")
    for reference in ("config.json", ".", str(tmp_path), str(tmp_path / "config.json")):
        assert read_configuration(reference, folder=tmp_path).values == published()["google/gemma-2b"]["config"]


def test_a_local_folder_precedes_a_published_name(tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    write_config(tmp_path / "gpt2", "google/gemma-2b")
    assert read_configuration("gpt2", folder=tmp_path).model_type == "gemma"


@pytest.mark.parametrize(
    ("reference", "content", "part"),
    [
        ("nowhere/config.json", None, "was not found"),
        ("folder", None, "the folder folder has no config.json"),
        ("broken.json", "{", "is not JSON"),
        ("list.json", "[1]", "is not a JSON object"),
        ("deep.json", "[" * 100_000, "is nested too deeply"),
        ("binary.json", "\udcff", "is not JSON"),
        ("meta-llama/Lama-3.1-70B", None, "or use meta-llama/Llama-3.1-70B"),
        ("Llama-3.1-7B", None, "meta-llama/Llama-3.1-8B"),
        ("zzz", None, "is neither a file nor a published model"),
    ],
)
def test_faults(reference: str, content: str | None, part: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / reference).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(InputError) as error:
        read_configuration(reference, folder=tmp_path)
    assert error.value.option == "--info-model"
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("google/gemma-4-31B", "embeddings in each layer"),
        ("moonshotai/Kimi-Linear-48B-A3B-Base", "Kimi delta attention"),
        ("MiniMaxAI/MiniMax-Text-01", "lightning attention"),
        ("llava-hf/llava-v1.6-mistral-7b-hf", "depends on the size of an image"),
        ("nvidia/Llama-3.1-Nemotron-Nano-VL-8B-V1", "examples/multimodal/train.py"),
        ("google-t5/t5-11b", "pretrain_t5.py"),
    ],
)
def test_models_of_refused_families_are_refused_by_name(name: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=part) as caught:
        read_configuration(name, folder=tmp_path)
    assert name in str(caught.value)


def test_no_published_model_has_the_beginning_of_a_refused_name() -> None:
    assert not [name for name in published_names() if refusal_of_name(name) is not None]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", "Qwen/Qwen3-235B-A22B"),
        ("nvidia/Qwen3-235B-A22B-NVFP4", "Qwen/Qwen3-235B-A22B"),
        ("LLM-Research/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("/checkpoints/Qwen3-4B-Instruct-2507-mcore/", "Qwen/Qwen3-4B"),
        ("modelscope/Llama-2-7b-ms", "meta-llama/Llama-2-7b-hf"),
    ],
)
def test_names_of_other_trainings_and_dtypes_of_a_model(name: str, model: str) -> None:
    assert read_configuration(name, folder=NOWHERE).values == published()[model]["config"]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B-Vision", "Qwen/Qwen3-8B-2", "Qwen/Qwen3-7B-FP8", "meta-llama/Llama-FP8"])
def test_other_names_are_no_published_model(name: str) -> None:
    assert published_model(name) is None
    with pytest.raises(InputError, match="is neither a file nor a published model"):
        read_configuration(name, folder=NOWHERE)
