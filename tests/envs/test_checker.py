"""The env checker: a sound env passes, and every kind of damage is found by the check that is about it."""

import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodichain.cli.main import main
from embodichain.envs.actions import ActionManager
from embodichain.envs.checker import CHECKS, check_env, run_checks
from embodichain.envs.gymnasium_env import GymnasiumVecEnv, make_gymnasium
from embodichain.envs.random import RandomStreams
from embodichain.envs.vec_env import VecEnv


class Walk(VecEnv):
    """A noisy walk on a line that ends beyond 2; small, and sound in every respect."""

    def __init__(self, num_envs=3, max_episode_steps=15):
        self.num_envs, self.device, self.max_episode_steps = num_envs, torch.device("cpu"), max_episode_steps
        self.observation_space = gym.spaces.Dict(
            {"walk": gym.spaces.Dict({"x": gym.spaces.Box(-9, 9, (1,))}), "time": gym.spaces.Box(0, 1, (1,))}
        )
        self.action_space = gym.spaces.Box(-1, 1, (1,))
        self.action_manager = ActionManager("push", self.action_space, num_envs, self.device)
        self.streams = RandomStreams(num_envs, seed=0)
        self.x, self.steps = torch.zeros(num_envs), torch.zeros(num_envs, dtype=torch.int64)
        self.begin(torch.arange(num_envs))

    def begin(self, ids, episodes=None):
        self.streams.next_episode(ids, episodes)
        self.x = self.x.index_copy(0, ids, self.streams.uniform(ids, 1, -1, 1)[:, 0].float())
        self.steps = self.steps.index_fill(0, ids, 0)

    def observe(self):
        time = self.steps.float().unsqueeze(1) / self.max_episode_steps
        return TensorDict({"walk": {"x": self.x.unsqueeze(1).clone()}, "time": time}, batch_size=[self.num_envs])

    def reset(self, seed=None, env_ids=None):
        ids = self.resolve_ids(env_ids)
        if isinstance(seed, int):
            self.streams.seed(ids, seed)
        self.begin(ids, seed if isinstance(seed, torch.Tensor) else None)
        return self.observe(), {"episode_seed": self.streams.episode_seed}

    def move(self, push):
        noise = self.streams.uniform(torch.arange(self.num_envs), 1, -0.1, 0.1)[:, 0].float()
        self.x = self.x + 0.5 * push[:, 0].clamp(-1, 1) + noise
        self.steps = self.steps + 1

    def ends(self):
        return self.x.abs() > 2, self.steps >= self.max_episode_steps

    def step(self, action):
        self.move(self.action_manager.unwrap(action, self.steps))
        terminated, truncated = self.ends()
        final = obs = self.observe()
        reward = -self.x.abs()
        info = {"rewards": {"near": reward}, "metrics": {"success": (self.x.abs() < 0.1).float()}}
        done = torch.nonzero(terminated | truncated).reshape(-1)
        if done.numel():
            self.begin(done)
            obs = self.observe()
        info |= {"final_observation": final, "episode_seed": self.streams.episode_seed}
        return obs, reward, terminated, truncated, info

    def get_state(self):
        state = {"x": self.x.clone(), "steps": self.steps.clone(), "streams": self.streams.state.clone()}
        return TensorDict(state, batch_size=[self.num_envs])

    def set_state(self, state, env_ids=None):
        ids = self.resolve_ids(env_ids)
        self.x, self.steps = self.x.index_copy(0, ids, state["x"]), self.steps.index_copy(0, ids, state["steps"])
        self.streams.state[ids] = state["streams"]
        return self.observe()

    def expert_action(self):
        return (-self.x).clamp(-1, 1).unsqueeze(1)

    def create_demo_action_list(self):
        return [self.expert_action()] * 3


def test_a_sound_env_passes_every_check():
    results = run_checks(Walk(), Walk)
    assert [r.name for r in results] == list(CHECKS)
    assert [r for r in results if r.problems or r.skipped] == []


# Each class breaks one promise; the value is the check that must say so.
BROKEN = {}


