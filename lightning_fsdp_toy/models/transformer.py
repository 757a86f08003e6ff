"""The encoder stack of the handbook: embedding, post-norm encoder layers, output head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fsdp_toy.models.counting import check_sizes


class SelfAttention(nn.Module):
    """Multi-head self-attention with the parameter names and the init of `MultiheadAttention`."""

    def __init__(self, d_model: int, nhead: int, dropout: float) -> None:
        super().__init__()
        self.nhead = nhead
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * d_model, d_model))  # q, k, v stacked
        self.in_proj_bias = nn.Parameter(torch.empty(3 * d_model))
        self.out_proj = nn.Linear(d_model, d_model)
        nn.init.zeros_(self.out_proj.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters that this module owns directly."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.in_proj_bias)

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        """Map (B, T, d_model) to (B, T, d_model); `causal` hides later positions."""
        batch, length, width = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        qkv = qkv.view(batch, length, 3, self.nhead, width // self.nhead)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, nhead, T, d_model / nhead)
        heads = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=causal
        )
        y: Tensor = self.out_proj(heads.transpose(1, 2).reshape(batch, length, width))
        return y


class EncoderLayer(nn.Module):
    """Post-norm encoder layer: self-attention, then a GELU feed-forward, each added and normed.

    Same parameter names, init (random numbers drawn in the same order) and maths as
    `nn.TransformerEncoderLayer(..., activation="gelu", batch_first=True)`, so that a state dict
    moves between the two. Written by hand because that class has an inference fast path which
    reads its weights without calling the submodules that own them.
    """

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = SelfAttention(d_model, nhead, dropout)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        """Map (B, T, d_model) to (B, T, d_model)."""
        x = self.norm1(x + self.dropout1(self.self_attn(x, causal)))
        y = self.linear2(self.dropout(F.gelu(self.linear1(x))))
        out: Tensor = self.norm2(x + self.dropout2(y))
        return out


class Transformer(nn.Module):
    """Encoder stack over tokens with a linear output head that has a bias.

    Like the handbook's model it has no positions. At the defaults it has 9,868,560 parameters in
    75 tensors of its state dict.

    Args:
        vocab_size: Number of different tokens.
        d_model: Width of the residual stream.
        nhead: Number of attention heads; must divide `d_model`.
        num_layers: Number of encoder layers.
        dim_feedforward: Width of the hidden layer of the feed-forward part.
        dropout: Dropout rate, 0 for none.
        causal: Hide later tokens, as next-token prediction needs; adds no parameters.

    Raises:
        ValueError: A size is below 1, or `nhead` does not divide `d_model`.
    """

    def __init__(
        self,
        vocab_size: int = 10000,
        d_model: int = 256,
        nhead: int = 4,
        num_layers: int = 6,
        dim_feedforward: int = 1024,
        dropout: float = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(
            d_model,
            nhead,
            dropout,
            vocab_size=vocab_size,
            num_layers=num_layers,
            dim_feedforward=dim_feedforward,
        )
        self.vocab_size = vocab_size
        self.causal = causal
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(
            EncoderLayer(d_model, nhead, dim_feedforward, dropout) for _ in range(num_layers)
        )
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (B, T) to logits (B, T, vocab_size)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.causal)
        logits: Tensor = self.head(x)
        return logits
