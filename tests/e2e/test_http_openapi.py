"""The OpenAPI document against the served behaviour: schemathesis asks, and compares answers with what is declared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode

from sglmt.http.operations import operations
from tests.support.instance import Instance
from tests.support.serving import look

EXAMPLES = 12  # a route and mode
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
NOT_SERVED = frozenset({"/open_session", "/close_session"})  # documented 501s, which a check takes for a failure

WITH_BODY = [path for (_, path), operation in operations().items() if operation.body is not None]
WITHOUT_BODY = [
    (method, path)
    for (method, path), operation in operations().items()
    if operation.body is None and path not in NOT_SERVED
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    options = ("--engine", "simulator", "--simulator-step-ms", "0", "--workers", "2", "--context-length", "256")
    with Instance(Path(tmp_path_factory.mktemp("o"))) as made:
        yield made.launch(*options)


@pytest.fixture(scope="module")
def schema(served: Instance) -> Any:
    load_all_checks()
    loaded = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    loaded.validate()  # against the OpenAPI 3.1 meta-schema
    return loaded


@pytest.fixture(autouse=True, scope="module")
def nobody_died(served: Instance) -> Iterator[None]:
    yield
    httpx.post(served.url + "/continue_generation", timeout=20)
    assert {f"{row.role}:{row.index}": row.restarts for row in look(served).processes if row.restarts} == {}


def operation_of(schema: Any, path: str) -> Any:
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        if found.ok().path == path:
            return found.ok()
    raise AssertionError(f"{path} is not in the document")


@pytest.mark.parametrize("path", WITH_BODY)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_bodies(path: str, mode: GenerationMode, schema: Any) -> None:
    checks = [CHECKS.get_one(name) for name in CHECKED]
    seen: set[int] = set()

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation_of(schema, path).as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        answer = case.call()
        seen.add(answer.status_code)
        if answer.status_code != 501:
            case.validate_response(answer, checks=checks)

    ask()
    assert seen


@pytest.mark.parametrize(("method", "path"), WITHOUT_BODY)
def test_routes_without_a_body(method: str, path: str, served: Instance, schema: Any) -> None:
    answer = httpx.request(method, served.url + path.replace("{model}", "default"), timeout=20)
    assert answer.status_code == 200
    if path != "/openapi.json":  # which schemathesis leaves out: it has asked for it already
        operation_of(schema, path).validate_response(answer)


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        (path, stream)
        for (_, path), each in operations().items()
        if each.example is not None
        for stream in ((False, True) if each.streams else (False,))
    ],
)
def test_the_examples_work(path: str, stream: bool, served: Instance, schema: Any) -> None:
    operation = operations()["POST", path]
    body = {**(operation.example or {}), **({"stream": True} if stream else {})}
    answer = httpx.post(served.url + path, json=body, timeout=20)
    expected = 501 if "embed" in operation.summary.lower() and answer.status_code == 501 else 200
    assert answer.status_code == expected, answer.text
    operation_of(schema, path).validate_response(answer)


def test_the_page(served: Instance) -> None:
    page = httpx.get(served.url + "/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "/v1/chat/completions" in page.text
