"""Run the commands shown in docs/sizing.md and put their answers below them.

A block that begins with ``$ sglang-sparse-kv`` holds a command and what it printed. With ``--check`` nothing is
written, and the status says whether the guide is up to date.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
GUIDE = REPOSITORY / "docs" / "sizing.md"
BLOCK = re.compile(r"^```console\n\$ sglang-sparse-kv (?P<command>.*?(?<!\\))\n.*?^```$", re.MULTILINE | re.DOTALL)
PROGRAM = [sys.executable, "-c", "import sglang_dualdecoder; sglang_dualdecoder.main()"]


def answer(command: str) -> str:
    """What the command prints, from the repository's folder. Raises RuntimeError when it fails."""
    path = os.pathsep.join([str(REPOSITORY / "python"), os.environ.get("PYTHONPATH", "")])
    argv = [*PROGRAM, *shlex.split(command.replace("\\\n", " "))]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{command} ended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout.rstrip()


def renew(text: str) -> str:
    """The guide with every answer as it is now."""
    return BLOCK.sub(lambda m: f"```console\n$ sglang-sparse-kv {m['command']}\n{answer(m['command'])}\n```", text)


def main() -> int:
    old = GUIDE.read_text(encoding="utf-8")
    new = renew(old)
    if "--check" in sys.argv[1:]:
        return int(new != old)
    GUIDE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
