"""The parser of a checkout: imported without training code, with missing packages replaced, and cached."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.launch.arguments import Arguments
from analyzer.launch.options import megatron_parser
from analyzer.launch.parse import parse

ARGUMENTS = """
import argparse
import dataclasses
import torch
import torch.nn.functional as F
import a_package_that_nobody_has.inside as anything
from megatron.core.enums import Backend
from megatron.core.transformer_config import TransformerConfig
from megatron.training.utils import print_rank_0

try:
    import transformer_engine
    HAVE_TE = True
except ImportError:
    HAVE_TE = False

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(description='Megatron-LM Arguments', allow_abbrev=False)
    group = parser.add_argument_group('network size')
    print("Megatron prints")
    group.add_argument('--num-layers', type=int, default=None)
    group.add_argument('--only-in-this-fork', type=float, default=0.25)
    group.add_argument('--attention-backend', type=lambda name: Backend[name], default=Backend.auto, choices=list(Backend))
    group.add_argument('--bf16', action='store_true')
    group.add_argument('--shout', action=argparse.BooleanOptionalAction, default=False)
    group.add_argument('--have-te', type=str, default=str(HAVE_TE))
    for field in dataclasses.fields(TransformerConfig):
        if field.type is int:
            group.add_argument('--' + field.name.replace('_', '-'), type=int, default=field.default)
    return parser.parse_args()
"""
CONFIG = """
from dataclasses import dataclass
from typing import Callable, Optional
import torch
import torch.nn.functional as F
from torch import Tensor, nn

@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x

@torch.compile(mode="max")
def compiled(x):
    return x

class Layer(nn.Module):
    pass

class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: "Tensor | None"):
        return x

apply = Op.apply
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9:
    raise RuntimeError("there is no GPU")

@dataclass
class TransformerConfig:
    hidden_size: int = 0
    params_dtype: torch.dtype = torch.float32
    activation_func: Callable = F.gelu
    pipeline_dtype: Optional[torch.dtype] = None
"""
ENUMS = "import enum\n\nclass Backend(enum.Enum):\n    flash = 1\n    auto = 5\n"
TRAINING_CODE = 'raise RuntimeError("training code ran")\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout with the layout of Megatron-LM since core 0.6."""
    root = tmp_path / "Megatron-LM"
    files = {
        "megatron/training/__init__.py": TRAINING_CODE,
        "megatron/training/utils.py": TRAINING_CODE,
        "megatron/training/arguments.py": ARGUMENTS,
        "megatron/core/__init__.py": "",
        "megatron/core/enums.py": ENUMS,
        "megatron/core/transformer_config.py": CONFIG,
        "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 17\nPATCH = 2\n",
        "pretrain_gpt.py": TRAINING_CODE,
    }
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def read(*argv: str, cache: Path, folder: Path = Path("/nowhere"), **environ: str) -> Arguments:
    return parse(argv, environ={"XDG_CACHE_HOME": str(cache), **environ}, folder=folder)[0]


def test_the_checkout_in_the_option_is_used(checkout: Path, tmp_path: Path) -> None:
    arguments = read(
        "--only-in-this-fork", "3", "--attention-backend", "flash", "--no-shout", "--hidden-size", "8",
        "--info-megatron", str(checkout), cache=tmp_path,
    )  # fmt: skip
    assert arguments.values["only_in_this_fork"] == 3.0
    assert arguments.values["attention_backend"] == "flash"
    assert arguments.values["shout"] is False
    assert arguments.values["hidden_size"] == 8
    assert arguments.values["have_te"] == "False"
    assert arguments.release == "0.17.2"
    assert arguments.source == f"{checkout}/megatron/training/arguments.py"
    assert not list(checkout.rglob("__pycache__"))


def test_an_option_that_the_checkout_lacks_is_refused(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--seq-length"):
        read("--seq-length", "8", "--info-megatron", str(checkout), cache=tmp_path)


@pytest.mark.parametrize("where", ["folder", "PYTHONPATH", "script"])
def test_the_checkout_that_the_launch_would_import_is_used(checkout: Path, tmp_path: Path, where: str) -> None:
    argv = ["--only-in-this-fork", "3"]
    if where == "folder":
        arguments = read(*argv, cache=tmp_path, folder=checkout)
    elif where == "PYTHONPATH":
        arguments = read(*argv, cache=tmp_path, PYTHONPATH=f"/nothing:{checkout}")
    else:
        arguments = read(str(checkout / "pretrain_gpt.py"), *argv, cache=tmp_path)
    assert arguments.values["only_in_this_fork"] == 3.0


def test_a_second_run_uses_the_cache(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read("--num-layers", "2", "--info-megatron", str(checkout), cache=tmp_path)
    extract = megatron_parser._extract
    monkeypatch.setattr(megatron_parser, "_extract", lambda _checkout: pytest.fail("loaded again"))
    read("--num-layers", "2", "--info-megatron", str(checkout), cache=tmp_path)
    monkeypatch.setattr(megatron_parser, "_extract", extract)
    parser = checkout / "megatron/training/arguments.py"
    parser.write_text(parser.read_text().replace("0.25", "0.75"))
    assert read("--info-megatron", str(checkout), cache=tmp_path).values["only_in_this_fork"] == 0.75


def test_a_broken_parser_is_reported(checkout: Path, tmp_path: Path) -> None:
    (checkout / "megatron/training/arguments.py").write_text("raise RuntimeError('this fork is broken')\n")
    with pytest.raises(InputError, match="this fork is broken"):
        read("--bf16", "--info-megatron", str(checkout), cache=tmp_path)
    arguments = read("--bf16", cache=tmp_path, folder=checkout)
    assert arguments.release == "0.16.1"
    assert "this fork is broken" in arguments.assumptions[0]


def test_a_folder_without_a_parser_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no megatron/training/arguments\.py"):
        read("--bf16", "--info-megatron", str(tmp_path), cache=tmp_path)


def test_an_unwritable_cache_is_not_an_error(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert read("--num-layers", "2", cache=tmp_path / "file", folder=checkout).values["num_layers"] == 2


def test_a_checkout_of_2023_is_supported(tmp_path: Path) -> None:
    root = tmp_path / "old"
    (root / "megatron").mkdir(parents=True)
    (root / "megatron/__init__.py").write_text(TRAINING_CODE)
    (root / "megatron/arguments.py").write_text(
        "import argparse, torch\n"
        "def parse_args():\n"
        "    parser = argparse.ArgumentParser(allow_abbrev=False)\n"
        "    parser.add_argument('--DDP-impl', default='local')\n"
        "    args = parser.parse_args()\n"
    )
    arguments = read("--DDP-impl", "torch", "--info-megatron", str(root), cache=tmp_path)
    assert (arguments.release, arguments.values["DDP_impl"]) == ("2023", "torch")
