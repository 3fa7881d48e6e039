"""The tokenizer of a Hugging Face directory, or a bare tokenizer.json: fast file, chat template, special tokens.

Used in the resolver only, the one place that may import transformers: for directories without a fast tokenizer
file, and with code from the directory only when the user trusts it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from sglmt.errors import ModelError
from sglmt.tokenizer.described import TokenizerParts
from sglmt.tokenizer.hf_files import read_json, token_content
from sglmt.tokenizer.templates import choose_template

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def hf_tokenizer_parts(path: Path, trust_remote_code: bool) -> TokenizerParts:
    """The parts of the tokenizer in a directory or a tokenizer.json file. Raises ModelError."""
    directory = path if path.is_dir() else path.parent
    fast_file = directory / "tokenizer.json" if path.is_dir() else path
    config = read_json(directory / "tokenizer_config.json") or {}
    special_map = read_json(directory / "special_tokens_map.json") or {}
    named = {
        name: text for name in _NAMES if (text := token_content(config.get(name, special_map.get(name)))) is not None
    }
    if fast_file.is_file():
        tokenizer_json = _completed(fast_file, config, _declared_special(config, special_map, named))
    else:
        tokenizer_json = _converted(directory, trust_remote_code)
    return TokenizerParts(tokenizer_json, _chat_template(directory, config), named)


def _declared_special(config: dict[str, Any], special_map: dict[str, Any], named: dict[str, str]) -> set[str]:
    """Texts the directory declares special, wherever it does so."""
    texts = set(named.values())
    for source in (config, special_map):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = source.get(key)
            values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
            texts |= {text for item in values if (text := token_content(item)) is not None}
    return texts | {entry["content"] for _, entry in _declared_added(config) if entry.get("special")}


def _declared_added(config: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """The tokens that tokenizer_config.json adds to the vocabulary, by id."""
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return []
    valid = (
        (int(key), entry)
        for key, entry in entries.items()
        if key.isdecimal() and isinstance(entry, dict) and token_content(entry) is not None
    )
    return sorted(valid, key=lambda item: item[0])


def _completed(fast_file: Path, config: dict[str, Any], special: set[str]) -> bytes:
    """The file as it is, unless tokens declared beside it are missing in it or lack the special flag."""
    try:
        data = fast_file.read_bytes()
        tokenizer = Tokenizer.from_buffer(data)
    except OSError as error:
        raise ModelError(f"cannot read {fast_file}: {error.strerror or error}") from error
    except Exception as error:
        raise ModelError(f"{fast_file} is not a tokenizer file ({error}); download it again") from error
    changed = False
    for index, entry in _declared_added(config):
        if tokenizer.token_to_id(entry["content"]) is None and index == tokenizer.get_vocab_size():
            changed |= bool(tokenizer.add_tokens([_added_token(entry)]))
    flagged = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    unflagged = [text for text in sorted(special - flagged) if tokenizer.token_to_id(text) is not None]
    if unflagged:
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in unflagged])
    return tokenizer.to_str().encode() if changed or unflagged else data


def _added_token(entry: dict[str, Any]) -> AddedToken:
    flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "special") if name in entry}
    return AddedToken(entry["content"], normalized=bool(entry.get("normalized", not entry.get("special"))), **flags)


def _converted(directory: Path, trust_remote_code: bool) -> bytes:
    os.environ["HF_HUB_OFFLINE"] = "1"  # a directory is read as it is; nothing is looked up elsewhere
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(
            f"{directory} has no tokenizer.json and converting its tokenizer needs transformers; "
            "install transformers, or add a tokenizer.json"
        ) from error
    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        first_line = str(error).strip().split("\n")[0]
        raise ModelError(f"cannot load the tokenizer in {directory}: {first_line}") from error
    fast = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(fast, Tokenizer):
        raise ModelError(
            f"the tokenizer in {directory} ({type(loaded).__name__}) has no fast form; "
            "pass --tokenizer-path with a tokenizer.json"
        )
    return fast.to_str().encode()


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    templates: dict[str, str] = {}
    value = config.get("chat_template") or (read_json(directory / "chat_template.json") or {}).get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates = {
            str(entry["name"]): str(entry["template"])
            for entry in value
            if isinstance(entry, dict) and "name" in entry and "template" in entry
        }
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"cannot read the chat template {path}: {error}") from error
    return choose_template(templates)
