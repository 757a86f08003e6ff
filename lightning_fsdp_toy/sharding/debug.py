"""What debug mode shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.root import RootState

__all__ = ["disagreement", "unit_table"]


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
                    str(flat.shard.numel() * flat.shard.element_size()),
                    "" if flat.is_trainable else "frozen",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def disagreement(ranks: list[int], theirs: list[tuple[str, str]]) -> str:
    """Say what each rank is about to do and where, ranks that agree together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for rank, mine in zip(ranks, theirs, strict=True):
        groups.setdefault(mine, []).append(str(rank))
    is_one_place = len({place for _, place in theirs}) == 1
    where = f" in {theirs[0][1]}" if is_one_place else ""
    each = "; ".join(
        f"{'rank' if len(members) == 1 else 'ranks'} {', '.join(members)}: {what}"
        + ("" if is_one_place else f" in {place}")
        for (what, place), members in groups.items()
    )
    return f"The ranks are about to do different things{where}. {each}."
