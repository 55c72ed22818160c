"""Checks of what happens over time: resets, final observations, time limits, seeds and states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.actions import ActionManager
from embodichain.envs.checker.probe import (
    SEED,
    SHORT,
    Finding,
    Frame,
    NotApplicable,
    Probe,
    first_difference,
    frame,
    leaves,
    rows_differ,
)
from embodichain.envs.vec_env import HasExpert
from embodichain.errors import ActionError, EnvContractError

# MERGED structure: Checks of what comes back: spaces, keys, shapes, types, devices and values.


_DTYPES = {np.dtype(t): getattr(torch, t) for t in ("float32", "float64", "float16", "uint8", "int8", "int32", "int64")}
_DTYPES[np.dtype(np.bool_)] = torch.bool


def check_spaces(probe: Probe) -> Iterator[Finding]:
    """The attributes that every environment has, and spaces of one env."""
    env = probe.env
    for name in ("num_envs", "max_episode_steps"):
        value = getattr(env, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Finding(f"{name} is an int of at least 1", repr(value), "set it in __init__")
    if not isinstance(getattr(env, "device", None), torch.device):
        yield Finding("device is a torch.device", repr(getattr(env, "device", None)), "torch.device('cpu'), not 'cpu'")
    if not isinstance(getattr(env, "observation_space", None), gym.spaces.Dict):
        got = repr(getattr(env, "observation_space", None))
        yield Finding("observation_space is a gymnasium Dict", got, "name the observation: Dict({'state': Box(...)})")
    yield from _action_space(env.action_space)
    if not isinstance(getattr(env, "action_manager", None), ActionManager):
        got = type(getattr(env, "action_manager", None)).__name__
        yield Finding(
            "action_manager is an ActionManager", got, "ActionManager('action', action_space, num_envs, device)"
        )
    elif env.action_manager.space != env.action_space:
        yield Finding(
            f"action_manager.space is {env.action_space}", str(env.action_manager.space), "use the same space"
        )


def _action_space(space: Any) -> Iterator[Finding]:
    if isinstance(space, gym.spaces.Discrete):
        if int(space.start) != 0:
            yield Finding("discrete actions count from 0", f"start={space.start}", "shift them inside the environment")
    elif isinstance(space, gym.spaces.Box):
        bounded = np.isfinite(space.low) & np.isfinite(space.high)
        if len(space.shape) != 1:
            yield Finding("a Box of shape (action_dim,)", f"shape {space.shape}", "flatten the action")
        if np.any(space.low[bounded] != -1.0) or np.any(space.high[bounded] != 1.0):
            yield Finding("bounds -1 and 1", str(space), "scale actions inside the environment")
    else:
        yield Finding("action_space is Box or Discrete", repr(space), "see ActionManager for what an action can be")


def check_reset(probe: Probe) -> Iterator[Finding]:
    """``reset`` returns an observation that fits its space, and the episodes' seeds."""
    result = probe.env.reset(seed=SEED)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        yield Finding("reset returns (obs, info)", type(result).__name__, "return a TensorDict and a dict")
        return
    yield from _observation(probe, result[0], "obs")
    yield from _episode_seed(probe, result[1])


def check_step(probe: Probe) -> Iterator[Finding]:
    """``step`` returns reward, flags and info of the promised types and shapes."""
    env = probe.env
    env.reset(seed=SEED)
    for action in probe.actions(3):
        result = env.step(action)
        if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
            got = f"{type(result).__name__} of {len(result) if isinstance(result, tuple) else 1}"
            yield Finding("step returns (obs, reward, terminated, truncated, info)", got, "return all five")
            return
        obs, reward, terminated, truncated, info = result
        problems = [
            *_observation(probe, obs, "obs"),
            *_vector(probe, "reward", reward, torch.float32),
            *_vector(probe, "terminated", terminated, torch.bool),
            *_vector(probe, "truncated", truncated, torch.bool),
            *_info(probe, info, reward),
        ]
        yield from problems
        if problems:
            return


def _info(probe: Probe, info: dict[str, Any], reward: Any) -> Iterator[Finding]:
    if "final_observation" not in info:
        yield Finding("info has final_observation", f"keys {sorted(info)}", "give what was reached, before any reset")
    else:
        yield from _observation(probe, info["final_observation"], "info[final_observation]")
    for group in ("rewards", "metrics"):
        values = info.get(group)
        if not isinstance(values, Mapping):
            yield Finding(f"info[{group}] is a dict of tensors", repr(values), "an empty dict will do")
            continue
        for name, value in values.items():
            yield from _vector(probe, f"info[{group}][{name}]", value, None)
    yield from _episode_seed(probe, info)
    parts = info.get("rewards")
    if isinstance(parts, Mapping) and parts and all(isinstance(p, Tensor) for p in (*parts.values(), reward)):
        total = torch.stack([p.double() for p in parts.values()]).sum(dim=0)
        if total.shape == reward.shape and not torch.allclose(total, reward.double(), rtol=1e-4, atol=1e-5):
            got = f"sum {total.tolist()[:3]}, reward {reward.tolist()[:3]}"
            yield Finding("info[rewards] sum to the reward", got, "report parts after weighting, and all of them")


