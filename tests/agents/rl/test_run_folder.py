"""What a run is called: since its creation, and as no other run."""

from __future__ import annotations

from pathlib import Path

from embodichain.agents.rl.collector import AsyncCfg
from embodichain.agents.rl.config import TrainCfg
from embodichain.agents.rl.runs import RunFolder


def test_workers_are_called_like_the_run_and_as_no_other(tmp_path: Path) -> None:
    def create(place: str) -> RunFolder:
        return RunFolder.create(TrainCfg.from_dict({"trainer": {"run_dir": str(tmp_path / place / "my run")}}))

    here, there = create("here"), create("there")
    assert here.name_of(0, 1).startswith("my_run-")
    assert here.name_of(0, 1) != there.name_of(0, 1)
    assert len({here.name_of(0, 2), here.name_of(1, 2), here.name_of(0, 1)}) == 3
    assert RunFolder.open(here.path, TrainCfg()).name_of(1, 2) == here.name_of(1, 2)
    moved = here.path.rename(tmp_path / "moved")
    assert RunFolder.open(moved, TrainCfg()).run_id == here.run_id
    assert AsyncCfg(name=here.name_of(1, 2)).name == here.name_of(1, 2)
