"""Tables as text for the terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_table(rows: Sequence[Sequence[str]], left_aligned: Collection[int] = (0,)) -> list[str]:
    """Lines of a table whose columns are as wide as their longest cell.

    Args:
        rows: the header and the other rows, all of the same length.
        left_aligned: indices of the columns to align to the left; the others are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    aligned = ["<" if index in left_aligned else ">" for index in range(len(widths))]
    return ["  ".join(map("{:{}{}}".format, row, aligned, widths)).rstrip() for row in rows]
