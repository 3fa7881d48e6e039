"""The tokenizer a worker holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from sglmt.errors import ModelError
from sglmt.tokenizer import fast_backend
from sglmt.tokenizer.loading import Backend, Tokenizer, load_chat_template, load_tokenizer
from sglmt.tokenizer.model_info import ModelInfo
from tests.unit.tokenizer import synthetic
from tests.unit.tokenizer.real_tokenizers import real_tokenizer


def test_long_and_short_texts_encode_alike(smollm: Tokenizer) -> None:
    text = "The year 2026, naïve 日本 🔥.\n" * 200
    long_ids = smollm.encode(text)
    assert long_ids == [i for _ in range(200) for i in smollm.encode("The year 2026, naïve 日本 🔥.\n")]
    assert smollm.encode_many([text, "", "a"]) == [long_ids, [], smollm.encode("a")]
    assert smollm.encode_many([]) == []
    assert smollm.decode(long_ids) == text


@pytest.mark.parametrize("backend", ["huggingface", "fastokens"])
@pytest.mark.parametrize("length", [1, 5000])
def test_text_that_is_not_unicode_is_a_value_error(smollm_info: ModelInfo, backend: Backend, length: int) -> None:
    tokenizer = load_tokenizer(smollm_info, backend)
    text = "a" * length + "\ud83d"
    with pytest.raises(ValueError, match=f"half of a surrogate pair at character {length}"):
        tokenizer.encode(text)
    with pytest.raises(ValueError, match=f"half of a surrogate pair at character {length}"):
        tokenizer.encode_many(["ok", text])


def test_digits_are_split_one_by_one(smollm: Tokenizer) -> None:
    assert [smollm.token_text(i) for i in smollm.encode("in 1234")] == ["in", " ", "1", "2", "3", "4"]


def test_special_tokens(smollm: Tokenizer) -> None:
    end = smollm.token_to_id("<|im_end|>")
    assert end is not None
    assert smollm.is_special(end)
    assert not smollm.is_special(smollm.encode("a")[0])
    ids = smollm.encode("hi<|im_end|>")
    assert ids[-1] == end
    assert smollm.decode(ids) == "hi"
    assert smollm.decode(ids, skip_special_tokens=False) == "hi<|im_end|>"
    assert smollm.token_text(end) == "<|im_end|>"


def test_bytes_of_tokens_add_up_to_the_text(smollm: Tokenizer) -> None:
    text = "naïve 鑫龘 🔥 x"
    ids = smollm.encode(text)
    assert b"".join(map(smollm.token_bytes, ids)) == text.encode()
    assert smollm.token_text(smollm.encode("龘")[0]).endswith("\ufffd")


def test_bytes_of_tokens_with_byte_fallback() -> None:
    tokenizer = synthetic.loaded("sentencepiece")
    ids = tokenizer.encode("fox ᚠ")
    assert b"".join(map(tokenizer.token_bytes, ids)) == " fox ᚠ".encode()


@pytest.mark.parametrize("bad", [-1, 49152, 4294967295, 2**70])
def test_an_id_outside_the_vocabulary_is_named(smollm: Tokenizer, bad: int) -> None:
    with pytest.raises(ValueError, match=f"token id {bad} is outside"):
        smollm.decode([1, bad])
    with pytest.raises(ValueError, match=f"token id {bad} is outside"):
        smollm.token_text(bad)


@pytest.mark.parametrize("content", [None, b"", b'{"version": "1.0"'])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=str(path)):
        load_tokenizer(synthetic.model_info(tokenizer_file=str(path)))


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    library = synthetic.wordpiece()
    library.enable_truncation(2)
    library.enable_padding(length=5)
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    tokenizer = load_tokenizer(synthetic.model_info(tokenizer_file=str(path)))
    assert tokenizer.decode(tokenizer.encode("the quick brown fox jumps")) == "the quick brown fox jumps"


def test_fastokens_gives_the_same_ids(smollm: Tokenizer, smollm_info: ModelInfo) -> None:
    fast = load_tokenizer(smollm_info, "fastokens")
    assert (fast.backend, fast.backend_note) == ("fastokens", "")
    assert load_tokenizer(smollm_info, "auto").backend == "fastokens"
    for text in synthetic.TEXTS:
        assert fast.encode(text) == smollm.encode(text)
    assert fast.encode_many(synthetic.TEXTS) == smollm.encode_many(synthetic.TEXTS)


def test_fastokens_refusing_a_tokenizer_says_why() -> None:
    path = str(real_tokenizer("WordPiece"))
    tokenizer = load_tokenizer(synthetic.model_info(tokenizer_file=path), "auto")
    assert tokenizer.backend == "huggingface"
    assert "fastokens refuses this tokenizer" in tokenizer.backend_note
    assert tokenizer.encode("hello there")


def test_fastokens_with_other_ids_is_not_trusted(smollm_info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = fast_backend.FastokensEncoder.encode

    def wrong(self: fast_backend.FastokensEncoder, text: str, add_special_tokens: bool) -> list[int]:
        ids = honest(self, text, add_special_tokens)
        return ids[:-1] if "🔥" in text else ids

    monkeypatch.setattr(fast_backend.FastokensEncoder, "encode", wrong)
    tokenizer = load_tokenizer(smollm_info, "fastokens")
    assert tokenizer.backend == "huggingface"
    assert "other ids" in tokenizer.backend_note


def test_chat_template_of_the_model(smollm_info: ModelInfo) -> None:
    template = load_chat_template(smollm_info)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert load_chat_template(msgspec.structs.replace(smollm_info, chat_template_file=None)) is None
    with pytest.raises(ModelError, match="/nowhere/x"):
        load_chat_template(msgspec.structs.replace(smollm_info, chat_template_file="/nowhere/x"))


def test_loading_imports_no_heavy_library_and_warns_of_nothing(smollm_info: ModelInfo) -> None:
    """A worker's memory and start time depend on it."""
    code = (
        "import json, sys, msgspec\n"
        "from sglmt.tokenizer.loading import load_tokenizer\n"
        "from sglmt.tokenizer.model_info import ModelInfo\n"
        "t = load_tokenizer(msgspec.json.decode(sys.stdin.buffer.read(), type=ModelInfo))\n"
        "t.encode('x' * 5000); t.table\n"
        "heavy = {'transformers', 'torch', 'numpy', 'gguf'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=msgspec.json.encode(smollm_info), capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert done.stderr == b""
