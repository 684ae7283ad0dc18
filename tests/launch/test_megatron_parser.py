"""The parser of a checkout: imported without training code, with missing packages replaced, and cached."""

from __future__ import annotations

from functools import cache as kept
from pathlib import Path
from typing import NoReturn

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
    # package_info.py of the checkout says 0.17.2
    assert arguments.release == "0.17.1"
    assert "this fork is broken" in arguments.warnings[0]
    assert arguments.warnings[0].endswith("The catalogue of Megatron-LM core 0.17.1 is used instead.")
    assert arguments.assumptions == ("Megatron-LM core 0.17.1 is assumed: the checkout is Megatron-LM core 0.17.2.",)


def test_the_warning_names_the_catalogue_that_is_used(checkout: Path, tmp_path: Path) -> None:
    (checkout / "megatron/training/arguments.py").write_text("raise RuntimeError('this fork is broken')\n")
    arguments = read("--data-impl", "mmap", cache=tmp_path, folder=checkout)
    assert arguments.release == "2023"
    assert arguments.warnings[0].endswith("The catalogue of Megatron-LM of August 2023 is used instead.")


@pytest.mark.parametrize(("minor", "base"), [("20", "0.19.0"), ("19", "0.19.0"), ("8", "0.8.0"), ("3", "0.3.0"), ("2", "2023")])
def test_the_release_of_a_checkout_selects_the_catalogue(
    checkout: Path, tmp_path: Path, minor: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_checkout: Path) -> NoReturn:
        raise InputError("--info-megatron", "the parser cannot be loaded", "leave it out")

    monkeypatch.setattr(megatron_parser, "_extract", broken)
    (checkout / "megatron/core/package_info.py").write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 0\n")
    assert read("--bf16", cache=tmp_path, folder=checkout).release == base


def test_a_folder_without_a_parser_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no megatron/training/arguments\.py"):
        read("--bf16", "--info-megatron", str(tmp_path), cache=tmp_path)


