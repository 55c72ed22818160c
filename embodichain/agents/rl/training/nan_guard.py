"""Stopping at the first NaN or infinity, with everything saved that is needed to find its cause."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.checkpoint import save_checkpoint
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import NotFiniteError


class NanGuard:
    """Looks at every rollout and every update.

    What it saves is a checkpoint folder with ``rollout`` (the failing batch ``[num_envs, num_steps]``), ``env_before``
    (the simulation before the rollout: ``env.set_state`` and the rollout's actions repeat it), ``env_after`` and
    ``policy``; ``load_checkpoint`` reads it.
    """

    def __init__(self, env: VecEnv | None, policy: Policy, folder: Path) -> None:
        """Watch a policy; ``env`` is saved as well, unless it is ``None`` because somebody else is using it."""
        self.env, self.policy, self.folder = env, policy, folder
        self._before: TensorDict | None = None

    def before_rollout(self) -> None:
        """Remember the simulation, so that a failing rollout can be repeated."""
        self._before = self._simulation()

    def check_rollout(self, rollout: TensorDictBase, step: int) -> None:
        """Raise ``NotFiniteError`` if anything in a rollout is not finite."""
        leaves = list(_floating(rollout))
        if not leaves or bool(_sums([leaf for _, leaf in leaves]).isfinite().all()):
            return
        for name, leaf in leaves:
            wrong = ~leaf.isfinite()
            if bool(wrong.any()):  # a sum may overflow without any number being infinite
                env, when = (
                    wrong.flatten(2).any(-1).nonzero()[0].tolist() if leaf.ndim > 2 else wrong.nonzero()[0].tolist()
                )
                where = f"{name} of env {env} in step {when} of the rollout that began at step {step}"
                self._fail(f"{where} is {leaf[env, when].flatten()[:8].tolist()}", rollout)

    def check_update(self, measures: Mapping[str, float], rollout: TensorDictBase, step: int) -> None:
        """Raise ``NotFiniteError`` if an update gave a loss or a parameter that is not finite."""
        bad = next((name for name, value in measures.items() if not math.isfinite(value)), None)
        if bad is not None:
            self._fail(f"{bad} is {measures[bad]} after the update at step {step}", rollout)
        named = [(name, p.detach()) for name, p in self.policy.named_parameters() if p.is_floating_point()]
        if named and not bool(_sums([p for _, p in named]).isfinite().all()):
            for name, parameter in named:
                if not bool(parameter.isfinite().all()):
                    self._fail(f"the parameter {name} is not finite after the update at step {step}", rollout)

    def _simulation(self) -> TensorDict | None:
        return self.env.get_state() if self.env is not None and self.env.supports_state else None

    def _fail(self, what: str, rollout: TensorDictBase) -> None:
        state = {
            "message": what,
            "rollout": rollout,
            "env_before": self._before,
            "env_after": self._simulation(),
            "policy": self.policy.state_dict(),
        }
        saved = save_checkpoint(self.folder, state)
        raise NotFiniteError(
            f"{what}. The rollout, the simulation before and after it, and the policy are saved in {saved}; lower the "
            "learning rate or look for what produced it. trainer.nan_guard=false trains on regardless."
        )


def _floating(rollout: TensorDictBase) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point leaves of a rollout with their names."""
    for key, leaf in rollout.items(include_nested=True, leaves_only=True):
        if leaf.is_floating_point():
            yield "/".join(key) if isinstance(key, tuple) else key, leaf


def _sums(tensors: list[Tensor]) -> Tensor:
    """Return one number per tensor that is finite only if all of its numbers are; nothing is allocated for it."""
    return torch.stack([tensor.sum(dtype=torch.float64) for tensor in tensors])
