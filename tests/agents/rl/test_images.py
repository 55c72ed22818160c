"""Images in every layout of Gymnasium's wrappers: channels first or last, grey, stacked frames, bytes or floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import FrameStackObservation, GrayscaleObservation
from tensordict import TensorDict

from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.checkpoint import load_policy
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.export import export_onnx
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.mlp import ImageEncoder, ImageEncoderCfg, ImageLayout
from embodichain.agents.rl.models.observation import FeatureEncoder
from embodichain.agents.rl.models.vla.tiny_vla import TinyVLA
from embodichain.agents.rl.runs import read_metrics
from embodichain.agents.rl.train import resume_training, train_from_config
from embodichain.agents.rl.utils import torch_threads
from embodichain.envs.gymnasium_env import GymnasiumVecEnv
from embodichain.errors import ConfigError, ObservationError
from tests.agents.rl.helpers import make_policy, network

ROOT = Path(__file__).parents[3]
SHAPES = {  # the layout of one observation, as an order of axes from [stack, channels, height, width]
    "[H, W]": ((20, 24), 1, lambda x: x[0, 0]),
    "[H, W, 3]": ((20, 24, 3), 3, lambda x: x[0].permute(1, 2, 0)),
    "[3, H, W]": ((3, 20, 24), 3, lambda x: x[0]),
    "[4, H, W], stacked grey": ((4, 20, 24), 4, lambda x: x[0]),
    "[H, W, 12], stacked along channels": ((20, 24, 12), 12, lambda x: x[0].permute(1, 2, 0)),
    "[4, H, W, 3], stacked RGB": ((4, 20, 24, 3), 3, lambda x: x.permute(0, 2, 3, 1)),
    "[4, 3, H, W], stacked RGB": ((4, 3, 20, 24), 3, lambda x: x),
    "[4, H, W, 1], stacked grey": ((4, 20, 24, 1), 1, lambda x: x.permute(0, 2, 3, 1)),
}


def encoder_of(space: gym.Space[Any], **settings: Any) -> FeatureEncoder:
    torch.manual_seed(0)
    policy = build_policy(
        {"name": "actor_critic", "image_encoder": {"channels": [4, 4], "feature_dim": 6, **settings}},
        space,
        gym.spaces.Discrete(2),
        "cpu",
    )
    return policy.encoder


def expected_features(encoder: FeatureEncoder, image: torch.Tensor) -> torch.Tensor:
    """Return the features of images ``[batch, channels, height, width]`` in [0, 1], by the plain definition."""
    own = encoder.image_encoders[0]
    return own.project(own.convolutions(image).flatten(1)).relu()


@pytest.mark.parametrize(
    ("layout", "dtype"), [(layout, np.uint8) for layout in SHAPES] + [(layout, np.float32) for layout in [*SHAPES][1:]]
)
def test_every_layout_is_seen_as_what_it_is(layout: str, dtype: type) -> None:
    shape, channels, arranged = SHAPES[layout]
    stack = 4 if len(shape) == 4 else 1
    high = 255 if dtype is np.uint8 else 1
    encoder = encoder_of(gym.spaces.Box(0, high, shape, dtype))
    plain = torch.randint(0, 256, (5, stack, channels, 20, 24), generator=torch.Generator().manual_seed(0))
    images = torch.stack([arranged(one) for one in plain])
    assert images.shape[1:] == shape
    given = images.to(torch.uint8) if dtype is np.uint8 else images / 255.0
    with torch.no_grad():
        features, _ = encoder(given)
        wanted = expected_features(encoder, plain.flatten(1, 2) / 255.0)
    assert encoder.public_dim == 6
    assert torch.allclose(features, wanted, atol=1e-5)
    assert features.std() > 1e-3


def test_bytes_of_other_ranges_are_scaled_by_their_own() -> None:
    encoder = encoder_of(gym.spaces.Box(0, 10, (8, 8, 3), np.uint8))
    image = torch.full((1, 8, 8, 3), 10, dtype=torch.uint8)
    with torch.no_grad():
        wanted = expected_features(encoder, torch.ones(1, 3, 8, 8))
        assert torch.allclose(encoder(image)[0], wanted, atol=1e-6)
    board = FeatureEncoder(gym.spaces.Box(0, 2, (3, 3), np.uint8))  # noughts and crosses
    assert (board.images, board.public_dim) == ([], 9)
    ram = FeatureEncoder(gym.spaces.Box(0, 255, (128,), np.uint8))
    assert (ram.images, ram.public_dim) == ([], 128)
    vectors = FeatureEncoder(gym.spaces.Box(0, 1, (84, 84), np.float32))
    assert vectors.images == []
    vectors = FeatureEncoder(gym.spaces.Box(-np.inf, np.inf, (4, 84, 84), np.float32))
    assert vectors.images == []


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((8, 8, 111), (111, 8, 8)),  # the planes of a chess board
        ((111, 8, 8), (111, 8, 8)),
        ((4, 4, 16), (16, 4, 4)),
        ((19, 19, 17), (17, 19, 19)),
        ((3, 4, 4), (3, 4, 4)),
        ((4, 4, 3), (3, 4, 4)),
        ((2, 8, 8, 20), (40, 8, 8)),
        ((2, 20, 8, 8), (40, 8, 8)),
        ((6, 8, 20), (6, 8, 20)),  # no two sides are equal: the smaller one
    ],
)
def test_two_equal_neighbours_are_height_and_width(shape: tuple[int, ...], sizes: tuple[int, int, int]) -> None:
    assert ImageLayout.of(shape, "board").sizes == sizes


def test_what_cannot_be_told_is_refused_until_it_is_said() -> None:
    cube = gym.spaces.Dict({"depth": gym.spaces.Box(0, 255, (16, 16, 16), np.uint8)})
    with pytest.raises(ConfigError, match=r"depth: .*\[16, 16, 16\].*image_encoder.layout"):
        encoder_of(cube)
    shapes = {layout: encoder_of(cube, layout=layout) for layout in ("channels_first", "channels_last")}
    image = TensorDict({"depth": torch.randint(0, 256, (2, 16, 16, 16), dtype=torch.uint8)}, [2])
    with torch.no_grad():
        first = shapes["channels_first"](image)[0]
        image["depth"] = image["depth"].permute(0, 2, 3, 1)
        assert torch.allclose(shapes["channels_last"](image)[0], first, atol=1e-6)
    with pytest.raises(ConfigError, match=r"state: expected images .*\[2, 4, 8, 8, 3\]"):
        encoder_of(gym.spaces.Dict({"state": gym.spaces.Box(0, 255, (2, 4, 8, 8, 3), np.uint8)}))


def test_several_images_of_a_dict_beside_vectors() -> None:
    parts = {
        "front": gym.spaces.Box(0, 255, (3, 16, 20), np.uint8),
        "above": gym.spaces.Box(0, 255, (16, 20), np.uint8),
        "speed": gym.spaces.Box(-1, 1, (2,), np.float32),
    }
    encoder = encoder_of(gym.spaces.Dict(parts))
    assert [entry.name for entry in encoder.images] == ["above", "front"]
    assert encoder.public_dim == 6 + 6 + 2
    obs = {name: torch.from_numpy(np.stack([part.sample(), part.sample()])) for name, part in parts.items()}
    with torch.no_grad():
        features, _ = encoder(TensorDict(obs, [2]))
    assert features.shape == (2, 14)


def test_vla_models_refuse_images_that_they_would_misread() -> None:
    for shape in ((3, 64, 64), (64, 64), (4, 64, 64, 3)):
        space = gym.spaces.Dict({"image": gym.spaces.Dict({"top": gym.spaces.Box(0, 255, shape, np.uint8)})})
        with pytest.raises(ObservationError, match=r"image/top: expected \[height, width, channels\]"):
            TinyVLA.complete_config({}, space, gym.spaces.Box(-1, 1, (2,)))


class MovingBar(gym.Env):
    """A bright bar moves left or right over an RGB screen; the action has to say where to. One frame does not tell."""

    observation_space = gym.spaces.Box(0, 255, (16, 20, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def _screen(self) -> np.ndarray:
        screen = np.full((16, 20, 3), 40, np.uint8)
        column = (self.column * 2) % 20
        screen[:, column : column + 2] = 220
        return screen

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.column, self.direction = int(self.np_random.integers(10)), int(self.np_random.integers(2))
        self.count = 0
        return self._screen(), {}

    def step(self, action: Any) -> Any:
        reward = float(self.count > 0 and int(action) == self.direction)  # at first, nothing has moved
        self.count += 1
        self.column += 2 * self.direction - 1
        return self._screen(), reward, self.count == 5, False, {}


def stacked(grey: bool) -> gym.Env:
    """Return the env as wrappers for Atari leave it: grey, and four frames at a time."""
    return FrameStackObservation(GrayscaleObservation(MovingBar()) if grey else MovingBar(), 4)


@pytest.mark.parametrize(("grey", "shape"), [(True, (4, 16, 20)), (False, (4, 16, 20, 3))])
def test_stacked_frames_tell_what_moves(grey: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    env = GymnasiumVecEnv.from_factory(lambda: stacked(grey), 32, max_episode_steps=5, seed=0)
    assert env.observation_space["state"].shape == shape
    settings = {"image_encoder": {"channels": [8, 8], "feature_dim": 32}}
    policy = make_policy(env, actor=network((32,)), critic=network((32,)), **settings)
    algorithm = PPO(PPOCfg(n_epochs=4, batch_size=160, learning_rate=3e-3, gamma=0.5, ent_coef=0.01), policy)
    collector, best = SyncCollector(env, policy), 0.0
    with torch_threads(1):
        for _ in range(40):
            rollout = collector.collect(10)
            assert rollout["observation", "state"].dtype == torch.uint8  # kept as bytes
            algorithm.update(rollout)
            best = max(best, float(collector.episodes["return"].mean()))
            if best > 3.8:
                break
    assert best > 3.8  # of 4; guessing gives 2
    env.close()


def test_the_example_of_stacked_frames_is_trained_resumed_and_loaded(tmp_path: Path) -> None:
    example = ROOT / "examples" / "agents" / "rl" / "frame_stack.json"
    trusted = [str(example.with_suffix(".py")), "frame_stack"]
    short = ["--trainer.total_steps", "2560", "--trainer.num_eval_episodes", "8"]
    result = train_from_config(example, [*short, "--trainer.run_dir", str(tmp_path / "run")], trusted)
    assert result.global_step == 2560
    assert resume_training(tmp_path / "run", ["--trainer.total_steps", "3840"], trusted).global_step == 3840
    logged = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["eval/length"] for line in logged if "eval/length" in line] == [10.0, 10.0]
    policy = load_policy(tmp_path / "run", trusted_modules=trusted)
    screens = torch.randint(0, 256, (7, 4, 24, 32), dtype=torch.uint8)
    with torch.no_grad():
        _, _, value = policy.get_action(TensorDict({"state": screens}, [7]))
    assert value.unique().numel() == 7


@pytest.mark.extra("export")
@pytest.mark.parametrize("layout", ["[H, W]", "[4, H, W], stacked grey", "[4, H, W, 3], stacked RGB", "floats"])
def test_images_of_every_layout_are_exported(tmp_path: Path, layout: str) -> None:
    shape = (3, 20, 24) if layout == "floats" else SHAPES[layout][0]
    space = gym.spaces.Box(0, 1, shape, np.float32) if layout == "floats" else gym.spaces.Box(0, 255, shape, np.uint8)
    actions = gym.spaces.Box(-1, 1, (2,), np.float32)
    small = {"type": "mlp", "hidden_sizes": [8]}
    torch.manual_seed(0)
    policy = build_policy({"name": "actor_only", "actor": small}, gym.spaces.Dict({"state": space}), actions, "cpu")
    written = export_onnx(policy, gym.spaces.Dict({"state": space}), actions, tmp_path / "p.onnx")  # compares actions
    session = pytest.importorskip("onnxruntime").InferenceSession(str(written))
    assert session.get_inputs()[0].shape[1:] == list(shape)
    assert session.get_inputs()[0].type == ("tensor(float)" if layout == "floats" else "tensor(uint8)")
    seen = np.stack([space.sample() for _ in range(3)])
    with torch.no_grad():
        wanted = policy.get_action(TensorDict({"state": torch.from_numpy(seen)}, [3]), deterministic=True)[0]
    assert np.allclose(session.run(None, {"state": seen})[0], wanted.numpy(), atol=1e-5)


def test_channels_of_zeros_for_fast_kernels_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder((20, 24, 3), ImageEncoderCfg(channels=(4, 4), feature_dim=6))
    image = torch.randint(0, 256, (5, 20, 24, 3), dtype=torch.uint8)
    expected = encoder.convolutions(encoder.layout.channels_first(image.float() / 255))
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in encoder.convolutions.parameters()]  # type: ignore[union-attr]
    encoder.zero_grad()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)  # as on a GPU, but in full precision
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda *_: torch.float32)
    got = encoder._convolve_unscaled(encoder.layout.channels_first(image))
    got.square().sum().backward()
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    for parameter, gradient in zip(encoder.convolutions.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)
