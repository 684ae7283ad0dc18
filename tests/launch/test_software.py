"""The versions of Transformer Engine and PyTorch that are assumed, and what depends on them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.parse import parse
from analyzer.launch.software import CONTAINERS, check_software, container_of, software_of
from analyzer.memory.ranks import highest_rank
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from analyzer.specs import SoftwareSpec, TrainingJob
from analyzer.specs.release import release_number
from tests.command import run
from tests.data_files import measured_records
from tests.job_of import job_of

TOKENS = 2048
HIDDEN = 1024
LAYERS = 8


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of packages, which is the only one."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def install(site: Path, *packages: tuple[str, str]) -> None:
    for package, version in packages:
        (site / package).mkdir(exist_ok=True)
        metadata = site / f"{package}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def test_containers_are_in_the_order_of_their_releases() -> None:
    numbers = [release_number(release) for release in CONTAINERS]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("release", "tag"),
    [
        ("2023", "23.07"),
        ("0.3.0", "23.07"),
        ("0.6.0", "24.02"),  # megatron/core/QuickStart.md
        ("0.9.0", "24.01"),  # .gitlab/stages/01.tests.yml
        ("0.11.0", "24.10"),  # .gitlab/stages/01.build.yml
        ("0.13.0", "25.04"),  # README
        ("0.16.1", "26.01"),  # README of February 2026
        ("0.20.0", "26.06"),
    ],
)
def test_the_container_of_a_release(release: str, tag: str) -> None:
    assert container_of(release).tag == tag


def test_every_known_release_has_a_container() -> None:
    assert all(container_of(release) for release in load_catalogue().releases)


def test_measured_runs_name_the_versions_of_their_container() -> None:
    """The B200 runs print the versions in container 26.01."""
    found = {
        (each["software"]["transformer_engine"], each["software"]["torch"]) for each in measured_records() if "software" in each
    }
    [(te, torch)] = found
    container = container_of("0.16.1")
    assert f".nv{container.tag}" in torch
    assert te.startswith(f"{container.te}.")
    assert torch.startswith(f"{container.torch}.")


@pytest.mark.usefixtures("site")
def test_without_packages_the_versions_are_those_of_the_container() -> None:
    software, sentence = software_of("0.13.0")
    assert software == SoftwareSpec(te="2.2", torch="2.7")
    assert sentence == "Transformer Engine 2.2 and PyTorch 2.7 are assumed, from the NGC container 25.04."


def test_installed_versions_are_used_if_they_can_train(site: Path) -> None:
    install(site, ("transformer_engine", "2.5.0"), ("torch", "2.8.0"))
    assert software_of("0.16.1")[0].te == "2.11", "Transformer Engine without its kernels cannot train"
    install(site, ("transformer_engine_torch", "2.5.0"))
    software, sentence = software_of("0.16.1")
    assert software == SoftwareSpec(te="2.5.0", torch="2.8.0")
    assert sentence.endswith("are assumed, from this installation.")


def test_a_torch_alone_says_nothing_about_the_training(site: Path) -> None:
    install(site, ("torch", "2.13.0"))
    assert software_of("0.16.1")[0].torch == "2.10"


def test_the_shadow_engine_runs_the_installed_transformer_engine(site: Path) -> None:
    install(site, ("transformer_engine", "2.5.0"), ("torch", "2.8.0"))
    software, sentence = software_of("0.16.1", engine="both")
    assert software == SoftwareSpec(te="2.5.0", torch="2.10")
    assert sentence == (
        "Transformer Engine 2.5.0, from this installation, and PyTorch 2.10, from the NGC container 26.01, are assumed."
    )


def test_broken_metadata_are_ignored(site: Path) -> None:
    install(site, ("transformer_engine", "unknown"), ("transformer_engine_torch", "unknown"), ("torch", "2.8.0"))
    assert software_of("0.16.1")[0].te == "2.11"


def test_options_win(tmp_path: Path) -> None:
    line = "--info-te 2.3 --info-torch=2.7.0a0+79aa17489c.nv25.04 --info-megatron 0.14 --nproc-per-node 8"
    arguments, _, _ = parse(line.split(), environ={}, folder=tmp_path)
    assert arguments.software == SoftwareSpec(te="2.3", torch="2.7.0a0+79aa17489c.nv25.04")
    assert arguments.versions == (
        "Transformer Engine 2.3, from --info-te, and PyTorch 2.7.0a0+79aa17489c.nv25.04, from --info-torch, are assumed."
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--info-te", "newest"), "--info-te: 'newest' is not a version; write a version such as 2.11, or none"),
        (("--info-te", "9.1"), "--info-te: Transformer Engine 9.1 is not known; write a version such as 2.11, or none"),
        (("--info-torch", "none"), "--info-torch: 'none' is not a version; write a version such as 2.10"),
        (("--info-torch", "2"), "--info-torch: '2' is not a version; write a version such as 2.10"),
        (("--info-torch", "2.١"), "--info-torch: '2.١' is not a version; write a version such as 2.10"),
        (("--info-te", "none"), "--info-te: none contradicts --transformer-impl transformer_engine; give the version of "
         "Transformer Engine, such as 2.11"),
    ],
)  # fmt: skip
def test_an_unknown_version_is_an_error_of_one_line(words: tuple[str, str], message: str) -> None:
    line = (
        "--nproc-per-node 8 --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 "
    )
    line += "--micro-batch-size 1 --bf16 --tokenizer-type NullTokenizer --vocab-size 1000"
    outcome = run(*line.split(), *words)
    assert (outcome.status, outcome.out, outcome.err) == (2, "", f"get-training-info: {message}\n")


def with_software(job: TrainingJob, *, te: str | None, torch: str = "2.8") -> TrainingJob:
    return replace(job, software=SoftwareSpec(te=te, torch=torch))


def saved_by_norms(job: TrainingJob) -> dict[str, int]:
    """Bytes of the inputs that the q/k norms of a layer save, by norm."""

    def find(tree: Module) -> Module | None:
        if tree.name == "qk_layernorm":
            return tree
        return next(filter(None, map(find, tree.children)), None)

    norms = find(stage_models(job)[0].trees[0])
    assert norms is not None
    return {norm.name: norm.saved[0].bytes for norm in norms.children}


@pytest.mark.parametrize("te", ["1.11", "1.12"])
def test_norms_before_te_1_13_keep_qkv_instead_of_copies(te: str) -> None:
    """`inputmat = inp.view((-1, in_features))` is saved (module/rmsnorm.py, 1.12); later `reshape` makes a contiguous copy."""
    job = job_of("--qk-layernorm --position-embedding-type rope")
    one = 2 * TOKENS * HIDDEN  # [s, b, h] in bf16
    assert saved_by_norms(with_software(job, te="1.13")) == {"q_layernorm": one, "k_layernorm": one}
    assert saved_by_norms(with_software(job, te=te)) == {"q_layernorm": 0, "k_layernorm": 3 * one}
    later, earlier = (highest_rank(with_software(job, te=each)).memory.activations_bytes for each in ("1.13", te))
    assert earlier - later == LAYERS * one


def test_grouped_queries_are_copied_before_the_norm() -> None:
    job = job_of("--qk-layernorm --position-embedding-type rope --group-query-attention --num-query-groups 4")
    one = 2 * TOKENS * HIDDEN
    assert saved_by_norms(with_software(job, te="1.11")) == {"q_layernorm": one, "k_layernorm": one + one // 2}


def test_a_checkpoint_around_attention_saves_qkv_once() -> None:
    job = job_of("--qk-layernorm --position-embedding-type rope --recompute-granularity selective")
    assert saved_by_norms(with_software(job, te="1.11")) == {"q_layernorm": 0, "k_layernorm": 0}


ROUTED = "--num-experts 8 --moe-router-topk 2 --disable-bias-linear --moe-router-dtype fp32 --transformer-impl local"


@pytest.mark.parametrize(
    ("release", "te", "in_te"),
    [
        ("0.12.3", "2.1", False),  # torch.nn.functional.linear
        ("0.13.0", "1.13", False),  # no general_gemm
        ("0.13.0", "2.6", True),
        ("0.16.1", "2.9.0", True),  # the last one with get_workspace
        ("0.16.1", "2.10.0", False),
        ("0.17.1", "2.12", True),
    ],
)
def test_routers_use_gemms_of_transformer_engine_if_megatron_finds_them(release: str, te: str, in_te: bool) -> None:
    """`te_general_gemm` (megatron/core/extensions/transformer_engine.py). Other GEMMs of Megatron's own layers use PyTorch."""
    rank = highest_rank(with_software(job_of(f"{ROUTED} --no-persist-layer-norm", release=release), te=te))
    workspace = [part.bytes for part in rank.memory.runtime_parts if part.name == "Transformer Engine GEMM workspace"]
    assert workspace == ([32 * 2**20 + 1024] if in_te else [])