def breaks(check, wording=""):
    def note(cls):
        BROKEN[cls.__name__] = (cls, check, wording)
        return cls

    return note


@breaks("spaces", "gymnasium Dict")
class FlatSpace(Walk):
    def __init__(self, num_envs=3):
        super().__init__(num_envs)
        self.observation_space = gym.spaces.Box(-9, 9, (2,))


@breaks("spaces", "bounds -1 and 1")
class WideActions(Walk):
    def __init__(self, num_envs=3):
        super().__init__(num_envs)
        self.action_space = gym.spaces.Box(-2, 2, (1,))


@breaks("spaces", "torch.device")
class DeviceName(Walk):
    def __init__(self, num_envs=3):
        super().__init__(num_envs)
        self.device = "cpu"


@breaks("spaces", "max_episode_steps")
class NoLimit(Walk):
    def __init__(self, num_envs=3):
        super().__init__(num_envs)
        self.max_episode_steps = 0


@breaks("reset", "keys")
class ExtraKey(Walk):
    def observe(self):
        return super().observe().set("more", torch.zeros(self.num_envs, 1))


@breaks("reset", "torch.float32")
class Doubles(Walk):
    def observe(self):
        return super().observe().double()


@breaks("reset", "has shape")
class WrongShape(Walk):
    def observe(self):
        obs = super().observe()
        return obs.set("time", obs["time"].expand(-1, 2))


@breaks("reset", "batch size")
class NoBatch(Walk):
    def observe(self):
        return TensorDict(super().observe().to_dict(), batch_size=[])


@breaks("reset", "finite")
class NotFinite(Walk):
    def observe(self):
        obs = super().observe()
        obs["time"][0] = float("nan")
        return obs


@breaks("reset", "lies within")
class OutOfBounds(Walk):
    def observe(self):
        obs = super().observe()
        return obs.set("time", obs["time"] - 0.5)


@breaks("reset", "episode_seed")
class NoEpisodeSeed(Walk):
    def reset(self, seed=None, env_ids=None):
        return super().reset(seed, env_ids)[0], {}


class Altered(Walk):
    """Lets a subclass change what step returns."""

    def step(self, action):
        return self.alter(*super().step(action))


@breaks("step", "reward is torch.float32")
class DoubleReward(Altered):
    def alter(self, obs, reward, terminated, truncated, info):
        return obs, reward.double(), terminated, truncated, info


@breaks("step", "reward has shape")
class ColumnReward(Altered):
    def alter(self, obs, reward, terminated, truncated, info):
        return obs, reward.unsqueeze(1), terminated, truncated, info


@breaks("finite values", r"after 8 steps, reward of env 1 has NaN")
class LateNanReward(Altered):
    def alter(self, obs, reward, terminated, truncated, info):
        late = (self.steps == 8) & (torch.arange(self.num_envs) == 1)
        reward = torch.where(late, torch.nan, reward)
        return obs, reward, terminated, truncated, info | {"rewards": {"all": reward}}


@breaks("finite values", r"after 7 steps, obs\[walk/x\] of env 0 has NaN")
class LateInfinity(Walk):
    def observe(self):
        obs = super().observe()
        obs["walk", "x"][self.steps == 7] = torch.inf
        return obs


@breaks("step", "terminated is torch.bool")
class FloatFlags(Altered):
    def alter(self, obs, reward, terminated, truncated, info):
        return obs, reward, terminated.float(), truncated, info


@breaks("step", "final_observation")
class NoFinal(Altered):
    def alter(self, obs, reward, terminated, truncated, info):
        del info["final_observation"]
        return obs, reward, terminated, truncated, info


@breaks("step", "sum to the reward")
class MissingPart(Altered):
    def alter(self, obs, reward, terminated, truncated, info):
        info["rewards"]["near"] = reward - 1.0
        return obs, reward, terminated, truncated, info


@breaks("step", "all five")
class FourValues(Altered):
    def alter(self, obs, reward, terminated, truncated, info):
        return obs, reward, terminated | truncated, info


