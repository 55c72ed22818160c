"""What a policy is: an author writes tensors, components use TensorDicts."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.config.classes import Config
from embodichain.errors import ConfigError

Evaluation = tuple[Tensor, Tensor, Tensor]
"""``(log_prob, entropy, value)``."""


class Policy(nn.Module, ABC):
    """Abstract base class that all RL policies must implement.

    An author writes ``get_action``, ``get_value`` and ``evaluate_actions``. ``obs`` is what the environment gives, a
    nested TensorDict of batch size ``[batch]``, or a flat tensor ``[batch, obs_dim]``. Collectors and algorithms call
    ``act``, ``state_value``, ``evaluate`` and ``forward``, which this class builds on those three.

    A policy whose actions do not tell how they were chosen (a denoising chain, tokens) sets ``has_decision`` and
    writes ``decide``; it gets its decision back as the third argument of ``evaluate_actions``.

    A recurrent policy sets ``is_recurrent`` and overrides ``initial_state``, ``act``, ``state_value`` and
    ``evaluate_sequences`` too. Its state is a tensor ``[batch, ...]`` that the caller keeps, passes in and resets.
    """

    cfg_type: ClassVar[type[Config] | None] = None
    """The settings that ``build`` takes, where a class says so: they are checked, and are flags, before it is built."""
    device: torch.device
    """Device where the policy parameters are located."""
    chunk_size: int = 1
    """Actions per decision. A policy that chooses several at once returns actions ``[batch, chunk_size, action_dim]``
    and log-probabilities and entropies ``[batch, chunk_size]``, one per action; the value is ``[batch]``."""
    is_recurrent: bool = False
    """Whether actions depend on earlier observations of the episode."""
    has_decision: bool = False
    """Whether actions come with a ``decision``, a TensorDict of the policy's own: what it needs to value a choice again
    and the environment does not need to carry it out. Rollouts store it; a recurrent policy has none."""
    has_critic: bool = True
    """Whether the values are estimates of a return; without a critic they are zeros."""
    critic_parts: tuple[str, ...] = ()
    """Submodules on which values depend and actions do not, such as ``critic``."""
    values_apart: bool = False
    """Whether values cost as much alone as with an action: collectors then call ``choose`` while they act, and
    ``get_value`` once, at a rollout's end, on all its observations in the form in which rollouts store them."""
    noise_steps: int | None = None
    """Steps for which collectors let the policy keep its exploration noise, 0 for a whole rollout; ``None``: it keeps
    none, and every action has noise of its own."""
    generator: torch.Generator | None = None
    """Source of noise for actions; ``None``: torch's generator. A collector beside a learner needs one of its own."""
    version: Tensor
    """How many updates shaped these weights, int64 ``[]``; collectors stamp it on every transition."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.register_buffer("version", torch.zeros((), dtype=torch.int64))

    @abstractmethod
    def get_action(self, obs: Observation, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Sample an action; return ``(action [batch, action_dim], log_prob [batch], value [batch])``.

        The most likely action if ``deterministic``. Discrete actions are ``[batch]``.
        """

    def decide(
        self, obs: Observation, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, TensorDictBase | None]:
        """Return ``(action, log_prob, value, decision)``; the decision is a TensorDict ``[batch]``, or ``None``.

        Log-probabilities may have factors: ``[batch, chunk_size, factors]``, see ``utils/ratios.py``.
        """
        return (*self.get_action(obs, deterministic), None)

    @abstractmethod
    def get_value(self, obs: Observation) -> Tensor:
        """Return the value estimate ``[batch]``."""

    @abstractmethod
    def evaluate_actions(self, obs: Observation, actions: Tensor, decision: TensorDictBase | None = None) -> Evaluation:
        """Return ``(log_prob, entropy, value)`` of given actions, each ``[batch]``.

        ``decision`` is what ``decide`` returned with them; a policy without ``has_decision`` need not take it.
        """

    def imitation_loss(self, obs: Observation, actions: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return ``[batch]`` how badly the policy would have chosen these ``actions`` ``[batch, n, action_dim]``.

        ``n`` is at most ``chunk_size``; ``valid`` ``[batch, n]`` tells which of them count (default: all).
        """
        raise TypeError(f"{type(self).__name__} lacks imitation_loss(obs, actions, valid)")

    def initial_state(self, batch_size: int) -> Tensor | None:
        """Return the recurrent state ``[batch, ...]`` at an episode's start; ``None`` if there is none."""
        return None

    def act(
        self, obs: Observation, state: Tensor | None = None, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return ``(action, log_prob, value, state after this observation)``."""
        return (*self.get_action(obs, deterministic), None)

    def draw_noise(self, num_envs: int) -> Tensor | None:
        """Return new exploration noise ``[num_envs, ...]`` of a policy with ``noise_steps``."""
        return None

    def hold_noise(self, noise: Tensor | None) -> None:
        """Explore by this noise ``[batch, ...]`` of ``draw_noise`` from now on; ``None``: by new one every time."""

    def hold_rows(self, first: int, num_envs: int) -> None:
        """Act for the envs from ``first`` on, of ``num_envs`` in all, from now on."""

    def choose(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Return ``(action, log_prob)``; a policy with ``values_apart`` does not run its critic here."""
        return self.act(obs)[:2]

    def state_value(self, obs: Observation, state: Tensor | None = None) -> Tensor:
        """Return the value ``[batch]`` of an observation, given the recurrent state before it."""
        return self.get_value(obs)

    def evaluate_sequences(self, obs: Observation, actions: Tensor, state: Tensor, start: Tensor) -> Evaluation:
        """Return ``(log_prob, entropy, value)``, each ``[num_steps, batch]``, of sequences.

        ``state`` ``[batch, ...]`` precedes the first step; ``start`` ``[num_steps, batch]`` marks episodes' beginnings.
        """
        raise TypeError(f"{type(self).__name__} is not recurrent, or lacks evaluate_sequences")

    def forward(self, tensordict: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Write ``action``, ``sample_log_prob`` and ``value`` of ``observation``, in place.

        A recurrent policy also writes the next ``hidden``, one with ``has_decision`` its ``decision``.
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
        """Return ``(log_prob, entropy, value)`` of a minibatch ``[rows]``, each in its batch size.

        A recurrent policy takes ``[num_steps, rows]`` with ``hidden`` before, and ``start`` of episodes at, every step.
        """
        if self.is_recurrent:
            return self.evaluate_sequences(batch["observation"], batch["action"], batch["hidden"][0], batch["start"])
        if self.has_decision:
            return self.evaluate_actions(batch["observation"], batch["action"], batch["decision"])
        return self.evaluate_actions(batch["observation"], batch["action"])

    def check(self) -> None:
        """Raise ``ConfigError`` if the class asks for what does not go together; algorithms and collectors call it."""
        if self.is_recurrent and self.has_decision:
            problem = "sets both is_recurrent and has_decision: expected one of them, as a recurrent policy's decisions"
            raise ConfigError(f"{type(self).__name__} {problem} are neither stored nor given back", "policy")

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Let every module do inside the block what it does in evaluation: ratios of unchanged weights are 1 then.

        Recurrent layers stay in training mode, without which cuDNN does not differentiate them.
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

    def seen_by_critic(self, obs: Observation) -> Observation:
        """Return what of an observation values follow from: collectors need not keep the rest."""
        return obs

    def take_auxiliary_loss(self) -> Tensor | None:
        """Return a loss ``[]`` of the policy's own on what ``evaluate`` was last given, which algorithms add; once."""
        return None

    @contextmanager
    def only_critic_learns(self) -> Iterator[None]:
        """Let gradients reach ``critic_parts`` alone inside the block: actions stay as they are."""
        frozen = [p for name, p in self.named_parameters() if p.requires_grad and not self.in_critic(name)]
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def in_critic(self, name: str) -> bool:
        """Tell whether a parameter or buffer of this name belongs to ``critic_parts``."""
        return any(name == part or name.startswith(f"{part}.") for part in self.critic_parts)

    def update_normalizer(self, obs: Observation) -> None:
        """Let running statistics take in the observations of a rollout; the algorithm calls it after each update."""

    def update_value_normalizer(self, returns: Tensor) -> None:
        """Let running statistics take in the returns of a rollout; the algorithm calls it before each update."""

    @property
    def value_scale(self) -> Tensor | float:
        """Unit in which errors of the value count; 1 unless the policy normalises its values."""
        return 1.0

    @classmethod
    def settings_type(cls) -> type[Config] | None:
        """Return the class of the settings; ``None`` if they are those of a subclass's own ``build``."""
        settled, built = (
            next(i for i, base in enumerate(cls.__mro__) if name in base.__dict__) for name in ("cfg_type", "build")
        )
        return cls.cfg_type if settled <= built else None

    @classmethod
    def build(cls, cfg: Mapping[str, Any], obs_space: Any, action_space: Any, device: torch.device) -> Self:
        """Construct the policy from its config block without ``name`` and ``action_dim``, as keyword arguments."""
        return cls(obs_space, action_space, device, **cfg)  # type: ignore[call-arg]
