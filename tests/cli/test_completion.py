"""The script that completes commands and options, as bash runs it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from embodichain.cli.main import main


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_fields_and_names(tmp_path, capfd):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capfd.readouterr().out)

    def complete(*words: str) -> list[str]:
        call = 'COMP_WORDS=(embodichain "$@"); COMP_CWORD=$#; _embodichain; printf "%s\\n" "${COMPREPLY[@]}"'
        code = f"source {script}; {call}"
        done = subprocess.run(
            ["bash", "-c", code, "bash", *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert complete("tr") == ["train"]
    assert complete("train", "--policy.memory.t") == ["--policy.memory.type"]
    assert complete("train", "--algorithm.cfg.learn") == ["--algorithm.cfg.learning_rate"]
    assert complete("train", "PushCubeR") == ["PushCubeRL"]
    assert complete("imitate", "--source.stream.num_w") == ["--source.stream.num_workers"]
    assert complete("envs", "ch") == ["check"]
    assert complete("play", "--video-e") == ["--video-episodes"]
    assert complete("stream", "--gym_config.num_e") == ["--gym_config.num_envs"]
    assert complete("eval", "comp") == ["completion.bash"]
