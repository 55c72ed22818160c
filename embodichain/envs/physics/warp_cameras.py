"""Cameras on a GPU: MuJoCo Warp ray-traces all worlds at once, and images stay on the device.

A step needs images of all worlds, and again of those that were reset. Only the device knows which these are, so all
rays are traced again, but the cameras of other worlds look into empty space, where a ray ends at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cache
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.envs.physics import Images
from embodichain.envs.rendering import mounted_name
from embodichain.envs.scene_cfg import OBSERVED_AS, CameraCfg, Output

_PIXELS = 4  # unpacked by each thread, from 16 bytes to 12
_FAR_AWAY = 1e6  # metres above the scene, for cameras that look upwards


class WarpCameras:
    """The configured cameras of all worlds, and the buffers that MuJoCo Warp renders into."""

    def __init__(
        self,
        wp: Any,
        mjw: Any,
        model: mujoco.MjModel,
        warp_model: Any,
        data: Any,
        cfgs: Sequence[CameraCfg],
        varied: Set[str],
    ) -> None:
        """Create the buffers; ``model`` is MuJoCo's, ``warp_model`` and ``data`` belong to MuJoCo Warp.

        ``varied`` are the model fields that differ between worlds.
        """
        self._wp, self._mjw, self._model, self._data, self._cfgs = wp, mjw, warp_model, data, cfgs
        wanted = {output: [output in cfg.outputs for cfg in cfgs] for output in OBSERVED_AS}
        self._context = mjw.create_render_context(
            model,
            nworld=data.nworld,
            cam_active=[mounted_name(cfg) for cfg in cfgs],
            cam_res=[(cfg.width, cfg.height) for cfg in cfgs],
            render_rgb=wanted["rgb"],
            render_depth=wanted["depth"],
            render_seg=wanted["segmentation"],
            use_shadows=False,  # as the CPU renderer at quality "lean"
            use_precomputed_rays="cam_fovy" not in varied,
            **_needed(model, varied),
        )
        self._buffers: dict[Output, Tensor] = {
            "rgb": wp.to_torch(self._context.rgb_data),
            "depth": wp.to_torch(self._context.depth_data),
            "segmentation": wp.to_torch(self._context.seg_data),
        }
        self._colors: dict[str, Tensor] = {}
        """Colour images of the last rendering, uint8 ``[worlds, 3 * pixels]``, by camera."""
        self._pos, self._mat = wp.to_torch(data.cam_xpos), wp.to_torch(data.cam_xmat)
        device = self._pos.device
        self._void = torch.tensor([0.0, 0.0, _FAR_AWAY], device=device)
        self._upwards = torch.diag(torch.tensor([1.0, -1.0, -1.0], device=device))
        self._mocap_pos = wp.to_torch(data.mocap_pos)
        self._mocap = {model.body(i).name: int(model.body_mocapid[i]) for i in range(model.nbody)}
        ids = [*(model.geom_bodyid + 1).tolist(), 0]  # the last entry is for geom -1, the background
        self._ids = torch.tensor(ids, dtype=torch.int32, device=device)
        self._is_geom = int(mujoco.mjtObj.mjOBJ_GEOM)

    def place(self, markers: Mapping[str, Tensor]) -> None:
        """Move mocap bodies to these positions."""
        for name, position in markers.items():
            self._mocap_pos[:, self._mocap[name]] = position

    def look_away(self, mask: Tensor) -> None:
        """Point the cameras of some worlds at empty space until their poses are computed again."""
        rows = mask.view(-1, 1, 1)
        self._pos.copy_(torch.where(rows, self._void, self._pos))
        self._mat.copy_(torch.where(rows.unsqueeze(-1), self._upwards, self._mat))

    def draw(self) -> None:
        """Render all cameras at their current poses, into new memory for colours."""
        self._mjw.refit_bvh(self._model, self._data, self._context)
        self._mjw.render(self._model, self._data, self._context)
        begin = 0
        for cfg in self._cfgs:
            if "rgb" in cfg.outputs:
                self._colors[cfg.name] = self._unpack(begin, cfg.height * cfg.width)
                begin += cfg.height * cfg.width

    def _unpack(self, begin: int, size: int) -> Tensor:
        """Return the colours of ``size`` pixels from ``begin`` on, uint8 ``[worlds, 3 * size]``."""
        packed = self._buffers["rgb"]
        if size % _PIXELS:
            pixels = packed[:, begin : begin + size].contiguous()
            return pixels.view(torch.uint8).view(*pixels.shape, 4)[..., :3].flip(-1).flatten(1)
        colors = torch.empty(packed.shape[0], 3 * size, dtype=torch.uint8, device=packed.device)
        words = self._wp.from_torch(colors.view(torch.int32), dtype=self._wp.uint32)
        self._wp.launch(
            _unpacking(self._wp),
            dim=(packed.shape[0], size // _PIXELS),
            inputs=[self._context.rgb_data, begin],
            outputs=[words],
            device=words.device,
        )
        return colors

    def images(self) -> Images:
        """Return copies of the images that ``draw`` has rendered."""
        images: Images = {}
        first = dict.fromkeys(self._buffers, 0)
        for cfg in self._cfgs:
            for output in cfg.outputs:
                begin, first[output] = first[output], first[output] + cfg.height * cfg.width
                if output == "rgb":
                    values = self._colors[cfg.name].view(-1, cfg.height * cfg.width, 3)
                else:
                    values = self._convert(cfg, output, self._buffers[output][:, begin : first[output]])
                images.setdefault(OBSERVED_AS[output], {})[cfg.name] = values.view(
                    -1, cfg.height, cfg.width, values.shape[-1]
                )
        return images

    def _convert(self, cfg: CameraCfg, output: Output, values: Tensor) -> Tensor:
        """Convert depth or ids of one camera, ``[worlds, pixels, ...]``, to the observation format."""
        if output == "depth":  # 0 for the background
            return torch.where(values > 0.0, values.clamp(cfg.near, cfg.far), cfg.far).unsqueeze(-1)
        geom, kind = values.unbind(-1)
        return self._ids[torch.where(kind == self._is_geom, geom, -1).long()].unsqueeze(-1)


@cache
def _unpacking(wp: Any) -> Any:
    """Return a Warp kernel that unpacks pixels of 32 bits (blue, green, red, alpha), four of them to three words."""

    def unpack(packed, begin, colors):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        world, group = wp.tid()
        first = begin + 4 * group
        a = packed[world, first]
        b = packed[world, first + 1]
        c = packed[world, first + 2]
        d = packed[world, first + 3]
        byte = wp.uint32(255)
        one, two, three = wp.uint32(8), wp.uint32(16), wp.uint32(24)
        red_green = ((a >> two) & byte) | (a & (byte << one))
        colors[world, 3 * group] = red_green | ((a & byte) << two) | ((b >> two) << three)
        green_blue = ((b >> one) & byte) | ((b & byte) << one)
        colors[world, 3 * group + 1] = green_blue | (c & (byte << two)) | ((c >> one) << three)
        blue_red = (c & byte) | ((d >> one) & (byte << one))
        colors[world, 3 * group + 2] = blue_red | ((d & (byte << one)) << one) | ((d & byte) << three)

    words = wp.array2d(dtype=wp.uint32)
    unpack.__annotations__ = {"packed": words, "begin": int, "colors": words}
    return wp.kernel(unpack, enable_backward=False)


def _needed(model: mujoco.MjModel, varied: Set[str]) -> dict[str, bool]:
    """Return the shading features that a model needs; without the others, images are equal and render faster."""
    lights = np.ones(model.nlight, bool) if "light_active" in varied else model.light_active.astype(bool)
    used = model.geom_matid[model.geom_matid >= 0]
    shiny = model.vis.headlight.active and np.any(model.vis.headlight.specular)
    return {
        "use_textures": bool(np.any(model.mat_texid[used] >= 0)) or not varied.isdisjoint(("geom_matid", "mat_texid")),
        "enable_specular": bool(shiny or np.any(model.light_specular[lights])) or "light_specular" in varied,
        "enable_emission": bool(np.any(model.mat_emission)) or "mat_emission" in varied,
        "enable_per_light_ambient": bool(np.any(model.light_ambient[lights])) or "light_ambient" in varied,
        "enable_vertex_normals": model.nmesh > 0,
    }