def test_an_unwritable_cache_is_not_an_error(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert read("--num-layers", "2", cache=tmp_path / "file", folder=checkout).values["num_layers"] == 2


def test_a_malformed_cached_table_is_written_again(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_parser, "_extract", kept(megatron_parser._extract))
    read("--num-layers", "2", cache=tmp_path, folder=checkout)
    (cached,) = (tmp_path / "get-training-info").glob("*.json")
    complete = cached.read_bytes()
    for content in ("", "{", "[]", "{}", "[1]", '[{"flag": 1}]', "[" * 100_000):
        cached.write_text(content)
        assert read("--num-layers", "2", cache=tmp_path, folder=checkout).values["num_layers"] == 2, content[:10]
        assert cached.read_bytes() == complete, content[:10]


def test_a_user_without_a_home_folder_has_no_cache(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    arguments, _, _ = parse(["--num-layers", "2", "--info-megatron", str(checkout)], environ={}, folder=checkout)
    assert arguments.values["num_layers"] == 2


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


def write(root: Path, files: dict[str, str]) -> Path:
    """Write `files`, with a parser that has the lines of `parse_args` after the imports."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def parser(imports: str, *lines: str) -> str:
    """Return the text of an arguments.py."""
    body = ["parser = argparse.ArgumentParser(allow_abbrev=False)", *lines, "return parser.parse_args()"]
    return f"import argparse\n{imports}\ndef parse_args(extra_args_provider=None, defaults={{}}):\n" + "".join(
        f"    {line}\n" for line in body
    )


CORE = {
    "megatron/__init__.py": TRAINING_CODE,
    "megatron/core/__init__.py": "import megatron.core.enums\n",
    "megatron/core/enums.py": ENUMS,
    "megatron/core/transformer/__init__.py": "from .transformer_config import TransformerConfig\n",
    "megatron/core/transformer/transformer_config.py": CONFIG,
}
OPTIONS = ("group = parser.add_argument_group(title='x')", "group.add_argument('--num-layers', type=int, default=None)")


def test_a_parser_of_core_0_4_loads(tmp_path: Path) -> None:
    """The imports of megatron/arguments.py, LumiOpen/Megatron-LM-lumi a2cca9d: modules of `megatron` itself, and of `tools`."""
    imports = (
        "import dataclasses, json, os, torch, types\n"
        "import torch.nn.functional as F\n"
        "from megatron.global_vars import set_retro_args, get_retro_args\n"
        "from tools.retro.utils import get_args_path as get_retro_args_path\n"
        "from megatron import get_tokenizer\n"
        "from megatron import core\n"
        "from megatron.core.transformer import TransformerConfig\n"
    )
    sizes = "[group.add_argument('--' + f.name, type=int) for f in dataclasses.fields(TransformerConfig) if f.type is int]"
    root = write(
        tmp_path / "fork",
        {
            **CORE,
            "megatron/arguments.py": parser(imports, *OPTIONS, sizes),
            "megatron/global_vars.py": TRAINING_CODE,
            "tools/retro/utils.py": TRAINING_CODE,
            "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 4\nPATCH = 0\n",
            "pretrain_gpt.py": TRAINING_CODE,
        },
    )
    arguments = read("pretrain_gpt.py", "--num-layers", "2", "--hidden_size", "8", cache=tmp_path, folder=root)
    assert (arguments.release, arguments.values["num_layers"], arguments.values["hidden_size"]) == ("0.4.0", 2, 8)
    assert arguments.source == f"{root}/megatron/arguments.py"


def test_a_parser_with_deepspeed_loads(tmp_path: Path) -> None:
    """The imports of megatron/arguments.py, bigscience-workshop/Megatron-DeepSpeed 007719a."""
    imports = (
        "import torch\nimport deepspeed\nfrom megatron.enums import PositionEmbeddingType\nimport megatron\n"
        "from megatron.logging import log_levels\n"
    )
    enum = "type=lambda x: PositionEmbeddingType[x], choices=list(PositionEmbeddingType), default=PositionEmbeddingType.absolute"
    root = write(
        tmp_path / "fork",
        {
            "megatron/__init__.py": TRAINING_CODE,
            "megatron/enums.py": "import enum\nclass PositionEmbeddingType(enum.Enum):\n    rotary = 1\n    absolute = 2\n",
            "megatron/logging.py": "import logging\nlog_levels = {'info': logging.INFO}\n",
            "megatron/arguments.py": parser(
                imports,
                *OPTIONS,
                f"group.add_argument('--kind-of-positions', {enum})",
                "group.add_argument('--log-level', choices=list(log_levels.keys()))",
                "group.add_argument('--glu-activation', choices=megatron.model.glu_activations.GLU_ACTIVATIONS.keys())",
                "parser = deepspeed.add_config_arguments(parser)",
            ),
        },
    )
    table = megatron_parser.load_table(root, environ={"XDG_CACHE_HOME": str(tmp_path)})
    kinds = {flag: option.kind for flag, option in table.options.items()}
    assert (kinds["--deepspeed"], kinds["--deepspeed_config"], kinds["--num-layers"]) == ("true", "store", "store")
    choices = {flag: option.choices for flag, option in table.options.items()}
    assert (choices["--kind-of-positions"], choices["--log-level"]) == (["rotary", "absolute"], ["info"])
    assert choices["--glu-activation"] is None


def test_classes_with_other_metaclasses_may_inherit_from_stand_ins(tmp_path: Path) -> None:
    """Configurations of later releases are protocols or have bases in modules that are not imported."""
    config = (
        "import abc\nfrom dataclasses import dataclass\nfrom typing import Generic, Protocol, TypeVar\nimport torch\n"
        "from megatron.training.models.base import ModelConfig\n"
        "T = TypeVar('T')\n"
        "class Meta(type):\n    pass\n"
        "class Base(metaclass=Meta):\n    pass\n"
        "class Buildable(Protocol):\n    def build(self) -> int: ...\n"
        "class Builder(ModelConfig[T], Buildable, Generic[T]):\n    pass\n"
        "class Layer(torch.nn.Module, abc.ABC):\n    pass\n"
        "@dataclass(kw_only=True)\n"
        "class TrainingConfig(ModelConfig, Base):\n    train_size: int = 7\n"
    )
    imports = (
        "import dataclasses, torch\nfrom megatron.training.config import TrainingConfig\n"
        "from megatron.training.models import GPTModelConfig\n"
    )
    sizes = "[group.add_argument('--' + f.name, type=int, default=f.default) for f in dataclasses.fields(TrainingConfig)]"
    root = write(
        tmp_path / "fork",
        {
            **CORE,
            "megatron/training/__init__.py": TRAINING_CODE,
            "megatron/training/models/__init__.py": TRAINING_CODE,
            "megatron/training/models/base.py": TRAINING_CODE,
            "megatron/training/config/__init__.py": "from megatron.training.config.training_config import TrainingConfig\n",
            "megatron/training/config/training_config.py": config,
            "megatron/training/arguments.py": parser(imports, *OPTIONS, sizes),
            "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 20\nPATCH = 0\n",
        },
    )
    arguments = read("--info-megatron", str(root), cache=tmp_path)
    assert (arguments.release, arguments.values["train_size"]) == ("0.20.0", 7)


def test_a_checkout_without_megatron_core_loads(tmp_path: Path) -> None:
    """Forks that install megatron-core as a package have no copy of it."""
    imports = "import torch\nfrom megatron.core.dist_checkpointing.validation import StrictHandling\n"
    strict = "group.add_argument('--dist-ckpt-strictness', choices=[e.value for e in StrictHandling])"
    root = write(
        tmp_path / "fork",
        {
            "megatron/training/__init__.py": TRAINING_CODE,
            "megatron/training/arguments.py": parser(imports, *OPTIONS, strict),
        },
    )
    arguments = read("--num-layers", "4", "--info-megatron", str(root), cache=tmp_path)
    assert (arguments.release, arguments.values["num_layers"]) == ("0.16.1", 4)
    assert "the checkout has no megatron/core/package_info.py" in arguments.assumptions[0]


def test_a_name_that_megatron_core_lacks_is_an_error(tmp_path: Path) -> None:
    root = write(tmp_path / "fork", {**CORE, "megatron/arguments.py": parser("from megatron.core.enums import Missing\n")})
    with pytest.raises(InputError, match="Missing"):
        read("--bf16", "--info-megatron", str(root), cache=tmp_path)
