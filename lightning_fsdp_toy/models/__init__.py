"""Language models in plain torch; none of them knows that it may be sharded."""

from lightning_fsdp_toy.models.counting import ParameterCount, count_parameters
from lightning_fsdp_toy.models.gpt import GPT
from lightning_fsdp_toy.models.transformer import EncoderLayer, Transformer

__all__ = ["Transformer", "EncoderLayer", "GPT", "ParameterCount", "count_parameters"]
