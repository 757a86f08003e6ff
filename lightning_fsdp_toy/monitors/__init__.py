"""Measures what a run really holds, moves and achieves."""

from lightning_fsdp_toy.monitors.communication import CommunicationMonitor
from lightning_fsdp_toy.monitors.counting import (
    TensorBytes,
    count_tensor_bytes,
    process_bytes,
    process_peak_bytes,
)
from lightning_fsdp_toy.monitors.memory import MemoryMonitor
from lightning_fsdp_toy.monitors.monitor import Monitor
from lightning_fsdp_toy.monitors.pictures import Pictures
from lightning_fsdp_toy.monitors.planned import PlanMonitor
from lightning_fsdp_toy.monitors.throughput import ThroughputMonitor
from lightning_fsdp_toy.monitors.timeline import Timeline

__all__ = [
    "CommunicationMonitor",
    "MemoryMonitor",
    "Monitor",
    "Pictures",
    "PlanMonitor",
    "TensorBytes",
    "ThroughputMonitor",
    "Timeline",
    "count_tensor_bytes",
    "process_bytes",
    "process_peak_bytes",
]
