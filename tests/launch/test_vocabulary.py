"""The number of tokens of each tokenizer, and the padded vocabulary size."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.launch.tokenizer.tokenizer_files import read_sentencepieces
from analyzer.launch.tokenizer.vocabulary import Vocabulary, pad_vocabulary, read_vocabulary
from tests.data_files import truth_records
from tests.job_of import job_of, launch_of


def read(
    line: str, *, tensor: int = 1, folder: Path = Path("/nowhere"), release: str = "0.16.1", home: str = "/nowhere"
) -> Vocabulary:
    return read_with_assumptions(line, tensor=tensor, folder=folder, release=release, home=home)[0]


def read_with_assumptions(
    line: str, *, tensor: int = 1, folder: Path = Path("/nowhere"), release: str = "0.16.1", home: str = "/nowhere"
) -> tuple[Vocabulary, list[str]]:
    launch = launch_of(line, release=release, environ={"HOME": home}, folder=folder)
    return read_vocabulary(launch, tensor=tensor), launch.assumptions


def test_padding_is_that_of_megatron() -> None:
    for record in truth_records("parameters.json"):
        size, tensor = record["tokenizer_vocab"], record["layout"]["tp"]
        assert pad_vocabulary(size, divisible_by=128, tensor=tensor) == record["padded_vocab_size"], record["model"]


@given(st.integers(1, 300_000), st.integers(1, 4096), st.integers(1, 64))
def test_padding_equals_the_loop_of_2023(size: int, divisible_by: int, tensor: int) -> None:
    after = size
    while after % (divisible_by * tensor):
        after += 1
    assert pad_vocabulary(size, divisible_by=divisible_by, tensor=tensor) == after


@pytest.mark.parametrize(
    ("release", "size"), [("2023", 32001), ("0.12.3", 32001), ("0.17.1", 32001), ("0.18.2", 32000), ("0.19.0", 32000)]
)
def test_null_tokenizer(release: str, size: int) -> None:
    assert read("--tokenizer-type NullTokenizer --vocab-size 32000", release=release).size == size


def test_null_tokenizer_without_a_size() -> None:
    with pytest.raises(InputError, match=r"^--vocab-size: .*add --vocab-size N"):
        read("--tokenizer-type NullTokenizer")


@pytest.mark.parametrize(("tensor", "padded"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_gpt2_without_its_vocabulary_file(tensor: int, padded: int) -> None:
    vocabulary, assumptions = read_with_assumptions("--vocab-file /dummy/gpt2-vocab.json --merge-file merges.txt", tensor=tensor)
    assert (vocabulary.size, vocabulary.padded) == (50257, padded)
    assert "50,257" in assumptions[0]


@pytest.mark.parametrize("line", ["", "--vocab-file /d/vocab.json", "--vocab-file europa-tokenizer/vocab.json"])
def test_the_size_of_gpt2_is_assumed_for_its_own_files_only(line: str) -> None:
    assert read(line).assumed is not None


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("--vocab-file /d/nordic_tokenizer_131072/vocab.json", 131072),  # vocab_size of LumiOpen/Viking-7B
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model ver3.0/llm-jp-tokenizer-100k.ver3.0b1.model", 99487),  # LLM-jp 1.7b
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model swiss-ai/Apertus-70B-2509", 131072),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /d/Apertus-8B-2509", 131072),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model alehc/swissai-tokenizer", 131072),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model t5-small", 32100),
    ],
)
def test_published_tokenizers_without_their_files(line: str, size: int) -> None:
    vocabulary, assumptions = read_with_assumptions(line)
    assert (vocabulary.size, vocabulary.assumed) == (size, None)
    assert f"{size:,}" in assumptions[0]


def test_gpt2_file(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({f"token{i}": i for i in range(1000)}))
    vocabulary = read("--vocab-file vocab.json --merge-file merges.txt --vocab-size 7", folder=tmp_path)
    assert vocabulary == Vocabulary(size=1000, padded=1024)


def test_a_given_padded_size_is_used_unchanged() -> None:
    assert read("--tokenizer-type NullTokenizer --vocab-size 99 --padded-vocab-size 130", tensor=2).padded == 130
    unknown, assumptions = read_with_assumptions(
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model some/model --padded-vocab-size 1000"
    )
    assert (unknown.size, unknown.padded) == (1000, 1000)
    assert assumptions
    with pytest.raises(InputError, match=r"^--padded-vocab-size: 131 vocabulary rows .* multiple of 2"):
        job_of("--padded-vocab-size 131 --tensor-model-parallel-size 2")


def test_padding_can_be_turned_off() -> None:
    assert read("--tokenizer-type NullTokenizer --vocab-size 32000 --no-pad-vocab-size", release="0.19.0").padded == 32000


def test_the_padding_multiple_is_an_option() -> None:
    assert read("--tokenizer-type NullTokenizer --vocab-size 129279 --make-vocab-size-divisible-by 3232").padded == 129280


@pytest.mark.parametrize(
    "line",
    [
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model some/unknown-model",
        "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model /dummy/tokenizer.model",
        "--tokenizer-type MultimodalTokenizer",
        "--tokenizer-type BertWordPieceLowerCase --vocab-file /dummy/vocab.txt",
    ],
)
def test_an_unknown_size_is_assumed_or_refused(line: str) -> None:
    unknown = read(line, tensor=2)
    assert (unknown.size, unknown.padded) == (128_000, 128_000)
    assert unknown.assumed is not None
    assert unknown.assumed.others == ((32_000, 32_000), (256_000, 256_000))
    with pytest.raises(InputError, match=r"add --vocab-size N, or --padded-vocab-size N"):
        read_vocabulary(replace(launch_of(line), strict=True), tensor=1)
    given_size, assumptions = read_with_assumptions(line + " --vocab-size 5000")
    assert (given_size.size, given_size.padded) == (5000, 5120)
    assert "--vocab-size" in assumptions[0]


@pytest.mark.parametrize(
    ("name", "size"),
    [("meta-llama/Meta-Llama-3-8B", 128256), ("meta-llama/Llama-2-7b-hf", 32000), ("Qwen/Qwen2.5-7B", 151665), ("gpt2", 50257)],
)
def test_sizes_of_known_tokenizers(name: str, size: int) -> None:
    vocabulary, assumptions = read_with_assumptions(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {name}")
    assert vocabulary.size == size
    assert name in assumptions[0]


@pytest.mark.parametrize(
    ("path", "known"),
    [("/dummy/tokenizer.model", True), ("/m/Mixtral-8x7B/tok.model", True), ("/d/llm-jp-tokenizer-100k.ver3.0a2.model", False)],
)
def test_llama_2_without_its_file(path: str, known: bool) -> None:
    vocabulary = read(f"--tokenizer-type Llama2Tokenizer --tokenizer-model {path}")
    assert vocabulary.size == (32_000 if known else 128_000)
    assert (vocabulary.assumed is None) == known


@pytest.mark.parametrize("line", ["--tokenizer-model /models/Llama-3.1-8B", "--tokenizer-model /cache/meta-llama/Meta-Llama-3-8B/"])
def test_a_path_may_name_the_tokenizer(line: str) -> None:
    assert read(f"--tokenizer-type HuggingFaceTokenizer {line}").size == 128_256


def test_any_type_of_tokenizer_is_accepted() -> None:
    assert read("--tokenizer-type QwenTokenizer --vocab-size 1000").size == 1000
    assert read("--tokenizer-type QwenTokenizer --tokenizer-model Qwen/Qwen2.5-7B").size == 151_665
    with pytest.raises(
        InputError, match=r"^--tokenizer-type: 'GPT2BPETokenize' is not a valid choice; did you mean GPT2BPETokenizer\?"
    ):
        read("--tokenizer-type GPT2BPETokenize --vocab-size 1000")


@pytest.mark.parametrize(("line", "size"), [("", 131072), ("--vocab-size 100000", 100000)])
def test_tik_tokenizer(line: str, size: int) -> None:
    assert read(f"--tokenizer-type TikTokenizer --tokenizer-model tok.json {line}").size == size


def hugging_face(folder: Path, vocabulary: object, added: list[str]) -> Path:
    folder.mkdir(parents=True)
    content = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": i, "content": token} for i, token in enumerate(added)]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 999}))
    return folder


def test_hugging_face_counts_added_tokens_once(tmp_path: Path) -> None:
    hugging_face(tmp_path / "bpe", {"<s>": 0, "a": 1, "b": 2}, ["<s>", "<new>"])
    hugging_face(tmp_path / "unigram", [["<s>", 0.0], ["a", -1.0]], ["<new>"])
    assert read("--tokenizer-type HuggingFaceTokenizer --tokenizer-model bpe", folder=tmp_path).size == 4
    assert read("--tokenizer-type HuggingFaceTokenizer --tokenizer-model unigram/tokenizer.json", folder=tmp_path).size == 3


def test_an_empty_folder_has_no_tokenizer(tmp_path: Path) -> None:
    """Scripts create the folder of a tokenizer before they download it: ROCm's train_llama3.sh, with the tokenizer of Llama 3.1."""
    (tmp_path / "tokenizer_llama3").mkdir()
    line = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
    assert read(f"{line} tokenizer_llama3", folder=tmp_path).size == 128256
    (tmp_path / "own").mkdir()
    assert read(f"{line} own", folder=tmp_path).assumed is not None


