"""The examples run against a server with sparse KV and say what they should."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fork_and_select(server_url):
    program = load("fork_select")
    result = program.run(server_url, (EXAMPLES / "report.txt").read_text())
    answers = result["answers"]
    assert list(answers) == list(program.QUESTIONS)
    assert "1874" in answers["When was the lighthouse built?"]
    assert "western slope" in answers["Where do the puffins nest?"]
    assert "Marta Lindqvist" in answers["Who leads the service crew?"]
    assert "tower white" in answers["What does the crew plan to paint next year?"]
    assert result["topic"] == "a lighthouse"


def test_agent_calls_its_tool(server_url):
    agent = load("agent")
    result = agent.run(server_url, city="Oslo")
    assert result["call"] == {"city": "Oslo"}
    # What the tool returned can be in the answer only if it travelled there and back.
    assert "7 degrees" in result["answer"]
    assert result["follow_up"]
    assert result["prompt_tokens"] == sorted(set(result["prompt_tokens"])), "each turn continues the last"


@pytest.mark.parametrize("name", ["fork_select", "agent"])
def test_from_the_command_line(server_url, name):
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--url", server_url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Oslo" in result.stdout or "1874" in result.stdout


def test_agent_says_what_came_instead_of_a_call():
    agent = load("agent")

    class Message:
        tool_calls = None
        content = "It is sunny."

    with pytest.raises(ValueError, match="asked for a tool call and wrote 'It is sunny"):
        agent.parse_call(Message)
