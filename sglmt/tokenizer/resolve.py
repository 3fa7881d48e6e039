"""From what the user named to what the processes read: facts, fast tokenizer file, chat template, in the cache.

Runs in the resolver child, before anything else starts. Everything it writes is keyed by a fingerprint of its
inputs, so a second start reads one small directory; any change of an input makes a new entry.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from sglmt.errors import ModelError
from sglmt.tokenizer.cache import read_entry, write_entry
from sglmt.tokenizer.chat_template import ChatTemplate
from sglmt.tokenizer.decoder_rules import compile_rules
from sglmt.tokenizer.described import ModelFacts, TokenizerParts
from sglmt.tokenizer.gguf_metadata import GgufMetadata, read_gguf
from sglmt.tokenizer.gguf_model import gguf_tokenizer_parts, read_gguf_model
from sglmt.tokenizer.hf_model import read_hf_model
from sglmt.tokenizer.hf_tokenizer import hf_tokenizer_parts
from sglmt.tokenizer.model_info import ModelInfo
from sglmt.tokenizer.segments import proven_separators
from sglmt.tokenizer.templates import given_template

FORMAT_VERSION = 2  # raise when what is written for the same inputs changes

_TOKENIZER, _TEMPLATE, _INFO = "tokenizer.json", "chat_template.jinja", "model_info.json"
_WEIGHTS = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"))


def resolve_model(
    model_path: str,
    tokenizer_path: str | None,
    chat_template: str | None,
    cache_dir: Path,
    trust_remote_code: bool = False,
) -> ModelInfo:
    """Resolve a `.gguf` file or a Hugging Face directory and write `<cache_dir>/<fingerprint>/`.

    `tokenizer_path` (a directory, tokenizer.json or .gguf) and `chat_template` (a path or a template) replace the
    model's own. Raises ModelError; ChatTemplateError when the template does not compile.
    """
    model = _existing(model_path, "--model-path")
    source = _existing(tokenizer_path, "--tokenizer-path") if tokenizer_path else model
    template = given_template(chat_template) if chat_template else None
    fingerprint = _fingerprint([model, source], template, trust_remote_code)
    entry = cache_dir.expanduser().absolute() / fingerprint
    cached = _cached(entry, fingerprint)
    if cached is not None:
        return cached
    facts, parts = _read(model, source, trust_remote_code)
    if template is not None:
        parts = TokenizerParts(parts.tokenizer_json, template, parts.special_tokens)
    if parts.chat_template is not None:
        ChatTemplate(parts.chat_template, parts.special_tokens)
    info = _info(model, facts, parts, entry, fingerprint)
    files = {_TOKENIZER: parts.tokenizer_json, _INFO: msgspec.json.encode(info)}
    if parts.chat_template is not None:
        files[_TEMPLATE] = parts.chat_template.encode()
    write_entry(entry, files)
    return info


def _existing(given: str, flag: str) -> Path:
    path = Path(given).expanduser().absolute()
    if not path.exists():
        raise ModelError(f"{flag} {given}: no such file or directory")
    accepted = (".gguf",) if flag == "--model-path" else (".gguf", ".json")
    if path.is_file() and path.suffix not in accepted:
        or_json = "" if flag == "--model-path" else ", a tokenizer.json"
        raise ModelError(f"{flag} {given}: expected a .gguf file{or_json} or a Hugging Face directory")
    return path


def _read(model: Path, source: Path, trust_remote_code: bool) -> tuple[ModelFacts, TokenizerParts]:
    metadata: GgufMetadata | None = None
    if model.is_dir():
        facts = read_hf_model(model)
    else:
        facts, metadata = read_gguf_model(model)
    if source.suffix == ".gguf" and source.is_file():
        reuse = metadata if metadata is not None and source == model else None
        parts = gguf_tokenizer_parts(reuse or read_gguf(source))
    else:
        parts = hf_tokenizer_parts(source, trust_remote_code)
    return facts, parts


def _info(model: Path, facts: ModelFacts, parts: TokenizerParts, entry: Path, fingerprint: str) -> ModelInfo:
    try:
        tokenizer = Tokenizer.from_str(parts.tokenizer_json.decode())
    except Exception as error:
        raise ModelError(f"{model}: its tokenizer cannot be loaded: {error}; pass --tokenizer-path") from error
    tokenizer.no_truncation()
    compile_rules(tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else None)

    def named(name: str) -> int | None:
        text = parts.special_tokens.get(name)
        return tokenizer.token_to_id(text) if text is not None else None

    bos = named("bos_token")
    eos = [index for index in (named("eos_token"), *facts.eos_ids) if index is not None]
    added = "".join(map(str, tokenizer.encode("a", add_special_tokens=True).special_tokens_mask))
    pad = named("pad_token")
    return ModelInfo(
        model_path=str(model),
        model_kind=facts.kind,
        architecture=facts.architecture,
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        bos_token_id=bos if bos is not None else facts.bos_id,
        eos_token_ids=[index for index in dict.fromkeys(eos) if index < facts.vocab_size],
        pad_token_id=pad if pad is not None else facts.pad_id,
        add_bos=added.startswith("1"),
        add_eos=added.lstrip("1").endswith("1"),
        special_token_ids=sorted(
            index
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special and (index := tokenizer.token_to_id(token.content)) is not None
        ),
        generation_defaults=facts.generation_defaults,
        is_embedding=facts.is_embedding,
        tokenizer_file=str(entry / _TOKENIZER),
        chat_template_file=str(entry / _TEMPLATE) if parts.chat_template is not None else None,
        fingerprint=fingerprint,
        special_tokens=parts.special_tokens,
        separators=proven_separators(tokenizer),
    )


def _cached(entry: Path, fingerprint: str) -> ModelInfo | None:
    files = read_entry(entry)
    if files is None or _TOKENIZER not in files or _INFO not in files:
        return None
    try:
        info = msgspec.json.decode(files[_INFO], type=ModelInfo)
    except msgspec.DecodeError:
        return None
    if info.fingerprint != fingerprint or (info.chat_template_file is not None and _TEMPLATE not in files):
        return None
    template = None if info.chat_template_file is None else str(entry / _TEMPLATE)
    return msgspec.structs.replace(info, tokenizer_file=str(entry / _TOKENIZER), chat_template_file=template)


def _fingerprint(paths: list[Path], template: str | None, trust_remote_code: bool) -> str:
    """A hash of path, size and modification time of every input file, and of what was given as text."""
    described: list[tuple[str, int, int]] = []
    try:
        for path in paths:
            for file in _inputs(path):
                status = file.stat()
                described.append((str(file), status.st_size, status.st_mtime_ns))
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror or error}") from error
    content = msgspec.json.encode([FORMAT_VERSION, described, template, trust_remote_code])
    return hashlib.sha256(content).hexdigest()[:32]


def _inputs(path: Path) -> list[Path]:
    if path.is_file():
        siblings = (
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
            "chat_template.json",
        )
        beside = [path.parent / name for name in siblings] if path.suffix == ".json" else []
        return [path, *(file for file in beside if file.is_file())]
    files = [*path.iterdir(), *path.glob("additional_chat_templates/*.jinja")]
    return sorted(file for file in files if file.is_file() and file.suffix not in _WEIGHTS)
