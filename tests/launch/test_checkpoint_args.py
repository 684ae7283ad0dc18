"""--use-checkpoint-args: the arguments of a checkpoint, read from a pickle that may be malicious."""

from __future__ import annotations

import argparse
import enum
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from analyzer.errors import InputError
from analyzer.launch.arguments import Arguments
from analyzer.launch.parse import parse


class Backend(enum.Enum):
    """Like the enums in Megatron's namespace."""

    auto = 5


class Storage:
    """Like the storage of a tensor, which torch.save writes next to the pickle."""


class TorchPickler(pickle.Pickler):
    """Pickles as torch.save does: storages by reference."""

    def persistent_id(self, value: Any) -> Any:
        return ("storage", "cuda:0", 1024) if isinstance(value, Storage) else None


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


ARGS = argparse.Namespace(
    num_layers=32, hidden_size=4096, num_attention_heads=32, swiglu=True, group_query_attention=True, num_query_groups=8,
    position_embedding_type="rope", attention_backend=Backend.auto, spec=["a", "b"], tensor_model_parallel_size=4,
    padded_vocab_size=50688, micro_batch_size=9, moe_layer_freq=None,
)  # fmt: skip


def save(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive, archive.open("archive/data.pkl", "w") as stream:
        TorchPickler(stream, protocol=2).dump(content)


@pytest.fixture
def load(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("100\n")
    return folder


def read(load: Path, *argv: str) -> Arguments:
    words = ["--use-checkpoint-args", "--load", str(load), "--micro-batch-size", "2", *argv]
    return parse(words, environ={}, folder=Path("/nowhere"))[0]


@pytest.mark.parametrize(
    "name",
    ["iter_0000100/common.pt", "iter_0000100/mp_rank_00/model_optim_rng.pt", "iter_0000100/mp_rank_00_000/model_optim_rng.pt"],
)
def test_model_options_come_from_the_checkpoint(load: Path, name: str) -> None:
    save(load / name, {"args": ARGS, "model": OrderedDict(weight=Storage()), "iteration": 100})
    arguments = read(load, "--hidden-size", "8192", "--num-query-groups", "4", "--tensor-model-parallel-size", "2")
    assert arguments.values["num_layers"] == 32
    assert arguments.values["hidden_size"] == 8192, "the command line takes precedence if Megatron allows it"
    assert arguments.values["num_query_groups"] == 8, "the checkpoint takes precedence if Megatron forces it"
    assert arguments.values["tensor_model_parallel_size"] == 2
    assert arguments.values["micro_batch_size"] == 2
    assert arguments.values["position_embedding_type"] == "rope"
    assert arguments.values["spec"] == ("a", "b")
    assert arguments.values["moe_layer_freq"] == 1
    assert {"num_layers", "swiglu"} <= arguments.given
    assert str(load / name) in arguments.assumptions[-1]
    parallel = read(load, "--use-mp-args-from-checkpoint-args", "--tensor-model-parallel-size", "2")
    assert parallel.values["tensor_model_parallel_size"] == 4


def test_the_step_or_the_release_folder_is_read(load: Path) -> None:
    save(load / "iter_0000007/common.pt", {"args": ARGS})
    assert read(load, "--ckpt-step", "7").values["num_layers"] == 32
    (load / "latest_checkpointed_iteration.txt").write_text("release")
    save(load / "release/common.pt", {"args": argparse.Namespace(num_layers=5)})
    assert read(load).values["num_layers"] == 5


def test_a_malicious_pickle_is_not_executed(load: Path, tmp_path: Path) -> None:
    trace = tmp_path / "it_ran"
    save(load / "iter_0000100/common.pt", {"bomb": Malicious(f"touch {trace}"), "args": ARGS})
    assert read(load).values["num_layers"] == 32
    save(load / "iter_0000100/common.pt", Malicious(f"touch {trace}"))
    with pytest.raises(InputError, match="contains no arguments"):
        read(load)
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"\x80\x02}q\x00."])
def test_a_damaged_file_is_refused(load: Path, content: bytes) -> None:
    (load / "iter_0000100").mkdir()
    (load / "iter_0000100/common.pt").write_bytes(content)
    with pytest.raises(InputError, match=r"common\.pt is not a file of torch\.save"):
        read(load)


def test_a_truncated_pickle_is_refused(load: Path) -> None:
    (load / "iter_0000100").mkdir()
    with zipfile.ZipFile(load / "iter_0000100/common.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00X")
    with pytest.raises(InputError, match="is damaged"):
        read(load)


def test_without_a_checkpoint_the_given_arguments_are_used(load: Path, tmp_path: Path) -> None:
    for folder, why in ((load, "iter_0000100 has neither"), (tmp_path / "nothing", "cannot be read")):
        arguments = read(folder, "--num-layers", "7")
        assert arguments.values["num_layers"] == 7
        assert why in arguments.unknown[-1]
    arguments = parse(["--use-checkpoint-args", "--num-layers", "7"], environ={}, folder=Path("/nowhere"))[0]
    assert arguments.unknown[-1].startswith("--use-checkpoint-args has no effect, because --load is not given.")
    (load / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(InputError, match="instead of an iteration"):
        read(load)