def test_hugging_face_vocab_json(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"b": 1, "<think>": 2}))
    assert read(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}").size == 3


def test_the_size_in_a_hugging_face_config_is_an_assumption(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 152064}))
    vocabulary, assumptions = read_with_assumptions(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}")
    assert vocabulary.size == 152064
    assert "unused rows" in assumptions[0]


@pytest.mark.parametrize("size", ["-5", "0", "true", "1.5", '"many"', "1" + "0" * 100])
def test_a_wrong_size_in_a_hugging_face_config_is_refused(size: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"vocab_size": {size}}}')
    with pytest.raises(InputError) as caught:
        read(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}")
    assert caught.value.option == "--tokenizer-model"
    assert f"vocab_size of {tmp_path / 'config.json'}" in str(caught.value)
    assert "add --vocab-size N" in str(caught.value)


def test_a_hugging_face_tokenizer_without_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(InputError, match=r"^--tokenizer-model: .* has no tokens; give"):
        read(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}")


def test_hugging_face_cache(tmp_path: Path) -> None:
    hugging_face(tmp_path / ".cache/huggingface/hub/models--some--model/snapshots/abc", {"a": 0}, ["<s>"])
    assert read("--tokenizer-type HuggingFaceTokenizer --tokenizer-model some/model", home=str(tmp_path)).size == 2


