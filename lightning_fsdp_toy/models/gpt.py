"""A small decoder: rotary positions, parameter-free norms, head tied to the embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fsdp_toy.models.counting import check_sizes

_INIT_STD = 0.02
_ROTARY_BASE = 10000.0


def rms_norm(x: Tensor) -> Tensor:
    """Scale the last dimension to a root mean square of one; no parameters."""
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


def rotary_tables(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, fp32 (length, head_dim / 2), of each position's rotations.

    Computed anew in every forward: no buffer to shard, broadcast or save. Source: Su et al.,
    RoFormer (2021), section 3.2.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, _ROTARY_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of features of (B, nhead, T, head_dim) by the angle of their position."""
    a, b = x.chunk(2, dim=-1)  # feature i is paired with feature i + head_dim / 2
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer: causal attention, then a GELU feed-forward, 12 d_model^2 weights."""

    def __init__(self, d_model: int, nhead: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.nhead = nhead
        self.dropout = dropout
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)
        self.residual_dropout = nn.Dropout(dropout)
        for linear in (self.qkv, self.up):
            nn.init.normal_(linear.weight, std=_INIT_STD)
        for linear in (self.proj, self.down):  # 2 num_layers of them add into the residual stream
            nn.init.normal_(linear.weight, std=_INIT_STD / (2 * num_layers) ** 0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (B, T, d_model) to (B, T, d_model)."""
        x = x + self.residual_dropout(self.attend(rms_norm(x), cos, sin))
        hidden = F.gelu(self.up(rms_norm(x)))
        out: Tensor = x + self.residual_dropout(self.down(hidden))
        return out

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention over (B, T, d_model)."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.nhead, width // self.nhead)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, nhead, T, d_model / nhead)
        heads = F.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        y: Tensor = self.proj(heads.transpose(1, 2).reshape(batch, length, width))
        return y


class GPT(nn.Module):
    """Small decoder-only language model; 794,752 parameters at vocabulary 65.

    Args:
        vocab_size: Number of different tokens.
        d_model: Width of the residual stream.
        nhead: Number of attention heads; `d_model / nhead` must be whole and even.
        num_layers: Number of decoder layers.
        max_seq_len: Longest sequence that `forward` accepts, in tokens.
        dropout: Dropout rate, 0 for none.

    Raises:
        ValueError: A size is below 1, or `d_model / nhead` is not whole and even.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        d_model: int = 128,
        nhead: int = 4,
        num_layers: int = 4,
        max_seq_len: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(
            d_model,
            nhead,
            dropout,
            vocab_size=vocab_size,
            num_layers=num_layers,
            max_seq_len=max_seq_len,
        )
        if d_model // nhead % 2:
            raise ValueError(
                f"`d_model` / `nhead` must be even, since rotary positions turn pairs of features,"
                f" got d_model={d_model} and nhead={nhead}"
            )
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.head_dim = d_model // nhead
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=_INIT_STD)
        self.embedding_dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            DecoderLayer(d_model, nhead, num_layers, dropout) for _ in range(num_layers)
        )
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self.head.weight = self.embedding.weight  # tied: one parameter, two uses

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (B, T) to logits (B, T, vocab_size).

        Raises:
            ValueError: T is above `max_seq_len`.
        """
        length = tokens.shape[1]
        if length > self.max_seq_len:
            raise ValueError(
                f"sequence of {length} tokens is longer than `max_seq_len`={self.max_seq_len}:"
                f" raise `model.max_seq_len` or lower `data.seq_len`"
            )
        cos, sin = rotary_tables(length, self.head_dim, tokens.device)
        x = self.embedding_dropout(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(rms_norm(x))
        return logits

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int) -> Tensor:
        """Append the most likely next token `max_new_tokens` times to int64 `idx` (B, T).

        Each step looks at the last `max_seq_len` tokens. Returns (B, T + max_new_tokens).
        """
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.max_seq_len :])
            idx = torch.cat((idx, logits[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
        return idx
