"""The play and demo commands, with and without OpenGL."""

import imageio.v3 as iio
import pytest
from PIL import Image

from embodichain.cli import demo, play
from embodichain.envs import gl_backend as gl
from embodichain.errors import ConfigError, EnvContractError, OutputError, RenderingError, UnknownNameError


@pytest.fixture
def no_gl(monkeypatch):
    """A machine on which nothing can draw."""
    monkeypatch.setattr(gl, "_found", None)
    monkeypatch.setattr(gl, "_failure", f"no OpenGL backend can draw on this machine. {gl.INSTALL_HINT}")


@pytest.fixture
def needs_gl():
    try:
        gl.choose_backend()
    except RenderingError as error:
        pytest.skip(f"needs OpenGL: {error}")


def words(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_play_prints_how_the_expert_did(capsys):
    assert play.main(["PushCubeRL", "--episodes", "6"]) == 0
    printed = words(capsys)
    assert "PushCubeRL, expert" in printed
    assert "success rate │ 100.0%" in printed
    assert "mean length" in printed


def test_play_films(capsys, tmp_path, needs_gl):
    video = tmp_path / "push.mp4"
    arguments = ["PushCubeRL", "--episodes", "2", "--video-episodes", "2", "--size", "96", "128", "--video", str(video)]
    assert play.main(arguments) == 0
    frames = iio.imread(video)
    assert frames.shape[1:] == (96, 128, 3)
    assert len(frames) > 30  # two episodes at 25 frames a second, the last frame of each held for 0.8 s
    assert frames[0].std() > 10
    assert "wrote" in words(capsys)


def test_play_without_gl_draws_from_above(capsys, tmp_path, no_gl):
    assert play.main(["PushCubeRL", "--episodes", "2", "--video", str(tmp_path / "push.mp4")]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["push.png"]
    assert Image.open(tmp_path / "push.png").size == (900, 640)
    printed = words(capsys)
    assert "libosmesa6" in printed
    assert "push.png" in printed


def test_play_without_gl_and_positions_says_so(capsys, tmp_path, no_gl):
    arguments = ["CartPoleRL", "--episodes", "1", "--policy", "random", "--video", str(tmp_path / "cart.mp4")]
    assert play.main(arguments) == 0
    assert list(tmp_path.iterdir()) == []
    assert "no trajectory plot" in words(capsys)


@pytest.mark.parametrize("policy", ["random", "zero"])
def test_play_a_gymnasium_id(capsys, policy):
    assert play.main(["CartPole-v1", "--episodes", "3", "--policy", policy]) == 0
    assert "success rate │ not reported" in words(capsys)
    assert play.main(["Pendulum-v1", "--episodes", "1", "--policy", policy]) == 0
    assert "mean length │ 200.0 steps" in words(capsys)


def test_play_repeats_itself(capsys):
    for _ in range(2):
        assert play.main(["ReachRL", "--episodes", "3", "--policy", "random", "--seed", "4"]) == 0
    first, second = (part.split("wall")[0] for part in words(capsys).split("mean return")[1:])
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["PushCub"], UnknownNameError, "PushCubeRL"),
        (["PushCubeRL", "--episodes", "0", "--speed", "0"], ConfigError, "(?s)--episodes.*--speed"),
        (["CartPole-v1"], EnvContractError, "--policy random"),
        (["PushCubeRL", "--video", "push.avi"], OutputError, ".mp4"),
    ],
)
def test_play_says_what_is_wrong(arguments, error, message):
    with pytest.raises(error, match=message):
        play.main(arguments)


def test_demo_films(capsys, tmp_path, needs_gl):
    assert demo.main(["--episodes", "1", "--num-envs", "1", "--output", str(tmp_path / "demo")]) == 0
    names = sorted(p.name for p in (tmp_path / "demo").iterdir())
    assert names == ["push_cube.mp4", "push_cube.png", "push_cube_from_above.png"]
    assert "success rate │ 100.0%" in words(capsys)


def test_demo_never_fails_for_want_of_a_screen(capsys, tmp_path, no_gl):
    assert demo.main(["--episodes", "2", "--num-envs", "2", "--output", str(tmp_path)]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["push_cube.png"]
    assert "apt-get install libosmesa6" in words(capsys)
