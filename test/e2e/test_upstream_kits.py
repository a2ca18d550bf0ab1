"""SGLang's own test kits, from the installed package, against our server.

docs/reliability.md lists those that are not here, and why.
"""

from __future__ import annotations

import json
import unittest
from pathlib import Path

import pytest
import requests
from sglang.test import kl_test_utils
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin, RunningTimeoutTwoWaveMixin, WaitingTimeoutMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.spec_server_kits import SpecGrammarKit, SpecLogprobKit
from texts import excerpt
from transformers import AutoTokenizer

KINDS_OF_TEXT = ("tale", "licence", "code", "records")
# The kit's, with an end to both: this model counts a population in zeros without one.
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[\\w]{1,20}$"},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}


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
    json_schema = json.dumps(CITY)


@pytest.mark.slow
class TestRegex(RegexConstrainedMixin, Kit):
    test_regex_generate_custom_log_format = None  # as below


@pytest.mark.slow
class TestEBNF(EBNFConstrainedMixin, Kit):
    test_ebnf_generate_custom_log_format = None  # [a-z]+ at a temperature: now and then this model finds no end of it


@pytest.mark.slow
class TestStress(BasicSchedulerStressMixin, Kit):
    test_concurrent_requests = None  # this model knows none of the capitals after the kit's first line
    test_long_prompt = None  # 8000 tokens are more than this model takes; test_long_contexts.py has 7000


@pytest.mark.slow
class TestDecode(BasicDecodeCorrectnessMixin, Kit):
    # This model cannot multiply, names other colours, and has no answer to a request for a sentence.
    test_basic_math = test_color_completion = test_ascii_ratio = None


@pytest.mark.slow
class TestGrammar(SpecGrammarKit, Kit):
    pass


@pytest.mark.slow
class TestLogprobs(KLDivergenceMixin, Kit):
    """A prefill of a whole answer gives each token the logprob that decoding it gave, over a prefix that a prefill left
    in the cache, and over one that decoding left.
    """

    kl_div_thres = 1e-6
    kl_div_max_samples = 8
    kl_div_prefill_max_new_tokens = kl_div_decode_max_new_tokens = 24

    @pytest.fixture(autouse=True)
    def _prompts(self, _server):
        """Texts of ours, in place of a download, and what the kit asks its class."""
        texts = [excerpt(kind, length, 700) for kind in KINDS_OF_TEXT for length in (900, 2200)]
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        key = f"{self.model}_{kl_test_utils.DEFAULT_PROMPT_TOKENS}_{kl_test_utils.DEFAULT_NUM_SAMPLES}"
        kl_test_utils._cached_input_ids[key] = [tokenizer.encode(text) for text in texts]
        type(self).base_url, type(self).model = self.base_url, self.model


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
def test_turns_hit_the_cache(sparse, demo_model: str, tmp_path: Path):
    """Six clients, four rounds: each finds all closed pages of the round before."""
    talks = [
        {"conversations": [{"value": excerpt(kind, 1500, start)}, {"value": "Yes."}]}
        for kind in KINDS_OF_TEXT
        for start in range(0, 2000, 200)
    ]
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    found = run_multiturn_cache_hit_test(
        sparse.url, demo_model, 6, 4, 150, 12, sub_question_input_length=60, dataset_path=str(tmp_path / "talks.json")
    )
    assert found["overall"]["cache_hit_rate"] > 0.5


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
