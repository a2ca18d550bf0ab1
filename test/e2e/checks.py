"""What tests assert about answers, said once."""

from __future__ import annotations

from collections.abc import Sequence

from serving import Answer, Server


def assert_same_tokens(ours: Sequence[Answer], expected: Sequence[Answer], what: str = "") -> None:
    """Token for token, with the texts in the message."""
    assert len(ours) == len(expected)
    for number, (own, other) in enumerate(zip(ours, expected)):
        if own.ids != other.ids:
            same = next((i for i, (a, b) in enumerate(zip(own.ids, other.ids)) if a != b), 0)
            raise AssertionError(
                f"{what}: answer {number} ({own.prompt_tokens} prompt tokens) differs at token {same} of "
                f"{len(other.ids)}:\n  {own.text!r}\nnot\n  {other.text!r}"
            )


def assert_same_bits(ours: Sequence[Answer], expected: Sequence[Answer], what: str = "") -> None:
    """The same tokens with the very same logprobs: not one bit of any row 0 depends on the policy."""
    assert_same_tokens(ours, expected, what)
    for own, other in zip(ours, expected):
        assert own.logprobs == other.logprobs, f"{what}: logprobs differ by up to {worst_gap([own], [other]):.2e}"


def worst_gap(ours: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """Largest difference between two logprobs of the same token."""
    return max(
        abs(a - b)
        for own, other in zip(ours, expected)
        for a, b in zip(own.logprobs or (), other.logprobs or (), strict=True)
    )


def ids(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.ids for answer in answers]


# What ranks of one server cannot disagree about, whichever pages their heads select.
SHARED = ("steps", "guides", "guide_hits", "bytes_stored", "bytes_staged", "free_tokens", "slots", "host_tokens")


def assert_ranks_agree(server: Server) -> None:
    """Two ranks have the same counters and the same free tokens."""
    first, second = server.ranks()
    assert {name: first[name] for name in SHARED} == {name: second[name] for name in SHARED}
    assert first["total"]["selected"] == second["total"]["selected"]
