"""Small models of many families with random weights: builders of (loss_fn, model, batch, split)."""

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from plait.models.llama import torch as llama
from plait.models.llama.config import CONFIGS as LLAMA_CONFIGS
from plait.models.mlp import torch as mlp
from plait.models.mlp.config import CONFIGS as MLP_CONFIGS


def _language(model, batch):
    return model(input_ids=batch["ids"], labels=batch["labels"]).loss


def _images(model, batch):
    return model(pixel_values=batch["x"], labels=batch["y"]).loss


def _ids():
    ids = torch.randint(0, 50, (2, 8))
    return {"ids": ids, "labels": ids.clone()}


def _pictures(size):
    return {"x": torch.randn(2, 3, size, size), "y": torch.tensor([1, 3])}


_SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def plait_mlp():
    batch = {"x": torch.randn(4, 32), "y": torch.randn(4, 32)}
    return mlp.loss_fn, mlp.build(MLP_CONFIGS["tiny"]), batch, ["layers.2"]


def plait_llama():
    tokens = torch.randint(0, 256, (2, 8), dtype=torch.int32)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    return llama.loss_fn, llama.build(LLAMA_CONFIGS["tiny"]), batch, ["layers.1", "layers.3"]


def hf_llama():
    config = hf.LlamaConfig(num_key_value_heads=2, max_position_embeddings=32, **_SIZES)
    return _language, hf.LlamaForCausalLM(config), _ids(), ["model.layers.1"]


def hf_gpt2():
    config = hf.GPT2Config(
        vocab_size=50,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.loss_type = "ForCausalLM"
    return _language, hf.GPT2LMHeadModel(config), _ids(), ["transformer.h.1"]


def hf_bert():
    config = hf.BertConfig(max_position_embeddings=32, **_SIZES)
    return _language, hf.BertForMaskedLM(config), _ids(), ["bert.encoder.layer.1"]


def hf_vit():
    sizes = {k: v for k, v in _SIZES.items() if k != "vocab_size"}
    config = hf.ViTConfig(
        image_size=16, patch_size=4, num_labels=5, hidden_dropout_prob=0.1, **sizes
    )
    return _images, hf.ViTForImageClassification(config), _pictures(16), ["vit.layers.1"]


def hf_resnet():
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return (
        _images,
        hf.ResNetForImageClassification(config),
        _pictures(32),
        ["resnet.encoder.stages.1"],
    )


HF = {f.__name__: f for f in (hf_llama, hf_gpt2, hf_bert, hf_vit, hf_resnet)}


class _Skip(nn.Module):
    """A skip connection over two cuts, and batch norm in each block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.SiLU()) for _ in range(3)
        )

    def forward(self, x):
        first = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](first)) + first


def skip():
    return (
        (lambda m, x: F.smooth_l1_loss(m(x), x)),
        _Skip(),
        torch.randn(4, 6),
        ["blocks.1", "blocks.2"],
    )


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(9, 6), nn.LSTM(6, 6, 2), nn.Linear(6, 9)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


def recurrent():
    ids = torch.randint(0, 9, (4, 3))
    return (
        (lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten())),
        _Recurrent(),
        ids,
        ["head"],
    )


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return (lambda m, x: F.mse_loss(m(x), x.roll(1, 0))), model, torch.randn(2, 5, 8), ["layers.1"]


OWN = {f.__name__: f for f in (plait_mlp, plait_llama, skip, recurrent, transformer)}
ALL = {**HF, **OWN}
