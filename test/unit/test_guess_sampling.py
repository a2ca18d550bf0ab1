"""What row 1 draws obeys the penalties and the grammar that its token will meet."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from batches import batch_info, request
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.sampling import penaltylib
from sglang.srt.sparse_kv import sampling
from sglang.srt.speculative.spec_utils import GrammarTree


def test_penalties_advance_as_upstream_counts():
    requests = [
        request(frequency=0.5, presence=0.3),
        request(repetition=1.3),
        request(frequency=0.2, repetition=0.8),
        request(),
    ]

    class Batch:
        reqs, device = requests, "cpu"

    batch = Batch()  # upstream refers to it weakly
    kinds = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    }
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(vocab_size=50, batch=batch, penalizers=kinds)
    rates = torch.tensor([[0.5, 0.3, 1.0], [0.0, 0.0, 1.3], [0.2, 0.0, 0.8], [0.0, 0.0, 1.0]])
    info = batch_info(4, penalizer_orchestrator=orchestrator)
    for tokens in torch.tensor([[3, 4, 5, 6], [7, 4, 8, 9], [3, 4, 5, 6]]):
        info.update_penalties()
        now = info.copy_for_forward()
        assert sampling.has_penalties(now)
        sampling.advance_penalties(now, tokens, rates)
        orchestrator.cumulate_output_tokens(tokens)
        info.update_penalties()
        torch.testing.assert_close(now.acc_additive_penalties, info.acc_additive_penalties)
        torch.testing.assert_close(now.acc_scaling_penalties, info.acc_scaling_penalties)


def test_batches_without_penalties_need_no_advance():
    info = batch_info(2)
    assert not sampling.has_penalties(info)
    sampling.advance_penalties(info, torch.tensor([1, 2]), torch.zeros(2, 3))
    assert info.acc_additive_penalties is None and info.acc_scaling_penalties is None


# ---------------------------------------------------------------- grammars


class Counting(BaseGrammarObject):
    """Allows only the token after the last one."""

    def __init__(self, last):
        super().__init__()
        self.history = [last]

    def accept_token(self, token):
        if token != self.history[-1] + 1:
            raise ValueError
        self.history.append(token)

    def rollback(self, k):
        del self.history[-k:]

    def allocate_vocab_mask(self, vocab_size, batch_size, device):
        return torch.full((batch_size, (vocab_size + 31) // 32), -1, dtype=torch.int32)

    def fill_vocab_mask(self, vocab_mask, idx):
        vocab_mask[idx] = 0
        vocab_mask[idx, (self.history[-1] + 1) // 32] = 1 << ((self.history[-1] + 1) % 32)


def allowed(row):
    return [32 * word + bit for word in range(2) for bit in range(32) if (int(row[word]) >> bit) & 1]


def test_row_1_is_masked_as_its_grammar_will_be():
    reqs = [SimpleNamespace(grammar=Counting(4)), SimpleNamespace(grammar=None), SimpleNamespace(grammar=Counting(8))]
    tree = GrammarTree.from_linear_chain(torch.tensor([[4, 5], [1, 2], [8, 30]]))
    mask = sampling.guess_grammar_mask(reqs, tree, batch_info(3), torch.device("cpu"))
    assert mask.vocab_mask.shape == (3, 2)
    assert allowed(mask.vocab_mask[0]) == [6], "the guess 5 is right; 6 follows it"
    assert len(allowed(mask.vocab_mask[1])) == 64
    assert len(allowed(mask.vocab_mask[2])) == 64, "a guess that the grammar refuses leads nowhere"
    assert [reqs[0].grammar.history, reqs[2].grammar.history] == [[4], [8]], "the grammars are where they were"


class NoRewind(BaseGrammarObject):
    pass


class Reasoning(BaseGrammarObject):
    def __init__(self, grammar):
        super().__init__()
        self.grammar = grammar

    def rollback(self, k):
        self.grammar.rollback(k)


def test_only_grammars_that_can_go_back_are_tried():
    assert sampling.can_rewind([None, Counting(1), Reasoning(Counting(1))])
    assert not sampling.can_rewind([Counting(1), NoRewind()])
    assert not sampling.can_rewind([Reasoning(NoRewind())])
