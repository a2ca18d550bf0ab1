"""Recall tasks: the asked-for is in the text exactly as often as it must be, within the room, and scoring is exact."""

from __future__ import annotations

import http.server
import json
import re
import threading

import pytest

from benchmark.quality import recall
from benchmark.quality.tasks import TASKS, Prompt, prompts, tracking


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [900, 2000])
def test_prompts_hold_what_is_asked_and_fit(task, length):
    made = prompts(task, length, 5, count)
    assert made == prompts(task, length, 5, count) and made != prompts(task, length, 5, count, seed=1)
    assert len({prompt.text for prompt in made}) == 5
    for prompt in made:
        assert 0.75 * length < count(prompt.text) <= length + 8
        assert all(reference in prompt.text for reference in prompt.references)
        assert len(set(prompt.references)) == len(prompt.references)
        assert not any(reference in prompt.answer_start for reference in prompt.references)


def test_needles_are_where_chance_put_them():
    made = prompts("niah_single_1", 1500, 40, count)
    depth = [prompt.text.index(prompt.references[0]) / len(prompt.text) for prompt in made]
    assert min(depth) < 0.2 and max(depth) > 0.8


def test_a_key_has_one_code_and_many_keys_have_others():
    for prompt in prompts("niah_multikey_2", 1500, 5, count):
        codes = dict(re.findall(r"code of ([a-z-]+) is (\d+)\.", prompt.text))
        key = re.search(r"secret code of ([a-z-]+) in the text above", prompt.text).group(1)
        assert codes[key] == prompt.references[0] and len(codes) > 40
        assert len(re.findall(rf"code of {key} is", prompt.text)) == 1, "another line gives the asked key another code"


@pytest.mark.parametrize("chains", [1, 2])
def test_variables_are_those_of_one_chain(monkeypatch, chains):
    monkeypatch.setitem(TASKS, "vt", tracking(chains))
    for prompt in prompts("vt", 1200, 5, count):
        value = re.search(r"hold the value (\d+)\?", prompt.text).group(1)
        holders: dict[str, str] = {}
        for name, number, other in re.findall(r"VAR (\w+) = (?:(\d+)|VAR (\w+))\.", prompt.text):
            holders[name] = number or holders[other]
        assert len(holders) == 5 * chains
        assert {name for name, held in holders.items() if held == value} == set(prompt.references)


@pytest.mark.parametrize("task", ["cwe", "fwe"])
def test_common_words_are_the_commonest(task):
    for prompt in prompts(task, 1500, 5, count):
        words = prompt.text.split("\n\n")[1].split()
        times = {word: words.count(word) for word in set(words)}
        rest = max(times[word] for word in times if word not in prompt.references)
        assert min(times[word] for word in prompt.references) >= 3 * rest


def test_scoring():
    prompt = Prompt("vt", "", "", ("Abc", "12"), 1)
    assert [prompt.score(answer) for answer in ("aBC, 120", "abc", "", "ab c")] == [1, 0.5, 0, 0]


class Parrot(http.server.BaseHTTPRequestHandler):
    """Finds the needle by reading; knows nothing of budgets."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/set_internal_state":
            reply, status = {"updated": False}, 200
        else:
            key = re.search(r"secret code of (\S+) in the text", body["prompt"]).group(1)
            code = re.search(rf"code of {key} is (\S+)\.", body["prompt"]).group(1)
            reply, status = {"choices": [{"text": f" {code}."}]}, 200
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def parrot():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Parrot)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


class Words:
    chat_template = None

    def encode(self, text, **kwargs):
        return re.findall(r"\w+|[^\w\s]", text)


def test_the_command(parrot, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(recall.AutoTokenizer, "from_pretrained", lambda folder: Words())
    arguments = ["--url", parrot, "--model", "any", "--prompts", "3", "--length", "800"]
    tasks = ["--task", "niah_single_1", "niah_multikey_2"]
    assert recall.main([*arguments, *tasks, "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["score"] for row in rows] == [1, 1] and "100.0%" in capsys.readouterr().out
    assert recall.main([*arguments, *tasks, "--budget", "256"]) == 1
    assert "did not take budget 256" in capsys.readouterr().err