@breaks("final observation", "what it reached")
class FinalIsNext(Altered):
    """final_observation is taken after the reset."""

    def alter(self, obs, reward, terminated, truncated, info):
        return obs, reward, terminated, truncated, info | {"final_observation": obs}


@breaks("final observation", "not done")
class FinalElsewhereZero(Altered):
    """Rows of envs that are not done are zero."""

    def alter(self, obs, reward, terminated, truncated, info):
        done = terminated | truncated
        if done.any():
            final = info["final_observation"]
            info["final_observation"] = final.apply(lambda v: torch.where(done.view(-1, 1), v, 0.0))
        return obs, reward, terminated, truncated, info


@breaks("final observation", "do not copy")
class FinalCopied(Altered):
    def alter(self, obs, reward, terminated, truncated, info):
        return obs, reward, terminated, truncated, info | {"final_observation": info["final_observation"].clone()}


@breaks("kept results", r"obs\[walk/x\]")
class ReusedBuffer(Walk):
    def observe(self):
        obs = super().observe()
        if "buffer" not in vars(self):
            self.buffer = torch.zeros(self.num_envs, 1)
        self.buffer.copy_(obs["walk", "x"])
        return obs.set(("walk", "x"), self.buffer)


@breaks("time limit", "terminated instead")
class LimitIsFailure(Walk):
    def ends(self):
        far, late = super().ends()
        return far | late, torch.zeros_like(late)


@breaks("time limit", "it continues")
class LateLimit(Walk):
    def ends(self):
        return torch.zeros(self.num_envs, dtype=torch.bool), self.steps >= self.max_episode_steps + 2

    def observe(self):
        obs = super().observe()
        return obs.set("time", obs["time"].clamp(max=1.0))


@breaks("seed", "give the same")
class GlobalNoise(Walk):
    def move(self, push):
        super().move(push)
        self.x = self.x + 0.01 * torch.rand(self.num_envs)


@breaks("seed", "starts new episodes")
class SameAgain(Walk):
    def begin(self, ids, episodes=None):
        self.streams.state[ids, 1] = 0
        super().begin(ids, episodes)


@breaks("num_envs", "whatever num_envs is")
class DependsOnNumEnvs(Walk):
    def begin(self, ids, episodes=None):
        super().begin(ids, episodes)
        self.x = self.x.index_add(0, ids, torch.full((len(ids),), 0.01 * self.num_envs))


@breaks("seed", "give the same")
class Leftover(Walk):
    """The start of an episode depends on how the last one ended."""

    def begin(self, ids, episodes=None):
        left = self.x[ids]
        super().begin(ids, episodes)
        self.x = self.x.index_add(0, ids, 0.01 * left)


@breaks("episode seed", "repeats the episode")
class HiddenDraw(Walk):
    """An episode that begins by itself draws a number more than one that is asked for by its seed."""

    def begin(self, ids, episodes=None):
        super().begin(ids, episodes)
        if episodes is None:
            self.streams.uniform(ids, 1)


@breaks("episode seed", "other episode_seed")
class OtherEpisode(Walk):
    def begin(self, ids, episodes=None):
        super().begin(ids, None if episodes is None else episodes + 1)


@breaks("episode seed", "repeats the episode")
class MadeUpStep(Walk):
    """Like a vector env in next-step mode: the step after an end only resets again."""

    ended = None

    def step(self, action):
        again = self.ended
        before = self.x.clone(), self.steps.clone()
        obs, reward, terminated, truncated, info = super().step(action)
        if again is not None and again.any() and not (terminated | truncated).any():
            self.x, self.steps = (torch.where(again, a, b) for a, b in zip(before, (self.x, self.steps), strict=True))
            obs = self.observe()
            reward = torch.where(again, 0.0, reward)
            info |= {"final_observation": obs, "rewards": {}}
        self.ended = terminated | truncated
        return obs, reward, terminated, truncated, info


@breaks("partial reset", "leaves the others")
class ResetsAll(Walk):
    def reset(self, seed=None, env_ids=None):
        return super().reset(seed, None)


