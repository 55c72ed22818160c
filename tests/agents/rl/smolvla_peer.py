"""Builds a small random SmolVLA with LeRobot itself, saves it, and writes what LeRobot does with it.

``python smolvla_peer.py FOLDER VARIANT ...``, with a Python that has lerobot, torch and transformers. It imports
nothing of this project. ``fixtures/smolvla`` is what it wrote with lerobot 0.4.4 and transformers 4.57.6.
"""

import sys
from pathlib import Path

import torch
import torchvision_names  # noqa: F401 - first, as what follows imports torchvision

# isort: split

import transformers
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
TASKS = ["push the red cube", "go", "push the cube to the blue goal\n"]
VARIANTS = {
    "plain": {},
    "special": {"add_image_special_tokens": True, "self_attn_every_n_layers": 1, "empty_cameras": 1},
    "shallow": {"num_expert_layers": 1, "self_attn_every_n_layers": -1},
    "selves": {"attention_mode": "self_attn", "prefix_length": 40, "pad_language_to": "max_length"},
}


def save_language_model(folder: Path) -> None:
    """Write config, processor and tokenizer of a tiny SmolVLM."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|im_end|>", *SPECIAL.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator(TASKS, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", extra_special_tokens=SPECIAL
    )
    text = {
        "model_type": "llama",
        "vocab_size": len(fast),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,  # one more than the policy uses
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 12,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    image = fast.convert_tokens_to_ids("<image>")
    config = transformers.SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=image, pad_token_id=0
    )
    config.save_pretrained(folder)
    transformers.SmolVLMProcessor(
        image_processor=transformers.SmolVLMImageProcessor(),
        tokenizer=fast,
        video_processor=transformers.SmolVLMVideoProcessor(),
        image_seq_len=4,
    ).save_pretrained(folder)


def main(folder: Path, variant: str) -> None:
    torch.manual_seed(0)
    save_language_model(folder / "backbone")
    settings = {
        "chunk_size": 5,
        "n_action_steps": 3,
        "max_state_dim": 8,
        "max_action_dim": 6,
        "resize_imgs_with_padding": (32, 32),
        "num_vlm_layers": 2,
        "num_steps": 3,
        **VARIANTS[variant],
    }
    visual = {"front": (3, 24, 32), "wrist": (3, 16, 16)}
    inputs = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, s) for name, s in visual.items()}
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (6,))
    config = SmolVLAConfig(
        vlm_model_name=str(folder / "backbone"),
        load_vlm_weights=False,
        device="cpu",
        push_to_hub=False,
        input_features=inputs,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (3,))},
        normalization_mapping={
            "VISUAL": NormalizationMode.IDENTITY,
            "STATE": NormalizationMode.MIN_MAX if variant == "special" else NormalizationMode.MEAN_STD,
            "ACTION": NormalizationMode.QUANTILES if variant == "special" else NormalizationMode.MEAN_STD,
        },
        **settings,
    )
    policy = SmolVLAPolicy(config)
    # Releases of transformers place patches differently: let all places look alike.
    places = policy.model.vlm_with_expert.vlm.model.vision_model.embeddings.position_embedding.weight
    places.data.copy_(places.data[:1].expand_as(places))
    for parameter in policy.parameters():  # so that every part of the network matters
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    stats = {
        key: {"mean": torch.randn(n), "std": torch.rand(n) + 0.5, "min": -torch.rand(n) - 1, "max": torch.rand(n) + 1}
        for key, n in (("observation.state", 6), ("action", 3))
    }
    for values in stats.values():
        values |= {"q01": values["min"] * 0.9, "q99": values["max"] * 0.9}
    before, after = make_smolvla_pre_post_processors(config, stats)
    for part in (policy, before, after):
        part.save_pretrained(folder)

    batch, images = len(TASKS), {f"observation.images.{name}": shape for name, shape in visual.items()}
    seen = {key: torch.rand(batch, *shape) for key, shape in images.items()}
    seen["observation.state"] = torch.randn(batch, 6)
    noise, time, target = torch.randn(batch, 5, 6), torch.rand(batch) * 0.999 + 0.001, torch.randn(batch, 5, 3)
    prepared = before({**seen, "task": TASKS, "action": target})
    with torch.no_grad():
        loss = policy.model.forward(
            *policy.prepare_images(prepared),
            prepared["observation.language.tokens"],
            prepared["observation.language.attention_mask"],
            policy.prepare_state(prepared),
            policy.prepare_action(prepared),
            noise,
            time,
        )
        del prepared["action"]
        actions = after(policy.predict_action_chunk(prepared, noise=noise))
    written = {**seen, "noise": noise, "time": time, "target": target, "loss": loss, "actions": actions}
    save_file({key: value.contiguous() for key, value in written.items()}, folder / "expected.safetensors")


if __name__ == "__main__":
    for chosen in sys.argv[2:]:
        main(Path(sys.argv[1]) / chosen, chosen)