def _episode_seed(probe: Probe, info: dict[str, Any]) -> Iterator[Finding]:
    if "episode_seed" not in info:
        yield Finding(
            "info has episode_seed", f"keys {sorted(info)}", "name the episode each env is in; -1 if you cannot"
        )
    else:
        yield from _vector(probe, "info[episode_seed]", info["episode_seed"], torch.int64)


def _vector(probe: Probe, name: str, value: Any, dtype: torch.dtype | None) -> Iterator[Finding]:
    """Check a tensor ``[num_envs]``; without a dtype any will do."""
    env = probe.env
    if not isinstance(value, Tensor):
        yield Finding(f"{name} is a tensor [{env.num_envs}]", type(value).__name__, "return tensors")
        return
    if tuple(value.shape) != (env.num_envs,):
        yield Finding(f"{name} has shape [{env.num_envs}]", str(list(value.shape)), "one value per env")
    if dtype is not None and value.dtype != dtype:
        yield Finding(f"{name} is {dtype}", str(value.dtype), f"convert it: .to({dtype})")
    if value.device.type != env.device.type:
        yield Finding(f"{name} is on {env.device}", str(value.device), "make it on env.device")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        yield Finding(f"{name} is finite", str(value.tolist()[:5]), "find out which term diverges")


def _observation(probe: Probe, obs: Any, name: str) -> Iterator[Finding]:
    env = probe.env
    if not isinstance(obs, TensorDictBase):
        yield Finding(f"{name} is a TensorDict", type(obs).__name__, "TensorDict({...}, batch_size=[num_envs])")
        return
    if tuple(obs.batch_size) != (env.num_envs,):
        yield Finding(f"{name} has batch size [{env.num_envs}]", str(list(obs.batch_size)), "batch_size=[num_envs]")
    spaces, found = _flat(env.observation_space), leaves(obs)
    if spaces.keys() != found.keys():
        yield Finding(f"{name} has the keys {sorted(spaces)}", str(sorted(found)), "match observation_space")
    for key in sorted(spaces.keys() & found.keys()):
        yield from _leaf(probe, f"{name}[{key}]", spaces[key], found[key])


def _leaf(probe: Probe, name: str, space: gym.Space[Any], value: Tensor) -> Iterator[Finding]:
    env = probe.env
    shape, dtype = (env.num_envs, *(space.shape or ())), _DTYPES.get(np.dtype(space.dtype))
    if tuple(value.shape) != shape:
        yield Finding(f"{name} has shape {list(shape)}", str(list(value.shape)), "spaces are those of one env")
        return
    if value.dtype != dtype:
        yield Finding(f"{name} is {dtype}", str(value.dtype), "match the dtype of observation_space")
    if value.device.type != env.device.type:
        yield Finding(f"{name} is on {env.device}", str(value.device), "make it on env.device")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        bad = torch.nonzero(~torch.isfinite(value).reshape(env.num_envs, -1).all(dim=1)).reshape(-1)
        yield Finding(f"{name} is finite", f"env {int(bad[0])} has NaN or infinity", "guard the simulation")
    elif isinstance(space, gym.spaces.Box):
        low, high = (torch.as_tensor(bound, device=value.device).double() for bound in (space.low, space.high))
        slack = 1e-5 * (1.0 + value.double().abs())  # rounding, not a violation
        if bool(((value < low - slack) | (value > high + slack)).any()):
            got = f"values in [{float(value.min()):.6g}, {float(value.max()):.6g}]"
            yield Finding(f"{name} lies within {space}", got, "widen the space, or clip the observation")


def _flat(space: gym.spaces.Dict) -> dict[str, gym.Space[Any]]:
    found: dict[str, gym.Space[Any]] = {}
    for key, value in space.spaces.items():
        nested = _flat(value) if isinstance(value, gym.spaces.Dict) else {"": value}
        found.update({f"{key}/{name}" if name else str(key): leaf for name, leaf in nested.items()})
    return found


# MERGED interface: Checks of what goes in: actions, right and wrong, the expert's actions, and closing.


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


