"""Whatever the OpenAPI document allows, and what it does not, the server never fails.

WAVEPP_SCHEMA_CASES says how many cases each endpoint gets; 2000 take some minutes.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import schemathesis

CASES = int(os.environ.get("WAVEPP_SCHEMA_CASES", "12"))
BAD_REQUEST, UNPROCESSABLE, SERVER_FAILED = 400, 422, 500

pytestmark = [pytest.mark.ray, pytest.mark.timeout(0 if CASES > 100 else 300)]


def try_operation(operation: Any) -> int:
    """Sends cases of one endpoint; returns how many."""
    count = 0
    cases = operation.as_strategy()
    if operation.body:
        cases |= operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

    @hypothesis.given(case=cases)
    @hypothesis.settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def check(case: Any) -> None:
        nonlocal count
        response = case.call(timeout=60)
        assert response.status_code < SERVER_FAILED, (case.as_curl_command(), response.text)
        assert response.status_code != UNPROCESSABLE
        if response.status_code >= BAD_REQUEST:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        count += 1

    check()
    return count


def test_no_request_makes_the_server_fail(server: str) -> None:
    schema: Any = schemathesis.openapi.from_url(f"{server}/openapi.json")
    tried = [try_operation(found.ok()) for found in schema.get_all_operations()]
    assert len(tried) >= 15
    assert min(tried) > 0
