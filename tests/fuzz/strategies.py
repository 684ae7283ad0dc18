"""Hypothesis strategies: launches that are mostly valid, and words, environments and files that are mostly not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from hypothesis import strategies as st

from analyzer.launch.forks.fork_table import load_fork_options
from analyzer.launch.options.catalogue import load_catalogue
from tests.fuzz.random_launches import RandomLaunches

Phrase = tuple[str, ...]
"""An option with its operands."""

FEATURES: Final = (
    "--optimizer sgd",
    "--optimizer lion",
    "--optimizer muon",
    "--main-params-dtype fp16 --use-precision-aware-optimizer --use-distributed-optimizer",
    "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8 --use-precision-aware-optimizer --use-distributed-optimizer",
    "--optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer",
    "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer --use-distributed-optimizer",
    "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion "
    "--use-distributed-optimizer --ckpt-format fsdp_dtensor",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim --use-distributed-optimizer --ckpt-format fsdp_dtensor",
    "--num-distributed-optimizer-instances 2 --use-distributed-optimizer",
    "--enable-cuda-graph",
    "--cuda-graph-impl local",
    "--cuda-graph-impl local --cuda-graph-scope full_iteration --no-check-for-nan-in-loss-and-grad",
    "--cuda-graph-impl transformer_engine --cuda-graph-scope attn",
    "--external-cuda-graph",
    "--cpu-offloading --cpu-offloading-num-layers 2",
    "--fine-grained-activation-offloading --offload-modules attn_norm core_attn",
    "--fine-grained-activation-offloading --offload-modules expert_fc1 moe_act",
    "--delay-wgrad-compute --overlap-moe-expert-parallel-comm",
    "--overlap-moe-expert-parallel-comm",
    "--transformer-impl local",
    "--use-tp-pp-dp-mapping",
    "--fp32-residual-connection",
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    "--decoder-first-pipeline-num-layers 1",
    "--decoder-last-pipeline-num-layers 1",
    "--pipeline-model-parallel-layout Et*4|t*4L",
    "--num-virtual-stages-per-pipeline-rank 2",
    "--microbatch-group-size-per-virtual-pipeline-stage 4",
    "--window-size 128,0",
    "--softmax-type learnable",
    "--moe-expert-capacity-factor 1",
    "--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity",
    "--moe-router-padding-for-fp8",
    "--moe-router-padding-for-quantization",
    "--moe-router-fusion",
    "--moe-layer-freq ([0]*2+[1]*2)*2",
    "--moe-layer-recompute",
    "--moe-use-upcycling",
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
    "--moe-token-dispatcher-type flex --moe-enable-deepep",
    "--moe-router-num-groups 4 --moe-router-group-topk 2",
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    "--moe-router-topk 8",
    "--fp8-format hybrid --fp8-param-gather --use-distributed-optimizer",
    "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16",
    "--fp4-format e2m1 --info-gpu B200",
    "--cp-comm-type a2a",
    "--cp-comm-type p2p a2a",
    "--hierarchical-context-parallel-sizes 1 2",
    "--tp-comm-overlap --sequence-parallel",
    "--distribute-saved-activations --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--mtp-num-layers 2",
    "--squared-relu",
    "--apply-residual-connection-post-layernorm",
    "--make-vocab-size-divisible-by 7",
    "--reuse-grad-buf-for-mxfp8-param-ag --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --info-gpu B200",
    "--accumulate-allreduce-grads-in-fp32",
    "--no-overlap-p2p-communication",
    "--overlap-p2p-communication-warmup-flush",
    "--defer-embedding-wgrad-compute",
    "--rampup-batch-size 8 8 1000",
    "--calculate-per-token-loss",
    "--manual-gc",
    "--info-moe-imbalance 1.5",
    "--info-margin 5%",
    "--info-gpu-memory 1GiB",
    "--info-gpu-memory 6GiB",
    "--info-megatron 2023",
    "--info-megatron 0.12",
    "--info-megatron 0.14",
    "--info-megatron 0.19",
    "--info-detail full",
    "--info-fail-on tight,unknown",
)
"""Options beyond those that the shadow engine supports."""

LONG: Final = ("9" * 5000, "x" * 300, "x" * 100_000, "[" * 3000, "-" * 500, "1," * 2000, "1e" + "9" * 50, "/" + "a/" * 3000)
ODD_TEXT: Final = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
NON_UTF_8: Final = st.text(st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF), min_size=1, max_size=3)
"""Bytes that are not UTF-8, as Python represents them in arguments and variables."""
NUMBERS: Final = st.one_of(
    st.integers(-3, 17).map(str),
    st.integers(0, 66).map(lambda power: str(1 << power)),
    st.integers(-(10**40), 10**40).map(str),
    st.floats().map(str),
    st.floats(-2, 2).map(str),
)
SPECIAL: Final = st.sampled_from(
    [
        *("", "-", "--", "=", "a=b", "none", "None", "null", "True", "false", "bf16", "fp32", "full", "auto", "nan", "inf", "-inf"),
        *(
            "1e400",
            "0x10",
            "1_000",
            "١",
            "²",
            "0,1",
            "1:2",
            "a|b",
            "[1]",
            "([1]*2+[0])*4",
            "[1]*10**12",
            "([1])*999999999",
            "{}",
            "'",
        ),
        *(
            '"',
            "\\",
            "%s",
            "%",
            "{0}",
            "$HOME",
            "~",
            "~nobody/x",
            ".",
            "..",
            "/",
            "/dev/null",
            "/dev/zero",
            "Et*2|t*2L",
            "E|t*9999999999|L",
        ),
        *("x\x1b[2Jy", "a\nb", "\u202e", "\ufeff8", "８", "é", "☃", "1 2", " 8", "8 ", "+8", "8.0", "-0", "list", "0.16", "2023"),
    ]
)
DIGITS: Final = st.sampled_from(["²", "9" * 5000, "١٢", "_", "9" * 30, "0" * 5000 + "8", "1_000", "⑧", "-8", "1:²:8", "1,²"])
"""Words that look like numbers, and that `int`, `str.isdigit` and `str.isdecimal` read differently."""
VALUES: Final = st.one_of(NUMBERS, NUMBERS, DIGITS, SPECIAL, ODD_TEXT, NON_UTF_8, st.sampled_from(LONG))

PLAUSIBLE: Final = {
    "int": st.one_of(st.integers(0, 9), st.sampled_from((16, 64, 128, 1024, 4096))).map(str),
    "float": st.one_of(st.floats(0, 1), st.integers(0, 9)).map(str),
}
"""Values of options, by type."""

LAUNCHERS: Final = tuple(
    tuple(text.split())
    for text in (
        *("--nproc-per-node 8 pretrain_gpt.py", "torchrun --nproc-per-node 8 --nnodes 2 -m pretrain_gpt", "pretrain_gpt.py"),
        *("deepspeed --num_gpus 8 pretrain_gpt.py --deepspeed", "deepspeed --include a:0,1@b:2,3 pretrain_gpt.py --zero-stage 1"),
        *("accelerate launch --num_processes 8 train.py", "pretrain_llama.py --noop-layers 1,2", "pretrain_mamba.py", ""),
        *("megatron sft --model Qwen/Qwen3-8B", "--info-world-size 8 --info-model meta-llama/Llama-3.2-1B"),
        "deepspeed --num_gpus 8 pretrain_gpt.py --deepspeed --num-experts 8 --moe-expert-parallel-size 4",
        "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml trainer.n_gpus_per_node=8 trainer.nnodes=2 "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.model.path=Qwen/Qwen3-8B",
    )
)
"""Beginnings of launches, with training scripts of forks of Megatron-LM."""

_HARMFUL: Final = (
    "--info-launch",
    "--info-record",
    "--info-engine",
    "--info-json",
    "--info-megatron",
    "--info-dry",
    "--info-run-all",
)
"""Options that start processes or write files."""
INFO_OPTIONS: Final = (
    *("--info-gpu", "--info-gpu-memory", "--info-detail", "--info-fail-on", "--info-margin", "--info-against", "--info-log"),
    "--info-check",
    *("--info-tolerance", "--info-rank", "--info-layers", "--info-moe-imbalance", "--info-world-size", "--info-gpus-per-node"),
    *("--info-model", "--info-strict", "--info-print-options", "--info-allocator", "--info-allow-truncated", "--info-nothing"),
)
LAUNCHER_OPTIONS: Final = ("--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-backend", "--master-addr", "--num_gpus", "-m")
CATALOGUE: Final = tuple(sorted(load_catalogue().newest))
FORK_OPTIONS: Final = tuple(load_fork_options().options)
CHOICES: Final = {
    flag: tuple(str(choice) for choice in option.choices) for flag, option in load_catalogue().newest.items() if option.choices
}


@dataclass(frozen=True)
class Launch:
    """The words of a launch: those of the launcher, and the options of Megatron-LM and of this program."""

    launcher: Phrase
    options: tuple[Phrase, ...]

    @property
    def words(self) -> list[str]:
        return [*self.launcher, *(word for phrase in self.options for word in phrase)]

    def value(self, flag: str) -> str:
        """The first operand of an option that is given, of several equal options the last."""
        return next(phrase[1] for phrase in reversed(self.options) if phrase[0] == flag)

    def changed(self, **values: int) -> Launch:
        """The launch with these values; `seq_length` stands for `--seq-length`."""
        flags = {"--" + name.replace("_", "-"): str(value) for name, value in values.items()}
        return replace(self, options=tuple((each[0], flags[each[0]]) if each[0] in flags else each for each in self.options))


def phrases(words: list[str]) -> tuple[Phrase, ...]:
    """The options of `words`, each with its operands."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return tuple(tuple(each) for each in found)


