"""SGLang's sampling features under two rows a request: as plain SGLang where the outcome is determined."""

from __future__ import annotations

import json

import pytest
from checks import assert_same_tokens, ids, worst_gap
from serving import Answer, Server, recorded
from texts import chat, excerpt, question

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 1, "maximum": 120},
            "hobbies": {"type": "array", "items": {"enum": ["chess", "rowing", "bread"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "hobbies"],
        "additionalProperties": False,
    }
)
POEM = chat("Write a short poem about a river and the moon.")
ANIMALS = chat("List ten animals, each with one sentence.")
PERSON = chat("Describe a person as JSON with name, age and hobbies.")
STORY = question("tale", 1200, 3000)

# Greedy, so that every one has one right outcome. They run as one batch: no parameter may reach a neighbour.
GREEDY: dict[str, tuple[str, dict]] = {
    "nothing": (POEM, {}),
    "frequency and presence penalty": (ANIMALS, {"frequency_penalty": 0.4, "presence_penalty": 0.3}),
    "repetition penalty": (ANIMALS, {"repetition_penalty": 1.3}),
    "logit bias": (POEM, {"logit_bias": {"260": 4.0, "28": -100.0}}),
    "min new tokens": (chat("What is the capital of France?"), {"min_new_tokens": 24}),
    "stop string": (ANIMALS, {"stop": ["\n2.", "\n3."]}),
    "stop token": (ANIMALS, {"stop_token_ids": [30]}),
    "ignored end": (chat("Say yes."), {"ignore_eos": True}),
    "JSON schema": (PERSON, {"json_schema": SCHEMA, "max_new_tokens": 60}),
    "regular expression": (chat("When did the war end?"), {"regex": r"In (19|20)[0-9]{2}, on (May|June) [0-9]{1,2}\."}),
    "penalties under a grammar": (PERSON, {"json_schema": SCHEMA, "frequency_penalty": 0.5, "max_new_tokens": 60}),
    "long prompt": (STORY, {"repetition_penalty": 1.1, "stop": ["clock."]}),
    # At any temperature these filters leave one token.
    "top-k 1": (STORY, {"temperature": 1.3, "top_k": 1}),
    "top-p 0": (POEM, {"temperature": 0.7, "top_p": 1e-6}),
    "min-p 1": (ANIMALS, {"temperature": 0.9, "min_p": 1.0}),
}


@recorded("plain")
def greedy_features(server: Server) -> list[Answer]:
    prompts, parameters = zip(*GREEDY.values())
    return server.ask_all(prompts, 32, parameters)


@recorded("plain")
def logprobs(server: Server) -> list[Answer]:
    wanted = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 260], "logprob_start_len": 0}
    server.flush()
    return server.ask_all([POEM, ANIMALS, excerpt("licence", 1200)], 20, **wanted)


@recorded("plain")
def several_samples(server: Server) -> list[Answer]:
    return server.post_samples(STORY, 3, {"temperature": 0, "max_new_tokens": 16})


@pytest.fixture(scope="module")
def ours(fleet) -> dict[str, Answer]:
    server = fleet.server("sparse")
    server.policy()
    return dict(zip(GREEDY, greedy_features(server)))


@pytest.mark.parametrize("name", GREEDY)
def test_feature_as_plain_sglang(ours, recorded_on, sparse, name: str):
    expected = dict(zip(GREEDY, recorded_on("plain", greedy_features)))
    assert_same_tokens([ours[name]], [expected[name]], name)
    assert (ours[name].text, ours[name].finish) == (expected[name].text, expected[name].finish)


def test_features_do_something(ours, sparse):
    assert len({tuple(ours[name].ids) for name in ("frequency and presence penalty", "repetition penalty")}) == 2
    assert ours["logit bias"].ids != ours["nothing"].ids and 28 not in ours["logit bias"].ids
    assert len(ours["min new tokens"].ids) >= 24 and len(ours["ignored end"].ids) == 32
    assert ours["stop string"].finish["type"] == "stop"
    person = json.loads(ours["JSON schema"].text)
    assert set(person) == {"name", "age", "hobbies"} and set(person["hobbies"]) <= {"chess", "rowing", "bread"}


def test_logprobs_as_plain_sglang(sparse, recorded_on):
    expected = recorded_on("plain", logprobs)
    found = logprobs(sparse)
    assert_same_tokens(found, expected)
    assert worst_gap(found, expected) < 0.05
    fields = ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
    for own, other in zip(found, expected):
        for field in fields:
            close_logprobs(own.meta[field], other.meta[field], field)


def close_logprobs(own, other, field: str) -> None:
    """Nested lists of (logprob, token id, text); a value that plain leaves out is None."""
    if isinstance(other, list) and (not other or not isinstance(other[0], (int, float))) and other[:1] != [None]:
        assert len(own) == len(other), f"{field}: {len(own)} entries, not {len(other)}"
        for a, b in zip(own, other):
            close_logprobs(a, b, field)
    elif other is None or other[0] is None:
        assert own == other, field
    else:
        assert own[1] == other[1] and abs(own[0] - other[0]) < 0.05, f"{field}: {own}, not {other}"


def test_several_samples_as_plain_sglang(sparse, recorded_on):
    assert ids(several_samples(sparse)) == ids(recorded_on("plain", several_samples))


SEEDED = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True}


def test_a_seed_gives_one_text(sparse: Server):
    """Alone, in company, and at a budget below the context with another guide: the seed decides."""
    seeds = [11, 12]
    alone = [sparse.ask(STORY, 16, **SEEDED, sampling_seed=seed) for seed in seeds]
    assert len({tuple(a.ids) for a in alone}) == len(seeds)
    together = sparse.ask_all([STORY] * 2, 16, [{"sampling_seed": seed} for seed in seeds], **SEEDED)
    assert_same_tokens(together, alone, "seeds in one batch")
    sparse.policy(guide="random")
    assert_same_tokens([sparse.ask(STORY, 16, **SEEDED, sampling_seed=11)], alone[:1], "random guide")


def test_samples_differ_and_the_guide_keeps_up(sparse: Server):
    """At temperature 1 an argmax guide is right in a tenth of the steps; with the noise shared it mostly is."""
    sparse.policy()
    for prompt in (STORY, ANIMALS):
        four = sparse.post_samples(prompt, 4, {"temperature": 1.0, "max_new_tokens": 33, "ignore_eos": True})
        assert len({tuple(a.ids) for a in four}) == 4
    totals = sparse.totals()
    assert totals["guides"] > 100
    assert totals["guide_hits"] > 0.8 * totals["guides"]


def test_no_seed_no_repetition(sparse: Server):
    assert sparse.ask(POEM, 16, **SEEDED).ids != sparse.ask(POEM, 16, **SEEDED).ids


def test_a_grammar_holds_at_a_temperature(sparse: Server):
    answers = sparse.ask_all([PERSON] * 4 + [POEM], 60, [{"json_schema": SCHEMA}] * 4 + [{}], temperature=1.0)
    for answer in answers[:4]:
        assert set(json.loads(answer.text)) == {"name", "age", "hobbies"}