@pytest.mark.parametrize(("te", "copies"), [("2.9", 1), ("2.11", 2)])
def test_the_forward_of_a_router_in_transformer_engine_needs_no_copy_in_fp32(te: str, copies: int) -> None:
    """`RouterGatingLinearFunction` (moe_utils.py): PyTorch multiplies `inp.to(router_dtype)`; backward copies in both cases."""
    job = with_software(job_of(ROUTED), te=te)
    router = next(module for name, module in stage_models(job)[0].trees[0].walk() if name.endswith("router"))
    work = (*router.forward_workspace, *router.backward_workspace)
    assert [each.shape[-1] for each in work if each.name == "input in the dtype of the router"] == [HIDDEN] * copies


@pytest.mark.parametrize(("te", "kept"), [("2.15", True), ("2.16.1", False)])
def test_quantizers_with_current_scaling_keep_no_scales_from_2_16_on(te: str, kept: bool) -> None:
    """`Float8CurrentScalingQuantizer.__init__` (transformer_engine/pytorch/tensor/float8_tensor.py) drops `scale` and `amax`."""
    job = with_software(job_of("--fp8-format hybrid --fp8-recipe tensorwise"), te=te)
    assert kept == any(part.name == "FP8 scaling factors" for part in highest_rank(job).memory.runtime_parts)