@breaks("state", "continues bitwise")
class ForgetsStreams(Walk):
    def get_state(self):
        return super().get_state().set("streams", torch.zeros_like(self.streams.state))


@breaks("state", "restores env 0")
class IgnoresIds(Walk):
    def set_state(self, state, env_ids=None):
        return super().set_state(state) if len(state) == self.num_envs else self.observe()


@breaks("state", "copy")
class StateIsView(Walk):
    def get_state(self):
        return super().get_state().set("streams", self.streams.state)

    def set_state(self, state, env_ids=None):
        return super().set_state(state.clone(), env_ids)


@breaks("state", "EnvContractError")
class DeniesState(Walk):
    supports_state = False


@breaks("actions", "not finite")
class TakesNan(Walk):
    def step(self, action):
        if isinstance(action, torch.Tensor):
            action = action.nan_to_num()
        return super().step(action)


@breaks("actions", "another key")
class AnyKey(Walk):
    def step(self, action):
        return super().step(next(iter(action.values())) if isinstance(action, dict) else action)


@breaks("actions", "ValueError")
class OtherError(Walk):
    def step(self, action):
        if isinstance(action, torch.Tensor) and len(action) != self.num_envs:
            raise ValueError("no")
        return super().step(action)


@breaks("actions", "changes nothing")
class MovesFirst(Walk):
    def step(self, action):
        self.streams.uniform(torch.arange(self.num_envs), 1)
        return super().step(action)


@breaks("expert", "lies in the action space")
class ShoutingExpert(Walk):
    def expert_action(self):
        return -5.0 * self.x.unsqueeze(1)


@breaks("expert", "changes nothing")
class MovingExpert(Walk):
    def create_demo_action_list(self):
        actions = [self.expert_action()]
        self.step(actions[0])
        return actions


@breaks("close", "twice")
class ClosesOnce(Walk):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("already closed")
        self.closed = True


# Damage that others rightly notice as well.
ALSO = {"SameAgain": {"partial reset"}}


@pytest.mark.parametrize("name", list(BROKEN))
def test_damage_is_found_by_the_check_that_is_about_it(name):
    cls, check, wording = BROKEN[name]
    problems = check_env(cls(), cls)
    about = [str(p) for p in problems if p.check == check]
    assert about, f"found only {[str(p) for p in problems]}"
    assert any(re.search(wording, text) for text in about), about
    others = {p.check for p in problems} - {check}
    assert others <= ALSO.get(name, set()), [str(p) for p in problems]
    for problem in problems:
        assert problem.expected
        assert problem.got
        assert problem.advice


def test_an_exception_inside_the_env_is_reported_with_its_place():
    class Raises(Walk):
        def reset(self, seed=None, env_ids=None):
            raise KeyError("lost")

    problems = check_env(Raises())
    assert [p.check for p in problems] == ["reset"]
    assert "KeyError" in problems[0].got
    assert "test_checker.py" in problems[0].got
    skipped = {r.name: r.skipped for r in run_checks(Raises())}
    assert skipped["seed"] == "not tried, because 'reset' failed"
    assert skipped["close"] is None


def test_what_cannot_be_checked_is_said():
    class Simple(Walk):
        supports_state = False
        get_state = VecEnv.get_state
        expert_action = property()  # no expert any more: the protocol asks for both

    del_expert = type("Plain", (Simple,), {})
    reasons = {r.name: r.skipped for r in run_checks(del_expert(1)) if r.skipped}
    assert "supports_state" in reasons["state"]
    assert "two envs" in reasons["partial reset"]
    assert "factory" in reasons["num_envs"]


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_adapted_gymnasium_envs_keep_the_contract(id):
    def factory(num_envs):
        return make_gymnasium(id, num_envs, max_episode_steps=30)

    assert [str(p) for p in check_env(factory(3), factory)] == []


