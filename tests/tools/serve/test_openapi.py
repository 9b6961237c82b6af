"""schemathesis finds nothing: every answer is one that the OpenAPI document tells of."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from edgellm.device_runtime.engine.template_flags import THINKING
from edgellm.tools.serve.protocols.ollama import LOADING
from edgellm.tools.serve.schemas.openai import WITHOUT_EFFECT

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
LENGTHS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "sampling_param_max_tokens",
)
# By path: of a request without a length the output fills the KV cache
DEFAULT_LENGTHS = {
    "/v1/responses": "max_output_tokens",
    "/v1/chat/completions": "max_tokens",
}
OF_TOOLS = ("tools.defer_loading", "tools.input_examples", "tools.allowed_callers")
OF_OTHERS = (
    "store", "truncation", "strict", "context_management", "container", *OF_TOOLS, *LOADING,
)  # fmt: skip


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_documented(lettered_server, mode):
    server, statuses = lettered_server, set()
    for name in (*WITHOUT_EFFECT, *OF_OTHERS, *THINKING):
        server.expects(f"WARNING: requests have {name}, which is ignored; logged once")

    def check(case):
        for name in LENGTHS if isinstance(case.body, dict) else ():
            if name in case.body and case.body[name] is None:
                del case.body[name]
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 8)  # seconds, not minutes
        length = DEFAULT_LENGTHS.get(case.path)
        if length and isinstance(case.body, dict) and not {*LENGTHS} & case.body.keys():
            case.body[length] = 8
        if mode.is_positive:  # most would be refused for their model alone
            case.path_parameters = case.path_parameters and {"name": "tiny"}
            if isinstance(case.body, dict):
                case.body["model"] = "tiny"
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    few = settings(
        max_examples=5,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) == 38
    for operation in operations:
        if mode.is_positive or operation.body:
            few(given(case=operation.as_strategy(generation_mode=mode))(check))()
    assert (200 in statuses) == mode.is_positive
    assert statuses & {400, 404}
