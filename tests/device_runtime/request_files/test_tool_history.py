"""Earlier tool calls, reasoning and bad words in request files."""

from __future__ import annotations

from edgellm.device_runtime.engine.chat_template import _turn
from edgellm.device_runtime.request_files import responses
from edgellm.device_runtime.request_files.request_file import Options, parse_request, sampling_of

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
}
MESSAGES = [
    {"role": "user", "content": "Bonn?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "sunny"},
]


def test_earlier_calls_reach_the_chat_template_as_they_do_in_the_server():
    request = parse_request({"messages": MESSAGES}, 0)
    found = [responses._message(one, one.items("")) for one in request.messages]
    turns = [_turn(message, at) for at, message in enumerate(found)]
    function = {"name": "weather", "arguments": {"city": "Bonn"}}
    assert turns == [
        {"role": "user", "content": "Bonn?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{**CALL, "function": function}],
        },
        {"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "c1"},
    ]


def test_bad_words_of_a_file_hold_unless_a_request_has_its_own():
    options = Options(bad_words=["a"])
    plain = parse_request({"messages": MESSAGES, "bad_words": None}, 0)
    assert sampling_of(plain.merged(options)).bad_words == ("a",)
    own = parse_request({"messages": MESSAGES, "bad_words": ["b", "c"]}, 0)
    assert sampling_of(own.merged(options)).bad_words == ("b", "c")
