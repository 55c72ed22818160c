"""Triton kernel that draws and copies windows; its draws equal those of ``gpu_mirror.pick`` on the CPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # words per program: several 16-byte loads in flight per thread
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _below(key, number, bound):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return the ``number``-th random integer of a key, in ``[0, bound)``."""
    bits = _mix(_mix(key) + (number + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 11
    unit = bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53
    return (unit * bound.to(tl.float64)).to(tl.int64)


@triton.jit
def _copy_windows(frames, out, key, rows, count, length, max_steps, chunk_size, width, tiles, tile: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    item = (tl.program_id(0) // tiles).to(tl.int64)
    part = tl.program_id(0) % tiles
    drawn = tl.load(key).to(tl.uint64)
    row = tl.load(rows + _below(drawn, 2 * item, tl.load(count)))
    start = _below(drawn, 2 * item + 1, tl.load(length + row) - chunk_size + 1)
    words = part * tile + tl.arange(0, tile)
    inside = words < chunk_size * width
    source = frames + (row * max_steps + start) * width
    target = out + item * chunk_size * width
    tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


class WindowKernel:
    """Samples windows of one key from frames ``[num_rows, max_steps, ...]``, copied in the largest fitting words."""

    def __init__(self, frames: Tensor, frame_bytes: int) -> None:
        self._word = next(dtype for dtype in _WORDS if frame_bytes % dtype.itemsize == 0)
        self._width = frame_bytes // self._word.itemsize
        self._frames, self._max_steps = self._words(frames), frames.shape[1]

    def __call__(self, out: Tensor, key: Tensor, table: tuple[Tensor, ...], chunk_size: int) -> None:
        """Fill ``out`` ``[batch_size, chunk_size, ...]`` with the windows determined by ``key`` ``[1]``.
        ``table`` is ``Table.on_device``."""
        words = chunk_size * self._width
        tile = min(_TILE, triton.next_power_of_2(words))
        tiles = triton.cdiv(words, tile)
        sizes = (self._max_steps, chunk_size, self._width, tiles)
        _copy_windows[(out.shape[0] * tiles,)](self._frames, self._words(out), key, *table, *sizes, tile=tile)

    def _words(self, memory: Tensor) -> Tensor:
        return memory.view(-1).view(self._word)