@st.composite
def launches(draw: st.DrawFn, *, features: int = 2) -> Launch:
    """Launches of small models with up to `features` of FEATURES. Megatron-LM accepts about half of them."""
    words = RandomLaunches(lambda number: draw(st.integers(0, number - 1))).launch()
    entry = words.index("pretrain_gpt.py") + 1
    extra = draw(st.lists(st.sampled_from(FEATURES), max_size=features, unique=True)) if features else []
    own = phrases(words[entry:])
    return Launch(tuple(words[:entry]), (*own, *(each for text in extra for each in phrases(text.split()) if each not in own)))


@st.composite
def plausible_operands(draw: st.DrawFn, flag: str) -> Phrase:
    """Operands of the type that a Megatron option has."""
    option = load_catalogue().newest[flag]
    if option.kind != "store":
        return ()
    if flag in CHOICES:
        return (draw(st.sampled_from(CHOICES[flag])),)
    number = option.nargs if isinstance(option.nargs, int) else 1
    return tuple(draw(PLAUSIBLE.get(option.type or "", ODD_TEXT)) for _ in range(number))


@st.composite
def options(draw: st.DrawFn) -> Phrase:
    """Any option with any operands."""
    others = st.sampled_from((*INFO_OPTIONS, *LAUNCHER_OPTIONS))
    flag = draw(st.one_of(st.sampled_from(CATALOGUE), st.sampled_from(CATALOGUE), st.sampled_from(FORK_OPTIONS), others))
    if flag in CATALOGUE and draw(st.booleans()):
        return (flag, *draw(plausible_operands(flag)))
    operands = draw(st.lists(VALUES, max_size=2))
    if operands and draw(st.integers(0, 9)) == 9:
        return (f"{flag}={operands[0]}", *operands[1:])
    return (flag, *operands)