def _final_key(name: str) -> str:
    return f"info[final_observation]{name.removeprefix('obs')}"


def check_final_observation(probe: Probe) -> Iterator[Finding]:
    """Rows of ``final_observation`` equal ``obs``, but for envs that are done: there it is what they reached."""
    env = probe.env
    env.reset(seed=SEED)
    for action in probe.actions(3):
        obs, _, terminated, truncated, info = env.step(action)
        if not bool((terminated | truncated).any()) and info["final_observation"] is not obs:
            yield Finding("final_observation is obs when no env is done", "another object", "do not copy it")
            break
    for t, f in enumerate(probe.long[1:], start=1):
        done = f.copies["terminated"] | f.copies["truncated"]
        for name in [key for key in f.copies if key.startswith("obs[")]:
            if bool((rows_differ(f.copies[name], f.copies[_final_key(name)]) & ~done).any()):
                got = f"after {t} steps, {_final_key(name)} differs"
                yield Finding("final_observation equals obs in envs that are not done", got, "start from a copy of obs")
                return
    if not probe.ended:
        return
    if _moves(probe) and not any(_reached_differs(probe, t, done) for t, done in probe.ended):
        got = f"it equals obs in all {sum(int(d.sum()) for _, d in probe.ended)} episodes that ended"
        advice = "keep the observation from before the reset, and reset in the same step"
        yield Finding("final_observation of a done env is what it reached, obs the start of the next", got, advice)


def _moves(probe: Probe) -> bool:
    """Whether observations change from step to step at all."""
    pairs = zip(probe.long[:-1], probe.long[1:], strict=True)
    return any(
        bool(rows_differ(a.copies[k], b.copies[k]).any()) for a, b in pairs for k in a.copies if k.startswith("obs[")
    )


def _reached_differs(probe: Probe, step: int, done: torch.Tensor) -> bool:
    f = probe.long[step].copies
    return any(bool((rows_differ(f[k], f[_final_key(k)]) & done).any()) for k in f if k.startswith("obs["))


def check_kept(probe: Probe) -> Iterator[Finding]:
    """What was returned once is never written to again."""
    for t, f in enumerate(probe.long):
        for name, value in f.returned.items():
            if bool(rows_differ(value, f.copies[name]).any()):
                got = f"{name} of step {t} was changed by later steps"
                yield Finding("returned tensors stay as they are", got, "return a clone of internal buffers")
                return


def check_time_limit(probe: Probe) -> Iterator[Finding]:
    """No episode is longer than ``max_episode_steps``, and one that gets there is truncated."""
    limit = probe.env.max_episode_steps
    reached, finding = _at_limit(probe.long, limit)
    if not reached and isinstance(probe.env, HasExpert):  # who knows the task may last longer than chance
        reached, finding = _at_limit(probe.play_expert(probe.long_steps), limit)
    if not reached:
        raise NotApplicable(f"no episode lasted until max_episode_steps={limit} within {probe.long_steps} steps")
    if finding is not None:
        yield finding


def _at_limit(trajectory: list[Frame], limit: int) -> tuple[bool, Finding | None]:
    """Return whether an episode of the trajectory reached the limit, and what was wrong there."""
    length = torch.zeros_like(trajectory[1].copies["terminated"], dtype=torch.int64)
    reached = False
    for f in trajectory[1:]:
        length += 1
        terminated, truncated = f.copies["terminated"], f.copies["truncated"]
        wrong = (length >= limit) & ~truncated
        reached |= bool((length >= limit).any())
        if bool(wrong.any()):
            got = "terminated instead" if bool((wrong & terminated).any()) else "it goes on"
            advice = "set truncated, so that the value of the state reached is bootstrapped"
            return True, Finding(f"truncated is set at step {limit} of an episode", got, advice)
        length[terminated | truncated] = 0
    return reached, None


def check_seed(probe: Probe) -> Iterator[Finding]:
    """The same seed and actions give the same trajectory, bitwise; without a seed the streams go on."""
    where = first_difference(probe.play(SHORT), probe.play(SHORT))
    if where is not None:
        yield Finding(
            "reset(seed) and the same actions give the same", f"different: {where}", "draw from seeded streams"
        )
    probe.need_episode_seeds()
    first, second = (probe.start(None)[0].copies["info[episode_seed]"] for _ in range(2))
    if bool((first == second).any()):
        yield Finding("reset() without a seed starts new episodes", "the same episode_seed", "advance the streams")


