"""Vision-language-action models: from images, an instruction and proprioception to chunks of actions."""

from embodichain.agents.rl.models.vla.hf_backbone import HFBackboneVLA, HFBackboneVLACfg
from embodichain.agents.rl.models.vla.loading import LoRACfg, apply_lora, load_vla_model, merge_lora, save_vla_model
from embodichain.agents.rl.models.vla.model import (
    VLAModel,
    VLAModelCfg,
    get_registered_vla_model_names,
    get_vla_model_class,
    register_vla_model,
)
from embodichain.agents.rl.models.vla.openvla import OpenVLA, OpenVLACfg
from embodichain.agents.rl.models.vla.smolvla import SmolVLA, SmolVLACfg
from embodichain.agents.rl.models.vla.tiny_vla import TinyVLA, TinyVLACfg

__all__ = [
    "HFBackboneVLA",
    "HFBackboneVLACfg",
    "LoRACfg",
    "OpenVLA",
    "OpenVLACfg",
    "SmolVLA",
    "SmolVLACfg",
    "TinyVLA",
    "TinyVLACfg",
    "VLAModel",
    "VLAModelCfg",
    "apply_lora",
    "get_registered_vla_model_names",
    "get_vla_model_class",
    "load_vla_model",
    "merge_lora",
    "register_vla_model",
    "save_vla_model",
]
