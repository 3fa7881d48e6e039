"""Tokenizers shared by the tests of this folder: the default model's, and one loaded tokenizer per kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglmt.tokenizer.default_model import default_model_path
from sglmt.tokenizer.loading import Tokenizer, load_tokenizer
from sglmt.tokenizer.model_info import ModelInfo
from sglmt.tokenizer.resolve import resolve_model
from tests.unit.tokenizer import synthetic


@pytest.fixture(scope="session")
def smollm_info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    """The default model, resolved into a fresh cache."""
    cache_dir: Path = tmp_path_factory.mktemp("resolved")
    return resolve_model(default_model_path(), None, None, cache_dir)


@pytest.fixture(scope="session")
def smollm(smollm_info: ModelInfo) -> Tokenizer:
    return load_tokenizer(smollm_info)


@pytest.fixture(params=sorted(synthetic.KINDS))
def any_kind(request: pytest.FixtureRequest) -> Tokenizer:
    """A small tokenizer of every kind in turn."""
    return synthetic.loaded(request.param)
