"""Lookups in the text so far, against the plainest search that there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sparse_kv.history import LONGEST, NONE, TokenHistory

CONTEXT = 24


def continuation(text: list[int]) -> int:
    """What followed the longest run of last tokens, up to LONGEST, where it stood last."""
    for run in range(min(LONGEST, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, run - 1, -1):
            if text[end - run : end] == text[-run:]:
                return text[end]
    return NONE


def following(history: TokenHistory, slots: list[int], texts: list[list[int]]) -> list[int]:
    return history.following(torch.tensor(slots), torch.tensor([len(text) - 1 for text in texts])).tolist()


TEXT = st.lists(st.integers(0, 4), min_size=1, max_size=CONTEXT)


@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(0, 100))
@settings(max_examples=300, deadline=None)
def test_a_lookup_is_the_plain_search(texts, seed):
    history = TokenHistory(6, CONTEXT, "cpu")
    slots = torch.randperm(6, generator=torch.Generator().manual_seed(seed))[: len(texts)].tolist()
    for slot, text in zip(slots, texts):
        history.fill(slot, torch.tensor(text))
    assert following(history, slots, texts) == [continuation(text) for text in texts]


@given(TEXT, TEXT)
@settings(max_examples=100, deadline=None)
def test_what_an_earlier_owner_left_is_not_read(earlier, text):
    history = TokenHistory(2, CONTEXT, "cpu")
    history.fill(1, torch.tensor(earlier + [text[-1]] * (CONTEXT - len(earlier))))
    history.fill(1, torch.tensor(text))
    assert following(history, [1], [text]) == [continuation(text)]


def test_tokens_join_one_by_one():
    history = TokenHistory(4, CONTEXT, "cpu")
    texts = {3: [7, 8], 1: [5]}
    for slot, text in texts.items():
        history.fill(slot, torch.tensor(text, dtype=torch.int64))
    for token in (9, 7, 8):
        positions = torch.tensor([len(text) for text in texts.values()])
        history.append(torch.tensor(list(texts)), positions, torch.tensor([token, token + 1], dtype=torch.int32))
        texts[3].append(token)
        texts[1].append(token + 1)
    assert following(history, list(texts), list(texts.values())) == [9, NONE]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 1, 2, 4, 2], 4),  # one token in common, the latest place
        ([9, 1, 2, 5, 1, 2, 6, 9, 1, 2], 5),  # three in common beat two that are later
        ([3], NONE),
        ([3, 3], 3),
        ([1, 2, 3, 4], NONE),
    ],
)
def test_the_longest_run_then_the_latest_place(text, expected):
    history = TokenHistory(1, CONTEXT, "cpu")
    history.fill(0, torch.tensor(text))
    assert following(history, [0], [text]) == [expected]


def test_a_full_context_is_searched_to_its_end():
    text = [*range(CONTEXT - 1), 0]
    history = TokenHistory(1, CONTEXT, "cpu")
    history.fill(0, torch.tensor(text))
    assert following(history, [0], [text]) == [1]
