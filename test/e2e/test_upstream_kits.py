"""SGLang's own test kits, from the installed package, against our server.

docs/reliability.md lists those that are not here, and why.
"""

from __future__ import annotations

import unittest

import pytest
import requests
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin, RunningTimeoutTwoWaveMixin, WaitingTimeoutMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.spec_server_kits import SpecLogprobKit


class Alive:
    """What kits ask of a server's process."""

    def __init__(self, server):
        self._server = server

    def poll(self) -> int | None:
        return None if requests.get(f"{self._server.url}/health", timeout=30).ok else 1


class Kit(unittest.TestCase):
    served_by = "sparse"

    @pytest.fixture(autouse=True)
    def _server(self, served, demo_model):
        self.base_url, self.model, self.process = served.url, demo_model, Alive(served)


class TestContract(BasicAPIContractMixin, Kit):
    pass


class TestAborts(AbortAllMixin, Kit):
    # Twice the eight that run at once: half of them are aborted in the queue.
    abort_all_num_requests = 16
    abort_all_max_new_tokens = 1500


@pytest.mark.slow
class TestStops(MatchedStopMixin, Kit):
    test_finish_stop_eos = None  # names another model's tokens; test_sampling_features.py ends texts by this one's
    test_finish_stop_str = None  # asks for a new line, and this model's chat has none in a thousand tokens


@pytest.mark.slow
class TestJSON(JSONConstrainedMixin, Kit):
    test_json_generate = None  # this model counts a population in zeros without an end


@pytest.mark.slow
class TestRegex(RegexConstrainedMixin, Kit):
    pass


@pytest.mark.slow
class TestEBNF(EBNFConstrainedMixin, Kit):
    pass


@pytest.mark.slow
class TestStress(BasicSchedulerStressMixin, Kit):
    test_long_prompt = None  # 8000 tokens are more than this model takes; test_long_contexts.py has 7000


@pytest.mark.slow
class TestSpeculativeLogprobs(SpecLogprobKit, Kit):
    served_by = "qwen2"
    logprob_match_delta = 1e-3  # float32


@pytest.mark.slow
class TestOverdue(RunningTimeoutTwoWaveMixin, Kit):
    """Both waves run into a limit of five seconds, at different steps."""

    served_by = "overdue"


@pytest.mark.slow
class TestQueueing(WaitingTimeoutMixin, Kit):
    """One request runs at a time, and those which have waited for a second end."""

    served_by = "queueing"


@pytest.mark.slow
def test_radix_tree(sparse):
    """Sixty prompts that share and branch, all at once, through a pool that they fill; then again."""
    nodes = radix_cache_server_kit.gen_radix_tree(num_nodes=60, chunk_len=24)
    body = {
        "input_ids": [node["input_ids"] for node in nodes],
        "sampling_params": [{"max_new_tokens": node["decode_len"] % 24, "temperature": 0} for node in nodes],
    }
    for _ in range(2):
        reply = requests.post(f"{sparse.url}/generate", json=body, timeout=600)
        assert reply.ok
        assert len(reply.json()) == len(nodes)