@st.composite
def mutated_launches(draw: st.DrawFn) -> list[str]:
    """Launches with added options, replaced values, dropped, repeated and shuffled words."""
    launch = draw(launches(features=1))
    words = launch.words
    if draw(st.integers(0, 4)) == 4:
        words = [*draw(st.sampled_from(LAUNCHERS)), *words[len(launch.launcher) :]]
    for change in draw(
        st.lists(st.sampled_from(("add", "add", "value", "drop", "repeat", "shuffle", "word")), min_size=1, max_size=4)
    ):
        place = draw(st.integers(0, len(words) - 1)) if words else 0
        if change == "add":
            words = [*words, *draw(options())]
        elif change == "shuffle":
            words = draw(st.permutations(words)) if draw(st.integers(0, 9)) == 9 else words
        elif change == "word":
            words = [*words[:place], draw(VALUES), *words[place:]]
        elif not words:
            continue
        elif change == "value":
            name, equals, _ = words[place].partition("=")
            value = f"{name}={draw(VALUES)}" if equals else words[place] if words[place].startswith("-") else draw(VALUES)
            words = [*words[:place], value, *words[place + 1 :]]
        elif change == "drop":
            words = [*words[:place], *words[place + 1 :]]
        else:
            words = [*words, *words[place : place + 2]]
    return [word for word in words if not word.startswith(_HARMFUL)]


