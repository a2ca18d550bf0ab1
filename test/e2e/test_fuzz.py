"""The HTTP interface under requests made from the server's own description of it, right ones and wrong ones."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable

import pytest
import requests
import schemathesis
from checks import assert_same_tokens
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from serving import Server
from texts import TWENTY

# What would stop the fuzzing rather than be tried by it. test_operations.py calls the first four.
LEFT_OUT = {
    "/pause_generation": "nobody would be answered",
    "/continue_generation": "belongs to it",
    "/update_weights_from_disk": "any path loads",
    "/release_memory_occupation": "refused",
    "/slow_down": "what it says",
    "/weights_checker": "can overwrite the weights",
    "/add_external_corpus": "of n-gram speculation; SGLang answers 500 without a body",
    "/remove_external_corpus": "of n-gram speculation; SGLang answers 500 without a body",
    "/start_expert_distribution_record": "ends a server whose model has no experts, without sparse KV too",
    "/stop_expert_distribution_record": "ends a server whose model has no experts, without sparse KV too",
    "/dump_expert_distribution_record": "ends a server whose model has no experts, without sparse KV too",
    "/scale_elastic_ep": "changes which GPUs take part",
    "/configure_logging": "writes every request to files",
    "/start_profile": "writes files",
    "/set_trace_level": "needs a tracer",
    "/init_weights_update_group": "waits for other machines",
    "/init_weights_send_group_for_remote_instance": "waits for other machines",
    "/send_weights_to_remote_instance": "waits for other machines",
    "/update_weights_from_distributed": "waits for other machines",
    "/update_weights_from_ipc": "waits for other processes",
    "/update_weights_from_tensor": "unpickles what an administrator sends, by SGLang's design",
    "/load_lora_adapter_from_tensors": "unpickles what an administrator sends, by SGLang's design",
}
# What people use most is tried most.
OFTEN = ("POST /generate", "POST /v1/chat/completions", "POST /v1/completions", "POST /set_internal_state")
ROUND = settings(
    max_examples=25,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
PATIENCE = 3  # seconds; whoever asks for a long answer hangs up


# What a field of a right request is replaced by. Wrong requests of schemathesis' own take minutes to draw here.
NUMBERS = st.integers() | st.floats() | st.sampled_from([-1, 0, 2**31, 2**63, 10**30])
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=4
)
# Fields that reach the sampler, tables or tensors, as JSON of any kind.
FIELDS = (
    *("text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("token_ids_logprob", "stream", "priority", "custom_params", "session_params", "bootstrap_room", "max_tokens"),
    *("temperature", "top_p", "top_k", "n", "seed", "stop", "logit_bias", "response_format", "messages", "server_args"),
)
SAMPLING = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "n"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "sampling_seed", "json_schema"),
    *("regex", "ebnf", "structural_tag", "custom_params", "ignore_eos", "stream_interval", "no_stop_trim"),
)


def cases(server: Server, wanted: Callable[[str], bool]) -> dict[str, st.SearchStrategy]:
    """A strategy of requests that the description allows, for each operation on a path that is wanted."""
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json"))
    operations = (result.ok() for result in schema.get_all_operations())
    return {f"{o.method.upper()} {o.path}": o.as_strategy() for o in operations if wanted(o.path)}


def spoil(body: object, data: st.DataObject) -> None:
    """Puts junk into a field or two of a JSON body, or into those of its sampling parameters."""
    if not isinstance(body, dict):
        return
    for _ in range(data.draw(st.integers(0, 2))):
        if data.draw(st.booleans()):
            inner = body.setdefault("sampling_params", {})
            if isinstance(inner, dict):
                inner[data.draw(st.sampled_from(SAMPLING))] = data.draw(JUNK)
        else:
            body[data.draw(st.sampled_from((*FIELDS, *map(str, body))))] = data.draw(JUNK)


def for_clients(path: str) -> bool:
    return path.startswith("/v1/") or path in (
        "/generate",
        "/set_internal_state",
        "/tokenize",
        "/detokenize",
        "/encode",
    )


def fuzz(server: Server, seconds: float, least: int, number: int, wanted: Callable[[str], bool]) -> Counter[str]:
    """Tries rounds of 25 requests until the time is over and what people use most was tried so often at `least`.
    Returns how often each operation was tried; under "5xx", how often SGLang had no better answer, under "broken", how
    often a reply broke off.
    """
    tried: Counter[str] = Counter()
    strategies = cases(server, wanted)
    names = [*strategies, *OFTEN * 8]
    http = requests.Session()
    until = time.monotonic() + seconds

    def one(data) -> None:
        name = data.draw(st.sampled_from(names))
        case = data.draw(strategies[name])
        spoil(case.body, data)
        tried[name] += 1
        patience = time.monotonic() + PATIENCE
        try:
            # As a stream, since a stream has no end otherwise: it is silent for less than its timeout.
            request = case.as_transport_kwargs(base_url=server.url)
            with http.request(**request, timeout=PATIENCE, stream=True) as reply:
                tried["5xx"] += reply.status_code >= 500
                for _ in reply.iter_content(None):
                    if time.monotonic() > patience:
                        break
        except requests.Timeout:
            pass
        except (UnicodeError, ValueError, requests.exceptions.InvalidHeader):
            pass  # nothing that a client can send
        except requests.RequestException:
            server.check_alive()
            tried["broken"] += 1

    for round in itertools.count():
        # Not one long run: Hypothesis would first try to be sure that a failure can be had again.
        seed(f"{number} {round}")(ROUND(given(st.data())(one)))()
        if time.monotonic() > until and all(tried[name] >= least for name in OFTEN):
            return tried


def ours(log: str) -> list[str]:
    """Tracebacks that end in code of this project, its refusals excepted. SGLang's own are its own: a reply of 500, a
    stream that breaks off.
    """
    found = []
    for trace in log.split("Traceback (most recent call last)")[1:]:
        frames = re.findall(r'File "([^"]+)"', trace)
        end = re.search(r"^\S*(Error|Exception)\S*:.*", trace, re.MULTILINE)
        if frames and "sparse_kv" in frames[-1] and not (end and "sglang-dualdecoder: " in end[0]):
            found.append(trace[:3000])
    return found


def check(server: Server, seconds: float, least: int, number: int, wanted: Callable[[str], bool]) -> Counter[str]:
    expected = server.ask(TWENTY[6], 8)
    server.check_idle()
    tried = fuzz(server, seconds, least, number, wanted)
    server.wait_idle()
    assert_same_tokens([server.ask(TWENTY[6], 8)], [expected], "after fuzzing")
    wrong = ours(server.news())
    assert not wrong, "\n".join(wrong)
    return tried


def test_whose_traceback_it_is():
    head, end = "Traceback (most recent call last):\n", '  File "/sglang/srt/http_server.py", line 1\n'
    own = '  File "/sglang/srt/sparse_kv/launch.py", line 2\n'
    assert not ours(head + own + end + "ValueError: no\n")
    assert not ours(head + end + own + "ValueError: sglang-dualdecoder: no.\n")
    assert len(ours("x\n" + head + end + own + "KeyError: 1\n" + head + end + "ValueError: no\n")) == 1


def test_a_round_of_requests(sparse: Server):
    tried = check(sparse, 4, 1, 0, for_clients)
    assert sum(tried.values()) >= 25, tried


@pytest.mark.slow
def test_minutes_of_requests(sparse: Server):
    tried = check(sparse, 300, 50, 1, lambda path: path not in LEFT_OUT)
    print(sum(tried.values()), dict(tried))
    assert len(tried) > 60, tried
