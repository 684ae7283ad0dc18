"""Every option is modelled, refused, assumed or without effect."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from analyzer import analyze
from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.build import build
from analyzer.launch.coverage.option_effects import MODELLED, NO_EFFECT
from analyzer.launch.coverage.script_effects import OF_SCRIPTS
from analyzer.launch.coverage.script_effects import REFUSED as REFUSED_IN_SCRIPTS
from analyzer.launch.coverage.supported import ASSUMED, MODELLED_VALUES, REFUSED, assumptions_of, is_known
from analyzer.launch.launchers.world import World
from analyzer.launch.options.catalogue import load_catalogue
from tests.data_files import parser_options
from tests.job_of import BASE, HOPPER, arguments_of, job_of


@pytest.mark.parametrize("release", ["0.12.3", "0.13.0", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.0"])
def test_every_option_is_in_exactly_one_table(release: str) -> None:
    options = parser_options(release)
    for dest in {each["dest"] for each in options}:
        tables = [
            name
            for name, table in (("modelled", MODELLED), ("refused", REFUSED), ("assumed", ASSUMED), ("none", NO_EFFECT))
            if dest in table
        ]
        assert len(tables) == 1, (dest, tables)


@pytest.mark.parametrize("release", load_catalogue().releases)
def test_every_option_of_the_catalogue_is_in_a_table(release: str) -> None:
    assert {each.dest for each in load_catalogue().table(release).options.values() if not is_known(each.dest)} == set()


@pytest.mark.parametrize("release", ["2023", "0.4.0", "0.5.0", "0.8.0", "0.11.0", "0.12.3", "0.14.0", "0.16.1", "0.19.0"])
def test_defaults_need_no_assumption(release: str) -> None:
    arguments = arguments_of(BASE, release=release)
    assert assumptions_of(arguments) == ()
    job_of("", release=release)


class Recorded(Mapping[str, object]):
    """Values that record which dests are read."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values_, self.read = values, set[str]()

    def __getitem__(self, dest: str) -> object:
        self.read.add(dest)
        return self.values_[dest]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)

    def get(self, dest: str, default: object = None) -> object:
        self.read.add(dest)
        return self.values_.get(dest, default)


VARIANTS = [
    "",
    "--defer-embedding-wgrad-compute --wgrad-deferral-limit 5 --pipeline-model-parallel-size 2",
    "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 4 --recompute-granularity selective",
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "--tokenizer-type GPT2BPETokenizer --overlap-param-gather-with-optimizer-step --use-distributed-optimizer "
    "--overlap-param-gather --overlap-grad-reduce --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 --ckpt-format torch",
    "--tokenizer-type SentencePieceTokenizer --tokenizer-model none",
    "--tokenizer-type BertWordPieceCase --deterministic-mode",
    "--defer-embedding-wgrad-compute --pipeline-model-parallel-size 2 --use-te-activation-func --no-bias-gelu-fusion",
    "--ddp-average-in-collective --fp32-residual-connection --cross-entropy-loss-fusion --context-parallel-size 2",
    "--train-iters 5 --hierarchical-context-parallel-sizes 1 --position-embedding-type rope --window-size 128,0",
    "--global-batch-size 12 --decrease-batch-size-if-needed",
    "--multi-latent-attention --position-embedding-type rope",
    "--num-experts 8 --moe-grouped-gemm --disable-bias-linear --moe-shared-expert-intermediate-size 1024 "
    "--moe-token-dispatcher-type alltoall --moe-router-group-topk 1 --moe-router-num-groups 4 --recompute-granularity selective",
    "--num-experts 8 --disable-bias-linear --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --use-distributed-optimizer --first-last-layers-bf16",
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer --load /dummy",
    "--optimizer muon",
    "--optimizer dist_muon",
    "--optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer",
    "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights",
    "--cuda-graph-impl transformer_engine --fine-grained-activation-offloading --offload-modules core_attn",
    "--num-experts 8 --expert-model-parallel-size 2 --disable-bias-linear --overlap-moe-expert-parallel-comm "
    "--moe-token-dispatcher-type alltoall",
    "--num-experts 8 --expert-model-parallel-size 2 --disable-bias-linear --moe-token-dispatcher-type flex "
    "--moe-expert-rank-capacity-factor 1.5 --moe-paged-stash --swiglu --fp8-format e4m3 --fp8-recipe mxfp8 "
    "--moe-mlp-glu-interleave-size 32 --moe-flex-dispatcher-backend hybridep --moe-router-dtype fp32",
    "--num-experts 8 --expert-model-parallel-size 2 --disable-bias-linear --moe-token-dispatcher-type flex",
    "--fp4-format e2m1",
    "--heterogeneous-layers-config-path config.json",
    "--is-hybrid-model",
    "--squared-relu --no-bias-gelu-fusion",
    "--experimental-attention-variant dsa --multi-latent-attention --no-rope-fusion --dsa-indexer-n-heads 4 "
    "--dsa-indexer-head-dim 64 --dsa-indexer-topk 256 --dsa-indexer-loss-coeff 0.01 --dsa-indexer-use-sparse-loss",
    "--experimental-attention-variant dsa --multi-latent-attention --no-rope-fusion --dsa-indexer-n-heads 4 --disable-bias-linear "
    "--dsa-indexer-head-dim 64 --dsa-indexer-topk 256 --dsa-indexer-loss-coeff 0.01 --dsa-indexer-topk-freq 4 "
    "--dsa-kernel-backend cudnn",
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --swiglu --attention-output-gate",
]


