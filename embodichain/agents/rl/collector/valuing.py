"""When the values of a rollout are computed: in two passes at its end, wherever the policy lets itself be valued apart.

A value is needed of every observation, of the one after the last step, and of every ``final_observation`` at which a
time limit cut an episode. While acting none of them is. So a policy with ``values_apart`` chooses actions alone and
values everything when the rollout is complete: all values are then those of the policy at the rollout's end, even if
new weights were adopted on the way. Other policies value each observation as they act on it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat

import torch
from torch import Tensor

from embodichain.agents.rl.buffer.rollout_buffer import RolloutBuffer
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.observations import Observation, sorted_leaves
from embodichain.errors import RolloutError

CPU_ROWS, GPU_ROWS = 2048, 65_536
"""Observations valued at a time, which bounds the memory for it; on a CPU their features stay in the cache."""


class Valuing:
    """Sets aside what has to be valued, and values it."""

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        value_now: Callable[[Observation, Tensor | None], Tensor],
        may_look: bool,
    ) -> None:
        """Value observations on a device; ``value_now`` does so between two steps, where it cannot be put off.

        ``may_look`` tells whether flags can be looked at without waiting for a device. Where they cannot, the final
        observations of all envs are kept until the end, or valued at once if that would take much memory.
        """
        self._policy, self._device, self._value_now, self.may_look = policy, device, value_now, may_look
        self.begin()

    def begin(self) -> None:
        """Begin a rollout."""
        self.apart = self._policy.values_apart
        """Whether nothing is valued while acting."""
        self._cut: list[Observation] = []
        self._cut_states: list[Tensor] = []
        self._finals: list[Observation] = []
        self._final_values: list[Tensor] = []

    def keep(self, cut: Tensor, final: Observation, state: Tensor | None) -> None:
        """Set aside the final observations of a step in which a time limit cut the episodes of some envs."""
        if not self._policy.has_critic:
            return
        if self.may_look:
            if _any(cut):
                rows = cut.nonzero().squeeze(-1)
                self._cut.append(final[rows.to(final.device)].to(self._device))
                self._cut_states += [] if state is None else [state[rows]]
        elif self.apart and not _has_pictures(final):
            self._finals.append(final.to(self._device))
        else:
            self._final_values.append(self._value_now(final.to(self._device), state))

    def finish(self, buffer: RolloutBuffer, obs: Observation, state: Tensor | None) -> None:
        """Complete the values of a rollout; ``obs`` and the memory ``state`` are those after its last step."""
        storage = buffer.storage
        if storage is None:
            raise RolloutError("nothing was collected")
        everywhere = storage["value"]
        if not self._policy.has_critic:
            zeros = torch.zeros_like(everywhere)
            buffer.finalize(None, zeros, value=zeros)
            return
        values = self._values(storage["observation"].flatten(0, 1), None).view_as(everywhere) if self.apart else None
        if self.may_look:
            states = None if state is None else torch.cat([state, *self._cut_states])
            last, final = self._values(torch.cat([obs, *self._cut]), states).tensor_split([obs.shape[0]])
        else:  # all of them: to find those that count would mean to wait
            last = self._policy.state_value(obs, state)
            finals = [self._values(torch.cat(self._finals), None)] if self._finals else self._final_values
            final = torch.cat(finals).view_as(everywhere)
        buffer.finalize(last, final, value=values)
        self.begin()

    def _values(self, obs: Observation, state: Tensor | None) -> Tensor:
        """Return the values ``[rows]`` of observations, some at a time."""
        size = CPU_ROWS if self._device.type == "cpu" else GPU_ROWS
        states = repeat(None) if state is None else state.split(size)
        parts = [self._policy.state_value(part, own) for part, own in zip(obs.split(size), states, strict=False)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _any(flags: Tensor) -> bool:
    """Tell whether any flag is set; numpy's call on a few of them costs a third of torch's."""
    return bool(flags.any() if flags.is_cuda else flags.numpy().any())


def _has_pictures(obs: Observation) -> bool:
    return not isinstance(obs, Tensor) and any(leaf.dtype == torch.uint8 for _, leaf in sorted_leaves(obs))