LOCAL = "--transformer-impl local --no-persist-layer-norm --use-distributed-optimizer"


def test_without_transformer_engine_and_apex_adam_is_that_of_torch() -> None:
    """`torch._foreach_sqrt` of the second moments allocates one fp32 element for each parameter of the shard."""
    job = with_software(job_of(f"{LOCAL} --no-gradient-accumulation-fusion", gpus=1), te=None)
    memory = highest_rank(job).memory
    assert memory.peak_allocated_bytes >= memory.allocated_bytes + memory.optimizer_bytes // 3  # master weights and two moments
    [fused] = {highest_rank(with_software(job, te="2.11")).memory.allocated_bytes}
    assert memory.allocated_bytes == fused


def test_fused_gradient_accumulation_needs_apex_whose_adam_is_fused() -> None:
    fused, without = (highest_rank(with_software(job_of(LOCAL, gpus=1), te=te)).memory for te in ("2.2", None))
    assert fused.peak_allocated_bytes == without.peak_allocated_bytes


@pytest.mark.parametrize("implementation", ["--use-legacy-models --transformer-impl local", "--transformer-impl local"])
def test_unfused_attention_of_own_layers_uses_the_global_memory_buffer(implementation: str) -> None:
    """`get_global_memory_buffer().get_tensor((b·a, s, s))` (megatron/legacy/model/transformer.py, dot_product_attention.py)."""
    job = job_of(f"{implementation} --tensor-model-parallel-size 2 --no-persist-layer-norm", release="0.11.0")
    [buffer] = [part.bytes for part in highest_rank(job).memory.runtime_parts if part.name == "Megatron's global memory buffer"]
    assert buffer == 16 // 2 * TOKENS**2 * 2


def test_a_cross_entropy_of_transformer_engine_needs_it() -> None:
    job = job_of(f"{LOCAL} --cross-entropy-loss-fusion --cross-entropy-fusion-impl te")
    with pytest.raises(InputError, match="none contradicts --cross-entropy-fusion-impl te"):
        check_software(SoftwareSpec(te=None, torch="2.8"), job.model)
