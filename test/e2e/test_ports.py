"""Who listens: a server with sparse KV opens no other ports than one without."""

from __future__ import annotations

import psutil
import requests
from serving import Server, recorded


@recorded("plain")
def listening(server: Server) -> list[tuple[str, str]]:
    """(process, address) of every listening socket; ports are drawn anew at each start."""
    main = psutil.Process(server.process.pid)
    found = []
    for process in (main, *main.children(recursive=True)):
        role = "main" if process == main else " ".join(process.cmdline())[:40]
        connections = process.net_connections("inet")
        found += [(role, c.laddr.ip) for c in connections if c.status == psutil.CONN_LISTEN]
    return sorted(found)


def test_the_same_ports_as_plain_sglang(sparse: Server, recorded_on):
    ours = listening(sparse)
    assert ours == recorded_on("plain", listening)
    assert ("main", "127.0.0.1") in ours


def test_numbers_only_reach_the_policy(sparse: Server):
    """The one endpoint that leads to us: no text, no list, nothing that would have to be read as an object."""
    for value in ("gASVAAAAAAAAAIwFcG9zaXiU", [1], {"a": 1}, None):
        body = {"server_args": {"sparse_kv.seed": value}}
        reply = requests.post(f"{sparse.url}/set_internal_state", json=body, timeout=60)
        assert reply.status_code in (400, 422) or reply.json() == [False], reply.text
    sparse.check_alive()
