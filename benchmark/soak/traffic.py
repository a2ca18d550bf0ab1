"""What agents do to a server, drawn from a seed: talks on shared documents, forks, forms to fill in, long and short
prompts, streams, aborts, clients that hang up; and probes, whose answers are known.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import requests

CHARACTERS = 3  # of a token, at least, in the corpora used here
DOCUMENTS = 3  # shared by all clients
FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["function", "class", "module"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}


class Failed(Exception):
    """An answer that should not be."""


class Tally:
    """What all clients did, and what went wrong."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.tokens = 0
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def add(self, kind: str, tokens: int, failure: str | None = None) -> None:
        with self._lock:
            self.done[kind] += 1
            self.tokens += tokens
            if failure is not None:
                self.failures.append(f"{kind}: {failure}"[:500])


class Client:
    """One of several that ask at the same time.

    Args:
        text: what prompts are cut from.
        longest: tokens of the longest prompt.
        without: names of kinds that are left out.
        patience: seconds without a word after which a request counts as hanging.
        incremental: each piece of a stream holds what is new, instead of all so far.
        probes: prompts with the token ids that they give alone; none where batches round differently.
    """

    def __init__(
        self,
        url: str,
        text: str,
        longest: int,
        probes: dict[str, list[int]],
        tally: Tally,
        seed: int,
        without: Sequence[str] = (),
        patience: float = 300,
        incremental: bool = False,
    ):
        self.url, self.text, self.longest, self.probes, self.tally = url, text, longest, probes, tally
        self.without, self.patience, self.incremental = without, patience, incremental
        self.draw, self.seed = random.Random(seed), seed
        self.http = requests.Session()
        self._tokens = self._number = 0
        self._until = float("inf")

    def run(self, until: float) -> None:
        """Asks until the monotonic clock says `until`."""
        self._until = until
        kinds: dict[Callable[[], None], int] = {
            self.talk: 4,
            self.fork: 2,
            self.long: 1,
            self.short: 3,
            self.follow: 2,
            self.hang_up: 2,
            self.abort: 2,
            self.abort_at_once: 1,
            self.form: 2,
            self.probe: 1 if self.probes else 0,
        }
        kinds = {kind: weight for kind, weight in kinds.items() if kind.__name__ not in self.without}
        while time.monotonic() < until:
            (kind,) = self.draw.choices([*kinds], [*kinds.values()])
            self._tokens, failure = 0, None
            try:
                kind()
            except (Failed, requests.RequestException, ValueError, KeyError, IndexError) as error:
                failure = f"{type(error).__name__} {error}"
            self.tally.add(kind.__name__, self._tokens, failure)

    # ------------------------------------------------------------------ kinds of traffic

    def talk(self) -> None:
        """A conversation about one of the shared documents; each turn holds all before it."""
        messages = [{"role": "system", "content": self._document()}]
        for _ in range(self.draw.randint(1, 4)):
            messages.append({"role": "user", "content": self._cut(self.draw.randint(20, 200))})
            body = {"model": "served", "messages": messages, "max_tokens": self._few(), "temperature": 0.7}
            choice = self._post("/v1/chat/completions", body)["choices"][0]
            messages.append({"role": "assistant", "content": choice["message"]["content"] or "..."})
            if time.monotonic() > self._until:
                break

    def fork(self) -> None:
        parameters = {"n": 3, "temperature": 0.8, "max_new_tokens": self._few()}
        replies = self._generate(self._document() + self._cut(60), parameters)
        if len(replies) != 3:
            raise Failed(f"{len(replies)} samples instead of 3")

    def long(self) -> None:
        self._generate(self._cut(self.longest * CHARACTERS), {"max_new_tokens": 4, "temperature": 0})

    def short(self) -> None:
        self._generate(self._cut(self.draw.randint(5, 100)), {"max_new_tokens": self._few(), "temperature": 1})

    def follow(self) -> None:
        """A stream that is read to its end."""
        last: dict[str, Any] = {}
        tokens = self._few()
        for reply in self._stream(self._document() + self._cut(40), tokens):
            if not reply["text"].startswith(last.get("text", "")):
                raise Failed("a stream took back what it had said")
            last = reply
        if not last or last["meta_info"]["finish_reason"] is None:
            raise Failed("a stream ended without an end")
        if last["meta_info"]["completion_tokens"] != tokens:
            raise Failed(f"a stream of {tokens} tokens had {last['meta_info']['completion_tokens']}")

    def hang_up(self) -> None:
        """The connection is closed before the first token or after some."""
        stream = self._stream(self._cut(self.draw.randint(50, 2000)), 400)
        for _ in range(self.draw.randint(0, 6)):
            next(stream, None)
        stream.close()

    def abort(self) -> None:
        """Another connection aborts a stream, which has to end."""
        rid, after = self._rid(), self.draw.randint(0, 6)
        for number, _ in enumerate(self._stream(self._cut(self.draw.randint(50, 2000)), 400, rid)):
            if number == after:
                self._abort(rid)

    def abort_at_once(self) -> None:
        """Aborted before anything is known of it: waiting, prefilling, between chunks, or not there yet."""
        rid, delay = self._rid(), self.draw.choice([0, 0, 0.01, 0.1, 0.5])
        timer = threading.Timer(delay, self._abort, [rid])
        timer.start()
        for _ in self._stream(self._cut(self.draw.randint(50, self.longest * CHARACTERS)), 40, rid):
            pass
        timer.join()

    def form(self) -> None:
        body = {
            "model": "served",
            "messages": [{"role": "user", "content": f"{self._cut(300)}\n\nDescribe this as JSON."}],
            "max_tokens": 60,
            "temperature": self.draw.choice([0, 1]),
            "response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}},
        }
        choice = self._post("/v1/chat/completions", body)["choices"][0]
        if choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) != set(FORM["required"]):
            raise Failed(f"another form: {choice['message']['content']}")

    def probe(self) -> None:
        """A prompt whose tokens are known, whatever runs beside it."""
        prompt = self.draw.choice([*self.probes])
        found = self.ask_probe(prompt)
        if found != self.probes[prompt]:
            raise Failed(f"a probe gave {found} and alone {self.probes[prompt]}")

    def ask_probe(self, prompt: str) -> list[int]:
        parameters = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        return self._generate(prompt, parameters)[0]["output_ids"]

    # ------------------------------------------------------------------ how it is asked

    def _few(self) -> int:
        return self.draw.choice([4, 16, 16, 40])

    def _cut(self, characters: int) -> str:
        start = self.draw.randrange(max(1, len(self.text) - characters))
        return self.text[start : start + characters]

    def _document(self) -> str:
        """The first part of one of the shared documents; parts of one share a prefix."""
        length = self.longest * CHARACTERS // 2
        start = self.draw.randrange(DOCUMENTS) * length
        return self.text[start : start + length // self.draw.randint(1, 3)]

    def _rid(self) -> str:
        self._number += 1
        return f"soak-{self.seed}-{self._number}"

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        reply = self.http.post(self.url + path, json=body, timeout=self.patience)
        if not reply.ok:
            raise Failed(f"{path} answered {reply.status_code}: {reply.text[:200]}")
        found = reply.json()
        if "usage" in found:
            self._tokens += found["usage"]["completion_tokens"]
        return found

    def _generate(self, prompt: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        found = self._post("/generate", {"text": prompt, "sampling_params": parameters})
        replies = found if isinstance(found, list) else [found]
        self._tokens += sum(len(reply["output_ids"]) for reply in replies)
        return replies

    def _stream(self, prompt: str, tokens: int, rid: str | None = None) -> Iterator[dict[str, Any]]:
        parameters = {"temperature": 0.7, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": parameters, "stream": True, "rid": rid or self._rid()}
        with requests.post(f"{self.url}/generate", json=body, timeout=self.patience, stream=True) as reply:
            if not reply.ok:
                raise Failed(f"a stream answered {reply.status_code}: {reply.text[:200]}")
            said = ""
            for line in reply.iter_lines():
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    found = json.loads(line[len(b"data:") :])
                    if "error" in found and "abort" not in str(found).lower():
                        raise Failed(f"a stream said {found}")
                    if "text" in found:
                        self._tokens += 1
                        said = found["text"] = said + found["text"] if self.incremental else found["text"]
                        yield found

    def _abort(self, rid: str) -> None:
        requests.post(f"{self.url}/abort_request", json={"rid": rid}, timeout=self.patience)
