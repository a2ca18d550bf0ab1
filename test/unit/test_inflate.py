"""The inflated model computes the source's function: checked by transformers' own Llama on tiny models."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.corpus import Corpus
from benchmark.models import check_inflation, inflate, rope_agreement
from benchmark.models.llama_ref import Checkpoint, Llama
from benchmark.models.shapes import PRESETS, Shape, plan_heads, plan_layers, rotary_places, shares

SOURCE = Shape(hidden=24, heads=6, kv_heads=2, head_dim=8, layers=3, intermediate=40)
SMOLLM2 = Shape(hidden=576, heads=9, kv_heads=3, head_dim=64, layers=30, intermediate=1536)
TARGETS = {
    "wider heads": Shape(48, 16, 4, 16, 5, 100),
    "same heads": Shape(24, 6, 2, 8, 3, 40),
    "groups smaller than the source's": Shape(64, 8, 8, 8, 4, 41),
    "one spare query head": Shape(32, 8, 2, 32, 3, 97),
    "TP 8": Shape(96, 24, 8, 16, 3, 64),
    # What the presets do to the demo model: groups of 5, heads twice as wide, 1.6 and 2.1 times the layers, 9 and 18
    # times the neurons.
    "as 14b": Shape(40, 40, 8, 16, 5, 360),
    "as 32b": Shape(40, 40, 8, 16, 7, 720),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Checkpoint:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=SOURCE.hidden,
        num_attention_heads=SOURCE.heads,
        num_key_value_heads=SOURCE.kv_heads,
        head_dim=SOURCE.head_dim,
        num_hidden_layers=SOURCE.layers,
        intermediate_size=SOURCE.intermediate,
        max_position_embeddings=64,
        rms_norm_eps=1e-2,  # large, so that a wrong constant shows
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.3, 1.7)
    model.save_pretrained(folder)
    return Checkpoint(folder)


def logits_by_transformers(folder: Path, ids: torch.Tensor, **config) -> torch.Tensor:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {**json.loads((folder / "config.json").read_text()), **config}
    model = LlamaForCausalLM.from_pretrained(folder, config=LlamaConfig(**settings), dtype=torch.float32)
    with torch.inference_mode():
        return model(ids[None]).logits[0]


@pytest.mark.parametrize("fill", ["real", "zeros"])
@pytest.mark.parametrize("name", TARGETS)
def test_same_logits(source, tmp_path, name, fill):
    ids = torch.arange(50) * 7 % 64
    inflate.write(source, TARGETS[name], tmp_path / "m", "float32", fill, context=64)
    expected = logits_by_transformers(source.folder, ids)
    got = logits_by_transformers(tmp_path / "m", ids)
    assert expected.std() > 0.3
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("rope", ["yarn", "linear", "llama3", "ntk"])
def test_same_logits_with_rope_scaling(source, tmp_path, rope):
    ids = torch.arange(200) * 7 % 64
    settings = inflate.rope_settings(source.config, SOURCE.head_dim, rope, 256)
    inflate.write(source, TARGETS["wider heads"], tmp_path / "m", "float32", rope=rope, context=256)
    expected = logits_by_transformers(source.folder, ids, **settings)
    got = logits_by_transformers(tmp_path / "m", ids)
    assert (expected - logits_by_transformers(source.folder, ids)).abs().max() > 1e-2
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_every_weight_is_real_and_every_head_matters(source, tmp_path):
    inflate.write(source, TARGETS["wider heads"], tmp_path / "m", "float32", "real", context=64)
    target = Checkpoint(tmp_path / "m")
    for layer, (_, counts) in enumerate(plan_layers(SOURCE.layers, 5)):
        for part in ("mlp.gate_proj", "mlp.up_proj"):
            assert target.get(f"model.layers.{layer}.{part}.weight").ne(0).all()
        for part in ("mlp.down_proj", "self_attn.o_proj"):
            weight = target.get(f"model.layers.{layer}.{part}.weight")
            # Each head's output is read, unless the whole layer is one of the silent extra ones.
            heads = weight.view(len(weight), -1, 16 if "attn" in part else 1).abs().amax((0, 2))
            assert (heads > 0).all() if counts else (heads == 0).all()


def test_reference_forward_equals_transformers(source):
    ids = torch.arange(40) * 5 % 64
    model = Llama(source)
    got = torch.cat(list(model.logits(model.last_stream(ids))))
    torch.testing.assert_close(got, logits_by_transformers(source.folder, ids), atol=1e-5, rtol=1e-4)


def test_compare_accepts_a_good_model_and_sees_a_broken_one(source, tmp_path):
    inflate.write(source, TARGETS["wider heads"], tmp_path / "m", "float32", context=64)
    ids, quiet = torch.arange(40) * 5 % 64, lambda text: None
    target = Checkpoint(tmp_path / "m")
    good = check_inflation.compare(source, target, ids, torch.float32, "cpu", quiet)
    assert good.target.largest < 1e-4 and good.target.top1 == 1 and max(good.layers) < 1e-5
    broken, name = target.get, "model.layers.2.self_attn.q_proj.weight"
    target.get = lambda key: broken(key) * (1.1 if key == name else 1.0)
    bad = check_inflation.compare(source, target, ids, torch.float32, "cpu", quiet)
    assert bad.target.largest > 1e-3 and max(bad.layers[:3]) < 1e-5 < bad.layers[3]


def test_second_run_keeps_the_result_and_another_shape_replaces_it(source, tmp_path):
    said = []
    target = TARGETS["same heads"]
    inflate.write(source, target, tmp_path / "m", "float16", context=64)
    inflate.write(source, target, tmp_path / "m", "float16", context=64, say=said.append)
    assert said == [f"{tmp_path / 'm'} already holds this model"]
    inflate.write(source, target, tmp_path / "m", "bfloat16", context=64)
    assert Checkpoint(tmp_path / "m").get("model.norm.weight").dtype == torch.bfloat16
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="something else"):
        inflate.write(source, target, tmp_path / "other", context=64)
    assert (tmp_path / "other" / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_hold_the_demo_model(preset):
    target = PRESETS[preset]
    plan = plan_heads(SMOLLM2, target)
    group = target.heads // target.kv_heads
    for head, (queried, share) in enumerate(zip(plan.q_source, plan.q_share, strict=True)):
        assert queried // 3 == plan.kv_source[head // group] and share > 0
    for head in range(SMOLLM2.heads):
        total = sum(s for q, s in zip(plan.q_source, plan.q_share, strict=True) if q == head)
        assert total == 1
    counting = [layer for layer, counts in plan_layers(SMOLLM2.layers, target.layers) if counts]
    assert counting == list(range(SMOLLM2.layers))


def test_shares_are_powers_of_two_that_add_up_to_one():
    for copies in range(1, 40):
        parts = shares(copies)
        assert len(parts) == copies and sum(parts) == 1
        assert all((1 / part).is_integer() and (int(1 / part) & (int(1 / part) - 1)) == 0 for part in parts)
        assert parts[0] <= 2 * parts[-1]


def test_rotary_places_keep_the_frequencies():
    for wide in (64, 128, 192, 256):
        places = rotary_places(64, wide)
        assert places[32:] == [place + wide // 2 for place in places[:32]]
        assert [100000.0 ** (-2 * place / wide) for place in places[:32]] == pytest.approx(
            [100000.0 ** (-2 * pair / 64) for pair in range(32)]
        )


@pytest.mark.parametrize(
    "target, complaint",
    [
        (Shape(16, 6, 2, 8, 3, 40), "hidden 16 is less than the source's 24"),
        (Shape(24, 6, 2, 12, 3, 40), "head_dim 12 is no multiple"),
        (Shape(24, 6, 2, 8, 2, 40), "layers 2 is less"),
        (Shape(24, 4, 3, 8, 3, 40), "do not divide"),
        (Shape(25, 6, 2, 8, 3, 40), "hidden 25 is no multiple of 6 query heads"),
        (Shape(24, 4, 4, 8, 3, 40), "use at least 6 KV heads"),
    ],
)
def test_impossible_shapes_are_refused(source, tmp_path, target, complaint):
    with pytest.raises(ValueError, match=complaint):
        inflate.write(source, target, tmp_path / "m", context=64)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--shape", "9b"], "--shape is '9b'"),
        (["--shape", "40,16,4"], "six numbers"),
        (["--shape", "48,16,4,16,5,100", "--context", "100"], "add --rope"),
    ],
)
def test_the_command_refuses_in_one_sentence(source, tmp_path, capsys, arguments, complaint):
    assert inflate.main([str(source.folder), str(tmp_path / "m"), *arguments]) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and complaint in error[0]


class Letters:
    """One token per character."""

    def encode(self, text, **kwargs):
        return [ord(letter) % 60 for letter in text]


def test_prompts_have_the_exact_length_and_no_common_start(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 20)
    corpus = Corpus(tmp_path, seed=3)
    prompts = corpus.prompts(Letters(), 7, 301)
    assert all(len(prompt) == 301 for prompt in prompts)
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 7
    assert prompts == Corpus(tmp_path, seed=3).prompts(Letters(), 7, 301)
    assert corpus.digest != Corpus(tmp_path, seed=4).digest
    with pytest.raises(ValueError, match="holds no text file"):
        Corpus(tmp_path / "nothing")


def test_windowed_predictions_line_up(source):
    ids = torch.arange(150) * 11 % 64
    model = Llama(source)
    top, logprob = rope_agreement.windowed(model, ids, 64)
    assert len(top) == 150 and len(logprob) == 149
    whole_top, whole_logprob = rope_agreement.predictions(model, ids[64:128])
    # Positions 96..127 are read in the window that starts at 64.
    assert top[96:128].tolist() == whole_top[32:].tolist()
    torch.testing.assert_close(logprob[96:127], whole_logprob[32:])
    assert rope_agreement.ranges(150, 64) == [(0, 16), (16, 32), (32, 64), (64, 128), (128, 150)]
