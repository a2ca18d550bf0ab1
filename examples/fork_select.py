"""Many questions to one document: an SGLang program with ``fork`` and ``select``.

The document is read once. Each fork asks its own question on top of the shared prefix, which the server keeps in
its radix cache (with sparse KV: in host memory, together with the page summaries), and all forks decode together.

    python examples/fork_select.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import sglang as sgl
from sglang.lang.chat_template import get_chat_template

QUESTIONS = (
    "When was the lighthouse built?",
    "Where do the puffins nest?",
    "Who leads the service crew?",
    "What does the crew plan to paint next year?",
)
TOPICS = ("cooking", "a lighthouse", "football", "computer chips")


@sgl.function
def survey(s, document: str):
    s += sgl.user(f"Read this report.\n\n{document}\n\nAnswer my questions about it in one sentence.")
    s += sgl.assistant("I have read the report. What would you like to know?")

    forks = s.fork(len(QUESTIONS))
    for fork, question in zip(forks, QUESTIONS, strict=True):
        fork += sgl.user(question)
        fork += sgl.assistant(sgl.gen("answer", max_tokens=32, temperature=0))
    forks.join()

    s += sgl.user("What is the report about?")
    s += sgl.assistant_begin()
    s += "The report is about " + sgl.select("topic", list(TOPICS))
    s += sgl.assistant_end()


def run(url: str, document: str) -> dict[str, Any]:
    """Ask all questions of the server at ``url``; returns {"answers": {question: answer}, "topic": choice}."""
    backend = sgl.RuntimeEndpoint(url)
    backend.chat_template = get_chat_template("chatml")
    state = survey.run(document=document, backend=backend)
    answers = dict(zip(QUESTIONS, (answer.strip() for answer in state["answer"]), strict=True))
    return {"answers": answers, "topic": state["topic"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask several questions about one document at once.")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="address of the SGLang server")
    parser.add_argument("--document", type=Path, default=Path(__file__).with_name("report.txt"))
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.url, arguments.document.read_text()), indent=2))


if __name__ == "__main__":
    main()
