"""Real architectures, tiny and random, the whole way through `shrink` and `plan.verify`: a fast part of the coverage benchmark.

The benchmark itself (benchmarks/shrink_coverage.py) takes all model types of transformers, timm and the probes.
"""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path += [str(Path(__file__).parents[1] / "trace"), str(Path(__file__).parents[2] / "benchmarks")]

import _zoo
import shrink_coverage as coverage

# One for each layout: encoder, decoders with every arrangement of heads, encoder-decoders, vision, audio, state space, experts.
MODELS = """
    bert deberta-v2 gpt2 llama falcon gpt_neox phi3 gemma2 t5 bart whisper vit convnext resnet segformer wav2vec2 mamba rwkv
    qwen2_moe
"""


@pytest.fixture(scope="module")
def kinds():
    return _zoo.kinds()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS.split())
def test_claims_about_architectures_are_true(name, kinds):
    task, build = kinds[name]
    result = coverage.Result(name, task)
    with _zoo.quiet():
        coverage.examine(result, *build(), draws=1)
    assert (result.verdict, result.why) == ("ok", "")
    assert result.cut > 0
    assert result.wired is not None, result.notes
    assert result.generates == ("generates" if task == "causal_lm" else "")


def test_a_wrong_claim_is_called_wrong(kinds, monkeypatch):
    """The benchmark is no witness unless it can say no: here the cut keeps other units than it says."""
    import secateur.edit.cuts as cut

    select = cut.select_indices

    def shifted(tensor, kept, *rest):
        if tensor.dim() == 2 and 1 in kept:
            kept = {**kept, 1: [(i + 1) % tensor.shape[1] for i in kept[1]]}
        return select(tensor, kept)

    for module in list(sys.modules.values()):
        if getattr(module, "select_indices", None) is select and module.__name__.startswith("secateur."):
            monkeypatch.setattr(module, "select_indices", shifted)
    result = coverage.Result("t5", "seq_to_seq_causal_lm")
    with _zoo.quiet():
        coverage.examine(result, *kinds["t5"][1](), draws=1)
    assert result.verdict == "wrong"


def test_a_model_with_nothing_to_cut_is_refused_with_a_reason():
    result = coverage.Result("table", "probe")
    coverage.examine(result, torch.nn.Sequential(torch.nn.Linear(3, 4)), {"x": torch.randn(2, 3)})
    assert result.verdict == "refused"
    assert "the model returns it" in result.why
