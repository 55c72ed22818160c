"""Checks of what goes in: actions, right and wrong, the expert's actions, and closing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from embodichain.envs.checker.probe import SHORT, Finding, NotApplicable, Probe, first_difference, leaves
from embodichain.envs.vec_env import HasExpert
from embodichain.errors import ActionError


def check_actions(probe: Probe) -> Iterator[Finding]:
    """Wrong actions raise ``ActionError`` and change nothing; a dict with the one key is an action too."""
    env, actions = probe.env, probe.actions(2 * SHORT)
    expected = probe.play(2 * SHORT)
    seen = probe.go_on(probe.start(), actions[:SHORT])
    for what, action in _wrong(probe, actions[0]).items():
        try:
            env.step(action)
        except ActionError:
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            got = f"{type(error).__name__}: {error}"
            yield Finding(f"ActionError for {what}", got, "check it with action_manager.unwrap")
        else:
            yield Finding(f"ActionError for {what}", "no error", "check it with action_manager.unwrap")
            return
    where = first_difference(expected, probe.go_on(seen, actions[SHORT:]))
    if probe.nondeterminism is not None:
        return
    if where is not None:
        advice = "check the action before anything moves"
        yield Finding("a refused action changes nothing", f"different: {where}", advice)
        return
    probe.start()
    obs, *_ = env.step({env.action_manager.action_type: actions[0]})
    if any(not torch.equal(value, expected[1].copies[f"obs[{name}]"]) for name, value in leaves(obs).items()):
        got = "another observation than for the tensor"
        yield Finding(f"{{{env.action_manager.action_type!r}: action}} is taken as the action", got, "unwrap it")


def _wrong(probe: Probe, action: Tensor) -> dict[str, Any]:
    key = probe.env.action_manager.action_type
    wrong: dict[str, Any] = {
        f"an action for {len(action) + 1} envs": torch.cat([action, action[:1]]),
        "a dict with another key": {f"not_{key}": action},
    }
    if probe.env.device.type != "cpu":  # there, looking at the values would wait for the device at every step
        return wrong
    if isinstance(probe.env.action_space, gym.spaces.Discrete):
        wrong["a choice that is none"] = torch.full_like(action, int(probe.env.action_space.n))
    else:
        wrong["an action that is not finite"] = action.clone().index_fill_(0, torch.tensor([0]), float("nan"))
    return wrong


def check_expert(probe: Probe) -> Iterator[Finding]:
    """The expert's actions are valid, and asking for them leaves the state as it was."""
    env = probe.env
    if not isinstance(env, HasExpert):
        raise NotApplicable("the environment has no expert")
    actions = probe.actions(2 * SHORT)
    expected = probe.play(2 * SHORT)
    seen = probe.go_on(probe.start(), actions[:SHORT])
    demo = env.create_demo_action_list()
    if not isinstance(demo, list) or not demo:
        yield Finding("create_demo_action_list returns actions", repr(demo)[:80], "return one tensor per step")
        return
    for what, action in (("expert_action()", env.expert_action()), ("create_demo_action_list()[0]", demo[0])):
        yield from _valid(probe, what, action, actions[0])
    where = first_difference(expected, probe.go_on(seen, actions[SHORT:]))
    if where is not None and probe.nondeterminism is None:
        yield Finding("asking the expert changes nothing", f"different: {where}", "restore the state afterwards")


def _valid(probe: Probe, what: str, action: Any, like: Tensor) -> Iterator[Finding]:
    if not isinstance(action, Tensor) or action.shape != like.shape or action.dtype != like.dtype:
        shape = f"{list(action.shape)} {action.dtype}" if isinstance(action, Tensor) else type(action).__name__
        yield Finding(f"{what} is {list(like.shape)} {like.dtype}", shape, "return what step takes")
    elif action.is_floating_point():
        low, high = probe.action_bounds
        if not bool(((action >= low) & (action <= high)).all()):  # NaN is in no interval
            yield Finding(f"{what} lies in the action space", f"{action.min():.4g} to {action.max():.4g}", "clip it")


def check_close(probe: Probe) -> Iterator[Finding]:
    """Closing twice is fine."""
    probe.env.close()
    try:
        probe.env.close()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        yield Finding("close() twice is fine", f"{type(error).__name__}: {error}", "remember that it is closed")
