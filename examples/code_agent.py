"""A coding agent over a repository, in as many turns as it wants: it reads files until it can answer.

Each turn the model chooses, as JSON that the server's grammar enforces, to read one of the files or to answer. A turn's
prompt continues the last one's, so the files already read stay in the server's radix cache, in host memory, and the
conversation may grow to the model's whole context.

    python examples/code_agent.py --url http://127.0.0.1:30000 --repository examples "What does fork_select.py do?"
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import openai

SYSTEM = (
    "You answer questions about a code repository. In each turn either read one file, with "
    '{"action": "read", "file": NAME}, or, when you have read enough, say {"action": "answer"}.'
)
MAX_CHARACTERS = 3000  # of a file; longer ones are cut


class Agent:
    """One conversation about one repository. `prompt_tokens` and `read` tell how it went."""

    def __init__(self, url: str, repository: Path, pattern: str = "*.py") -> None:
        self.client = openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none")
        self.model = self.client.models.list().data[0].id
        self.files = {str(path.relative_to(repository)): path for path in sorted(repository.rglob(pattern))}
        if not self.files:
            raise ValueError(f"{repository} holds no file that matches {pattern}.")
        listing = "\n".join(self.files)
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"{SYSTEM}\n\nThe repository holds these files:\n{listing}"}
        ]
        self.prompt_tokens: list[int] = []
        self.read: list[str] = []

    def ask(self, question: str, most_files: int = 4) -> str:
        """The answer to `question`, after reading at most `most_files` more files."""
        self._say("user", question)
        for _ in range(most_files):
            step = self._step()
            if step["action"] == "answer":
                break
            self.read.append(step["file"])
            text = self.files[step["file"]].read_text(errors="replace")[:MAX_CHARACTERS]
            self._say("user", f"{step['file']}:\n```\n{text}\n```\nRead another file, or answer.")
        self._say("user", f"Now answer in one or two sentences: {question}")
        return self._reply(max_tokens=64)

    def _step(self) -> dict[str, str]:
        left = [name for name in self.files if name not in self.read]
        choices: list[dict[str, Any]] = [_action("answer")]
        if left:
            choices.insert(0, _action("read", file={"enum": left}))
        schema = {"name": "step", "schema": {"anyOf": choices}}
        text = self._reply(max_tokens=64, response_format={"type": "json_schema", "json_schema": schema})
        try:
            return json.loads(text)
        except ValueError:  # the grammar allows spaces without end, and so the limit of tokens may cut a step off
            return {"action": "answer"}

    def _say(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})

    def _reply(self, **options: Any) -> str:
        reply = self.client.chat.completions.create(model=self.model, messages=self.messages, temperature=0, **options)
        self.prompt_tokens.append(reply.usage.prompt_tokens)
        text = reply.choices[0].message.content or ""
        self._say("assistant", text)
        return text


def _action(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"action": {"const": name}, **fields},
        "required": ["action", *fields],
        "additionalProperties": False,
    }


def run(url: str, repository: Path, questions: list[str], most_files: int = 4) -> dict[str, Any]:
    """Ask questions one after another in one conversation; returns {"answers", "read", "prompt_tokens"}."""
    agent = Agent(url, repository)
    answers = [agent.ask(question, most_files) for question in questions]
    return {"answers": answers, "read": agent.read, "prompt_tokens": agent.prompt_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask about a repository; the model reads the files that it wants.")
    parser.add_argument("questions", nargs="*", default=["What does the program fork_select.py do?"])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="address of the SGLang server")
    parser.add_argument("--repository", type=Path, default=Path(__file__).parent)
    parser.add_argument("--most-files", type=int, default=4, help="read before each answer")
    arguments = parser.parse_args()
    result = run(arguments.url, arguments.repository, arguments.questions, arguments.most_files)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
