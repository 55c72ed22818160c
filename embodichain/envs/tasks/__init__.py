"""The tasks that come with the package, one file each."""

from embodichain.envs.tasks.cart_pole import CartPole
from embodichain.envs.tasks.pick_cube import PickCube
from embodichain.envs.tasks.push_cube import PushCube
from embodichain.envs.tasks.push_cube_language import PushCubeLanguage
from embodichain.envs.tasks.reach import Reach

__all__ = ["CartPole", "PickCube", "PushCube", "PushCubeLanguage", "Reach"]
