"""Servers as users start them, each with a setting of its own, against servers that were started otherwise."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from checks import assert_same_tokens, ids, worst_gap
from kinds import smallest_cache
from serving import Answer, Kind, Server, recorded
from texts import TWENTY, chat, excerpt, question

pytestmark = pytest.mark.slow

BUDGET = 512
PROMPTS = [TWENTY[1], TWENTY[6], *TWENTY[-3:]]


@recorded("sparse")
def at_budget_512(server: Server) -> list[Answer]:
    server.policy(budget=BUDGET)
    return server.ask_each(PROMPTS, 24, return_logprob=True)


@recorded("plain")
def whole_contexts(server: Server) -> list[Answer]:
    return server.ask_all(PROMPTS, 24, return_logprob=True)


@recorded("plain")
def long_answers(server: Server) -> list[Answer]:
    return server.ask_all(RETRACTED, 150, ignore_eos=True)


RETRACTED = [question(kind, 1200, 800 * i) for i, kind in enumerate(("tale", "licence", "code", "records"))]


@pytest.mark.parametrize("served", ["guide-none", "nothing-resident", "some-resident"], indirect=True)
def test_same_tokens_at_budget_512(served: Server, recorded_on):
    expected = recorded_on("sparse", at_budget_512)
    ours = served.ask_each(PROMPTS, 24, return_logprob=True)
    assert_same_tokens(ours, expected, served.name)
    # One row a request has other GEMMs than two; fp32 keeps them close.
    assert worst_gap(ours, expected) < 1e-3
    summary = served.counters()
    assert summary["rows"] == (1 if served.name == "guide-none" else 2)
    assert summary["total"]["missed"] > 0
    again = served.ask_all(PROMPTS[:4], 24)
    assert ids(again) == ids(expected[:4])


@pytest.mark.parametrize("served", ["some-resident"], indirect=True)
def test_policy_is_fixed_without_debug(served: Server):
    assert served.post("/set_internal_state", {"server_args": {"sparse_kv.prefetch": 0}}) == [False]
    assert "policy is fixed" in served.log_tail(5)


@pytest.mark.parametrize("served", ["page-8", "page-32"], indirect=True)
def test_page_sizes_as_plain_sglang(served: Server, recorded_on):
    expected = recorded_on("plain", whole_contexts)
    ours = served.ask_all(PROMPTS, 24, return_logprob=True)
    assert_same_tokens(ours, expected, served.name)
    assert worst_gap(ours, expected) < 0.05
    page = int(served.name.partition("-")[2])
    again = served.ask(PROMPTS[-1], 24)
    assert again.ids == expected[-1].ids and again.cached_tokens == (again.prompt_tokens - 1) // page * page


@pytest.mark.parametrize("served", ["retracting"], indirect=True)
def test_retraction(served: Server, recorded_on):
    """SGLang takes running requests back again and again; they return to pages and slots of others."""
    expected = recorded_on("plain", long_answers)
    few_rows = {"rows": "auto", "skip_scores": True, "check": True}
    for policy in ({}, {"guide": "random", "transfer": "reordered", "check": True, "poison": True}, few_rows):
        served.policy(**policy)
        served.flush()
        assert_same_tokens(served.ask_all(RETRACTED, 150, ignore_eos=True), expected, f"retracted under {policy}")
    assert len(re.findall("KV cache pool is full. Retract requests|retract", served.log())) > 3


def test_one_slot_less_refuses_to_start(demo_model: str):
    """The capacity rule is exact: what one request needs, minus a byte."""
    too_small = {"budget": 256, "cache_memory": smallest_cache(256, 1) - 1}
    command = Kind(("--max-total-tokens", "4096"), too_small).command(demo_model, 1)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0
    sentence = ended.stderr.strip().splitlines()[-1]
    assert "slots per layer and kv head, one request needs" in sentence, ended.stderr[-3000:]


ENGINE = """
import json, sys
import sglang as sgl

if __name__ == "__main__":
    model, arguments, prompts = json.load(sys.stdin)
    engine = sgl.Engine(model_path=model, **arguments)
    replies = engine.generate(prompts, {"temperature": 0, "max_new_tokens": 24})
    print("ANSWER", json.dumps([reply["output_ids"] for reply in replies]))
    engine.shutdown()
"""


def test_engine_without_a_server(demo_model: str, recorded_on, tmp_path):
    """sgl.Engine(sparse_kv=...) in a script of its own: children unpickle before our code is loaded."""
    expected = recorded_on("plain", whole_contexts)
    script = tmp_path / "program.py"
    script.write_text(ENGINE)
    arguments = {"device": "cpu", "dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 4}
    arguments |= {"sparse_kv": "dualdecoder", "sparse_kv_budget": 2048}
    ended = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps([demo_model, arguments, PROMPTS]),
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = [line for line in ended.stdout.splitlines() if line.startswith("ANSWER")]
    assert found, ended.stderr[-3000:]
    assert json.loads(found[0].removeprefix("ANSWER")) == ids(expected)


def _draws(server: Server) -> dict[tuple[int, ...], int]:
    """How often each pair of a first and a second token is drawn: the second in a decode step."""
    prompt = chat(excerpt("tale", 200), "I see.", "Choose one word: red, green or blue?")
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(16):
        parameters = {"temperature": 1.0, "max_new_tokens": 2, "ignore_eos": True, "top_p": 0.9}
        for answer in server.post_samples(prompt, 32, parameters):
            counts[tuple(answer.ids)] = counts.get(tuple(answer.ids), 0) + 1
    return counts


@recorded("plain")
def draws(server: Server) -> dict[tuple[int, ...], int]:
    return _draws(server)


def test_same_distribution_as_plain_sglang(sparse: Server, recorded_on):
    """512 draws of each: a two-sample chi-square test of what both draw often."""
    ours, plain = draws(sparse), recorded_on("plain", draws)
    often = [pair for pair in ours.keys() | plain.keys() if ours.get(pair, 0) + plain.get(pair, 0) >= 10]
    cells = [(ours.get(pair, 0), plain.get(pair, 0)) for pair in often]
    rest = (512 - sum(a for a, _ in cells), 512 - sum(b for _, b in cells))
    cells += [rest] if sum(rest) else []
    assert len(cells) >= 4
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells)
    degrees = len(cells) - 1
    # Mean and four standard deviations of the chi-square distribution.
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5
