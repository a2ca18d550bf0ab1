"""Many questions to many documents at once, over the OpenAI API.

All questions are asked together. Those on one document share its text as a prefix, which the server reads once and
keeps in host memory; how many decode together is the server's business.

    python examples/batch_qa.py --url http://127.0.0.1:30000 examples/minutes/*.txt
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import openai

QUESTIONS = ("Who is the chair?", "When is the next meeting or event?", "Which repair was discussed?")
TOGETHER = 64  # requests in flight; the server queues what it cannot run


def prompt(document: str, question: str) -> str:
    # The document comes first, so that questions on it have a prefix in common.
    return f"{document}\n\nAnswer in one short sentence: {question}"


async def ask_all(url: str, documents: dict[str, str], questions: Sequence[str]) -> dict[str, dict[str, str]]:
    """Answers by document and question."""
    limit = asyncio.Semaphore(TOGETHER)
    async with openai.AsyncOpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none", timeout=None) as client:
        model = (await client.models.list()).data[0].id

        async def ask(document: str, question: str) -> str:
            async with limit:
                reply = await client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": prompt(document, question)}],
                    temperature=0,
                    max_tokens=40,
                )
            return (reply.choices[0].message.content or "").strip()

        pairs = [(name, question) for name in documents for question in questions]
        answers = await asyncio.gather(*(ask(documents[name], question) for name, question in pairs))
    found: dict[str, dict[str, str]] = {name: {} for name in documents}
    for (name, question), answer in zip(pairs, answers, strict=True):
        found[name][question] = answer
    return found


def run(url: str, paths: Sequence[Path], questions: Sequence[str] = QUESTIONS) -> dict[str, dict[str, str]]:
    """Ask every question of every document; returns {file name: {question: answer}}."""
    return asyncio.run(ask_all(url, {path.name: path.read_text() for path in paths}, questions))


def main() -> None:
    folder = Path(__file__).with_name("minutes")
    parser = argparse.ArgumentParser(description="Ask several questions of several documents at once.")
    parser.add_argument("documents", nargs="*", type=Path, default=sorted(folder.glob("*.txt")))
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="address of the SGLang server")
    parser.add_argument("--question", action="append", help="may be given several times")
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.url, arguments.documents, arguments.question or QUESTIONS), indent=2))


if __name__ == "__main__":
    main()
