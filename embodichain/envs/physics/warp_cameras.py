"""Pictures of all worlds at once, drawn on the GPU by ray casting from what MuJoCo Warp knows of the scene.

They look like those of the CPU's renderer at quality ``lean``: no shadows, no sky. They come as tensors on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mujoco
import torch
from torch import Tensor

from embodichain.envs.camera_mounts import mounted_name
from embodichain.envs.rendering import CameraCfg


class WarpCameras:
    """The configured cameras of one simulation."""

    def __init__(
        self,
        model: mujoco.MjModel,
        simulation: Any,
        cfgs: Sequence[CameraCfg],
        stream: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Prepare to draw; ``simulation`` has Warp's own parts, ``stream`` lets Warp work in torch's order."""
        self._warp, self._mjw, self._model, self._data = simulation
        self._cfgs, self._stream = list(cfgs), stream
        self._mocap = {model.body(i).name: int(model.body_mocapid[i]) for i in range(model.nbody)}
        with stream():
            self._context = self._mjw.create_render_context(
                model,
                nworld=self._data.nworld,
                cam_active=[mounted_name(cfg) for cfg in cfgs],
                cam_res=[(cfg.width, cfg.height) for cfg in cfgs],
                render_rgb=True,
                render_depth=False,
                render_seg=False,
                use_shadows=False,
            )
        self._pixels = self._warp.to_torch(self._context.rgb_data)
        self._markers = self._warp.to_torch(self._data.mocap_pos)

    def take(self, markers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return uint8 pictures ``[num_envs, height, width, 3]`` by name; ``markers`` are positions of mocap bodies."""
        for name, positions in markers.items():
            self._markers[:, self._mocap[name]] = positions
        with self._stream():
            self._mjw.kinematics(self._model, self._data)
            self._mjw.camlight(self._model, self._data)
            self._mjw.refit_bvh(self._model, self._data, self._context)
            self._mjw.render(self._model, self._data, self._context)
        pictures, first = {}, 0
        for cfg in self._cfgs:
            last = first + cfg.height * cfg.width
            pictures[cfg.name] = self._unpack(first, last).view(-1, cfg.height, cfg.width, 3)
            first = last
        return pictures

    def _unpack(self, first: int, last: int) -> Tensor:
        """Return the pixels of one camera; a pixel is a 32-bit number whose bytes are blue, green, red and opacity."""
        numbers = self._pixels[:, first:last].contiguous()
        return numbers.view(torch.uint8).view(*numbers.shape, 4)[..., :3].flip(-1)
