"""Triton kernel that arranges images in blocks of 2x2 pixels, in one pass over them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Numbers per program; a power of two."""


@triton.jit
def _arrange(  # type: ignore[no-untyped-def]  # noqa: ANN202
    image,  # noqa: ANN001
    out,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    channel_stride,  # noqa: ANN001
    y_stride,  # noqa: ANN001
    x_stride,  # noqa: ANN001
    depth: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    channels: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    here = at < high * wide * channels
    channel, block = at % channels, at // channels
    x, y = block % wide, block // wide
    inside = here & (x > 0) & (y > 0) & (channel < 4 * depth)
    pixel_y, pixel_x = 2 * (y - 1) + channel // (2 * depth), 2 * (x - 1) + channel // depth % 2
    source = row * row_stride + channel % depth * channel_stride + pixel_y * y_stride + pixel_x * x_stride
    number = tl.load(image + source, mask=inside, other=0).to(tl.float32)
    number = tl.where(channel == 4 * depth, 1.0, number)
    tl.store(out + row * (high * wide * channels) + at, number.to(out.dtype.element_ty), mask=here)


def arrange_in_blocks(image: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Return the result of ``mlp.in_blocks`` for images on a GPU that need no gradient."""
    image = image.view(torch.uint8) if image.dtype == torch.bool else image
    rows, depth, height, width = image.shape
    high, wide = height // 2 + 1, width // 2 + 1
    out = torch.empty(rows, high, wide, channels, dtype=dtype, device=image.device)
    if rows:
        with torch.cuda.device(image.device):
            launch = _arrange[(rows, triton.cdiv(high * wide * channels, _TILE))]
            launch(image, out, *image.stride(), depth, high, wide, channels, _TILE, num_warps=8)
    return out.permute(0, 3, 1, 2)
