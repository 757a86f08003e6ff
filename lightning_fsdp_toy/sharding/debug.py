"""What debug mode shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fsdp_toy.sharding.buffers import num_bytes

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.root import RootState

__all__ = ["unit_table"]


def unit_table(root: RootState) -> str:
    """Return a table of the flat parameters: what they hold, in elements and bytes of this rank."""
    rows = [("flat parameter", "module", "params", "numel", "padded", "dtype", "shard bytes", "")]
    for unit in root.units:
        for flat in unit.flats:
            dtype = str(flat.dtype).removeprefix("torch.")
            if flat.is_mixed:
                dtype += f" as {str(flat.compute_dtype).removeprefix('torch.')}"
            rows.append(
                (
                    flat.name,
                    type(unit.module).__name__,
                    str(len(flat.originals)),
                    str(flat.layout.numel),
                    str(flat.layout.padded_numel),
                    dtype,
                    str(num_bytes(flat.shard)),
                    "" if flat.is_trainable else "frozen",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
