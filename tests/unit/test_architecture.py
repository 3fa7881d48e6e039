"""The rules of docs/architecture.md that a reader relies on: who imports whom, and that what is named exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sglmt"

# package → packages of ours it must never import, directly or by any of its modules
FORBIDDEN = {
    "supervisor": {"workers", "http", "engines", "tokenizer"},
    "control": {"workers", "http", "engines", "tokenizer"},
    "status": {"workers", "http", "engines", "tokenizer"},
    "ipc": {"workers", "http", "engines", "tokenizer", "supervisor", "control", "status"},
    "tokenizer": {"workers", "http", "engines", "supervisor", "control"},
    "engines": {"workers", "http", "supervisor", "control"},
}
ONLY = {"messages": {"messages", "errors"}, "delivery": {"delivery", "errors"}}
HEAVY = {"transformers", "torch", "openvino", "openvino_genai", "gguf"}


def modules(package: str) -> list[Path]:
    return sorted((PACKAGE / package).rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Full names of the modules a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names.add(node.module)
    return names


def ours(path: Path) -> set[str]:
    """The packages (or top-level modules) of ours that a file imports."""
    return {name.split(".")[1] for name in imports_of(path) if name.startswith("sglmt.")}


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_go_one_way(package: str) -> None:
    wrong = {str(path.relative_to(ROOT)): ours(path) & FORBIDDEN[package] for path in modules(package)}
    assert not {path: names for path, names in wrong.items() if names}


@pytest.mark.parametrize("package", sorted(ONLY))
def test_pure_packages_import_nothing_else_of_ours(package: str) -> None:
    wrong = {str(path.relative_to(ROOT)): ours(path) - ONLY[package] for path in modules(package)}
    assert not {path: names for path, names in wrong.items() if names}


def test_heavy_libraries_are_imported_by_the_resolver_and_engines_only() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sorted(PACKAGE.rglob("*.py"))
        if {name.split(".")[0] for name in imports_of(path)} & HEAVY
        and path.parent.name not in ("engines", "tokenizer")
    ]
    assert wrong == []


def test_no_pickle_anywhere() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sorted(PACKAGE.rglob("*.py"))
        if {name.split(".")[0] for name in imports_of(path)} & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    ]
    assert wrong == []


def test_every_module_opens_with_a_paragraph() -> None:
    without = [
        str(path.relative_to(ROOT))
        for path in sorted(PACKAGE.rglob("*.py"))
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert without == []


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_documents_name_only_what_exists(document: str) -> None:
    """Files in backquotes, and links to files, are there."""
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:sglmt|scripts|tests|docs)/[\w./-]+)`", text))
    named |= {
        f"sglmt/{name}"
        for name in re.findall(
            r"`((?:supervisor|control|status|messages|ipc|delivery|tokenizer|workers|engines|http)/[\w./-]+\.py)`", text
        )
    }
    linked = {
        str((ROOT / document).parent.joinpath(target).resolve().relative_to(ROOT))
        for target in re.findall(r"\]\(([\w./-]+)\)", text)
    }
    missing = sorted(name for name in named | linked if not (ROOT / name).exists())
    assert missing == []
