"""Servers as the tests use them: real processes, one at a time for each that runs tests, asked over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import requests
import tiny_models
from filelock import FileLock, Timeout
from sglang.srt.sparse_kv.policy import NAMED

from benchmark.serving.server import free_port

START_TIMEOUT = 300  # seconds; a start takes about 25 on two cores
ASK_TIMEOUT = 600
IDLE_TIMEOUT = 60

# Text in a log that no healthy server writes.
BAD_LOG = ("Traceback (most recent call last)", "leak detected", "use-after-free", "double free")

# Flags that plain and sparse servers share. The pool of each kind is given in tokens; chunks are short, so that
# prompts of a few hundred tokens already attend to a prefix in host memory.
COMMON = (
    *("--device", "cpu", "--dtype", "float32", "--page-size", "16", "--chunked-prefill-size", "512"),
    *("--random-seed", "7", "--sleep-on-idle", "--decode-log-interval", "8"),
    *("--load-snapshot-publish-interval", "1"),
)

# Threads that spin while they wait for one another make a busy machine thirty times slower.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}

# The policy beside the budget, see sparse_kv/policy.py. A test names what differs.
DEFAULT_POLICY = {
    "hysteresis": 2.0,
    "guide": "resync",
    "guide_attends": "selected",
    "rows": 2,
    "skip_scores": False,
    "prefetch": True,
    "prefetch_cap": 1.0,
    "prefetch_floor": 0.25,
    "residency": "all",
    "cache_slots": 0,
    "transfer": "plain",
    "seed": 0,
    "check": False,
    "poison": False,
    "shuffle_predictions": False,
    "skip_write_through": False,
    "skip_invalidation": False,
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a server is started.

    flags: beside COMMON. sparse: the values of --sparse-kv-config; None for plain SGLang. model: a name in
    tiny_models.py; None for the demo model. environment: beside the inherited one.
    """

    flags: tuple[str, ...] = ()
    sparse: dict[str, Any] | None = None
    model: str | None = None
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def switchable(self) -> bool:
        """Whether its policy can be switched at run time."""
        return self.sparse is not None and bool(self.sparse.get("debug"))

    def command(self, model: str, port: int) -> list[str]:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        command += ["--host", "127.0.0.1", "--port", str(port), *COMMON, *self.flags]
        if self.sparse is not None:
            command += ["--sparse-kv", "dualdecoder", "--sparse-kv-config", json.dumps(self.sparse)]
        return command


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a server said to one prompt. logprobs: of each token, None unless asked for."""

    text: str
    ids: list[int]
    logprobs: list[float] | None
    cached_tokens: int
    prompt_tokens: int
    finish: dict[str, Any]
    meta: dict[str, Any] = dataclasses.field(repr=False)

    @classmethod
    def read(cls, reply: dict[str, Any]) -> Answer:
        meta = reply["meta_info"]
        logprobs = meta.get("output_token_logprobs")
        return cls(
            text=reply["text"],
            ids=reply["output_ids"],
            logprobs=None if logprobs is None else [entry[0] for entry in logprobs],
            cached_tokens=meta["cached_tokens"],
            prompt_tokens=meta["prompt_tokens"],
            finish=meta["finish_reason"],
            meta=meta,
        )


class Server:
    """One running server. Every request is greedy unless told otherwise."""

    def __init__(self, name: str, kind: Kind, demo_model: str, folder: Path, port: int = 0):
        self.name, self.kind = name, kind
        self.log_path = folder / f"{name}.log"
        model = tiny_models.make(kind.model, folder, demo_model) if kind.model else demo_model
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = self.log_path.open("w")
        self.process = subprocess.Popen(
            kind.command(model, self.port),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **kind.environment},
            start_new_session=True,
        )
        self._http = requests.Session()
        self._seen = 0  # bytes of the log that were looked at
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self) -> None:
        start = time.monotonic()
        while True:
            self.check_alive()
            log = self.log()
            if "The server is fired up" in log:
                return
            if "error while attempting to bind" in log:  # and goes on without anybody to hear
                raise RuntimeError(f"{self.name} did not get port {self.port}:\n{self.log_tail()}")
            if time.monotonic() - start > START_TIMEOUT:
                raise TimeoutError(f"{self.name} was not ready after {START_TIMEOUT} s:\n{self.log_tail()}")
            time.sleep(0.5)

    # ------------------------------------------------------------------ life

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        # SGLang's first line lists some 400 arguments.
        return "\n".join(line[:400] for line in self.log().splitlines()[-lines:])

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with status {self.process.returncode}:\n{self.log_tail()}")

    def stop(self) -> None:
        if self.process.poll() is None:
            # SGLang's children are in the same group; none of them may outlive the test.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._log.close()

    # ------------------------------------------------------------------ requests

    def get(self, path: str) -> Any:
        reply = self._http.get(self.url + path, timeout=IDLE_TIMEOUT)
        reply.raise_for_status()
        return reply.json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            reply = self._http.post(self.url + path, json=body, timeout=ASK_TIMEOUT)
        except requests.ConnectionError:
            time.sleep(2)  # a crash is reported by the process, not by the socket
            self.check_alive()
            raise
        if not reply.ok:
            raise RuntimeError(f"{self.name}: {path} answered {reply.status_code}: {reply.text[:500]}")
        return reply.json()

    def ask_all(
        self, prompts: Sequence[str], tokens: int = 16, each: Sequence[dict] | None = None, **options: Any
    ) -> list[Answer]:
        """Answers to prompts that arrive together, as one batch.

        tokens: most new tokens. each: sampling parameters of each prompt. options: those of all; the names that belong
        to the request and not to its sampling (return_logprob, ...) go there.
        """
        known = ("return_logprob", "top_logprobs_num", "logprob_start_len", "token_ids_logprob")
        body: dict[str, Any] = {name: options.pop(name) for name in known if name in options}
        common = {"temperature": 0, "max_new_tokens": tokens, **options}
        body["text"] = list(prompts)
        body["sampling_params"] = [{**common, **own} for own in (each or [{}] * len(prompts))]
        return [Answer.read(reply) for reply in self.post("/generate", body)]

    def ask(self, prompt: str, tokens: int = 16, **options: Any) -> Answer:
        return self.ask_all([prompt], tokens, **options)[0]

    def ask_each(self, prompts: Iterable[str], tokens: int = 16, **options: Any) -> list[Answer]:
        """Answers to prompts asked one after another."""
        return [self.ask(prompt, tokens, **options) for prompt in prompts]

    def post_samples(self, prompt: str, count: int, parameters: dict[str, Any]) -> list[Answer]:
        """Several samples of one prompt."""
        body = {"text": prompt, "sampling_params": {**parameters, "n": count}}
        return [Answer.read(reply) for reply in self.post("/generate", body)]

    def stream(self, prompt: str, tokens: int, rid: str, **options: Any) -> Iterator[dict[str, Any]]:
        """Replies as they come. Closing the iterator closes the connection."""
        parameters = {"temperature": 0, "max_new_tokens": tokens, **options}
        body = {"text": prompt, "sampling_params": parameters, "stream": True, "rid": rid}
        with requests.post(self.url + "/generate", json=body, timeout=ASK_TIMEOUT, stream=True) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    yield json.loads(line[len(b"data:") :])

    def flush(self) -> None:
        """Empties the radix cache and, with it, the page cache."""
        self.wait_idle()
        reply = self._http.post(self.url + "/flush_cache", timeout=IDLE_TIMEOUT)
        assert reply.ok, f"{self.name}: the cache was not flushed: {reply.text}"

    # ------------------------------------------------------------------ what the server says about itself

    def info(self) -> dict[str, Any]:
        return self.get("/server_info")

    def counters(self) -> dict[str, Any]:
        """The sparse KV summary of /server_info."""
        return self.info()["internal_states"][0]["sparse_kv"]

    def ranks(self) -> list[dict[str, Any]]:
        """The counters of each tensor parallel rank."""
        return self.counters()["ranks"]

    def totals(self) -> dict[str, int]:
        """Counters of all layers together, and the steps and guides of the summary."""
        summary = self.counters()
        return {
            **summary["total"],
            **{name: summary[name] for name in ("steps", "one_row", "all_pages", "guides", "guide_hits")},
        }

    def policy(self, **values: Any) -> None:
        """Sets the policy, the default where a name is left out, empties the page cache and resets the counters."""
        self.wait_idle()
        values = {**DEFAULT_POLICY, "budget": (self.kind.sparse or {})["budget"], **values}
        flat = {f"sparse_kv.{name}": _as_number(name, value) for name, value in values.items()}
        flat["sparse_kv.reset_counters"] = 1
        # Not every switch empties the page cache, but one of the seed does.
        for update in ({"sparse_kv.seed": 10**6}, flat):
            updated = self.post("/set_internal_state", {"server_args": update})
            assert updated == [True], f"{self.name} refused the policy {values}:\n{self.log_tail(8)}"

    def load(self) -> dict[str, Any]:
        """Requests and tokens in use, as of a moment after this call."""
        start = time.time()
        while True:
            self.check_alive()
            self.info()  # wakes a sleeping scheduler; the snapshot that the other endpoint reads may be old
            load = self.get("/v1/loads?include=core")["loads"][0]
            if load["timestamp"] >= start:
                return load
            if time.time() - start > IDLE_TIMEOUT:
                raise AssertionError(f"{self.name} told no news of its load in {IDLE_TIMEOUT} s")
            time.sleep(0.05)

    def wait_idle(self) -> dict[str, Any]:
        """Waits until no request is left; returns the load."""
        start = time.monotonic()
        while True:
            load = self.load()
            if load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_used_tokens"] == 0:
                return load
            if time.monotonic() - start > IDLE_TIMEOUT:
                raise AssertionError(f"{self.name} is not idle after {IDLE_TIMEOUT} s: {load}")
            time.sleep(0.05)

    def check_idle(self) -> None:
        """Asserts that no request, no token and no complaint of SGLang's own checks is left.

        SGLang checks its pools whenever it is idle and ends the process on a leak; tokens that stay locked pass that
        check, and are seen here as used.
        """
        self.wait_idle()
        time.sleep(0.3)
        self.check_alive()
        new = self.news()
        for bad in BAD_LOG:
            assert bad not in new, f"{self.name} logged {bad!r}:\n{new[-3000:]}"

    def news(self) -> str:
        """What was logged since the last look."""
        with self.log_path.open(errors="replace") as log:
            log.seek(self._seen)
            new = log.read()
            self._seen = log.tell()
        return new


def _as_number(name: str, value: Any) -> float:
    """SGLang's endpoint carries numbers only."""
    if name in NAMED and isinstance(value, str):
        return NAMED[name].index(value)
    if name == "residency" and isinstance(value, str):
        return {"all": 1.0, "none": 0.0}[value]
    return int(value) if isinstance(value, bool) else value


