"""Small models with random weights, and the stages and residual streams that a person expects in their blocks."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

VOCABULARY = 40
IDS = [
    torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(i))
    for i, shape in enumerate([(2, 9), (3, 6), (1, 11)])
]


def _text(**names):
    sizes = {"vocab_size": VOCABULARY}
    return sizes | names


def llama(**changes):
    config = transformers.LlamaConfig(
        **_text(hidden_size=16, intermediate_size=28, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
        | changes
    )
    return transformers.LlamaForCausalLM(config)


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**_text(n_embd=16, n_layer=2, n_head=2, n_positions=32)))


def opt():
    config = transformers.OPTConfig(
        **_text(hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16, pad_token_id=1)
    )
    return transformers.OPTForCausalLM(config)


def neox(parallel=True):
    config = transformers.GPTNeoXConfig(
        **_text(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2),
        use_parallel_residual=parallel,
    )
    return transformers.GPTNeoXForCausalLM(config)


def gptj():
    config = transformers.GPTJConfig(**_text(n_embd=16, n_layer=2, n_head=2, n_positions=32, rotary_dim=4))
    return transformers.GPTJForCausalLM(config)


def falcon():
    config = transformers.FalconConfig(
        **_text(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, new_decoder_architecture=False, parallel_attn=True)
    )
    return transformers.FalconForCausalLM(config)


def bert():
    config = transformers.BertConfig(
        **_text(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32)
    )
    return transformers.BertModel(config, add_pooling_layer=False)


def mixtral(experts=4):
    config = transformers.MixtralConfig(
        **_text(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1),
        num_local_experts=experts,
        num_experts_per_tok=2,
    )
    return transformers.MixtralForCausalLM(config)


def gemma3n():
    """The last two blocks read the keys and values of the first two, which leave them in an object."""
    config = transformers.Gemma3nTextConfig(
        **_text(hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1),
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=4,
        head_dim=8,
        altup_num_inputs=2,
        laurel_rank=4,
        num_kv_shared_layers=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    return transformers.Gemma3nForCausalLM(config)


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 12, bias=False), nn.Linear(width, 12, bias=False)
        self.down = nn.Linear(12, width, bias=False)

    def forward(self, x):
        return self.down(self.gate(x).sigmoid() * self.up(x))


class Mixture(nn.Module):
    """A block with a list of experts, one for each position. `router` decides by the first features of a position."""

    def __init__(self, width=8, experts=3):
        super().__init__()
        self.inner, self.experts = nn.Linear(width, width), nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x):
        flat = self.inner(x).flatten(0, 1)
        chosen, made = flat[:, : len(self.experts)].argmax(-1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                made.index_add_(0, rows, expert(flat[rows]))
        return x + made.view_as(x)


class Mixtures(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x, attention_mask=None):
        for block in self.blocks:
            x = block(x)
        return x


def vit():
    config = transformers.ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config)


class Encoder(nn.Module):
    """A plain transformer of torch."""

    def __init__(self, norm_first=True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x)


class Residual(nn.Module):
    """A block of a residual network. `plain`: its last convolution is added as it is."""

    def __init__(self, width, plain=False):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.Identity() if plain else nn.BatchNorm2d(width)
        self.plain = plain

    def forward(self, x):
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        y += x
        return y if self.plain else y.relu()


class ResNet(nn.Module):
    def __init__(self, plain=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(4, plain) for _ in range(3)))
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class TwoRows(nn.Module):
    """Two rows of blocks; the second one is longer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.first = nn.Sequential(*(Residual(4) for _ in range(2)))
        self.second = nn.Sequential(*(Residual(4) for _ in range(3)))
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.second(self.first(self.stem(x))).mean((2, 3)))


def t5():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**_text(**sizes)))


TEXT = [{"input_ids": ids} for ids in IDS]
PAIRS = [{"input_ids": ids, "decoder_input_ids": ids[:, :5]} for ids in IDS]
IMAGES = [{"pixel_values": torch.randn(n, 3, 8, 8)} for n in (2, 3)]
PLAIN_IMAGES = [torch.randn(n, 3, 6, 6) for n in (2, 3)]
VECTORS = [torch.randn(2, 7, 16), torch.randn(3, 5, 16)]

# model -> (how it is built, batches, path of its blocks, stages of a block, layer -> module whose input is the stream)
MODELS = {
    "llama": (
        llama,
        TEXT,
        "model.layers",
        [
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["self_attn.o_proj"],
            ["mlp.gate_proj", "mlp.up_proj"],
            ["mlp.down_proj"],
        ],
        {"self_attn.o_proj": "", "mlp.down_proj": "post_attention_layernorm"},
    ),
    "gpt2": (
        gpt2,
        TEXT,
        "transformer.h",
        [["attn.c_attn"], ["attn.c_proj"], ["mlp.c_fc"], ["mlp.c_proj"]],
        {"attn.c_proj": "", "mlp.c_proj": "ln_2"},
    ),
    "opt": (
        opt,
        TEXT,
        "model.decoder.layers",
        [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.out_proj"], ["fc1"], ["fc2"]],
        {"self_attn.out_proj": "", "fc2": "final_layer_norm"},
    ),
    "neox, parallel": (
        neox,
        TEXT,
        "gpt_neox.layers",
        [["attention.query_key_value", "mlp.dense_h_to_4h"], ["attention.dense", "mlp.dense_4h_to_h"]],
        {},
    ),
    "neox, one after the other": (
        lambda: neox(False),
        TEXT,
        "gpt_neox.layers",
        [["attention.query_key_value"], ["attention.dense"], ["mlp.dense_h_to_4h"], ["mlp.dense_4h_to_h"]],
        {"attention.dense": "", "mlp.dense_4h_to_h": "post_attention_layernorm"},
    ),
    "gptj": (
        gptj,
        TEXT,
        "transformer.h",
        [["attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in"], ["attn.out_proj", "mlp.fc_out"]],
        {},
    ),
    "falcon": (
        falcon,
        TEXT,
        "transformer.h",
        [["self_attention.query_key_value", "mlp.dense_h_to_4h"], ["self_attention.dense", "mlp.dense_4h_to_h"]],
        {},
    ),
    "bert": (
        bert,
        TEXT,
        "encoder.layer",
        [
            ["attention.self.query", "attention.self.key", "attention.self.value"],
            ["attention.output.dense"],
            ["intermediate.dense"],
            ["output.dense"],
        ],
        {"attention.output.dense": "", "output.dense": "intermediate"},
    ),
    "resnet": (ResNet, PLAIN_IMAGES, "blocks", [["conv1"], ["conv2"]], {}),
    "resnet, plain sums": (lambda: ResNet(plain=True), PLAIN_IMAGES, "blocks", [["conv1"], ["conv2"]], {"conv2": ""}),
}
