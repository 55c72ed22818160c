"""The Parquet files of a dataset: rows of many episodes, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodichain.agents.datasets.lerobot.features import DATA_PATH, place
from embodichain.extras import require

MAX_MEGABYTES = 100


class TableFiles:
    """Appends tables to a file, and begins a new one when that is full."""

    def __init__(self, root: Path) -> None:
        self._parquet = require("pyarrow.parquet", extra="data")
        self._root = root
        self._number = 0
        self._path = Path()
        self._writer: Any = None

    def write(self, table: Any) -> dict[str, int]:
        """Append a table and return the place of the file it went to."""
        if self._writer is not None and self._path.stat().st_size > MAX_MEGABYTES << 20:
            self.close()
            self._number += 1
        if self._writer is None:
            self._path = self._root / DATA_PATH.format(**place(self._number))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = self._parquet.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)
        return place(self._number)

    def close(self) -> None:
        """Finish the present file; calling it twice is fine."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def to_column(values: NDArray[Any]) -> Any:
    """Return an array ``[n, ...]`` as an Arrow column: numbers, or (nested) lists of fixed size."""
    arrow = require("pyarrow", extra="data")
    column = arrow.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        column = arrow.FixedSizeListArray.from_arrays(column, size)
    return column


def from_column(column: Any) -> NDArray[Any]:
    """Return the numbers of an Arrow column, lists flattened."""
    arrow = require("pyarrow", extra="data")
    column = column.combine_chunks()
    while arrow.types.is_nested(column.type):
        column = column.flatten()
    return np.array(column.to_numpy(zero_copy_only=False))
