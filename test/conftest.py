"""Settings that every test shares, and the demo model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports transformers or a CUDA library: tests never reach for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REPOSITORY = Path(__file__).resolve().parent.parent

# Machines that run the tests differ in speed by an order of magnitude, so no example has a deadline,
# nor the making of one. A failure prints the code that reproduces it.
settings.register_profile("repository", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("repository")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left out of `make test`, run by `make test-all`")


@pytest.fixture(scope="session")
def demo_model() -> str:
    """Directory of SmolLM2-135M-Instruct in float32, as `make model` prepares it."""
    path = Path(os.environ.get("SPARSE_KV_DEMO_MODEL", REPOSITORY / "demo-model" / "SmolLM2-135M-Instruct"))
    if not (path / "prepared").is_file():
        pytest.fail(f"The demo model is not in {path}; run `make model` first.", pytrace=False)
    return str(path)
