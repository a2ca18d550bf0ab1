"""Run-time policies of the sparse server, by the names that ``policies.json`` gives them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import requests

TABLE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("policies.json").read_text())


_TRIES = 5


class PolicyRefused(ValueError):
    """The server does not know or does not allow a policy."""


def resolve(name: str) -> dict[str, Any]:
    """The settings of a policy: a name of the table, or name=value pairs joined by commas.

    Raises:
        ValueError: neither.
    """
    if name in TABLE:
        return TABLE[name]
    settings: dict[str, Any] = {}
    for part in name.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{name!r} is no policy; use {', '.join(TABLE)} or key=value pairs.")
        try:
            settings[key] = float(value)
        except ValueError:
            settings[key] = value
    return settings


def switch(url: str, name: str, before: dict[str, Any]) -> None:
    """Set a policy on a running server.

    Args:
        url: of the server.
        name: as ``resolve`` takes it.
        before: the policy that the server started with, as its ``/server_info`` gave it; what the new policy
            does not name returns to this.

    Raises:
        PolicyRefused: the server said no.
    """
    wanted = resolve(name)
    unknown = [key for key in wanted if key not in before]
    if unknown:
        raise PolicyRefused(f"the server has no policy {', '.join(unknown)}")
    # All policies of the table start from the same state, whatever was set before.
    touched = {key for settings in TABLE.values() for key in settings if key in before} | set(wanted)
    values = {
        f"sparse_kv.{key}": _number(key, wanted.get(key, before[key]))
        for key in sorted(touched)
        if key in wanted or not isinstance(before[key], list)
    }
    reply = None
    for _ in range(_TRIES):
        reply = requests.post(f"{url}/set_internal_state", json={"server_args": values}, timeout=60)
        if reply.ok and all(reply.json()):
            return
        # It switches between requests only, and may still be tidying up after the last one.
        time.sleep(0.3)
    assert reply is not None
    raise PolicyRefused(f"the server refused {values}: HTTP {reply.status_code} {reply.text[:200]}")


def _number(key: str, value: Any) -> float:
    """SGLang's endpoint carries numbers only; a name travels as its place in the list of names."""
    if isinstance(value, str):
        import sglang_dualdecoder

        sglang_dualdecoder.find_overlay()
        from sglang.srt.sparse_kv.policy import NAMED

        if key == "residency":
            return {"none": 0.0, "all": 1.0}[value]
        return NAMED[key].index(value)
    return value
