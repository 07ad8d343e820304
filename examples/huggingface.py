"""A language model with 2:4 zeros from calibration data: saved, compressed, generating text. Then a smaller one.

Without arguments it trains a tiny Llama on the text of this project's README, letter by letter, for some seconds. With a model
of your own: `python examples/huggingface.py --model FOLDER --text FILE`, a folder with a tokenizer and some kilobytes of text.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import secateur as sc

LENGTH = 64  # tokens in a row


def rows(tokens: Tensor) -> Tensor:
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


def tiny(steps: int) -> tuple[Any, Tensor]:
    """A small Llama that has read the README, and the README as numbers of its letters."""
    torch.manual_seed(0)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    data = rows(torch.tensor(list(text.encode("ascii", "ignore"))))
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = data[torch.randint(len(data), (16,))]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model.eval(), data


def perplexity(model: Any, data: Tensor) -> float:
    with torch.inference_mode():
        losses = [float(model(input_ids=part, labels=part).loss) for part in data.split(16)]
    return math.exp(sum(losses) / len(losses))


def written_by(model: Any, prompt: Tensor) -> Tensor:
    """The tokens that a model appends to a prompt, with a key-value cache of a fixed size."""
    mask = torch.ones_like(prompt)
    made = model.generate(
        prompt, attention_mask=mask, max_new_tokens=32, do_sample=False, cache_implementation="static", pad_token_id=0
    )
    return made[0, prompt.shape[1] :]


def main(
    folder: str | None = None, text: str | None = None, steps: int = 150, out: str = "out/huggingface"
) -> dict[str, float]:
    """Returns the perplexity of the dense model, of each way to prune it, and of a smaller model."""
    if folder is None:
        (model, data), speller = tiny(steps), None
    else:
        speller = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        data = rows(speller(Path(text or __file__).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0])
    half = len(data) // 2
    calibration = [{"input_ids": part} for part in data[:half].split(8)]  # a batch is what the model takes
    judged, prompt = data[half:], data[half][None, :16]

    # Zeros: two of four neighbouring weights, by four methods. The last one is the best.
    ways: dict[str, dict[str, Any]] = {
        "magnitude": {"criterion": sc.magnitude},
        "Wanda": {"criterion": sc.wanda, "data": calibration},
        "SparseGPT": {"method": "sparsegpt", "data": calibration},
        "flow": {"method": "flow", "data": calibration},
    }
    found, pruned = {"dense": perplexity(model, judged)}, model
    for name, arguments in ways.items():
        pruned = copy.deepcopy(model)
        sc.prune_(pruned, pattern="2:4", exclude="lm_head", **arguments)
        found[name] = perplexity(pruned, judged)

    # An ordinary folder of Hugging Face, with the zeros in it.
    sc.save(pruned, f"{out}/pruned")
    again = type(model).from_pretrained(f"{out}/pruned").eval()
    assert perplexity(again, judged) == found["flow"]

    # Sparse formats for the layers, which must be wide to get faster; those of the tiny model get smaller. The text stays.
    before = written_by(again, prompt)
    objective = "speed" if folder else "size"
    compression = sc.compress_(again, {"input_ids": prompt[:, :1]}, objective=objective)
    tokens = written_by(again, prompt)

    # A smaller model: fewer channels in every MLP, as many in each, so that a config can describe it.
    small, plan = sc.shrink(
        model, calibration[0], params=0.85, scope="tensor", exclude=("*embed_tokens", "*self_attn*", "lm_head"), bias=False
    )
    sc.distill_(small, model, calibration, lr=1e-3)
    found["shrunk"] = perplexity(small, judged)
    saved = sc.save(small, f"{out}/small")
    assert saved["from_pretrained"] is True
    loaded = type(model).from_pretrained(f"{out}/small").eval()
    assert torch.equal(written_by(loaded, prompt), written_by(small, prompt))

    for name, value in found.items():
        print(f"{name:<9}  perplexity {value:.2f}")
    print(f"\n{compression}\n\n{plan}")
    new = tokens.tolist()
    print(f"\ncompressed, it writes {'the same' if torch.equal(tokens, before) else 'another'} text")
    print(f"{out}/pruned writes: {speller.decode(new) if speller else bytes(new).decode()!r}")
    return found


@click.command(help=__doc__)
@click.option("--model", "folder", type=click.Path(exists=True, file_okay=False), help="A Hugging Face folder.")
@click.option("--text", type=click.Path(exists=True, dir_okay=False), help="A text file to calibrate and to measure on.")
@click.option("--steps", default=150, show_default=True, help="Training steps of the tiny model.")
@click.option("--out", default="out/huggingface", show_default=True)
def command(folder: str | None, text: str | None, steps: int, out: str) -> None:
    main(folder, text, steps, out)


if __name__ == "__main__":
    command()
