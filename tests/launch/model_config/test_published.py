"""The catalogue of published models, and configurations in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.launch.model_config.published import CATALOGUE, read_configuration
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