def check_num_envs(probe: Probe) -> Iterator[Finding]:
    """Env i of a seed behaves the same whatever ``num_envs`` is."""
    if probe.factory is None:
        raise NotApplicable("no factory was given that makes the environment with another num_envs")
    probe.need_determinism()
    count = probe.env.num_envs
    with probe.factory(count + 1) as other:
        more = probe.go_on(probe.start(env=other), probe.actions(SHORT, count + 1), env=other)
    where = first_difference(probe.play(SHORT), more, slice(0, count))
    if where is not None:
        got = f"with {count} and {count + 1} envs: {where}"
        yield Finding("env i behaves the same whatever num_envs is", got, "derive each env's stream from (seed, i)")


def check_episode_seed(probe: Probe) -> Iterator[Finding]:
    """An episode that began by itself can be played again from its ``episode_seed``."""
    probe.need_episode_seeds()
    probe.need_determinism()
    t, done = next((pair for pair in reversed(probe.need_ends()) if pair[0] < probe.long_steps), (0, None))
    if done is None:
        raise NotApplicable("the only episodes that ended did so at the last step")
    seeds = probe.long[t].copies["info[episode_seed]"]
    again = probe.start(seeds)
    if bool(rows_differ(again[0].copies["info[episode_seed]"], seeds).any()):
        yield Finding("reset(seed=tensor) starts these episodes", "other episode_seed", "take the tensor as it is")
        return
    steps = min(SHORT, probe.long_steps - t)
    probe.go_on(again, probe.actions(probe.long_steps)[t : t + steps])
    alive = done.clone()
    for k, f in enumerate(again):
        original = probe.long[t + k].copies
        for name in (key for key in f.copies if key.startswith("obs[") or (k and key == "reward")):
            if bool((rows_differ(f.copies[name], original[name]) & alive).any()):
                got = f"{k} steps into the episode {name} differs"
                advice = "after a reset nothing may be left of the last episode, and no step may be made up"
                yield Finding("reset(seed=episode_seed) repeats the episode", got, advice)
                return
        if k:
            alive &= ~(original["terminated"] | original["truncated"])


def check_partial_reset(probe: Probe) -> Iterator[Finding]:
    """``reset(env_ids=...)`` leaves the other envs where they are."""
    env = probe.env
    if env.num_envs < 2:
        raise NotApplicable("it takes two envs to reset one of them")
    before = probe.play(3)[-1].copies
    obs, info = env.reset(env_ids=[0])
    after = frame(obs, info).copies
    if any(bool(rows_differ(value, before[name])[1:].any()) for name, value in after.items()):
        yield Finding("reset(env_ids=[0]) leaves the others", "their observation changed", "reset only env_ids")
    if not isinstance(before.get("info[episode_seed]"), torch.Tensor) or bool((before["info[episode_seed]"] < 0).all()):
        return
    if bool(rows_differ(after["info[episode_seed]"], before["info[episode_seed]"])[0]) is False:
        yield Finding(
            "reset(env_ids=[0]) starts a new episode there", "the same episode_seed", "enter the next episode"
        )


def check_state(probe: Probe) -> Iterator[Finding]:
    """``set_state(get_state())`` continues bitwise, for all envs or some."""
    env = probe.env
    if not env.supports_state:
        try:
            env.get_state()
        except EnvContractError as error:
            raise NotApplicable("supports_state is False") from error
        yield Finding(
            "get_state raises EnvContractError where supports_state is False", "a state", "set supports_state"
        )
        return
    probe.need_determinism()
    actions = probe.actions(2 * SHORT)
    probe.go_on(probe.start(), actions[:SHORT])
    state = env.get_state()
    if tuple(state.batch_size) != (env.num_envs,):
        yield Finding(f"a state of batch size [{env.num_envs}]", str(list(state.batch_size)), "one row per env")
        return
    kept = state.clone()
    expected = probe.go_on([], actions[SHORT:])
    env.set_state(state)
    where = first_difference(expected, probe.go_on([], actions[SHORT:]))
    if where is not None:
        got = f"different: {where}"
        yield Finding(
            "set_state(get_state()) continues bitwise", got, "save counters, random streams and warm starts too"
        )
    if any(
        bool(rows_differ(a, b).any()) for a, b in zip(state.values(True, True), kept.values(True, True), strict=True)
    ):
        yield Finding("a state is a copy", "later steps changed it", "clone what get_state returns")
    env.set_state(kept[:1], env_ids=[0])
    again = probe.go_on([], actions[SHORT : SHORT + 1])
    if where is None and first_difference(expected[:1], again, slice(0, 1)) is not None:
        yield Finding("set_state(state[:1], env_ids=[0]) restores env 0", "it went on otherwise", "honour env_ids")
