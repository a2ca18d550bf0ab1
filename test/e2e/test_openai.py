"""The OpenAI interface as plain SGLang's: tools, forms, several choices, logprobs, stops, streams and whole answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from serving import Server, recorded
from texts import excerpt

pytestmark = pytest.mark.slow  # test_sampling_features.py has what these share with /generate

TOOL = {
    "type": "function",
    "function": {
        "name": "find_item",
        "description": "Look an item up in the list.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}, "colour": {"enum": ["amber", "black", "cobalt"]}},
            "required": ["number", "colour"],
        },
    },
}
FORM = {
    "type": "object",
    "properties": {"item": {"type": "string", "maxLength": 8}, "price": {"type": "integer", "maximum": 999}},
    "required": ["item", "price"],
    "additionalProperties": False,
}
LIST = excerpt("records", 900, 2000)
ASK = [
    {"role": "system", "content": "You answer in short sentences."},
    {"role": "user", "content": f"{LIST}\n\nWhich of these items is the cheapest?"},
]
POEM = [{"role": "user", "content": "Write a short poem about a river and the moon."}]
EBNF = 'root ::= "Item " num ": " ("cheap" | "dear") "."\nnum ::= [0-9] [0-9]'

CHATS: dict[str, dict[str, Any]] = {
    "an answer": {"messages": ASK},
    "several choices": {"messages": ASK, "n": 3},
    "a tool that must be called": {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
    "a tool by its name": {
        "messages": ASK,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "find_item"}},
        "max_tokens": 60,
    },
    "a tool that may be called": {"messages": ASK, "tools": [TOOL]},
    "a form": {
        "messages": ASK,
        "response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}},
        "max_tokens": 50,
    },
    "any JSON": {"messages": POEM, "response_format": {"type": "json_object"}, "max_tokens": 24},
    "a grammar": {"messages": ASK, "ebnf": EBNF},
    "a regular expression": {"messages": ASK, "regex": "Item [0-9]{3}, [a-z]{3,8}\\."},
    "penalties": {"messages": POEM, "frequency_penalty": 0.5, "presence_penalty": 0.4, "max_tokens": 24},
    "repetition": {"messages": POEM, "repetition_penalty": 1.2, "max_tokens": 24},
    "a stop string": {"messages": POEM, "stop": [",", "moon"], "max_tokens": 24},
    "a biased token": {"messages": POEM, "logit_bias": {"260": 3.0, "28": -100}},
    "logprobs": {"messages": ASK, "logprobs": True, "top_logprobs": 3},
    "no special tokens": {"messages": POEM, "skip_special_tokens": False, "ignore_eos": True, "max_tokens": 16},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "a batch": {"prompt": ["The capital of France is", LIST, excerpt("tale", 700, 900)]},
    "an echo": {"prompt": "The capital of France is", "echo": True, "logprobs": 2},
    "choices of a batch": {"prompt": ["One, two,", "def fibonacci(n):"], "n": 2},
    "token ids": {"prompt": [504, 3575, 282, 4649, 314]},
    "a stop string": {"prompt": LIST, "stop": ["crowns"], "max_tokens": 24},
}


def whole(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What each choice says, without what is drawn anew for each reply and with logprobs' tokens only."""
    found = server.post(path, body)
    return [_choice(choice) for choice in sorted(found["choices"], key=lambda choice: choice["index"])]


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    logprobs = choice.get("logprobs") or {}
    tokens = [entry["token"] for entry in logprobs.get("content") or ()] or logprobs.get("tokens")
    said = choice.get("text", message.get("content"))
    return {"said": said, "calls": calls, "tokens": tokens, "finish": choice["finish_reason"]}


def streamed(server: Server, path: str, body: dict[str, Any]) -> dict[int, list[Any]]:
    """Texts of each choice, put together from a stream, and why it ended."""
    texts: dict[int, str] = {}
    finish: dict[int, str] = {}
    with requests.post(server.url + path, json={**body, "stream": True}, timeout=600, stream=True) as reply:
        assert reply.ok, reply.text
        for line in reply.iter_lines():
            if not line.startswith(b"data:") or b"[DONE]" in line:
                continue
            for choice in json.loads(line[len(b"data:") :]).get("choices", ()):
                delta = choice.get("delta") or {}
                said = choice.get("text") or delta.get("content") or ""
                said += "".join(call["function"].get("arguments") or "" for call in delta.get("tool_calls") or ())
                texts[choice["index"]] = texts.get(choice["index"], "") + said
                finish[choice["index"]] = choice.get("finish_reason") or finish.get(choice["index"], "")
    return {index: [texts[index], finish[index]] for index in sorted(texts)}


def complete(kind: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    return path, {"model": "served", "temperature": 0, "max_tokens": 12, **body}


BODIES = {
    **{f"chat, {name}": ("chat", body) for name, body in CHATS.items()},
    **{f"completion, {name}": ("completion", body) for name, body in COMPLETIONS.items()},
}


@recorded("plain")
def answers(server: Server) -> dict[str, tuple]:
    server.flush()
    found = {}
    for name, (kind, body) in BODIES.items():
        path, full = complete(kind, body)
        found[name] = whole(server, path, full), streamed(server, path, full)
    return found


@pytest.fixture(scope="module")
def ours(fleet) -> dict[str, tuple]:
    server = fleet.server("sparse")
    server.policy()
    return answers(server)


@pytest.mark.parametrize("name", BODIES)
def test_as_plain_sglang(ours, recorded_on, sparse, name: str):
    expected = recorded_on("plain", answers)
    assert ours[name] == expected[name]


def test_it_is_what_was_asked_for(ours, sparse):
    for name in ("chat, a tool that must be called", "chat, a tool by its name"):
        (choice,), _ = ours[name]
        call = choice["calls"][0] if choice["calls"] else None
        found = call[1] if call else json.loads(choice["said"])[0]["parameters"]
        assert found["colour"] in ("amber", "black", "cobalt")
    (form,), _ = ours["chat, a form"]
    assert set(json.loads(form["said"])) == {"item", "price"}
    assert ours["chat, a grammar"][0][0]["said"].startswith("Item ")
    assert len(ours["chat, several choices"][0]) == 3 and len(ours["completion, choices of a batch"][0]) == 4
    assert "," not in ours["chat, a stop string"][0][0]["said"]
    assert len(ours["chat, logprobs"][0][0]["tokens"]) > 5
    for name, (choices, stream) in ours.items():
        if "echo" not in name and not any(choice["calls"] for choice in choices):
            assert [text for text, _ in stream.values()] == [choice["said"] or "" for choice in choices], name
