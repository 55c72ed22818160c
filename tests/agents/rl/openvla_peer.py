"""Builds a small random OpenVLA of timm's and transformers' own classes, saves it, and writes what these do with it.

``python openvla_peer.py FOLDER``, with a Python that has timm, torch and transformers. It imports nothing of this
project. OpenVLA's own class is code that lies in its repository; how it puts the parts together is written out here.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
import torchvision_names  # noqa: F401 - first, as what follows imports torchvision

# isort: split

import timm
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from timm.models.vision_transformer import LayerScale
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import nn

TASKS = ["Push the red cube", "go"]
IDS = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
MEANS = [[0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5]]
STDS = [[0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5]]
STATS = {
    "first": {"action": {"q01": [-0.5, -1.0, 0.0], "q99": [0.5, 2.0, 1.0], "mask": [True, True, False]}},
    "second": {"action": {"q01": [0.0] * 7, "q99": [1.0] * 7}},
}
BINS, PADDED = 16, 8


def main(folder: Path) -> None:
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, special_tokens=["<s>"])
    tokenizer.train_from_iterator(TASKS, trainer)
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size() + BINS + PADDED

    small = {"pretrained": False, "num_classes": 0, "img_size": 28, "embed_dim": 16, "depth": 3, "num_heads": 16}
    towers = [timm.create_model(i, **small, act_layer="gelu").eval() for i in IDS]
    text = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text)).eval()
    sizes = [32, 128, 32, 32]
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    for parameter in [p for module in (*towers, llama, *layers) for p in module.parameters()]:
        parameter.data.normal_(std=0.3)
    state = {f"projector.fc{i + 1}.{k}": v for i, layer in enumerate(layers) for k, v in layer.state_dict().items()}
    state |= {f"language_model.{key}": value for key, value in llama.state_dict().items()}
    for place, tower in zip(("featurizer", "fused_featurizer"), towers, strict=True):
        scales = {name for name, module in tower.named_modules() if isinstance(module, LayerScale)}
        for key, value in tower.state_dict().items():
            owner = key.rpartition(".")[0]
            state[f"vision_backbone.{place}.{owner + '.scale_factor' if owner in scales else key}"] = value
    save_torch_state_dict({k: v.contiguous() for k, v in state.items()}, folder, max_shard_size="100KB")
    about = {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "auto_map": {"AutoModelForVision2Seq": "modeling_prismatic.OpenVLAForActionPrediction"},
        "timm_model_ids": IDS,
        "image_sizes": [28, 28],
        "use_fused_vision_backbone": True,
        "text_config": {"model_type": "llama", **text},
        "n_action_bins": BINS,
        "pad_to_multiple_of": PADDED,
        "norm_stats": STATS,
    }
    (folder / "config.json").write_text(json.dumps(about))
    prepared = {"image_resize_strategy": "resize-naive", "means": MEANS, "stds": STDS}
    (folder / "preprocessor_config.json").write_text(json.dumps(prepared))

    images = torch.rand(len(TASKS), 3, 28, 28)
    expected = {"images": images, "tokens": [], "log_probs": []}
    with torch.no_grad():
        for row, task in enumerate(TASKS):
            patches = []
            for tower, mean, std in zip(towers, MEANS, STDS, strict=True):
                image = (images[row : row + 1] - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
                (seen,) = tower.get_intermediate_layers(image, n={len(tower.blocks) - 2})
                patches.append(seen)
            x = torch.cat(patches, dim=2)
            for i, layer in enumerate(layers):
                x = layer(x if i == 0 else nn.functional.gelu(x))
            prompt = f"In: What action should the robot take to {task.lower()}?\nOut:"
            words = llama.get_input_embeddings()(torch.tensor([tokenizer.encode(prompt).ids]))
            embedded = torch.cat([words[:, :1], x, words[:, 1:]], dim=1)
            tokens, log_probs = [], []
            for _ in range(3):
                logits = llama(inputs_embeds=embedded, use_cache=False).logits[0, -1]
                among = logits[vocabulary - PADDED - BINS : vocabulary - PADDED].log_softmax(-1)
                best = int(among.argmax())
                tokens.append(vocabulary - PADDED - BINS + best)
                log_probs.append(among[best])
                new = llama.get_input_embeddings()(torch.tensor([[tokens[-1]]]))
                embedded = torch.cat([embedded, new], dim=1)
            expected["tokens"].append(torch.tensor(tokens))
            expected["log_probs"].append(torch.stack(log_probs))
    tokens = torch.stack(expected["tokens"])
    edges = torch.linspace(-1.0, 1.0, BINS)
    centers = (edges[:-1] + edges[1:]) / 2
    normal = centers[(vocabulary - PADDED - tokens - 1).clamp(0, BINS - 2)]
    low, high, mask = (torch.tensor(STATS["first"]["action"][key]) for key in ("q01", "q99", "mask"))
    actions = torch.where(mask, 0.5 * (normal + 1.0) * (high - low + 1e-8) + low, normal)
    written = {"images": images, "actions": actions, "log_probs": torch.stack(expected["log_probs"])}
    save_file(written, folder / "expected.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
