"""A language model: 2:4 zeros with calibration data, saved, loaded by from_pretrained, and generating text.

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


def main(
    folder: str | None = None, text: str | None = None, steps: int = 150, out: str = "out/huggingface"
) -> dict[str, float]:
    """Returns the perplexity of the dense model and of each way to prune it."""
    if folder is None:
        (model, data), speller = tiny(steps), None
    else:
        speller = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        data = rows(speller(Path(text or __file__).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0])
    half = len(data) // 2
    calibration = [{"input_ids": part} for part in data[:half].split(8)]  # a batch is what the model takes

    ways: dict[str, dict[str, Any]] = {
        "magnitude": {"criterion": sc.magnitude},
        "Wanda": {"criterion": sc.wanda, "data": calibration},
        "SparseGPT": {"method": "sparsegpt", "data": calibration},
    }
    found, pruned = {"dense": perplexity(model, data[half:])}, model
    for name, arguments in ways.items():
        pruned = copy.deepcopy(model)
        sc.prune_(pruned, pattern="2:4", exclude="lm_head", **arguments)
        found[name] = perplexity(pruned, data[half:])
    for name, value in found.items():
        print(f"{name:<9}  perplexity {value:.2f}")

    sc.save(pruned, out)  # an ordinary folder of Hugging Face
    again = type(model).from_pretrained(out).eval()
    assert perplexity(again, data[half:]) == found["SparseGPT"]
    written = again.generate(data[half][None, :16], max_new_tokens=32, do_sample=False)[0].tolist()
    print(f"\n{out} writes: {speller.decode(written) if speller else bytes(written).decode()!r}")
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
