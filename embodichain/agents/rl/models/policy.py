"""The abstract base class of policies: implementations use tensors, collectors and algorithms use TensorDicts."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.utils import Level
from embodichain.agents.rl.utils.tensordicts import Observation, dict_to_tensordict
from embodichain.config.classes import Config
from embodichain.errors import ConfigError, PolicyContractError

Evaluation = tuple[Tensor, Tensor, Tensor]
"""``(log_prob, entropy, value)``."""

_TAKING_DICTS = ("get_action", "get_value", "act", "state_value")
"""Methods to which users may pass observations as nested dicts of tensors or arrays."""


def _taking_dicts(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method such that nested dicts of tensors or arrays are observations as well."""

    @functools.wraps(method)
    def converted(self: Policy, obs: Observation | Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(obs, Mapping) and not isinstance(obs, TensorDictBase):
            obs = dict_to_tensordict(obs, self.device)["observation"].apply(_to_single)
        return method(self, obs, *args, **kwargs)

    return converted


def _to_single(tensor: Tensor) -> Tensor:
    """Return double precision, NumPy's default, as single precision: policies are trained with that."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


class Policy(nn.Module, ABC):
    """Abstract base class of all policies.

    A subclass implements ``get_action``, ``get_value`` and ``evaluate_actions``. ``obs`` is the environment's
    observation: a nested TensorDict of batch size ``[batch]``, or a flat tensor ``[batch, obs_dim]``. Collectors and
    algorithms call ``act``, ``state_value``, ``evaluate`` and ``forward``, which use these three methods.

    If the log-probability cannot be computed from the action alone (a denoising chain, tokens), the policy sets
    ``has_decision`` and implements ``decide``. ``evaluate_actions`` gets that decision as its third argument.

    A recurrent policy sets ``is_recurrent`` and also overrides ``initial_state``, ``act``, ``state_value`` and
    ``evaluate_sequences``. Its state is a tensor ``[batch, ...]`` that the caller keeps, passes in and resets.
    """

    cfg_type: ClassVar[type[Config] | None] = None
    """Config class of the settings that ``build`` takes, to check them early and offer them as flags; or ``None``."""
    device: torch.device
    """Device where the policy parameters are located."""
    chunk_size: int = 1
    """Actions per decision. If it is more than 1, actions are ``[batch, chunk_size, action_dim]``, log-probabilities
    and entropies ``[batch, chunk_size]``, one per action; the value is ``[batch]``."""
    is_recurrent: bool = False
    """Whether actions depend on earlier observations of the episode."""
    has_decision: bool = False
    """Whether actions come with a ``decision``, a TensorDict with everything else that their log-probability depends
    on. Rollouts store it. Not available for recurrent policies."""
    factors: tuple[Level, ...] | None = None
    """Names of the factors of an action's or a chunk's probability for ``log_prob_per``, such as ``("token",)``; ``()``
    if there are none, ``None`` if unknown."""
    has_critic: bool = True
    """Whether the policy estimates values; without a critic they are zeros."""
    critic_parts: tuple[str, ...] = ()
    """Submodules that only values depend on, such as ``critic``."""
    values_apart: bool = False
    """Whether actor and critic share no computation. Collectors then call ``choose`` for each step, and ``get_value``
    once at the end of a rollout, on all of its stored observations."""
    noise_steps: int | None = None
    """Number of steps for which exploration noise is kept, 0 for a whole rollout; ``None`` draws new noise for every
    action."""
    generator: torch.Generator | None = None
    """Random generator for actions; ``None`` is torch's default. A collector that runs beside a learner has its own."""
    version: Tensor
    """Number of updates of these weights, int64 ``[]``; collectors store it with every transition."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _TAKING_DICTS:
            if name in vars(cls):
                setattr(cls, name, _taking_dicts(vars(cls)[name]))

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.register_buffer("version", torch.zeros((), dtype=torch.int64))

    @abstractmethod
    def get_action(self, obs: Observation, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Sample actions; return ``(action [batch, action_dim], log_prob [batch], value [batch])``.

        With ``deterministic``, the most likely actions. Discrete actions are ``[batch]``. Callers may also pass nested
        dicts of tensors or arrays, which reach the implementation as a TensorDict.
        """

    def decide(
        self, obs: Observation, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, TensorDictBase | None]:
        """Return ``(action, log_prob, value, decision)``; the decision is a TensorDict ``[batch]``, or ``None``.

        Log-probabilities may consist of several factors: ``[batch, chunk_size, factors]``, see ``utils/ratios.py``.
        """
        return (*self.get_action(obs, deterministic), None)

    @abstractmethod
    def get_value(self, obs: Observation) -> Tensor:
        """Return value estimates ``[batch]``."""

    @abstractmethod
    def evaluate_actions(self, obs: Observation, actions: Tensor, decision: TensorDictBase | None = None) -> Evaluation:
        """Return ``(log_prob, entropy, value)`` of given actions, each ``[batch]``.

        ``decision`` is the one that ``decide`` returned with them, only passed if ``has_decision``.
        """

    def imitation_loss(self, obs: Observation, actions: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the imitation loss ``[batch]`` of ``actions`` ``[batch, n, action_dim]``.

        ``n`` is at most ``chunk_size``. ``valid`` ``[batch, n]`` masks the actions that count (default: all).
        """
        raise TypeError(f"{type(self).__name__} lacks imitation_loss(obs, actions, valid)")

    def initial_state(self, batch_size: int) -> Tensor | None:
        """Return the recurrent state ``[batch, ...]`` at the start of an episode; ``None`` if there is none."""
        return None

    def act(
        self, obs: Observation, state: Tensor | None = None, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return ``(action, log_prob, value, state after this observation)``."""
        return (*self.get_action(obs, deterministic), None)

    def draw_noise(self, num_envs: int) -> Tensor | None:
        """Return new exploration noise ``[num_envs, ...]``, for policies with ``noise_steps``."""
        return None

    def hold_noise(self, noise: Tensor | None) -> None:
        """Use this noise ``[batch, ...]`` of ``draw_noise`` from now on; ``None`` draws new noise for every action."""

    def hold_rows(self, first: int, num_envs: int) -> None:
        """Tell the policy that it now acts for the envs from ``first`` on, out of ``num_envs``."""

    def choose(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Return ``(action, log_prob)``; a policy with ``values_apart`` does not run its critic here."""
        return self.act(obs)[:2]

    def state_value(self, obs: Observation, state: Tensor | None = None) -> Tensor:
        """Return the values ``[batch]`` of an observation, given the recurrent state before it."""
        return self.get_value(obs)

    def evaluate_sequences(self, obs: Observation, actions: Tensor, state: Tensor, start: Tensor) -> Evaluation:
        """Return ``(log_prob, entropy, value)`` of sequences, each ``[num_steps, batch]``.

        ``state`` ``[batch, ...]`` is the one before the first step; ``start`` ``[num_steps, batch]`` marks the first
        observations of episodes.
        """
        raise TypeError(f"{type(self).__name__} is not recurrent, or lacks evaluate_sequences")

    def forward(self, tensordict: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Add ``action``, ``sample_log_prob`` and ``value`` for ``observation``, in place.

        A recurrent policy also writes the next ``hidden``, and one with ``has_decision`` its ``decision``.
        """
        if self.has_decision:
            parts = self.decide(tensordict["observation"], deterministic)
            return tensordict.update(dict(zip(("action", "sample_log_prob", "value", "decision"), parts, strict=True)))
        state = tensordict.get("hidden", None)
        if state is None:
            state = self.initial_state(tensordict.batch_size[0])
        action, log_prob, value, state = self.act(tensordict["observation"], state, deterministic)
        written = {"action": action, "sample_log_prob": log_prob, "value": value}
        return tensordict.update(written if state is None else written | {"hidden": state})

    def evaluate(self, batch: TensorDictBase) -> Evaluation:
        """Return ``(log_prob, entropy, value)`` of a minibatch ``[rows]``.

        A recurrent policy takes ``[num_steps, rows]`` with ``hidden``, the recurrent state before each step, and
        ``start``, which marks the first steps of episodes.
        """
        if self.is_recurrent:
            parts = self.evaluate_sequences(batch["observation"], batch["action"], batch["hidden"][0], batch["start"])
        elif self.has_decision:
            parts = self.evaluate_actions(batch["observation"], batch["action"], batch["decision"])
        else:
            parts = self.evaluate_actions(batch["observation"], batch["action"])
        stored = batch.get("sample_log_prob", None)
        if stored is not None and (len(parts) != 3 or parts[0].shape != stored.shape):
            self._refuse_evaluation(parts, stored)
        return parts

    def _refuse_evaluation(self, parts: Any, stored: Tensor) -> None:
        """Raise ``PolicyContractError``: shapes that differ would be broadcast against each other, or fail."""
        method = f"{type(self).__name__}.{'evaluate_sequences' if self.is_recurrent else 'evaluate_actions'}"
        if len(parts) != 3:
            raise PolicyContractError(f"{method} returned {len(parts)} values, expected (log_prob, entropy, value)")
        raise PolicyContractError(
            f"{method} returned log_prob of shape {list(parts[0].shape)}, expected {list(stored.shape)}, as it was "
            "when the actions were chosen"
        )

    def check(self) -> None:
        """Raise ``ConfigError`` if attributes of the class contradict each other; algorithms and collectors call it."""
        if self.is_recurrent and self.has_decision:
            problem = "sets both is_recurrent and has_decision: expected one of them, as a recurrent policy's decisions"
            raise ConfigError(f"{type(self).__name__} {problem} are neither stored nor given back", "policy")

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Put all modules into evaluation mode inside the block, so that ratios of unchanged weights are 1.

        Recurrent layers stay in training mode, which cuDNN needs for gradients; their dropout is set to 0.
        """
        training = [module for module in self.modules() if module.training]
        recurrent = [(module, module.dropout) for module in training if isinstance(module, nn.RNNBase)]
        try:
            for module in training:
                if isinstance(module, nn.RNNBase):
                    module.dropout = 0.0
                else:
                    module.training = False
            yield
        finally:
            for module in training:
                module.training = True
            for layer, dropout in recurrent:
                layer.dropout = dropout

    @contextmanager
    def in_gradient_steps(self, batch_size: int) -> Iterator[None]:
        """Context of gradient steps that train both actor and critic on minibatches of ``batch_size``."""
        yield

    def seen_by_critic(self, obs: Observation) -> Observation:
        """Return the part of an observation that values depend on; collectors need not keep the rest."""
        return obs

    def take_auxiliary_loss(self) -> Tensor | None:
        """Return, once, the auxiliary loss ``[]`` of the last ``evaluate``, which algorithms add; or ``None``."""
        return None

    @contextmanager
    def only_critic_learns(self) -> Iterator[None]:
        """Freeze all parameters but those of ``critic_parts`` inside the block."""
        frozen = [p for name, p in self.named_parameters() if p.requires_grad and not self.in_critic(name)]
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    @property
    def trains_critic_alone(self) -> bool:
        """Whether a trained parameter belongs to ``critic_parts``, so that the critic can be trained alone."""
        return any(p.requires_grad and self.in_critic(name) for name, p in self.named_parameters())

    def in_critic(self, name: str) -> bool:
        """Return whether a parameter or buffer of this name belongs to ``critic_parts``."""
        return any(name == part or name.startswith(f"{part}.") for part in self.critic_parts)

    def update_normalizer(self, obs: Observation) -> None:
        """Update running statistics with the observations of a rollout; algorithms call it after each update."""

    @property
    def lacks_statistics(self) -> bool:
        """Whether observations are to be normalised and there are no statistics yet; synchronises with a GPU."""
        return False

    def update_value_normalizer(self, returns: Tensor) -> None:
        """Update running statistics with the returns of a rollout; algorithms call it before each update."""

    @property
    def value_scale(self) -> Tensor | float:
        """Scale by which the value loss divides errors; 1 unless the policy normalises its values."""
        return 1.0

    @classmethod
    def settings_type(cls) -> type[Config] | None:
        """Return ``cfg_type``; ``None`` if a subclass overrides ``build`` without a ``cfg_type`` of its own."""
        settled, built = (
            next(i for i, base in enumerate(cls.__mro__) if name in base.__dict__) for name in ("cfg_type", "build")
        )
        return cls.cfg_type if settled <= built else None

    @classmethod
    def settings_below(cls, cfg: Mapping[str, Any]) -> dict[tuple[str, ...], type[Config]]:
        """Return the classes of mappings inside the settings ``cfg`` that ``settings_type`` leaves open, by path."""
        return {}

    @classmethod
    def build(cls, cfg: Mapping[str, Any], obs_space: Any, action_space: Any, device: torch.device) -> Self:
        """Build the policy from its config block (without ``name`` and ``action_dim``), as keyword arguments."""
        return cls(obs_space, action_space, device, **cfg)  # type: ignore[call-arg]
