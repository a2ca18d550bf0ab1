"""Every curl command of the documents, sent to a running server."""

from __future__ import annotations

import json
import re
import shlex
import subprocess

import pytest
from doc_commands import COMMANDS

CURLS = sorted({command for _, command in COMMANDS if command.startswith("curl ")})


@pytest.mark.parametrize("command", CURLS)
def test_curl(server_url, command):
    words = shlex.split(command.replace("http://127.0.0.1:30000", server_url))
    reply = subprocess.run([*words, "--silent", "--fail", "--max-time", "120"], capture_output=True, text=True)
    assert reply.returncode == 0, reply.stderr
    if "/metrics" in command:
        assert re.search("^sglang:", reply.stdout, re.MULTILINE)
    else:
        answer = json.loads(reply.stdout)
        assert answer and answer != [False], "the server refused it"


def test_there_are_some():
    assert len(CURLS) >= 4
