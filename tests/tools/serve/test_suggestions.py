"""Unknown fields and values of bodies get the name that was probably meant."""

from __future__ import annotations

import pytest

MESSAGES = [{"role": "user", "content": "w20"}]
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["w20"]}
SAMPLING = {
    "name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "data": ['{"temperatur": 0}'],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "field", "meant"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokns": 4}, "max_tokns", "max_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "topP": 1}, "topP", "top_p"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "contnet": "x"}]},
         "messages.0", "content"),
        ("/v1/chat/completions", {"messages": [{"role": "usr", "content": "x"}]},
         "messages.0.role", "user"),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream_options": {"include_usge": True}},
         "stream_options.include_usge", "include_usage"),
        ("/v1/completions", {"prompt": "w20", "logprob": 1}, "logprob", "logprobs"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "stop_sequence": []},
         "stop_sequence", "stop_sequences"),
        ("/v1/responses", {"input": "w20", "max_output_token": 3}, "max_output_token",
         "max_output_tokens"),
        ("/api/chat", {"model": "tiny", "messages": MESSAGES, "options": {"num_predct": 3}},
         "options.num_predct", "num_predict"),
        ("/v2/models/tiny/generate", {"text_input": "w20", "max_tokenz": 3}, "max_tokenz",
         "max_tokens"),
        ("/v2/models/tiny/infer", {"inputs": [], "output": []}, "output", "outputs"),
        ("/v2/models/tiny/infer", {"inputs": [], "parameters": {"sequence_begin": 1}},
         "parameters.sequence_begin", "sequence_end"),
        ("/v2/models/tiny/infer", {"inputs": [{**TENSOR, "parameters": {"binary_datasize": 1}}]},
         "inputs.0.parameters.binary_datasize", "binary_data_size"),
        ("/v2/models/tiny/infer",
         {"inputs": [TENSOR], "outputs": [{"name": "text_output", "parameters": {"binary": 1}}]},
         "outputs.0.parameters.binary", "binary_data"),
        ("/v2/models/tiny/infer", {"inputs": [TENSOR, SAMPLING]}, "parameters.temperatur",
         "temperature"),
    ],
    ids=str,
)  # fmt: skip
def test_names_that_are_nearly_right(server, path, body, field, meant):
    status, answer = server.json(path, body)
    error = answer["error"]
    message = error if isinstance(error, str) else error["message"]
    assert status == 400
    assert message.startswith(field)
    assert message.endswith(f"(did you mean {meant}?)")


def test_a_name_like_none_gets_no_guess(server):
    status, answer = server.json("/v1/chat/completions", {"messages": MESSAGES, "qqqqqq": 1})
    assert (status, answer["error"]["message"]) == (400, "qqqqqq: extra inputs are not permitted")
