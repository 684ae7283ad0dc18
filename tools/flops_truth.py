"""Write model FLOPs that Megatron's own `num_floating_point_operations` returns, for the launches below.

    python tools/flops_truth.py TRAINING_PY RELEASE OUTPUT [SOURCE]

TRAINING_PY is megatron/training/training.py of that release. Only the source of the function is executed. Its arguments are the
defaults of the release, the options of the launch, and the values that `validate_args` derives. OUTPUT (the tests read
tests/data/truth/flops.json) gets a record for each launch; records of RELEASE that it has are replaced. SOURCE says where the
file is from; default: the release.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from analyzer.launch.argv_parser import read_words  # noqa: E402
from analyzer.launch.options.catalogue import load_catalogue  # noqa: E402
from analyzer.specs.release import is_before  # noqa: E402

FUNCTION: Final = "num_floating_point_operations"
COMMON: Final = "--micro-batch-size 1 --bf16 --tokenizer-type NullTokenizer"
GQA: Final = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu --untie-embeddings-and-output-weights "
    "--vocab-size 128250 --global-batch-size 128"
)
MIXTRAL: Final = f"{GQA} --num-experts 8 --moe-router-topk 2"
DEEPSEEK: Final = (
    "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --seq-length 4096 "
    "--max-position-embeddings 4096 --swiglu --vocab-size 102390 --global-batch-size 1536 --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)
LATENT_ATTENTION: Final = "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
EXPERTS: Final = "--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408"
ROPE: Final = "--position-embedding-type rope"
SHARED: Final = "--moe-shared-expert-intermediate-size 2816"
QWEN3_NEXT: Final = (
    "--hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 --kv-channels 256 --group-query-attention "
    "--num-query-groups 2 --seq-length 4096 --max-position-embeddings 4096 --swiglu --vocab-size 151900 --global-batch-size 1024 "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 "
    "--experimental-attention-variant gated_delta_net"
)
LAUNCHES: Final = {
    "gpt": (
        "0.3", "--num-layers 24 --hidden-size 2304 --num-attention-heads 24 --seq-length 2048 --max-position-embeddings 2048 "
        "--vocab-size 50250 --global-batch-size 512",
    ),
    "gpt_one_sequence": (
        "0.3", "--num-layers 2 --hidden-size 192 --num-attention-heads 3 --seq-length 100 --max-position-embeddings 100 "
        "--vocab-size 1000 --global-batch-size 8",
    ),
    "swiglu_default_width": (
        "0.5", "--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 4096 --max-position-embeddings 4096 "
        "--swiglu --vocab-size 31990 --global-batch-size 1000",
    ),
    "uneven": (
        "0.5", "--num-layers 7 --hidden-size 1215 --ffn-hidden-size 1407 --num-attention-heads 15 --seq-length 6001 "
        "--max-position-embeddings 6001 --swiglu --vocab-size 31990 --global-batch-size 14208",
    ),
    "uneven_long": (
        "0.5", "--num-layers 30 --hidden-size 567 --ffn-hidden-size 6913 --num-attention-heads 7 --seq-length 99999 "
        "--max-position-embeddings 99999 --swiglu --vocab-size 31990 --global-batch-size 6600",
    ),
    "uneven_moe": (
        "0.12", "--num-layers 7 --hidden-size 1539 --ffn-hidden-size 4101 --num-attention-heads 9 --seq-length 4099 "
        "--max-position-embeddings 4099 --vocab-size 50250 --global-batch-size 12344 --num-experts 16 --moe-router-topk 3 "
        "--moe-ffn-hidden-size 1001 --moe-layer-freq 3",
    ),
    "gqa": ("0.3", GQA),
    "gqa_kv_channels": ("0.5", f"{GQA} --kv-channels 256"),
    "gqa_padded": ("0.5", f"{GQA} --tensor-model-parallel-size 4 --make-vocab-size-divisible-by 256"),
    "moe": ("0.5", MIXTRAL),
    "moe_expert_width": ("0.10", f"{MIXTRAL} --moe-ffn-hidden-size 3584"),
    "moe_freq": ("0.10", f"{MIXTRAL} --moe-layer-freq 3"),
    "moe_list": ("0.10", f"{DEEPSEEK} {EXPERTS} --moe-layer-freq ([0]*3+[1]*24)"),
    "moe_shared": ("0.10", f"{DEEPSEEK} {EXPERTS} {SHARED} --moe-layer-freq ([0]+[1]*26)"),
    "moe_not_gated": ("0.10", f"{DEEPSEEK.replace(' --swiglu', '')} {EXPERTS} {SHARED}"),
    "mla": ("0.10", f"{DEEPSEEK} {LATENT_ATTENTION} {EXPERTS} {SHARED} --moe-layer-freq ([0]+[1]*26)"),
    "mla_queries": ("0.10", f"{DEEPSEEK} {LATENT_ATTENTION} --q-lora-rank 1536"),
    "mla_odd": (
        "0.12", f"{DEEPSEEK} --multi-latent-attention --kv-lora-rank 500 --qk-head-dim 96 --v-head-dim 80 --seq-length 1001",
    ),
    "mtp": ("0.12", f"{GQA} {ROPE} --mtp-num-layers 1"),
    "mtp_moe": ("0.12", f"{DEEPSEEK} {EXPERTS} {SHARED} {ROPE} --moe-layer-freq ([0]+[1]*26) --mtp-num-layers 2"),
    "mtp_last_dense": ("0.12", f"{DEEPSEEK} {EXPERTS} {ROPE} --moe-layer-freq ([1]*26+[0]) --mtp-num-layers 2"),
    "mtp_mla": (
        "0.12", f"{DEEPSEEK} {LATENT_ATTENTION} --q-lora-rank 1536 {EXPERTS} {SHARED} --moe-layer-freq ([0]*3+[1]*24) "
        f"{ROPE} --mtp-num-layers 1",
    ),
    "deepseek_v3": (
        "0.12", "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --seq-length 4096 "
        "--max-position-embeddings 4096 --swiglu --vocab-size 129270 --global-batch-size 15360 --normalization RMSNorm "
        f"--disable-bias-linear --untie-embeddings-and-output-weights {ROPE} {LATENT_ATTENTION} --q-lora-rank 1536 "
        "--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
        "--moe-layer-freq ([0]*3+[1]*58) --mtp-num-layers 1",
    ),
    "latent": ("0.16", f"{DEEPSEEK} {EXPERTS} {SHARED} --moe-latent-size 1024"),
    "latent_fraction": ("0.16", f"{DEEPSEEK} {EXPERTS} --moe-latent-size 1000 --moe-ffn-hidden-size 1401 --moe-layer-freq 2"),
    "delta_net": (
        "0.16", f"{QWEN3_NEXT} --attention-output-gate --linear-attention-freq 4 --num-layers 48 --mtp-num-layers 1",
    ),
    "delta_net_list": (
        "0.16", f"{QWEN3_NEXT} --linear-attention-freq ([1]*5+[0])*2 --num-layers 12 --linear-num-key-heads 3 "
        "--linear-num-value-heads 9 --linear-key-head-dim 96 --linear-value-head-dim 72 --linear-conv-kernel-dim 3",
    ),
    "output_gate": ("0.16", f"{GQA} --attention-output-gate"),
    "quick_geglu": ("0.16", f"{GQA.replace('--swiglu', '--quick-geglu')} --num-experts 32 --moe-router-topk 4"),
}  # fmt: skip
"""First release of each launch, and its options. The uneven ones show differences in rounding."""


def function_of(path: Path) -> Callable[[Any, int], float]:
    """Return the function of a training.py. Models with Mamba layers are not among the launches."""
    text = path.read_text()
    found = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION)
    source = ast.get_source_segment(text, next(found))
    assert source is not None
    namespace: dict[str, Any] = {
        "is_hybrid_model": lambda _: False,
        "is_linear_attention_variant": lambda variant: variant == "gated_delta_net",
    }
    exec(source, namespace)
    function: Callable[[Any, int], float] = namespace[FUNCTION]
    return function


def arguments(words: list[str], release: str) -> SimpleNamespace:
    """Return Megatron's arguments after `validate_args` and the construction of the tokenizer."""
    table = load_catalogue().table(release)
    values: dict[str, Any] = {**table.defaults, **read_words(words, table).values}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if values["ffn_hidden_size"] is None:
        values["ffn_hidden_size"] = int((4 * hidden * 2 / 3) / 64) * 64 if values["swiglu"] else 4 * hidden
    if values["kv_channels"] is None:
        values["kv_channels"] = hidden // heads
    if values.get("num_experts") is not None and values.get("moe_ffn_hidden_size") is None:
        values["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
    values["padded_vocab_size"] = _padded(values)
    return SimpleNamespace(**values)


def _padded(values: Mapping[str, Any]) -> int:
    """The padded vocabulary, for sizes that the extra token of NullTokenizer does not change."""
    multiple = values["make_vocab_size_divisible_by"] * values["tensor_model_parallel_size"]
    sizes = {-(-tokens // multiple) * multiple for tokens in (values["vocab_size"], values["vocab_size"] + 1)}
    assert len(sizes) == 1, "the padded vocabulary depends on the tokenizer"
    return int(sizes.pop())


def main(path: str, release: str, output: str, source: str = "") -> None:
    """Write the records of `release`."""
    function, file = function_of(Path(path)), Path(output)
    content = json.loads(file.read_text()) if file.exists() else {"sources": {}, "records": []}
    records = [record for record in content["records"] if record["release"] != release]
    for name, (first, options) in LAUNCHES.items():
        if not is_before(release, first):
            args = arguments(f"{COMMON} {options}".split(), release)
            records.append({"launch": name, "release": release, "flops": function(args, args.global_batch_size)})
    parts = {
        "sources": {**content["sources"], release: source or release},
        "launches": {name: f"{COMMON} {options}" for name, (_, options) in LAUNCHES.items()},
    }
    lines = [f'"{name}":{json.dumps(part, indent=0)}' for name, part in parts.items()]
    rows = ",\n".join(json.dumps(record) for record in records)
    file.write_text("{" + ",\n".join([*lines, f'"records":[\n{rows}\n]']) + "}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
