"""docs/sizing.md: its commands run, and what it shows is what they print."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
from pathlib import Path

import pytest
from sglang.srt.sparse_kv import command, cost

REPOSITORY = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("renew_sizing", REPOSITORY / "scripts" / "renew_sizing.py")
assert _spec is not None and _spec.loader is not None
renew_sizing = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(renew_sizing)
TEXT = renew_sizing.GUIDE.read_text(encoding="utf-8")


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def differences(shown: str, now: str) -> list[str]:
    """Lines that differ in words, or in a number by more than 3 % and 0.02."""

    def same(old: str, new: str) -> bool:
        words = [re.sub(r"\s+", " ", NUMBER.sub("#", line)) for line in (old, new)]
        numbers = zip(NUMBER.findall(old), NUMBER.findall(new))
        return words[0] == words[1] and all(abs(float(a) - float(b)) <= max(0.03 * float(b), 0.02) for a, b in numbers)

    lines = list(itertools.zip_longest(shown.splitlines(), now.splitlines(), fillvalue=""))
    return [f"{old} -> {new}" for old, new in lines if not same(old, new)]


@pytest.fixture(scope="module")
def renewed() -> str:
    return renew_sizing.renew(TEXT)


def test_the_examples_are_what_the_program_prints(renewed):
    assert len(renew_sizing.BLOCK.findall(TEXT)) >= 3
    assert not differences(TEXT, renewed), "run python scripts/renew_sizing.py"


@pytest.mark.parametrize(
    ("word", "other"), [("in the host pool", "in the hosts pool"), ("16.061 GB", "17.061 GB"), ("    landmarks", "")]
)
def test_an_old_answer_would_be_noticed(word, other, renewed):
    stale = TEXT.replace(word, other, 1)
    assert stale != TEXT and differences(stale, renewed)


def test_the_command_that_fails(capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    said = re.search(
        r"`sglang-sparse-kv (plan[^`]*llama-3.1-70b[^`]*)` says that the weights\nof one rank take (\S+) GB", TEXT
    )
    assert said is not None
    assert command.main(shlex.split(said[1])) == 1
    assert f"take {said[2]} GB" in capsys.readouterr().err


def test_every_option_is_in_the_guide(capsys):
    with pytest.raises(SystemExit):
        command.main(["plan", "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    shown = TEXT.split("## What is decided")[0]
    assert not {option for option in options if option not in shown and not option.startswith("--sparse-kv")} - {
        "--context-length",
        "--tp-size",
    }


def test_the_curves_in_the_guide():
    for curve in cost.CURVES:
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| {curve.name} |"))
        shares = [100 * share for _, share in curve.demand]
        for share in shares:
            assert any(abs(float(cell) - share) <= 0.05 * share for cell in re.findall(r"([\d.]+) %", row)), (
                row,
                share,
            )
        remaining, extra = f"{curve.remaining:.0%}".replace("%", " %"), f"{curve.extra - 1:.0%}".replace("%", " %")
        assert remaining in TEXT and extra in TEXT
