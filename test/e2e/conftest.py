"""Which servers there are, and the order of tests that starts each of them once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kinds import KINDS
from serving import Fleet, Scenario, Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one server follow one another; those without a server come first."""
    names = list(KINDS)

    def place(item: pytest.Item) -> int:
        wanted = [*getattr(item, "fixturenames", ())]
        if "served" in wanted:
            wanted.append(item.callspec.params["served"] if hasattr(item, "callspec") else item.cls.served_by)
        return max((names.index(name) for name in wanted if name in names), default=-1)

    items.sort(key=place)


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, demo_model: str, tmp_path_factory) -> Iterator[Fleet]:
    modules: dict[Any, bool] = {}  # those with tests to run, and whether slow ones are among them
    for item in request.session.items:
        if hasattr(item, "module"):
            modules[item.module] = modules.get(item.module, False) or item.get_closest_marker("slow") is not None
    found = {
        value: None
        for module, slow in modules.items()
        for value in vars(module).values()
        if hasattr(value, "recorded_on") and (slow or not value.slow)
    }
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    fleet = Fleet(KINDS, demo_model, tmp_path_factory.mktemp("servers"), shared, found)
    yield fleet
    fleet.stop()


@pytest.fixture(scope="session")
def recorded_on(fleet: Fleet) -> Callable[[str, Scenario], Any]:
    return fleet.recorded_on


@pytest.fixture
def sparse(fleet: Fleet) -> Iterator[Server]:
    """The server of the fast tier with its policy as started; idle and whole when the test ends."""
    yield from _tidy(fleet.server("sparse"))


@pytest.fixture
def pair(fleet: Fleet) -> Iterator[Server]:
    """A server whose pool holds two requests of test_reuse.py."""
    yield from _tidy(fleet.server("pair"))


@pytest.fixture
def served(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Server]:
    """The server whose name the test gives as this fixture's parameter, or its class as `served_by`."""
    yield from _tidy(fleet.server(request.param if hasattr(request, "param") else request.cls.served_by))


@pytest.fixture
def server_url(sparse: Server) -> str:
    """Address of the fast tier's server, for programs that are given one."""
    return sparse.url


def _tidy(server: Server) -> Iterator[Server]:
    if server.kind.switchable:
        server.policy()
    yield server
    server.check_idle()
