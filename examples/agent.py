"""An agent in three turns with a tool call, over the OpenAI API.

1. The user asks for the weather. The server must call the tool (``tool_choice``), so its grammar forces valid JSON.
2. The tool's result goes back; the model answers in words.
3. A second question builds on the conversation. Each turn's prompt continues the last one's, so the server takes
   the shared part from its radix cache.

    python examples/agent.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import openai

WEATHER = {
    "Oslo": "7 degrees Celsius, rain",
    "Cairo": "31 degrees Celsius, clear sky",
    "Lima": "18 degrees Celsius, fog",
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look up the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(WEATHER)}},
            "required": ["city"],
        },
    },
}
SYSTEM = (
    "You are a weather assistant. To look up the weather of a city, call the tool get_weather with the name of the "
    "city. Then answer with the numbers that the tool returned."
)


def get_weather(city: str) -> str:
    """The tool: a table look-up in place of a weather service."""
    return f"{city}: {WEATHER[city]}."


def parse_call(message: Any) -> tuple[str, dict[str, Any], str]:
    """Name, arguments and id of the one tool call in ``message``.

    A server without ``--tool-call-parser`` leaves the forced call in the text, as a JSON list.

    Raises:
        ValueError: the message holds no tool call.
    """
    if message.tool_calls:
        call = message.tool_calls[0]
        return call.function.name, json.loads(call.function.arguments), call.id
    try:
        call = json.loads(message.content)[0]
        return call["name"], call["parameters"], "call_0"
    except (TypeError, ValueError, LookupError) as error:
        raise ValueError(f"The model was asked for a tool call and wrote {message.content!r}.") from error


def run(url: str, city: str = "Oslo") -> dict[str, Any]:
    """Hold the conversation with the server at ``url``.

    Returns:
        {"call": the arguments that the model chose, "answer": turn 2's text, "follow_up": turn 3's text,
        "prompt_tokens": [tokens of each turn's prompt]}.

    Raises:
        ValueError: the model called something that is not the tool.
    """
    client = openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    prompt_tokens: list[int] = []

    def turn(**options: Any) -> Any:
        reply = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=48, **options)
        prompt_tokens.append(reply.usage.prompt_tokens)
        return reply.choices[0].message

    messages.append({"role": "user", "content": f"What is the weather in {city} today?"})
    name, arguments, call_id = parse_call(turn(tools=[TOOL], tool_choice="required"))
    if name != "get_weather" or arguments.get("city") not in WEATHER:
        raise ValueError(f"The model called {name}({arguments}), which is not the tool it was given.")
    call = {"name": name, "arguments": json.dumps(arguments)}
    messages.append(
        {
            "role": "assistant",
            "content": json.dumps([{"name": name, "parameters": arguments}]),
            "tool_calls": [{"id": call_id, "type": "function", "function": call}],
        }
    )
    messages.append({"role": "tool", "tool_call_id": call_id, "content": get_weather(arguments["city"])})

    answer = turn().content
    messages.append({"role": "assistant", "content": answer})

    messages.append({"role": "user", "content": "Should I take an umbrella?"})
    follow_up = turn().content
    return {"call": arguments, "answer": answer, "follow_up": follow_up, "prompt_tokens": prompt_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description="A three-turn conversation with a tool call.")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="address of the SGLang server")
    parser.add_argument("--city", default="Oslo", choices=list(WEATHER))
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.url, arguments.city), indent=2))


if __name__ == "__main__":
    main()
