"""``embodichain completion bash``: print a script for shell completion of commands, options, fields and names."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from embodichain.cli.main import COMMANDS
from embodichain.cli.options import loading, parse_options

_BASH = """\
# Completion of the embodichain command. Load it with: source <(embodichain completion bash)
_embodichain() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} options="" names=""
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "{commands} --help --version --traceback" -- "$word"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  else
    COMPREPLY=($(compgen -W "$names" -- "$word") $(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _embodichain embodichain
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_BY_NAME = ("play", "view", "stream", "record", "train", "imitate", "sweep", "envs")
"""Commands whose argument may be the name of an environment."""
_SUBCOMMANDS = {"envs": ("list", "check"), "robots": ("list", "check")}


@dataclass(frozen=True)
class CompletionArgs:
    """Print a script that completes commands and options: source <(embodichain completion bash)."""

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """The shell to generate the script for."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = parse_options(CompletionArgs, argv, "embodichain completion")
    with loading():
        from embodichain.envs.registration import list_envs

        names = [spec.id for spec in list_envs()]
    words = {command: [*_SUBCOMMANDS.get(command, ()), *(names if command in _BY_NAME else ())] for command in COMMANDS}
    cases = [
        f'    {command}) options="{" ".join(options)}" names="{" ".join(words[command])}" ;;'
        for command, options in _options().items()
    ]
    script = _BASH.format(commands=" ".join(COMMANDS), cases="\n".join(cases))
    print(_ZSH + script if args.shell == "zsh" else script, end="")
    return 0


def _options() -> dict[str, list[str]]:
    """Return the options of every command, including the fields of its config."""
    from embodichain.agents.engine.config import ActionSourceCfg, OnlineDataEngineCfg
    from embodichain.agents.imitation.config import ImitateCfg
    from embodichain.agents.imitation.config import schemas_of as imitation_schemas
    from embodichain.agents.rl.config import TrainCfg, schemas_of
    from embodichain.config.command_line import flags_of
    from embodichain.envs.env_cfg import GymCfg

    engine = flags_of(
        OnlineDataEngineCfg(),
        OnlineDataEngineCfg,
        (),
        {("gym_config",): (GymCfg,), ("action_config",): (ActionSourceCfg,)},
    )
    training = flags_of(TrainCfg(), TrainCfg, (), schemas_of(TrainCfg()))
    imitation = flags_of(ImitateCfg(), ImitateCfg, (), imitation_schemas(ImitateCfg()))
    fields = {
        name: [f"--{flag.name}" for flag in flags if flag.name]
        for name, flags in (("engine", engine), ("train", training), ("imitate", imitation))
    }
    more: dict[str, Iterable[str]] = {"stream": fields["engine"], "record": fields["engine"], "train": fields["train"]}
    more |= {"imitate": fields["imitate"], "sweep": fields["train"]}
    runs = ["--config", "--resume", "--trust"]
    own = {"train": [*runs, "--viewer", "--seeds", "--jobs"], "imitate": [*runs, "--dagger"]}
    return {
        command: sorted({"--help", *own.get(command, ()), *_own_options(command), *more.get(command, ())})
        for command in COMMANDS
    }


def _own_options(command: str) -> Iterator[str]:
    """Yield the options declared by the ``Args`` classes of a command's module."""
    module: Any = importlib.import_module(f"embodichain.cli.{command}")
    for name, cls in vars(module).items():
        if name.endswith("Args") and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__:
            yield from (f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(cls))