Scenario = Callable[[Server], Any]


def _outcome(scenario: Scenario, server: Server) -> Any:
    try:
        return scenario(server)
    except Exception as error:  # belongs to the tests that want the result
        return error


def _key(scenario: Scenario) -> str:
    return f"{scenario.__module__}.{scenario.__qualname__}"


def recorded(*kinds: str, slow: bool = False) -> Callable[[Scenario], Scenario]:
    """Marks a function of a server whose results tests need of other servers too.

    It runs right after such a server has started; the fixture `recorded_on` hands out what it returned. So no two
    servers need to be up at once. slow: only slow tests ask for it.
    """

    def mark(scenario: Scenario) -> Scenario:
        scenario.recorded_on, scenario.slow = kinds, slow  # type: ignore[attr-defined]
        return scenario

    return mark


class Fleet:
    """Starts the servers that tests ask for, one at a time, and keeps what was recorded on each.

    shared: a folder of all processes that run tests; what one of them records there the others read.
    """

    def __init__(
        self, kinds: dict[str, Kind], demo_model: str, folder: Path, shared: Path, scenarios: Iterable[Scenario]
    ):
        self.kinds, self.demo_model, self.folder, self.shared = kinds, demo_model, folder, shared
        self.scenarios = list(scenarios)
        self.running: Server | None = None
        self.results: dict[tuple[str, Scenario], Any] = {}

    def server(self, name: str) -> Server:
        """The running server of that name. What is to be recorded on kinds before it is recorded first, unless another
        process is at it.
        """
        if self.running is None or self.running.name != name:
            for earlier in list(self.kinds)[: list(self.kinds).index(name)]:
                if self._pending(earlier):
                    with contextlib.suppress(Timeout):
                        self._record(earlier, wait=False)
            self._start(name)
        assert self.running is not None
        self.running.check_alive()
        return self.running

    def _record(self, name: str, wait: bool = True) -> None:
        """Runs what is pending on a server of that name, unless another process has."""
        file = self.shared / f"{name}.recorded"
        with FileLock(f"{file}.lock", timeout=-1 if wait else 0):
            if file.exists():
                known = pickle.loads(file.read_bytes())
                self.results |= {(name, s): known[_key(s)] for s in self._pending(name)}
            else:
                self._start(name)
                file.write_bytes(
                    pickle.dumps({_key(s): result for (n, s), result in self.results.items() if n == name})
                )

    def _start(self, name: str) -> None:
        self.stop()
        self.running = server = Server(name, self.kinds[name], self.demo_model, self.folder)
        for scenario in self._pending(name):
            self.results[name, scenario] = _outcome(scenario, server)

    def _pending(self, name: str) -> list[Scenario]:
        return [s for s in self.scenarios if name in s.recorded_on and (name, s) not in self.results]  # type: ignore[attr-defined]

    def recorded_on(self, name: str, scenario: Scenario) -> Any:
        """What the scenario returned on a server of that name, which is started if no process has run it yet."""
        if (name, scenario) not in self.results:
            self._record(name)
        result = self.results[name, scenario]
        if isinstance(result, Exception):
            raise result
        return result

    def stop(self) -> None:
        if self.running is not None:
            self.running.stop()
            self.running = None
