"""The models: sizes, equality with torch's own layers, causality, arguments."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fsdp_toy.data import SyntheticDataModule
from lightning_fsdp_toy.models import GPT, EncoderLayer, Transformer, count_parameters
from lightning_fsdp_toy.models.gpt import rotary_tables, rotate

TINY_TRANSFORMER = dict(vocab_size=17, d_model=8, nhead=2, num_layers=2, dim_feedforward=12)
TINY_GPT = dict(vocab_size=17, d_model=8, nhead=2, num_layers=2, max_seq_len=6)


@pytest.mark.parametrize("causal", [False, True])
def test_transformer_has_the_parameters_of_the_handbook(causal: bool) -> None:
    with torch.device("meta"):
        model = Transformer(causal=causal)
    assert count_parameters(model) == (9_868_560, 9_868_560)
    assert len(model.state_dict()) == 75
    assert not list(model.buffers())


def test_gpt_counts_its_tied_weight_once_and_saves_no_positions() -> None:
    model = GPT(vocab_size=65)
    assert count_parameters(model).total == 794_752
    assert model.head.weight is model.embedding.weight
    assert not list(model.buffers())
    assert set(model.state_dict()) - {"head.weight"} == {n for n, _ in model.named_parameters()}


def test_frozen_parameters_count_as_total_but_not_as_trainable() -> None:
    model = Transformer(**TINY_TRANSFORMER)
    total = count_parameters(model).total
    model.embedding.requires_grad_(False)
    assert count_parameters(model) == (total, total - 17 * 8)


def test_encoder_layer_starts_with_the_weights_of_torchs_layer() -> None:
    torch.manual_seed(1)
    ours = EncoderLayer(8, 2, 12, 0.1)
    torch.manual_seed(1)
    theirs = nn.TransformerEncoderLayer(8, 2, 12, 0.1, activation="gelu", batch_first=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.parametrize("causal", [False, True])
def test_encoder_layer_computes_what_torchs_layer_computes(causal: bool) -> None:
    ours = EncoderLayer(8, 2, 12, 0.0)
    theirs = nn.TransformerEncoderLayer(8, 2, 12, 0.0, activation="gelu", batch_first=True)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()  # biases too
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5) if causal else None
    out, expected = ours(x, causal), theirs(x, src_mask=mask)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_dropout_is_active_in_training_only() -> None:
    for model in (Transformer(**TINY_TRANSFORMER, dropout=0.5), GPT(**TINY_GPT, dropout=0.5)):
        tokens = torch.randint(17, (2, 6))
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("model", "is_causal"),
    [
        (Transformer(**TINY_TRANSFORMER), False),
        (Transformer(**TINY_TRANSFORMER, causal=True), True),
        (GPT(**TINY_GPT), True),
    ],
)
def test_only_causal_models_are_blind_to_later_tokens(model: nn.Module, is_causal: bool) -> None:
    tokens = torch.randint(17, (2, 6))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 17
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 6, 17)
    assert torch.equal(before[:, :-1], after[:, :-1]) == is_causal
    assert not torch.equal(before[:, -1], after[:, -1])


def test_rotary_scores_depend_on_the_distance_between_positions_only() -> None:
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    cos, sin = rotary_tables(9, 8, torch.device("cpu"))
    rotated_q = rotate(q.expand(1, 1, 9, 8), cos, sin)
    rotated_k = rotate(k.expand(1, 1, 9, 8), cos, sin)
    scores = (rotated_q @ rotated_k.transpose(-1, -2))[0, 0]  # (query position, key position)
    for distance in range(3):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(scores[3, 3], scores[3, 2])


def test_gpt_starts_near_the_loss_of_a_uniform_guess() -> None:
    torch.manual_seed(0)
    logits = GPT()(torch.randint(256, (4, 64)))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.randint(256, (256,)))
    assert loss.item() == pytest.approx(5.545, abs=0.1)  # ln 256


def test_generate_appends_the_most_likely_token_beyond_the_longest_sequence() -> None:
    model = GPT(**TINY_GPT)
    start = torch.randint(17, (2, 3))
    out = model.generate(start, 5)
    assert out.shape == (2, 8)
    assert torch.equal(out[:, :3], start)
    for length in range(3, 8):
        logits = model(out[:, max(0, length - 6) : length])
        assert torch.equal(out[:, length], logits[:, -1].argmax(-1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Transformer(d_model=10, nhead=4), "`d_model` must be a multiple of `nhead`"),
        (lambda: Transformer(vocab_size=0), "`vocab_size` must be at least 1, got 0"),
        (lambda: Transformer(dim_feedforward=-1), "`dim_feedforward` must be at least 1, got -1"),
        (lambda: GPT(num_layers=0), "`num_layers` must be at least 1, got 0"),
        (lambda: GPT(nhead=0), "`nhead` must be at least 1, got 0"),
        (lambda: GPT(dropout=1.0), r"`dropout` must be in \[0, 1\), got 1.0"),
        (lambda: GPT(d_model=12, nhead=4), "`d_model` / `nhead` must be even"),
        (lambda: GPT(**TINY_GPT)(torch.zeros(1, 7, dtype=torch.int64)), "raise `model.max_seq_len"),
    ],
)
def test_bad_arguments_are_named_in_one_line(make, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_transformer_learns_one_fixed_batch_by_heart_in_30_steps() -> None:
    data = SyntheticDataModule(vocab_size=10000, batch_size=4, seq_len=128, fixed_batch=True)
    data.setup()
    tokens, targets = next(iter(data.train_dataloader()))
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(9.36, abs=0.1)  # ln 10000 + 0.15
    assert losses[-1] < 2.2
