"""OnlineDataset as others' training loops use it: accelerate, and the Trainer of transformers."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_envs import check_chunks, stream_settings
from tensordict import TensorDict
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from embodichain.agents.datasets import OnlineDataset, UniformChunkSampler
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from tests.programs import run_torchrun

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def engine() -> Iterator[OnlineDataEngine]:
    with OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(refill_threshold=100_000))) as engine:
        yield engine


def as_batch(nested: dict[str, Any]) -> TensorDict:
    return TensorDict(nested, batch_size=nested["action"].shape[:2])


def test_a_transform_may_make_plain_dicts(engine: OnlineDataEngine) -> None:
    """Also of chunks whose length varies, which need no mask while nothing pads them."""
    for size in (4, UniformChunkSampler(2, 5)):
        chunk = next(iter(OnlineDataset(engine, size, transform=TensorDict.to_dict)))
        assert type(chunk) is dict
        assert type(chunk["observation"]) is dict
        check_chunks(as_batch(default_collate([chunk])))


@pytest.mark.extra("vla")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_mode", [False, True])
def test_accelerate_prepares_a_loader_of_plain_dicts(engine: OnlineDataEngine, batch_mode: bool, workers: int) -> None:
    from accelerate import Accelerator

    dataset = OnlineDataset(engine, 4, batch_size=8 if batch_mode else None, transform=TensorDict.to_dict)
    loader = DataLoader(dataset, batch_size=None if batch_mode else 8, num_workers=workers)
    for batch in itertools.islice(Accelerator(cpu=True).prepare(loader), 3):
        assert batch["action"].shape[:2] == (8, 4)
        check_chunks(as_batch(batch))


@pytest.mark.extra("vla")
@pytest.mark.parametrize("batch_mode", [False, True])
def test_accelerate_leaves_tensordicts_alone_that_it_does_not_dispatch(
    engine: OnlineDataEngine, batch_mode: bool
) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    dataset = OnlineDataset(engine, 4, batch_size=8 if batch_mode else None)
    for batch in itertools.islice(accelerator.prepare(DataLoader(dataset, batch_size=None if batch_mode else 8)), 3):
        assert isinstance(batch, TensorDict)
        assert batch.batch_size == torch.Size([8, 4])
        check_chunks(batch)


RANK = """
import itertools, json, sys
from pathlib import Path
from accelerate import Accelerator
from stream_envs import stream_settings
from tensordict import TensorDict
from torch.utils.data import DataLoader
from embodichain.agents.datasets import OnlineDataset
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg

accelerator = Accelerator(cpu=True)
engine = OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(refill_threshold=100_000)))
if accelerator.is_main_process:
    engine.start()
dataset = OnlineDataset(engine, 4, batch_size=8, transform=TensorDict.to_dict)
loader = accelerator.prepare(DataLoader(dataset, batch_size=None))
actions = [batch["action"].tolist() for batch in itertools.islice(loader, 2)]
Path(f"{sys.argv[1]}/{accelerator.process_index}.json").write_text(json.dumps(actions))
accelerator.wait_for_everyone()
engine.stop()
"""


@pytest.mark.extra("vla")
def test_accelerate_hands_the_batches_of_one_engine_to_all_processes(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    words = ["--nproc-per-node=2", "--rdzv-backend=loopback", str(script), str(tmp_path)]
    forked = "from tests.programs import fork_ranks; fork_ranks(); from torch.distributed import run; run.main()"
    done = run_torchrun("-c", forked, *words, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    drawn = [torch.tensor(json.loads((tmp_path / f"{rank}.json").read_text())) for rank in range(2)]
    assert [actions.shape for actions in drawn] == [(2, 8, 4, 2)] * 2
    assert len(torch.cat(drawn).flatten(1).unique(dim=0)) == 4  # each has batches of its own


class Cloned(nn.Module):
    """Predicts actions from states; keeps the shapes that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, observation: dict[str, Tensor], action: Tensor, **_: Tensor) -> dict[str, Tensor]:
        self.shapes.append(tuple(action.shape))
        return {"loss": (self.layer(observation["state"] / 1e6) - action).square().mean()}


@pytest.mark.extra("vla")
@pytest.mark.parametrize("batch_mode", [False, True])
def test_the_trainer_of_transformers_trains_on_a_stream(
    engine: OnlineDataEngine, tmp_path: Path, batch_mode: bool
) -> None:
    from transformers import Trainer, TrainingArguments

    class InBatches(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size=None))

    model, size = Cloned(), 8 if batch_mode else None
    before = model.layer.weight.clone()
    arguments = TrainingArguments(
        str(tmp_path), max_steps=5, per_device_train_batch_size=8, report_to=[], use_cpu=True, save_strategy="no"
    )
    dataset = OnlineDataset(engine, 4, batch_size=size, transform=TensorDict.to_dict)
    trainer = (InBatches if batch_mode else Trainer)(
        model, arguments, train_dataset=dataset, data_collator=default_collate
    )
    result = trainer.train()
    assert result.global_step == 5
    assert 0.0 < result.training_loss < float("inf")
    assert model.shapes == [(8, 4, 2)] * 5
    assert not torch.equal(model.layer.weight, before)
