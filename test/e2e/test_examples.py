"""The examples run against a server with sparse KV and say what they should."""

from __future__ import annotations

import importlib.util
import json
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


def test_a_chat_is_streamed(server_url):
    result = load("chat_stream").run(server_url, "What is the capital of France?", tokens=24)
    assert "Paris" in result["text"] and result["tokens"] > 1
    assert result["pieces"] > 1 and result["first_token_seconds"] > 0 and result["tokens_per_second"] > 0


def test_every_question_is_asked_of_every_document(server_url):
    program = load("batch_qa")
    paths = sorted((EXAMPLES / "minutes").glob("*.txt"))
    found = program.run(server_url, paths, program.QUESTIONS[:2])
    assert list(found) == ["garden.txt", "harbour.txt"]
    assert all(list(answers) == list(program.QUESTIONS[:2]) and all(answers.values()) for answers in found.values())
    assert found["garden.txt"] != found["harbour.txt"], "each answer is about its own document"


def test_a_coding_agent_reads_files_and_answers(server_url, tmp_path):
    (tmp_path / "area.py").write_text("def area(width, height):\n    return width * height\n")
    (tmp_path / "greet.py").write_text("def greet(name):\n    return f'Hello, {name}!'\n")
    result = load("code_agent").run(server_url, tmp_path, ["What does greet.py do?", "And area.py?"], most_files=2)
    assert set(result["read"]) <= {"area.py", "greet.py"} and len(result["read"]) == len(set(result["read"]))
    assert len(result["answers"]) == 2 and all(result["answers"])
    assert result["prompt_tokens"] == sorted(set(result["prompt_tokens"])), "each turn continues the last"


def test_an_agent_without_files_says_so(server_url, tmp_path):
    with pytest.raises(ValueError, match=r"holds no file that matches \*\.py"):
        load("code_agent").run(server_url, tmp_path, ["What is here?"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fork_select", "agent", "chat_stream", "batch_qa"])
def test_from_the_command_line(server_url, name):
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--url", server_url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    assert any(word in result.stdout for word in ("Oslo", "1874", "Paris", "harbour.txt"))


@pytest.mark.slow
def test_offline(demo_model):
    command = [sys.executable, str(EXAMPLES / "offline.py"), "--model-path", demo_model]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    said = json.loads(result.stdout[result.stdout.index("{\n") :])
    assert len(said["texts"]) == 7 and all(said["texts"]) and 0 < said["hit"] <= 1


def test_agent_says_what_came_instead_of_a_call():
    agent = load("agent")

    class Message:
        tool_calls = None
        content = "It is sunny."

    with pytest.raises(ValueError, match="asked for a tool call and wrote 'It is sunny"):
        agent.parse_call(Message)
