"""A streamed chat over the OpenAI API, with the time of the first token and the pace of the rest.

python examples/chat_stream.py --url http://127.0.0.1:30000 --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, TextIO

import openai


def run(url: str, prompt: str, tokens: int = 64, out: TextIO | None = None) -> dict[str, Any]:
    """Stream the answer to `prompt` to `out`.

    Returns:
        {"text", "pieces": how many it came in, "first_token_seconds", "tokens", "tokens_per_second"}.
    """
    client = openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none")
    model = client.models.list().data[0].id
    begin = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces: list[str] = []
    first = count = 0.0
    for chunk in stream:
        if chunk.usage:
            count = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - begin
            pieces.append(chunk.choices[0].delta.content)
            if out:
                print(pieces[-1], end="", file=out, flush=True)
    rest = time.perf_counter() - begin - first
    return {
        "text": "".join(pieces),
        "pieces": len(pieces),
        "first_token_seconds": round(first, 3),
        "tokens": int(count),
        "tokens_per_second": round((count - 1) / rest, 1) if count > 1 else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A streamed answer and its pace.")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="address of the SGLang server")
    parser.add_argument("--prompt", default="What is the capital of France?")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    result = run(arguments.url, arguments.prompt, arguments.tokens, out=sys.stdout)
    del result["text"]
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
