"""From the command line and a file to a config, and the messages about mistakes in them."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest
import torch

import embodichain
from embodichain.agents.rl.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from embodichain.agents.rl.config import TrainCfg, complete, load_train_config, num_iterations, override
from embodichain.agents.rl.models import get_registered_policy_names
from embodichain.agents.rl.runs import read_metrics
from embodichain.agents.rl.train import main, make_eval_env, parse_args, report, resume_training, train_from_config
from embodichain.agents.rl.trainer import TrainingResult
from embodichain.cli.main import main as command_line
from embodichain.config import load_config
from embodichain.envs.task_env import TaskEnv
from embodichain.errors import ConfigError, TrustedModuleError, UnknownNameError, UntrustedModuleError
from embodichain.extras import check_trusted, import_trusted
from tests.agents.rl.training_cases import train_config, write_config
from tests.programs import run_program

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs" / "agents" / "rl").rglob("train_config*.json"))


def loaded(tmp_path, words=(), **changes) -> TrainCfg:
    return override(load_train_config(write_config(tmp_path / "c.json", tmp_path / "run", **changes)), list(words))


# --- the command line ---------------------------------------------------------------------------------------------


def test_command_line_is_taken_apart():
    args = parse_args(["c.json", "--trainer.num_envs", "128", "--trust", "mine", "--algorithm.cfg.gamma", "0.9"])
    assert (args.config, args.resume, args.trust) == (Path("c.json"), None, ["mine"])
    assert args.overrides == ["--trainer.num_envs", "128", "--algorithm.cfg.gamma", "0.9"]
    assert parse_args(["--config", "c.json"]).config == Path("c.json")
    assert parse_args(["--resume", "run", "--trust", "a", "--trust", "b"]).trust == ["a", "b"]


def test_distributed_is_what_torchrun_does(monkeypatch, tmp_path):
    assert parse_args(["c.json"]).distributed is None
    assert parse_args(["c.json", "--distributed", "--trainer.seed", "1"]).overrides == ["--trainer.seed", "1"]
    with pytest.raises(ConfigError, match=r"torchrun --nproc-per-node=\S+ -m embodichain train"):
        main(["c.json", "--distributed"])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"no-distributed.*without torchrun"):
        main(["c.json", "--no-distributed"])
    with pytest.raises(ConfigError, match=r"no such file"):  # what comes next
        main([str(tmp_path / "c.json"), "--distributed"])


@pytest.mark.parametrize("words", [[], ["c.json", "--resume", "run"], ["c.json", "--config", "d.json"], ["--config"]])
def test_command_line_needs_one_config_or_run(words):
    with pytest.raises(ConfigError, match="command line"):
        parse_args(words)


def test_help_is_there_without_a_config(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "--resume RUN" in capsys.readouterr().out


def test_help_with_a_config_lists_every_field(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(write_config(tmp_path / "c.json", tmp_path / "run")), "--help"])
    assert stop.value.code == 0
    listed = capsys.readouterr().out
    for field in ("--trainer.num_envs", "--algorithm.cfg.clip_coef", "--trainer.gym_config.env.substeps"):
        assert field in listed


def test_any_field_can_be_overridden(tmp_path):
    words = ["--trainer.num_envs", "16", "--algorithm.cfg.gamma", "0.9", "--trainer.gym_config.env.substeps", "5"]
    cfg = loaded(tmp_path, [*words, "--policy.actor.hidden_sizes", "[7, 7]", "--trainer.seed", "3"])
    assert cfg.trainer.num_envs == cfg.trainer.gym_config["num_envs"] == 16
    assert cfg.algorithm.cfg["gamma"] == 0.9
    assert cfg.trainer.gym_config["env"]["substeps"] == 5
    assert cfg.policy["actor"]["hidden_sizes"] == [7, 7]
    assert cfg.trainer.gym_config["seed"] == 3


def test_the_algorithm_learns_where_the_policy_acts(tmp_path):
    assert loaded(tmp_path, ["--trainer.device", "cuda"]).algorithm.cfg["device"] == "cuda"
    apart = loaded(tmp_path, ["--trainer.device", "cuda", "--algorithm.cfg.device=cpu"])
    assert (apart.trainer.device, apart.algorithm.cfg["device"]) == ("cuda", "cpu")
    given = loaded(tmp_path, ["--trainer.device", "cuda"], algorithm={"cfg": {"device": "cuda:1"}})
    assert given.algorithm.cfg["device"] == "cuda:1"


def test_collection_in_a_cluster_is_one_flag(tmp_path):
    words = ["--trainer.collector", "ray", "--trainer.collector.num_workers", "2"]
    collector = loaded(tmp_path, words).trainer.collector
    assert (collector.worker, collector.num_workers) == ("ray", 2)


@pytest.mark.parametrize(("model_type", "mode"), [("vla", "async"), ("standard", "sync"), (None, "sync")])
def test_model_type_is_an_alias_of_the_mode(tmp_path, model_type, mode):
    in_file = {} if model_type is None else {"model_type": model_type}
    flags = [] if model_type is None else ["--trainer.model_type", model_type]
    for cfg in (loaded(tmp_path, trainer=in_file), loaded(tmp_path, flags)):
        assert (cfg.trainer.collector.mode, cfg.trainer.model_type) == (mode, None)
        assert cfg.trainer.collects_async is (mode == "async")
    other = "sync" if mode == "async" else "async"
    changed = loaded(tmp_path, ["--trainer.collector.mode", other], trainer=in_file)
    assert changed.trainer.collector.mode == other


def test_a_run_saved_with_a_model_type_resumes_as_it_was(tmp_path):
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iterations": 1, "model_type": "vla"})
    train_from_config(config)
    checkpoint = find_checkpoint(tmp_path / "run")
    state = load_checkpoint(checkpoint)
    state["config"]["trainer"]["model_type"] = "vla"  # as earlier versions saved it
    del state["config"]["trainer"]["collector"]["mode"]
    save_checkpoint(checkpoint, state)
    resume_training(tmp_path / "run", ["--trainer.iterations", "2"])
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum("async/lag_max" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("ranks", "here", "words"),
    [
        (1, 1, "embodichain"),
        (2, 2, "torchrun --nproc-per-node=2 -m embodichain"),
        (4, 2, "torchrun ... -m embodichain"),
    ],
)
def test_an_interrupted_run_says_how_to_continue(monkeypatch, ranks, here, words):
    launched = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": here, "MASTER_ADDR": "box", "MASTER_PORT": 1}
    for name, value in launched.items() if ranks > 1 else ():
        monkeypatch.setenv(name, str(value))
    told = report(TrainingResult(Path("runs/a"), 64, 2, 1.0, "interrupted", None)).splitlines()
    assert told[-1] == f"continue with: {words} train --resume runs/a"


def test_module_and_command_train_alike(tmp_path):
    for name, command in (
        ("module", ["embodichain.agents.rl.train", "--config"]),
        ("command", ["embodichain", "train"]),
    ):
        config = write_config(tmp_path / f"{name}.json", tmp_path / name, trainer={"iterations": 1})
        done = run_program("-m", *command, config, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert f"run: {tmp_path / name}" in done.stderr
    a, b = (load_checkpoint(find_checkpoint(tmp_path / name))["random"]["torch"] for name in ("module", "command"))
    assert a.equal(b)


def test_the_path_from_the_command_to_the_gradient_step_is_short(tmp_path, monkeypatch):
    """Seven functions of this package, five of them down to the algorithm's update, and then the optimiser's step."""
    package, step = str(Path(embodichain.__file__).parent), torch.optim.Adam.step
    paths: list[list[str]] = []

    def counted(self, *args, **kwargs):
        frames = [frame for frame in inspect.stack(context=0) if frame.filename.startswith(package)]
        paths.append([f"{Path(frame.filename).stem}.{frame.function}" for frame in reversed(frames)])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", counted)
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iterations": 1, "enable_eval": False})
    assert command_line(["train", str(config)]) == 0
    path = paths[0]
    assert path[:5] == ["main.main", "train.main", "train.train_from_config", "trainer.train", "ppo.update"]
    assert len(path) + 1 <= 8, path


def test_wrong_field_ends_with_a_message_and_code_2(tmp_path):
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iteration": 5})
    done = run_program("-m", "embodichain.agents.rl.train", "--config", config)
    assert done.returncode == 2
    assert "trainer.iteration: unknown key" in done.stderr
    assert "'iterations'" in done.stderr
    assert "Traceback" not in done.stderr


# --- the file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"trainer": {"num_envs": "8"}}, ConfigError, r"trainer\.num_envs: expected an integer"),
        ({"trainer": {"model_type": "vlaa"}}, ConfigError, r"trainer\.model_type: expected"),
        ({"trainer": {"iterations": None}}, ConfigError, "expected iterations, total_steps or max_seconds"),
        ({"trainer": {"enable_eval": False, "target_success": 0.9}}, ConfigError, "a target is judged by evaluations"),
        ({"trainer": {"exp_name": "../../elsewhere"}}, ConfigError, r"trainer\.exp_name"),
        ({"trainer": {"gym_config": {"id": "CartPoleLR"}}}, UnknownNameError, "CartPoleRL"),
        ({"trainer": {"gym_config": {"env": {"substep": 3}}}}, ConfigError, "substeps"),
        ({"algorithm": {"name": "pop"}}, UnknownNameError, "unknown algorithm 'pop'.*'ppo'"),
        ({"algorithm": {"cfg": {"gama": 0.9}}}, ConfigError, r"gama: unknown key.*'gamma'"),
        ({"algorithm": {"cfg": {"gamma": 1.5}}}, ConfigError, "gamma"),
        ({"policy": {"name": "actor_critik"}}, UnknownNameError, "unknown policy 'actor_critik'.*'actor_critic'"),
        ({"policy": {"actor": {"activation": "rellu"}}}, ConfigError, "unknown activation 'rellu'.*'relu'"),
        ({"optimizer": {}}, ConfigError, "optimizer: unknown key"),
    ],
)
def test_mistakes_are_named(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", **changes))


def test_environment_is_a_file_beside_the_config_an_id_or_inline(tmp_path, monkeypatch):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "gym.json").write_text(json.dumps({"id": "CartPoleRL", "max_episode_steps": 33, "num_envs": 4}))
    data = train_config(tmp_path / "run")
    del data["trainer"]["num_envs"]
    data["trainer"]["gym_config"] = "gym.json"
    (folder / "c.json").write_text(json.dumps(data))
    monkeypatch.chdir(tmp_path)
    cfg = override(load_train_config("configs/c.json"), [])
    assert cfg.trainer.gym_config["max_episode_steps"] == 33
    assert cfg.trainer.num_envs == 4
    data["trainer"]["gym_config"] = "CartPoleRL"
    assert complete(TrainCfg.from_dict(data)).trainer.gym_config["max_episode_steps"] == 500
    data["trainer"]["gym_config"] = "elsewhere.json"
    with pytest.raises(ConfigError, match="no such file"):
        complete(TrainCfg.from_dict(data))


def test_gymnasium_keeps_its_own_time_limit(tmp_path):
    cfg = loaded(tmp_path)
    cfg = override(cfg.replace(trainer=cfg.trainer.replace(gym_config={"id": "CartPole-v1"})), [])
    with make_eval_env(cfg) as env:
        assert env.max_episode_steps == 500


def test_evaluation_environment_has_its_own_settings(tmp_path):
    settings = {"eval_gym_config": {"max_episode_steps": 7}, "num_eval_episodes": 3, "num_eval_envs": 2}
    cfg = loaded(tmp_path, trainer=settings)
    with make_eval_env(cfg) as env:
        assert (env.num_envs, env.max_episode_steps) == (2, 7)


def test_whichever_limit_comes_first_ends_the_training(tmp_path):
    settings = loaded(tmp_path, trainer={"iterations": 10, "total_steps": 500}).trainer  # 128 steps per rollout
    assert num_iterations(settings) == 4
    assert num_iterations(settings.replace(total_steps=None)) == 10
    assert num_iterations(settings.replace(total_steps=None, iterations=None)) is None


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_shipped_configs_train(tmp_path, path):
    if load_config(path)["trainer"].get("device") == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    words = ["--trainer.iterations", "1", "--trainer.enable_eval", "false", "--trainer.target_return", "None"]
    words += ["--trainer.target_success", "None", "--trainer.buffer_size", "4", "--trainer.num_envs", "16"]
    if load_config(path)["algorithm"]["name"] == "distill":  # by the teacher that the config beside it trains
        train_from_config(path.with_name("train_config.json"), [*words, "--trainer.run_dir", str(tmp_path / "teacher")])
        words += ["--algorithm.cfg.teacher", str(tmp_path / "teacher")]
    result = train_from_config(path, [*words, "--trainer.run_dir", str(tmp_path / "run")])
    policy = load_config(path)["policy"]
    model = policy.get("vla_config", {}).get("model_config", policy)
    assert result.global_step == 64 * model.get("chunk_size", 1)


# --- trust --------------------------------------------------------------------------------------------------------

MODULE = """
from pathlib import Path
from embodichain.agents.rl.models import ActorOnly, register_policy
register_policy("{name}_policy", type("Mine", (ActorOnly,), {{}}))
Path(__file__).with_suffix(".ran").touch()
"""


def test_config_alone_imports_nothing(tmp_path):
    (tmp_path / "mine_a.py").write_text(MODULE.format(name="mine_a"))
    settings = {"import_modules": ["mine_a"], "iterations": 1}
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer=settings, policy={"name": "mine_a_policy"})
    with pytest.raises(UntrustedModuleError, match=r"c\.json names the module 'mine_a'.*--trust mine_a"):
        train_from_config(config)
    assert not (tmp_path / "mine_a.ran").exists()


def test_trusted_module_beside_the_config_is_imported(tmp_path):
    (tmp_path / "mine_b.py").write_text(MODULE.format(name="mine_b"))
    data = train_config(tmp_path / "run", trainer={"import_modules": ["mine_b"], "iterations": 1})
    data["policy"] = {"name": "mine_b_policy"}
    data["algorithm"] = {"name": "grpo", "cfg": {"group_size": 4}}
    (tmp_path / "c.json").write_text(json.dumps(data))
    assert train_from_config(tmp_path / "c.json", trusted_modules=["mine_b"]).iteration == 1
    assert (tmp_path / "mine_b.ran").exists()
    assert str(tmp_path) == sys.path.pop()  # behind all others


def test_module_that_is_nowhere_is_named(tmp_path):
    with pytest.raises(
        UnknownNameError, match=r"no module 'mine_c' on Python's path, nor in .*: --trust some/where/mine_c\.py"
    ):
        import_trusted(["mine_c"], [tmp_path])


def test_module_can_be_given_as_a_file(tmp_path):
    (tmp_path / "mine_e.py").write_text(MODULE.format(name="mine_e"))
    check_trusted(["mine_e"], [str(tmp_path / "mine_e.py")], "config")
    import_trusted([str(tmp_path / "mine_e.py")])
    assert "mine_e_policy" in get_registered_policy_names()


def test_module_that_fails_is_not_half_imported(tmp_path):
    (tmp_path / "mine_d.py").write_text("raise RuntimeError('broken')")
    with pytest.raises(
        TrustedModuleError, match=r"'mine_d' cannot be imported: RuntimeError: broken \(.*mine_d\.py, line 1\)"
    ):
        import_trusted(["mine_d"], [tmp_path])
    assert "mine_d" not in sys.modules


def test_environments_are_closed_when_a_run_cannot_be_built(tmp_path, monkeypatch):
    closed = []
    close = TaskEnv.close
    monkeypatch.setattr(TaskEnv, "close", lambda env: (closed.append(env.num_envs), close(env)))
    overrides = ["--trainer.num_envs", "256", "--trainer.num_eval_envs", "2", "--trainer.buffer_size", str(2**24)]
    with pytest.raises(ConfigError, match="buffer_size") as caught:
        train_from_config("CartPoleRL", [*overrides, "--trainer.run_dir", str(tmp_path / "run")])
    assert caught.tb is not None  # whoever keeps the traceback keeps the frames
    assert sorted(closed) == [2, 256]