def test_a_vector_env_that_makes_up_steps_is_found():
    """A NEXT_STEP vector env that honours masks but still resets an env again: only a replay can tell."""

    class Stubborn(gym.vector.SyncVectorEnv):
        def reset(self, *, seed=None, options=None):
            pending = self._autoreset_envs.copy()
            result = super().reset(seed=seed, options=options)
            self._autoreset_envs = pending
            return result

    make = lambda: gym.make("CartPole-v1", max_episode_steps=30)  # noqa: E731
    problems = check_env(GymnasiumVecEnv(Stubborn([make] * 3), max_episode_steps=30))
    assert "episode seed" in {p.check for p in problems}


def test_discrete_choices_out_of_range_are_tried():
    class Careless(GymnasiumVecEnv):
        def step(self, action):
            return super().step(action.clamp(max=1) if isinstance(action, torch.Tensor) else action)

    vector = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode="Disabled")
    problems = check_env(Careless(vector))
    assert [p.check for p in problems] == ["actions"]
    assert "a choice that is none" in problems[0].expected


# --- the command ------------------------------------------------------------------------------------------------------


def test_envs_list_shows_the_tasks(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["envs", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    from embodichain.envs.registration import list_envs

    for spec in list_envs():  # one line each, of which a terminal shows all
        assert [line for line in lines if line.split(" ")[0] == spec.id and len(line.split()) > 3]
    assert max(map(len, lines)) <= 80
    assert len(lines) == len(list_envs()) + 2
    assert main(["envs", "list", "--long"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("CartPoleRL", "ReachRL", "PushCubeRL", "PickCubeRL"))
    assert "delta_qpos" in shown


def test_envs_check_passes_and_fails_with_its_exit_code(capsys, tmp_path, monkeypatch):
    assert main(["envs", "check", "CartPoleRL", "--num-envs", "2"]) == 0
    assert "the contract is kept" in capsys.readouterr().out
    (tmp_path / "lossy_envs.py").write_text(
        "import gymnasium as gym, numpy as np\n"
        "class Lossy(gym.Env):\n"
        "    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)\n"
        "    action_space = gym.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return np.array([np.random.rand()], np.float32), {}\n"
        "    def step(self, action):\n"
        "        return np.array([0.5], np.float32), 1.0, False, False, {}\n"
        "gym.register('Lossy-v0', entry_point=Lossy, max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["envs", "check", "lossy_envs:Lossy-v0"]) == 2  # not trusted
    assert "--trust lossy_envs" in capsys.readouterr().err
    assert main(["envs", "check", "lossy_envs:Lossy-v0", "--trust", "lossy_envs"]) == 1
    shown = capsys.readouterr().out
    assert "fail" in shown
    assert "reset(seed)" in shown
    gym.registry.pop("Lossy-v0")


def test_observations_of_our_tasks_as_gymnasium_sees_them():
    """Our task as a Gymnasium vector env, adapted back, is the task itself."""
    from embodichain.envs.gymnasium_env import TaskGymnasiumVectorEnv
    from embodichain.envs.registration import make

    there_and_back = GymnasiumVecEnv(TaskGymnasiumVectorEnv("CartPoleRL", num_envs=3, max_episode_steps=8))
    assert there_and_back.max_episode_steps == 8
    direct = make("CartPoleRL", num_envs=3, max_episode_steps=8)
    obs, info = there_and_back.reset(seed=1)
    same, _ = direct.reset(seed=info["episode_seed"])
    assert torch.equal(obs["robot", "qpos"], same["robot", "qpos"])
    for t in range(20):
        action = torch.from_numpy(np.sin(np.arange(3, dtype=np.float32) + t)[:, None])
        obs, reward, terminated, truncated, info = there_and_back.step(action)
        _, reward_, terminated_, truncated_, info_ = direct.step(action)
        assert torch.equal(reward, reward_)
        assert torch.equal(terminated, terminated_)
        assert torch.equal(truncated, truncated_)
        for key in (("robot", "qpos"), ("robot", "qvel")):
            assert torch.equal(info["final_observation"][key], info_["final_observation"][key])
        done = torch.nonzero(terminated | truncated).reshape(-1)
        if done.numel():
            direct.reset(seed=info["episode_seed"][done], env_ids=done)
    assert there_and_back.step(action)[4]["metrics"].keys() == {"success"}