def sentencepiece(path: Path, pieces: list[str]) -> None:
    """Writes a model in the format of the library: field 1 for each piece (text, score, kind), then the trainer's settings."""
    data = b""
    for piece in pieces:
        text = piece.encode()
        message = b"\x0a" + bytes([len(text)]) + text + b"\x15\x00\x00\x80\xbf" + b"\x18\x01"
        data += b"\x0a" + bytes([len(message)]) + message
    settings = b"\x10\x01"
    path.write_bytes(data + b"\x12" + bytes([len(settings)]) + settings)


def test_sentencepiece(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    sentencepiece(path, ["<unk>", "<s>", "</s>", "▁a", "▁b"])
    assert read_sentencepieces(path) == ["<unk>", "<s>", "</s>", "▁a", "▁b"]
    assert read(f"--tokenizer-type Llama2Tokenizer --tokenizer-model {path}").size == 5
    assert read(f"--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {path}").size == 5
    # <CLS>, <SEP>, <EOD>, <MASK>, a padding token that the model does not have, and two extra ids
    assert read(f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {path} --vocab-extra-ids 2").size == 12
    assert read(f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {path}", release="0.17.1").size == 5


def test_bert_word_pieces(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[BOS]\n[CLS]\nword\n")
    assert read("--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt", folder=tmp_path).size == 5


@pytest.mark.parametrize("content", [b"not a model", b"\x0a\xff\xff\xff\xff", b"", b"\x00" * 8])
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    (tmp_path / "vocab.json").write_bytes(content)
    for line in ("--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model", "--vocab-file vocab.json --merge-file m"):
        with pytest.raises(InputError, match="cannot be read as a vocabulary"):
            read(line, folder=tmp_path)


@given(st.binary(max_size=200))
def test_any_content_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        assert read_sentencepieces(path)