def test_modelled_options_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option of `MODELLED` is read for some launch, and every option that is read is in a table.

    Not counted are the checks of combinations: they also read options that have no effect.
    """
    monkeypatch.setattr("analyzer.launch.build.option_violations", lambda *_: ())
    read: set[str] = set()
    for release in ("2023", "0.7.0", "0.16.1", "0.18.2", "0.19.0"):
        for variant, precision in [*((variant, "--bf16") for variant in VARIANTS), ("", "--fp16")]:
            try:
                arguments = arguments_of(f"{BASE.replace('--bf16', precision)} {variant}", release=release)
            except InputError:
                continue  # an option that this release does not have
            for script in (None, "pretrain_bert.py", "pretrain_t5.py", "pretrain_vlm.py"):
                recorded = Recorded(arguments.values)
                launch = replace(arguments, values=recorded, entry=script)
                with contextlib.suppress(InputError):
                    build(launch, World(1, 8), environ={}, gpu=HOPPER, folder=Path("/nowhere"))
                # sizes that a script requires may come from its checkpoint
                read |= recorded.read - {"use_checkpoint_args"} - OF_SCRIPTS
    assert MODELLED - read == set()
    assert read - MODELLED - set(REFUSED) - set(ASSUMED) == set()


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--position-embedding-type mrope", "--position-embedding-type mrope"),
        ("--perform-rl-step", "--perform-rl-step"),
        ("--skip-train", "--skip-train"),
        ("--transformer-impl inference_optimized", "--transformer-impl"),
    ],
)
def test_options_that_are_not_modelled_are_refused(line: str, option: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        job_of(line)
    assert error.value.option.startswith(option)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--enable-mhc-connections --mhc-num-residual-streams 4", "--enable-mhc-connections: hyper-connections"),
        ("--enable-hyper-connections --num-residual-streams 4", "--enable-hyper-connections: hyper-connections"),
        ("--num-residual-streams 4", "--num-residual-streams: hyper-connections"),
        ("--enable-mhc", "--enable-mhc: hyper-connections"),
        ("--mhc-sinkhorn-iterations 20", "--mhc-sinkhorn-iterations: hyper-connections"),
        ("--hc-lowrank 320", "--hc-lowrank: hyper-connections"),
        ("--kda-safe-gate", "Kimi delta attention"),
        ("--csa-window-size 128", "DeepSeek-V4"),
    ],
)
def test_layers_of_later_code_are_refused(options: str, part: str) -> None:
    """Options of the branches main and dev of Megatron-LM, and of forks: no release has them."""
    words = ["--nproc-per-node", "8", "--info-model", "Qwen/Qwen3-0.6B", *options.split()]
    with pytest.raises(UnsupportedError, match=part):
        analyze(words, environ={}, folder="/nowhere")


def test_switches_of_later_code_that_are_off_are_not_refused() -> None:
    analyze(["--nproc-per-node", "8", "--info-model", "Qwen/Qwen3-0.6B", "--use-fused-mhc", "false"], environ={}, folder="/nowhere")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", "too high"),
        ("--use-nccl-ub", "too low"),
        ("--load /dummy/checkpoints", "first iteration"),
        ("--fake-process-group", "too high"),
        ("--no-clone-scatter-output-in-embedding", "too low"),
    ],
)
def test_assumptions_name_the_option_and_the_direction(line: str, word: str) -> None:
    assumed = [
        each for each in job_of(line).assumptions if each.startswith(line.split()[-1].replace("/dummy/checkpoints", "--load"))
    ]
    assert len(assumed) == 1
    assert word in assumed[0]


def test_an_option_in_no_table_is_listed() -> None:
    arguments = arguments_of(BASE)
    arguments = replace(
        arguments,
        values={**arguments.values, "my_own_cache": 3},
        given=arguments.given | {"my_own_cache"},
        spelled={**arguments.spelled, "my_own_cache": "--my-own-cache"},
    )
    assert assumptions_of(arguments) == ("--my-own-cache is not known to this program: its memory is not counted.",)


def test_modelled_values_belong_to_a_table() -> None:
    assert set(MODELLED_VALUES) <= set(REFUSED) | set(ASSUMED) | set(REFUSED_IN_SCRIPTS)
