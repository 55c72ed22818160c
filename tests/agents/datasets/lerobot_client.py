"""What the real ``lerobot`` sees in folders, and writes; run by its own Python, see ``test_real_lerobot.py``.

``python lerobot_client.py open FOLDER...`` prints JSON; ``write FOLDER`` writes a small dataset.
"""

import json
import os
import sys
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "rl"))
import torchvision_names  # noqa: E402, F401 - first, as lerobot imports torchvision

# isort: split

from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402


def plain(value):
    return {"shape": list(value.shape), "sum": float(value.double().sum())} if hasattr(value, "shape") else value


def seen(folder):
    data = LeRobotDataset("some/name", root=folder, video_backend="pyav")
    steps = {"action": [0.0, 1.0 / data.fps]}
    chunks = LeRobotDataset("some/name", root=folder, video_backend="pyav", delta_timestamps=steps)
    batch = next(iter(torch.utils.data.DataLoader(chunks, batch_size=3)))
    rows = [0, len(data) // 2, len(data) - 1]
    return {
        "frames": len(data),
        "episodes": data.num_episodes,
        "fps": data.fps,
        "robot_type": data.meta.robot_type,
        "tasks": {words: int(row["task_index"]) for words, row in data.meta.tasks.iterrows()},
        "names": {name: feature["names"] for name, feature in data.features.items()},
        "rows": {row: {name: plain(value) for name, value in data[row].items()} for row in rows},
        "batch": {name: plain(value) for name, value in batch.items()},
        "stats": {name: np.asarray(entry["mean"]).ravel().tolist() for name, entry in data.meta.stats.items()},
    }


def write(folder):
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["a", "b", "c"]},
        "observation.images.top": {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
        "observation.held": {"dtype": "float32", "shape": (1,), "names": ["held"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
        "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    }
    data = LeRobotDataset.create("some/name", 20, features, root=folder, robot_type="so100", use_videos=True)
    for episode, task in enumerate(["lift it", "lower it", "lift it"]):
        for step in range(6 + episode):
            image = np.full((64, 96, 3), 40 * episode + 3 * step, np.uint8)
            state, held = np.array([episode, step, 0.5], np.float32), np.array([step % 2], np.float32)
            action, done = np.array([step, -step], np.float32), np.array([step == 5])
            frame = {"observation.state": state, "observation.images.top": image, "observation.held": held}
            data.add_frame({**frame, "action": action, "next.success": done, "task": task})
        data.save_episode()
    data.finalize()


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2])
    else:
        print(json.dumps({folder: seen(folder) for folder in sys.argv[2:]}))
