"""What the user may say: sizes, ranges, unknown keys, and the four arguments together."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import pickletools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sparse_kv.config import PAGE_SIZES, SparseKVConfig, config_from_arguments, parse_size


def refusal(error: pytest.ExceptionInfo) -> str:
    """The text of a refusal, checked to be one sentence that can be shown to a person."""
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".") and ". " not in text
    return text


@pytest.mark.parametrize(
    ("value", "total", "expected"),
    [
        (1, None, 1),
        (96 * 10**9, None, 96 * 10**9),
        ("1024", None, 1024),
        ("96GB", None, 96 * 10**9),
        ("96 gb", None, 96 * 10**9),
        ("64GiB", None, 64 * 2**30),
        ("1.5KiB", None, 1536),
        ("0.5TB", None, 5 * 10**11),
        ("50%", 10**9, 5 * 10**8),
        ("100%", 7, 7),
        ("12.5 %", 8, 1),
    ],
)
def test_sizes(value, total, expected):
    assert parse_size(value, total) == expected


@pytest.mark.parametrize(
    "value", ["", "GB", "-1GB", "1 GB 2", "0", 0, -5, "0%", "101%", "1XB", "1,5GB", "٣GB", True, 1.5, None, [1]]
)
def test_what_is_no_size(value):
    with pytest.raises(ValueError) as error:
        parse_size(value, total=100, name="host_memory")
    assert "host_memory" in refusal(error)


def test_a_share_needs_a_whole():
    with pytest.raises(ValueError) as error:
        parse_size("50%")
    assert "50%" in refusal(error)


@given(st.integers(1, 2**60))
def test_integers_are_exact_however_large(value):
    assert parse_size(value) == parse_size(str(value)) == parse_size(f"{value}B") == value


def test_defaults_are_valid_and_match_the_manual():
    config = SparseKVConfig.from_dict({})
    assert (config.budget, config.sinks, config.window, config.guide, config.most_rows) == (1664, 16, 64, "resync", 2)
    assert [config.whole_at(budget) for budget in (16, 1663, 1664, 4096)] == [0, 0, 2048, 2048]
    assert [SparseKVConfig.from_dict({"whole": n}).whole_at(16) for n in (0, 500)] == [0, 500]
    assert config.lookahead == "auto" and SparseKVConfig.from_dict({"lookahead": 8}).lookahead == 8


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": "2048"}, "budget"),
        ({"budget": True}, "budget"),
        ({"budget": 1.0}, "budget"),
        ({"sinks": -1}, "sinks"),
        ({"window": -1}, "window"),
        ({"whole": -1}, "whole"),
        ({"whole": "all"}, "'auto' or a whole number"),
        ({"whole": 2048.0}, "whole number"),
        ({"whole": True}, "whole number"),
        ({"lookahead": 0}, "lookahead"),
        ({"lookahead": "half"}, "'auto' or a whole number"),
        ({"lookahead": 2.0}, "whole number"),
        ({"ring": 1}, "2 to 4"),
        ({"ring": 5}, "2 to 4"),
        ({"seed": -1}, "seed"),
        ({"prefetch_cap": -0.1}, "prefetch_cap"),
        ({"prefetch_cap": 1.5}, "prefetch_cap"),
        ({"prefetch_floor": -0.1}, "prefetch_floor"),
        ({"prefetch_cap": float("nan")}, "prefetch_cap"),
        ({"prefetch_cap": float("inf")}, "prefetch_cap"),
        ({"guide": "oracle"}, "'chain', 'lookup', 'resync', 'none'"),
        ({"guide": None}, "guide"),
        ({"host_memory": "lots"}, "host_memory"),
        ({"cache_memory": 0}, "cache_memory"),
        ({"residency": "some"}, "residency"),
        ({"residency": 1.5}, "residency"),
        ({"residency": [0, -1]}, "residency"),
        ({"residency": [0, 0]}, "twice"),
        ({"residency": [0.5]}, "residency"),
        ({"residency": True}, "residency"),
        ({"residency": None}, "residency"),
    ],
)
def test_values_out_of_range(values, word):
    with pytest.raises(ValueError) as error:
        SparseKVConfig.from_dict(values)
    assert word in refusal(error)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(SparseKVConfig) if isinstance(f.default, bool)])
def test_true_or_false(name):
    for value in (0, 1, 1.0, "false", None, []):
        with pytest.raises(ValueError) as error:
            SparseKVConfig.from_dict({name: value})
        assert name in refusal(error) and "true or false" in refusal(error)


def test_an_unknown_key_names_its_neighbour():
    with pytest.raises(ValueError) as error:
        SparseKVConfig.from_dict({"residencey": "all"})
    assert "'residencey'" in refusal(error) and "'residency'" in refusal(error)
    with pytest.raises(ValueError) as error:
        SparseKVConfig.from_dict({"zzz": 1})
    assert "cache_memory" in refusal(error)


VALID = st.fixed_dictionaries(
    {},
    optional={
        "budget": st.integers(1, 2**31),
        "host_memory": st.sampled_from(["auto", "96GB", "50%", 123]),
        "guide": st.sampled_from(["chain", "lookup", "resync", "none"]),
        "residency": st.one_of(
            st.sampled_from(["all", "none"]), st.floats(0, 1), st.lists(st.integers(0, 99), unique=True)
        ),
        "prefetch_cap": st.floats(0, 1),
        "prefetch_floor": st.floats(0, 1),
        "guide_attends": st.sampled_from(["selected", "own"]),
        "ring": st.integers(2, 4),
        "debug": st.booleans(),
    },
)


@given(VALID)
def test_the_dict_form_survives_json_and_pickle_and_needs_no_class(values):
    config = SparseKVConfig.from_dict(values)
    plain = config.to_dict()
    assert SparseKVConfig.from_dict(json.loads(json.dumps(plain))) == config
    pickled = pickle.dumps(plain)
    assert pickle.loads(pickled) == plain
    assert not [op for op, _, _ in pickletools.genops(pickled) if "GLOBAL" in op.name]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_budget_holds_a_page(page_size):
    SparseKVConfig.from_dict({"budget": page_size}).check_page_size(page_size)
    with pytest.raises(ValueError) as error:
        SparseKVConfig.from_dict({"budget": page_size - 1}).check_page_size(page_size)
    assert f"{page_size - 1} tokens" in refusal(error)


@pytest.mark.parametrize("page_size", [1, 4, 12, 64])
def test_other_page_sizes(page_size):
    with pytest.raises(ValueError) as error:
        SparseKVConfig.from_dict({}).check_page_size(page_size)
    assert f"--page-size is {page_size}" in refusal(error)


def test_layers_that_the_model_lacks():
    config = SparseKVConfig.from_dict({"residency": [0, 29]})
    config.check_num_layers(30)
    with pytest.raises(ValueError) as error:
        config.check_num_layers(29)
    assert "layer 29" in refusal(error)


def test_the_four_arguments_together():
    assert config_from_arguments(None) is None
    config = config_from_arguments("dualdecoder", "512", "1GB", '{"guide": "none", "residency": [1, 2]}')
    assert (config.budget, config.host_memory, config.most_rows, config.residency) == (512, "1GB", 1, (1, 2))
    assert config_from_arguments("dualdecoder", 512, 10**9, {"guide": "none"}).budget == 512


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((None, 512), "--sparse-kv-budget"),
        ((None, None, "1GB"), "--sparse-kv-host-memory"),
        ((None, None, None, "{}"), "--sparse-kv-config"),
        (("other",), "'other'"),
        ((True,), "True"),
        (("dualdecoder", "many"), "'many'"),
        (("dualdecoder", "0"), "budget"),
        (("dualdecoder", None, "lots"), "'lots'"),
        (("dualdecoder", None, None, "{"), "no valid JSON"),
        (("dualdecoder", None, None, "[]"), "JSON object"),
        (("dualdecoder", None, None, '"x"'), "JSON object"),
        (("dualdecoder", None, None, '{"ring": 2, "ring": 3}'), "twice"),
        (("dualdecoder", 512, None, '{"budget": 512}'), "keep one"),
        (("dualdecoder", None, "1GB", '{"host_memory": "2GB"}'), "keep one"),
        (("dualdecoder", None, None, '{"prefetch_cap": NaN}'), "prefetch_cap"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, word):
    with pytest.raises(ValueError) as error:
        config_from_arguments(*arguments)
    assert word in refusal(error)


NAMES = [field.name for field in dataclasses.fields(SparseKVConfig)]
NUMBERS = st.integers() | st.sampled_from([2**31, 2**63, -(2**63), 10**400]) | st.floats()
SIZES = st.from_regex(r"\A\s?[0-9]{1,3}(\.[0-9]+)?\s?(%|[kmgt]?i?b)\Z")
HUGE = st.sampled_from(["9" * 400 + ".5GB", "9" * 5000])
WORDS = st.sampled_from(["all", "none", "auto", "chain"])
SCALARS = st.none() | st.booleans() | NUMBERS | SIZES | HUGE | st.text() | WORDS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6)
OBJECTS = st.dictionaries(st.sampled_from(NAMES) | st.text(), VALUES, max_size=4)
DEEP = st.sampled_from(["[" * 10**5, '{"ring": ' + "9" * 5000 + "}"])
TEXTS = st.text() | (OBJECTS | VALUES).map(json.dumps) | DEEP


@settings(max_examples=int(os.environ.get("SPARSE_KV_FUZZ", 200)))
@given(
    mode=st.sampled_from(["dualdecoder", "dualdecoder", "dualdecoder", None]) | st.text(),
    budget=st.none() | st.none() | st.integers() | st.text() | HUGE,
    host_memory=st.none() | st.none() | SCALARS,
    more=st.none() | TEXTS | OBJECTS,
)
def test_whatever_is_said_is_taken_or_refused_in_one_sentence(mode, budget, host_memory, more):
    """Command lines, files and keywords of people and of programs: a configuration or a reason, nothing else."""
    try:
        config = config_from_arguments(mode, budget, host_memory, more)
    except ValueError as error:
        text = str(error)
        assert text.endswith(".") and "\n" not in text and len(text) < 1000
    else:
        assert config is None or SparseKVConfig.from_dict(config.to_dict()) == config


def test_rows():
    def rows(**values):
        made = SparseKVConfig.from_dict(values)
        return made.rows, made.most_rows, made.keeps_history

    assert rows() == rows(rows="auto") == ("auto", 2, True)
    assert rows(rows=2) == (2, 2, True)
    assert rows(rows=1) == (1, 1, False)
    assert rows(rows="auto", guide="none") == ("auto", 1, False)
    for wrong in (0, 3, "two", True, 2.0, None):
        with pytest.raises(ValueError, match=r"^rows is [^\n]*; use 'auto', 1 or 2\.$"):
            rows(rows=wrong)
