"""What arrives at a server, as `sglang.bench_serving` takes it; all of it is made without a network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.corpus import Corpus, Tokenizer

NAMES = ("random", "shared", "agents")
QUESTION = "\n\nWhat does this do? Answer in detail, and say what you would change."


@dataclass(frozen=True)
class Workload:
    """Requests of one kind; sizes in tokens.

    random: tokens drawn at random, `first` of them, nothing shared. shared: `groups` prefixes of `shared` tokens, each
    followed by `first` others; random, too. agents: conversations of real text that share a system prompt of `shared`
    tokens; the first turn brings `first` tokens, each later one `later`, and the history grows by the answers.
    """

    name: str
    sessions: int
    answer: int
    first: int
    shared: int = 0
    groups: int = 1
    turns: int = 1
    later: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest request with its answer; a chat's template and re-encoded text are allowed 3 %."""
        grown = self.shared + self.first + (self.turns - 1) * self.later + self.turns * self.answer
        return int(grown * 1.03) + 64 * self.turns

    @property
    def kept(self) -> int:
        """Tokens of different text that all requests together leave behind."""
        own = self.first + (self.turns - 1) * self.later + self.turns * self.answer
        return self.sessions * own + self.shared * (self.groups if self.name == "shared" else 1)

    def arguments(self, tokenizer: Tokenizer, folder: Path, corpus: Corpus) -> list[str]:
        """Of `sglang.bench_serving`; writes what it reads into `folder`.

        Raises:
            ValueError: sessions do not divide into groups, or the name is none of NAMES.
        """
        if self.name == "random":
            sizes = ["--random-input-len", str(self.first), "--random-output-len", str(self.answer)]
            return ["--backend", "sglang", "--dataset-name", "random-ids", *sizes, "--random-range-ratio", "1.0"]
        if self.name == "shared":
            if self.sessions % self.groups:
                raise ValueError(f"{self.sessions} sessions do not divide into {self.groups} groups; use a multiple.")
            sizes = {"num-groups": self.groups, "prompts-per-group": self.sessions // self.groups}
            sizes |= {"system-prompt-len": self.shared, "question-len": self.first, "output-len": self.answer}
            found = ["--backend", "sglang", "--dataset-name", "generated-shared-prefix"]
            return found + [part for name, size in sizes.items() for part in (f"--gsp-{name}", str(size))]
        if self.name == "agents":
            file = folder / "agents.json"
            file.write_text(json.dumps({"conversations": self.conversations(tokenizer, corpus)}))
            return [
                *("--backend", "sglang-oai-chat", "--dataset-name", "agentic-trace", "--dataset-path", str(file)),
                *("--sharegpt-output-len", str(self.answer)),
            ]
        raise ValueError(f"{self.name!r} is no workload; use {', '.join(NAMES)}.")

    def conversations(self, tokenizer: Any, corpus: Corpus) -> list[list[dict[str, Any]]]:
        """Turns of each session: the messages that are new in it."""
        texts = corpus.prompts(tokenizer, self.sessions + 1, max(self.shared, self.first + self.turns * self.later, 1))
        system = {"role": "system", "content": tokenizer.decode(texts[-1][: self.shared])}
        found = []
        for ids in texts[:-1]:
            turns, at = [], 0
            for turn in range(self.turns):
                size = self.later if turn else self.first
                said = {"role": "user", "content": tokenizer.decode(ids[at : at + size]) + QUESTION}
                turns.append(
                    {"messages": [said] if turn else [system, said], "prompt_tokens": self.shared + self.first}
                )
                at += size
            found.append(turns)
        return found
