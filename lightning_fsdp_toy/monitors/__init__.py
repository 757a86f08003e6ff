"""Measures what a run really holds and moves."""

from lightning_fsdp_toy.monitors.memory import TensorBytes, count_tensor_bytes, process_peak_bytes

__all__ = ["TensorBytes", "count_tensor_bytes", "process_peak_bytes"]
