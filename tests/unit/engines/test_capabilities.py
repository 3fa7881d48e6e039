"""Every engine declares every feature that the protocol names, with one of the three words."""

from __future__ import annotations

import re

import pytest

from sglmt.engines import openvino, openvino_embedding
from sglmt.engines.base import Capability, EngineInfo
from sglmt.engines.simulator import SimulatorEngine

WORDS = {Capability.EXACT, Capability.APPROXIMATE, Capability.REFUSED}


def features() -> set[str]:
    """The names in the protocol's documentation."""
    text = EngineInfo.__doc__ or ""
    listed = re.search(r"features:(.*?); and", text, re.DOTALL)
    continued = re.search(r"after a crash:(.*?)\.", text, re.DOTALL)
    assert listed is not None
    assert continued is not None
    names = set(listed[1].split())
    return names | {f"continue.{name.strip()}" for name in continued[1].split(",")}


def simulator_capabilities() -> dict[str, str]:
    engine = SimulatorEngine(
        vocab_size=9,
        context_length=9,
        eos_token_ids=[],
        special_token_ids=[],
        step_s=0.0,
        seed=0,
        script=None,
    )
    return engine.info().capabilities


@pytest.mark.parametrize(
    "declared",
    [simulator_capabilities(), openvino.CAPABILITIES, openvino_embedding.CAPABILITIES],
    ids=["simulator", "openvino", "openvino embedding"],
)
def test_every_feature_is_declared_once(declared: dict[str, str]) -> None:
    assert set(declared) == features()
    assert set(declared.values()) <= WORDS