PLAIN: Final = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 "
    "--global-batch-size 16 --bf16 --lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer --vocab-size 1000"
)


@st.composite
def nearly_valid_launches(draw: st.DrawFn) -> list[str]:
    """A small launch with one odd value, or with one or two more options."""
    words = [*draw(st.sampled_from(LAUNCHERS)), *PLAIN.split(), *draw(st.sampled_from(("", *FEATURES))).split()]
    for _ in range(draw(st.integers(1, 2))):
        if draw(st.booleans()):
            words += draw(options())
            continue
        place = draw(st.sampled_from([index for index, word in enumerate(words) if not word.startswith("--") or "=" in word]))
        name, equals, _ = words[place].rpartition("=")
        words[place] = name + equals + draw(VALUES)
    return [word for word in words if not word.startswith(_HARMFUL)]


VARIABLES: Final = (
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"),
    *("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_APPLY_QK_LAYER_SCALING", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
    *(
        "NCCL_GRAPH_REGISTER",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "RANK",
        "NNODES",
        "NPROC_PER_NODE",
        "PET_NNODES",
        "PET_NPROC_PER_NODE",
    ),
    *("SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NPROCS", "SLURM_JOB_NUM_NODES"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_TASKS_PER_NODE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_SIZE"),
    *("LANG", "LC_ALL", "HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "COLUMNS", "TERM", "NO_COLOR", "PYTHONPATH"),
    *("HETEROGENEOUS_LAYERS_CONFIG", "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "USE_MNNVL", "NVLINK_DOMAIN_SIZE"),
)
SETTINGS: Final = st.sampled_from(
    [
        *(
            "expandable_segments:True",
            "max_split_size_mb:64",
            "max_split_size_mb:abc",
            "max_split_size_mb:-1",
            "roundup_power2_divisions:4",
        ),
        *(
            "roundup_power2_divisions:[256:1,512:2,>:8]",
            "garbage_collection_threshold:0.8",
            "backend:cudaMallocAsync",
            ":",
            ",",
            "a:b:c",
        ),
        *(
            "max_split_size_mb:" + "9" * 5000,
            ":4096:8",
            ":16:8",
            ":0:0",
            "4(x2),3",
            "8(x99999999)",
            "gpu:8",
            "C",
            "/dev/null",
            "Ring",
            "^Ring",
        ),
    ]
)
ENVIRONMENTS: Final = st.dictionaries(
    st.sampled_from(VARIABLES), st.one_of(NUMBERS, DIGITS, SETTINGS, SPECIAL, ODD_TEXT, NON_UTF_8), min_size=1, max_size=4
)

JSON_VALUES: Final[st.SearchStrategy[Any]] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-2, 9), st.floats(), ODD_TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ODD_TEXT, inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def altered(draw: st.DrawFn, document: Any) -> Any:
    """A JSON document with one to three values replaced, removed or repeated."""
    for _ in range(draw(st.integers(0, 2))):
        document = draw(_altered_once(document))
    return document


@st.composite
def _altered_once(draw: st.DrawFn, document: Any) -> Any:
    if not isinstance(document, dict | list) or not document or draw(st.integers(0, 9)) == 9:
        near = isinstance(document, int) and draw(st.booleans())
        return draw(st.integers(0, 2 * document + 1 if document > 0 else 1)) if near else draw(JSON_VALUES)
    place: Any = draw(st.sampled_from(sorted(document) if isinstance(document, dict) else range(len(document))))
    copy = document.copy()
    change = draw(st.sampled_from(("replace", "replace", "replace", "remove")))
    if change == "remove":
        del copy[place]
    else:
        copy[place] = draw(_altered_once(document[place]))
    return copy
