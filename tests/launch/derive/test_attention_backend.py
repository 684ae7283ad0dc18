"""The kernel that Transformer Engine 2.11 selects in `get_attention_backend`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import analyzer
from analyzer.errors import InputError
from analyzer.launch.derive.model.attention_backend import AttentionNeeds, choose_backend
from analyzer.specs import HardwareSpec
from analyzer.specs.software import SoftwareSpec
from tests.job_of import AMPERE, BASE, BLACKWELL, HOPPER, job_of

VOLTA = HardwareSpec(name="V100", compute_capability=(7, 0))


@pytest.mark.parametrize(
    ("gpu", "deterministic", "head_dim", "picked"),
    [
        (HOPPER, False, 128, "fused"),
        (BLACKWELL, False, 128, "fused"),
        (AMPERE, False, 128, "flash"),
        (HOPPER, True, 128, "fused"),
        (BLACKWELL, True, 128, "flash"),
        (AMPERE, True, 128, "flash"),
        (HOPPER, False, 256, "fused"),
        (AMPERE, False, 256, "flash"),
        (HardwareSpec(name="L40S", compute_capability=(8, 9)), False, 256, "unfused"),
        (HOPPER, False, 100, "unfused"),
        (HOPPER, False, 512, "unfused"),
        (VOLTA, False, 128, "unfused"),
        (HardwareSpec(), False, 128, "fused"),
    ],
)
def test_automatic_choice(gpu: HardwareSpec, deterministic: bool, head_dim: int, picked: str) -> None:
    needs = AttentionNeeds(half_precision=True, head_dim=head_dim, deterministic=deterministic)
    backend, sentence = choose_backend("auto", needs=needs, gpu=gpu)
    assert backend == picked
    assert picked in sentence


@pytest.mark.parametrize(
    ("te", "more", "picked"),
    [
        ("2.11", {"value_head_dim": 128}, "unfused"),
        ("2.12", {"value_head_dim": 128}, "fused"),
        ("2.12", {"value_head_dim": 128, "dropout": True}, "unfused"),
        ("2.12", {"value_head_dim": 128, "sinks": True}, "unfused"),
    ],
)
def test_deterministic_attention_on_blackwell(te: str, more: dict[str, Any], picked: str) -> None:
    """Heads of DeepSeek-V3. `nvte_get_fused_attn_backend` and `get_attention_backend` of Transformer Engine 2.11 and 2.12."""
    needs = AttentionNeeds(half_precision=True, head_dim=192, deterministic=True, software=SoftwareSpec(te=te, torch="2.9"), **more)
    assert choose_backend("auto", needs=needs, gpu=BLACKWELL)[0] == picked


@pytest.mark.parametrize(
    ("te", "capability", "dropout", "picked"),
    [
        ("2.17", (10, 3), False, "unfused"),
        ("2.18", (10, 3), False, "fused"),
        ("2.18", (10, 3), True, "unfused"),
        ("2.17", (10, 0), False, "flash"),
    ],
)
def test_heads_of_256_on_blackwell(te: str, capability: tuple[int, int], dropout: bool, picked: str) -> None:
    """Those of Qwen3.5. flash-attn 2 has them on B200 and GB200, and not on B300 and GB300 (Transformer Engine 2.17 and 2.18)."""
    needs = AttentionNeeds(half_precision=True, head_dim=256, dropout=dropout, software=SoftwareSpec(te=te, torch="2.12"))
    gpu = HardwareSpec(compute_capability=capability)
    backend, sentence = choose_backend("auto", needs=needs, gpu=gpu)
    assert backend == picked
    assert ("--info-te 2.18" in sentence) is (te == "2.17" and picked == "unfused")


def test_the_version_of_transformer_engine_decides_on_determinism() -> None:
    deterministic = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    launch = f"pretrain_gpt.py {BASE} --attention-dropout 0 --info-gpu B200-192GB --info-world-size 8"
    for te, backend in (("2.11", "flash"), ("2.12", "fused")):
        report = analyzer.analyze(f"{launch} --info-te {te}", environ=deterministic)
        assert report.job.model.attention_backend == backend


def test_fp32_uses_unfused_attention() -> None:
    assert job_of("", base=BASE.replace("--bf16", "")).model.attention_backend == "unfused"
    with pytest.raises(InputError, match="no flash attention for heads of 64, fp32"):
        job_of("--attention-backend flash", base=BASE.replace("--bf16", ""))


def test_the_option_selects_the_kernel() -> None:
    for backend in ("flash", "fused", "unfused"):
        assert job_of(f"--attention-backend {backend}").model.attention_backend == backend
    assert job_of("--transformer-impl local").model.attention_backend == "unfused"


def test_context_parallelism_has_no_unfused_attention() -> None:
    with pytest.raises(InputError, match="no unfused attention"):
        job_of("--attention-backend unfused --context-parallel-size 2")


def test_flash_attention_of_two_head_sizes_needs_version_3_on_hopper() -> None:
    """Transformer Engine: flash-attn 2 does not support multi-latent attention, flash-attn 3 does."""
    line = "--multi-latent-attention --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --attention-backend flash"
    job = job_of(line)
    assert job.model.attention_backend == "flash"
    assert any("flash-attn 3 installed" in each for each in job.assumptions)
    older = job_of(line, gpu=AMPERE)
    assert older.model.attention_backend == "flash"
    assert any("no flash attention for heads of 192 and 128" in each for each in older.assumptions)


@pytest.mark.parametrize(("query", "values", "supported"), [(96, 64, False), (192, 96, False), (128, 64, False), (64, 128, True)])
def test_flash_attention_3_supports_few_pairs_of_head_sizes(query: int, values: int, supported: bool) -> None:
    """`_is_fa3_supported` (Transformer Engine 2.11)."""
    line = f"--multi-latent-attention --qk-head-dim {query - 32} --qk-pos-emb-head-dim 32 --v-head-dim {values} "
    job = job_of(line + "--attention-backend flash")
    assert job.model.attention_backend == "flash"
    assert any(f"no flash attention for heads of {query} and {values}" in each for each in job.assumptions) == (not supported)


def test_the_environment_must_not_contradict_the_option() -> None:
    with pytest.raises(InputError, match=r"^--attention-backend: fused needs NVTE_FLASH_ATTN=0, and the environment has 1"):
        job_of("--attention-backend fused", environ={"NVTE_FLASH_ATTN": "1"})
    assert job_of("--attention-backend flash", environ={"NVTE_FUSED_ATTN": "0"}).model.attention_backend == "flash"


def test_the_environment_excludes_kernels_if_the_option_is_auto() -> None:
    off = {"NVTE_FUSED_ATTN": "0"}
    job = job_of("", environ=off)
    assert job.model.attention_backend == "flash"
    assert any("because of NVTE_FUSED_ATTN=0" in sentence for sentence in job.assumptions)
    assert job_of("", environ=off | {"NVTE_FLASH_ATTN": "0"}).model.attention_backend == "unfused"
    with pytest.raises(InputError, match="under NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0 and NVTE_UNFUSED_ATTN=0"):
        job_of("", environ=off | {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"})


def test_the_environment_can_require_determinism() -> None:
    environ = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    assert job_of("", gpu=BLACKWELL, environ=environ).model.attention_backend == "flash"


def test_code_of_2023() -> None:
    assert job_of("", release="2023").model.attention_backend == "unfused"
    assert job_of("--use-flash-attn", release="2023").model.attention_backend == "flash"
    with pytest.raises(InputError, match=r"^--use-flash-attn: .*16 bit"):
        job_of("--use-flash-attn", release="2023", base=BASE.replace("--bf16", ""))


@given(st.integers(1, 512), st.booleans(), st.sampled_from([(7, 0), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]))
def test_without_context_parallelism_there_is_always_a_kernel(head_dim: int, half: bool, capability: tuple[int, int]) -> None:
    needs = AttentionNeeds(half_precision=half, head_dim=head_dim)
    backend, _ = choose_backend("auto", needs=needs, gpu=HardwareSpec(compute_capability=capability))
    assert half or backend == "unfused"
    assert capability >= (8, 0) or backend == "unfused"
