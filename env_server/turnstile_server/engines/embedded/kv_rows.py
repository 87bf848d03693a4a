"""The attention cache of the embedded engine: one row per call, columns are positions.

Owns the key and value buffers of all layers. What must hold: row r's columns ``[0, len(held[r]))`` are the keys
and values of exactly the ids ``held[r]`` under the present weights; the columns behind them are finite and masked.
The rows of running calls come first, so a decoding step reads one slice and copies nothing. A row keeps its
contents after its call has ended, so a later prompt with the same beginning need not be computed again.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from turnstile_server.engines.embedded.device import CPU_FLOAT32, ComputeDevice

FIRST_COLUMNS = 1024


class KvRows(Cache):
    """``rows`` rows that grow up to ``columns`` columns, in the shapes that the model's layers ask for.
    ``compute``: the device and dtype of the model, which the buffers have too."""

    def __init__(self, rows: int, columns: int, compute: ComputeDevice = CPU_FLOAT32) -> None:
        super().__init__(layers=[])
        self._compute = compute
        self.held: list[list[int]] = [[] for _ in range(rows)]
        self._last_use = [0] * rows
        self._clock = 0
        self._columns = columns
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._rows = slice(0, 0)
        self._row_numbers = self._positions = torch.empty(0, dtype=torch.int64, device=compute.device)
        self._start = 0
        self._end = 0

    def choose_row(self, ids: list[int], limit: int, first_free: int) -> int:
        """Moves the best free row to ``first_free`` and makes it hold the longest known prefix of ``ids``.

        At most ``limit`` ids are reused. Rows from ``first_free`` on are free. Returns how many are held.
        """
        shared = [min(_common_prefix(ids, held), limit) for held in self.held]
        source = max(range(len(shared)), key=lambda row: shared[row])
        reused = shared[source]
        if source >= first_free and reused == len(self.held[source]):
            target = source
        else:  # a row that holds more is not cut: copy into the row that was used longest ago
            target = min(range(first_free, len(self.held)), key=lambda row: self._last_use[row])
            if target != source and reused:
                for buffer in (*self._keys.values(), *self._values.values()):
                    buffer[target, :, :reused] = buffer[source, :, :reused]
        self.held[target] = ids[:reused]
        self.swap(target, first_free)
        self.touch(first_free)
        return reused

    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows."""
        if a == b:
            return
        end = max(len(self.held[a]), len(self.held[b]))
        for buffer in (*self._keys.values(), *self._values.values()):
            kept = buffer[a, :, :end].clone()
            buffer[a, :, :end] = buffer[b, :, :end]
            buffer[b, :, :end] = kept
        self.held[a], self.held[b] = self.held[b], self.held[a]
        self._last_use[a], self._last_use[b] = self._last_use[b], self._last_use[a]

    def touch(self, row: int) -> None:
        self._clock += 1
        self._last_use[row] = self._clock

    def forget(self) -> None:
        """No row holds anything any more (new weights)."""
        self.held = [[] for _ in self.held]

    def aim_at_row(self, row: int, count: int) -> tuple[Tensor, Tensor]:
        """The next forward appends ``count`` ids to ``row``. Gives position_ids [1, count] and the mask
        [1, 1, count, columns]."""
        start = len(self.held[row])
        self._aim(slice(row, row + 1), start, start + count)
        self._positions = torch.arange(start, start + count, device=self._compute.device)
        return self._positions[None, :], self._mask()[None, None]

    def aim_at_first(self, count: int) -> tuple[Tensor, Tensor]:
        """The next forward appends one id to each of the first ``count`` rows. Gives position_ids [count, 1]
        and the mask [count, 1, 1, columns]."""
        lengths = [len(held) for held in self.held[:count]]
        self._aim(slice(0, count), lengths[0], max(lengths) + 1)
        self._positions = torch.tensor(lengths, device=self._compute.device)
        return self._positions[:, None], self._mask()[:, None, None]

    def _aim(self, rows: slice, start: int, end: int) -> None:
        """``start``: the first new position of the first row; ``end``: behind the last of all. They are known
        here, so that no layer has to wait for a GPU to read them."""
        self._rows, self._start, self._end = rows, start, end
        self._row_numbers = torch.arange(rows.start, rows.stop, device=self._compute.device)

    def _mask(self) -> Tensor:
        """bool [positions, columns]: True where the column is not behind the position."""
        return torch.arange(self._end, device=self._compute.device)[None, :] <= self._positions[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer with [rows, heads, new, dim]; gives all columns so far."""
        results = []
        for buffers, states in ((self._keys, key_states), (self._values, value_states)):
            buffer = self._room(buffers, layer_idx, states)
            if states.shape[2] == 1:
                buffer[self._row_numbers, :, self._positions] = states[:, :, 0]
            else:
                buffer[self._rows.start, :, self._start : self._start + states.shape[2]] = states[0]
            results.append(buffer[self._rows, :, : self._end])
        return results[0], results[1]

    def _room(self, buffers: dict[int, Tensor], layer: int, states: Tensor) -> Tensor:
        buffer = buffers.get(layer)
        if buffer is not None and buffer.shape[2] >= self._end:
            return buffer
        columns = FIRST_COLUMNS if buffer is None else buffer.shape[2]
        while columns < self._end:
            columns *= 2
        shape = (len(self.held), states.shape[1], min(columns, max(self._columns, self._end)), states.shape[3])
        grown = self._zeros(shape)
        if buffer is not None:
            for row in range(len(self.held)):
                kept = min(max(len(self.held[row]), 1), buffer.shape[2])
                grown[row, :, :kept] = buffer[row, :, :kept]
        buffers[layer] = grown
        return grown

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self._compute.device.type != "cpu":
            return torch.zeros(shape, dtype=self._compute.dtype, device=self._compute.device)
        # From NumPy, because calloc'd pages that no call reaches cost no memory. It has no bfloat16; the bits of
        # its zero are those of an integer.
        numbers = np.float32 if self._compute.dtype == torch.float32 else np.int16
        return torch.from_numpy(np.zeros(shape, numbers)).view(self._compute.dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start


def _common_prefix(a: list[int], b: list[int]) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
