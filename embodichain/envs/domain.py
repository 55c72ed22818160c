"""Domain randomisation: per-env friction and mass of the task's object, drawn when an episode starts."""

from __future__ import annotations

import mujoco
import torch
from torch import Tensor

from embodichain.envs.env_cfg import EventsCfg
from embodichain.envs.physics import Physics
from embodichain.envs.random import RandomStreams
from embodichain.errors import ConfigError

_MASS_FIELDS = ("body_mass", "body_inertia")


class DomainRandomization:
    """Scales the object's friction and mass per env; does nothing, and costs nothing, unless configured."""

    def __init__(self, events: EventsCfg, physics: Physics, object_body: str | None) -> None:
        self._physics = physics
        self._friction, self._mass = events.randomize_friction, events.randomize_mass
        self.active = self._friction is not None or self._mass is not None
        if not self.active:
            return
        if object_body is None:
            raise ConfigError(
                "env.events: randomize_friction and randomize_mass need an object, and this task has none"
            )
        body = mujoco.mj_name2id(physics.model, int(mujoco.mjtObj.mjOBJ_BODY), object_body)
        first, count = int(physics.model.body_geomadr[body]), int(physics.model.body_geomnum[body])
        self._body, self._geoms = body, slice(first, first + count)
        names: tuple[str, ...] = ("geom_friction",) if self._friction is not None else ()
        names += _MASS_FIELDS if self._mass is not None else ()
        self._nominal = {name: physics.model_field(name)[0].clone() for name in names}

    def apply(self, env_ids: Tensor, streams: RandomStreams) -> None:
        """Draw new values for these envs."""
        if self._friction is not None:
            scale = streams.uniform(env_ids, 1, *self._friction.scale)
            friction = self._nominal["geom_friction"][self._geoms, 0] * scale
            self._write("geom_friction", env_ids, (self._geoms, 0), friction)
        if self._mass is not None:
            scale = streams.uniform(env_ids, 1, *self._mass.scale)
            self._write("body_mass", env_ids, (self._body,), self._nominal["body_mass"][self._body] * scale[:, 0])
            self._write("body_inertia", env_ids, (self._body,), self._nominal["body_inertia"][self._body] * scale)
            self._physics.refresh_model(env_ids)

    def apply_where(self, mask: Tensor, streams: RandomStreams, drawn: Tensor) -> Tensor:
        """Draw new values where ``mask`` ``[num_envs]`` holds, without waiting for the device.

        ``drawn`` is the state of the streams to draw from; what they are afterwards is returned.
        """
        before, fields = streams.state.clone(), self.state()
        env_ids = torch.arange(mask.shape[0], device=mask.device)
        streams.state.copy_(drawn)
        self.apply(env_ids, streams)
        after = streams.state.clone()
        streams.state.copy_(before)
        for name, old in fields.items():
            target = self._physics.model_field(name)
            target.copy_(torch.where(mask.view(-1, *([1] * (old.dim() - 1))), target, old))
        if self._mass is not None:
            self._physics.refresh_model(env_ids)
        return after

    def state(self) -> dict[str, Tensor]:
        """Return the randomised model fields, ``[num_envs, ...]`` each."""
        return {name: self._physics.model_field(name).clone() for name in self._nominal} if self.active else {}

    def set_state(self, env_ids: Tensor, fields: dict[str, Tensor]) -> None:
        """Restore what :meth:`state` returned."""
        for name, values in fields.items():
            self._physics.model_field(name)[env_ids] = values
        if self._mass is not None:
            self._physics.refresh_model(env_ids)

    def _write(self, name: str, env_ids: Tensor, index: tuple[int | slice, ...], values: Tensor) -> None:
        target = self._physics.model_field(name)
        rows = target[env_ids]
        rows[(slice(None), *index)] = values.to(rows.dtype)
        target[env_ids] = rows
