"""How many models of timm, torchvision and transformers are cut into units that give forward()'s bits.

54 models that any model's design was tried on in kind (18 of torchvision, 28 of timm, three transformers, five of our
own), and 30 further ones of timm and torchvision, drawn by a seeded rule. Each is judged anew on 4 samples that the
search did not see: outputs in evaluation and training, every gradient, every buffer. Needs timm, torchvision and
transformers; models run one after the other, and results are written after each.

    python -m benchmarks.found_units [--only NAME,...]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edge_client.models import library
from edge_client.models.found_units.calls import call_model
from edge_client.models.found_units.checks import Chain, buffers_of, problem_of, restore
from edge_client.models.found_units.running import PartRunner
from edge_client.models.found_units.search import SAMPLES, find_units, recorded_calls

OUT = Path(__file__).parent / "results" / "found_units.json"
SEED = 26
DRAWN = 30
MOST_PARAMETERS = 30_000_000
ENOUGH = 4  # units

TORCHVISION = {
    "alexnet": 64, "convnext_tiny": 64, "densenet121": 64, "efficientnet_b0": 64, "googlenet": 64, "mnasnet0_5": 64,
    "mobilenet_v2": 64, "mobilenet_v3_small": 64, "mobilenet_v3_large": 64, "regnet_y_400mf": 64, "resnet18": 64,
    "resnet50": 64, "resnext50_32x4d": 64, "shufflenet_v2_x0_5": 64, "squeezenet1_1": 64, "swin_t": 64, "vgg11": 64,
    "vit_b_16": 64,
}  # fmt: skip
TIMM = {
    "mobilenetv3_small_100": 64, "mobilenetv2_100": 64, "efficientnet_lite0": 64, "efficientnet_b0": 64,
    "tf_efficientnetv2_b0": 64, "resnet18": 64, "resnet26d": 64, "densenet121": 64, "vit_tiny_patch16_224": 64,
    "deit_tiny_patch16_224": 64, "mobilevit_xxs": 64, "mobilevitv2_050": 64, "convnext_atto": 64, "convnextv2_atto": 64,
    "coat_lite_tiny": 224, "coatnet_nano_rw_224": 224, "maxvit_rmlp_pico_rw_256": 256, "crossvit_tiny_240": 240,
    "ghostnet_050": 64, "hardcorenas_a": 64, "hrnet_w18_small": 64, "mixer_s32_224": 224, "poolformer_s12": 64,
    "pvt_v2_b0": 64, "regnetx_002": 64, "repvgg_a0": 64, "swin_tiny_patch4_window7_224": 224,
    "xcit_nano_12_p16_224": 64,
}  # fmt: skip


class Tokens(nn.Module):
    """A transformer of words as a classifier of whole numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model((x * 90).long() + 1).logits
        return logits


def _transformer(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        size: dict[str, Any] = {"vocab_size": 100, "num_labels": 10, "pad_token_id": 0}
        kinds: dict[str, Callable[[], nn.Module]] = {
            "gpt2": lambda: transformers.GPT2ForSequenceClassification(
                transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4, n_positions=32, **size)
            ),
            "bert": lambda: transformers.BertForSequenceClassification(
                transformers.BertConfig(
                    num_hidden_layers=4, hidden_size=64, num_attention_heads=4, intermediate_size=128, **size
                )
            ),
            "distilbert": lambda: transformers.DistilBertForSequenceClassification(
                transformers.DistilBertConfig(n_layers=4, dim=64, n_heads=4, hidden_dim=128, **size)
            ),
        }
        return Tokens(kinds[name]())

    return build


class Sequence1d(nn.Module):
    """A recurrent network over a sequence."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.recurrent, self.fc = kind(8, 32, 2, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.recurrent(x)[0][:, -1])
        return logits


class Cnn1d(nn.Module):
    """Convolutions over a sequence, with functional activations."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(8 if n == 0 else 16, 16, 3, padding=1) for n in range(5))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.relu(conv(x))
        logits: Tensor = self.fc(x.mean(dim=2))
        return logits


class UNet(nn.Module):
    """Skips across stages."""

    def __init__(self) -> None:
        super().__init__()
        widths = ((3, 8), (8, 16), (16, 32), (48, 16), (24, 8), (8, 8), (8, 8))
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)) for a, b in widths
        )
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        pool, up = nn.functional.max_pool2d, nn.functional.interpolate
        one = self.parts[0](x)
        two = self.parts[1](pool(one, 2))
        x = self.parts[3](torch.cat([up(self.parts[2](pool(two, 2)), scale_factor=2), two], 1))
        x = self.parts[4](torch.cat([up(x, scale_factor=2), one], 1))
        logits: Tensor = self.fc(self.parts[6](self.parts[5](x)).mean(dim=(2, 3)))
        return logits


class SharedWeights(nn.Module):
    """One convolution runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.again = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.fc = nn.GroupNorm(4, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for _ in range(3):
            x = torch.relu(self.norm(self.again(x)))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


Case = tuple[Callable[[], nn.Module], tuple[int, ...]]


def known_models() -> dict[str, Case]:
    """The 54."""
    cases = {f"torchvision:{name}": _named(f"torchvision:{name}", size) for name, size in TORCHVISION.items()}
    cases |= {f"timm:{name}": _named(f"timm:{name}", size) for name, size in TIMM.items()}
    cases |= {f"transformers:{name}": (_transformer(name), (12,)) for name in ("gpt2", "bert", "distilbert")}
    cases |= {"our:lstm": (lambda: Sequence1d(nn.LSTM), (20, 8)), "our:gru": (lambda: Sequence1d(nn.GRU), (20, 8))}
    return cases | {
        "our:cnn1d": (Cnn1d, (8, 40)),
        "our:unet": (UNet, (3, 32, 32)),
        "our:shared": (SharedWeights, (3, 32, 32)),
    }


def _named(name: str, size: int) -> Case:
    shape = (3, size, size)
    return lambda: library.build(name, shape, 10, library.LibraryOptions()), shape


def drawn_models() -> dict[str, Case]:
    """The others: shuffled by the seed, the first of each family, at most so many parameters, at their usual size."""
    names = [name for name in library.expand("timm:*,torchvision:*") if name not in known_models()]
    random.Random(SEED).shuffle(names)
    import timm

    chosen: dict[str, Case] = {}
    families: set[str] = {name.partition(":")[2].split("_")[0].rstrip("0123456789") for name in known_models()}
    for name in names:
        kind, _, model = name.partition(":")
        family = model.split("_")[0].rstrip("0123456789")
        if family in families or len(chosen) == DRAWN:
            continue
        size = timm.get_pretrained_cfg(model).input_size[-1] if kind == "timm" else 224
        with torch.device("meta"):
            count = sum(
                p.numel() for p in library.build(name, (3, size, size), 10, library.LibraryOptions()).parameters()
            )
        if size <= 256 and count <= MOST_PARAMETERS:
            families.add(family)
            chosen[name] = _named(name, size)
    return chosen


def judge(case: Case) -> dict[str, Any]:
    """Cut one model, and compare anew."""
    build, shape = case
    torch.manual_seed(0)
    module = build()
    began = time.process_time()
    units = find_units(module, torch.rand(SAMPLES, *shape))
    seconds = time.process_time() - began
    result: dict[str, Any] = {"units": len(units.names), "cpu_seconds": round(seconds, 2), "reason": units.reason}
    result |= {"needs_input": units.needs_input, "names": list(units.names)}
    x = torch.rand(SAMPLES, *shape, generator=torch.Generator().manual_seed(1))
    if units.is_cut:
        chain = Chain(PartRunner(module, recorded_calls(module, x)), list(units.cuts), needs_input=units.needs_input)
        result["problem"] = problem_of(chain, x)
    else:
        saved = buffers_of(module)
        module.train()
        call_model(module, x).square().sum().backward()  # it trains whole
        restore(module, saved)
        result["problem"] = ""
    return result


def main() -> int:
    """Judge all, or those that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {"known": {}, "drawn": {}}
    for part, cases in (("known", known_models()), ("drawn", drawn_models())):
        for name, case in cases.items():
            if name in results[part] or (options.only and name not in options.only.split(",")):
                continue
            try:
                results[part][name] = judge(case)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                results[part][name] = {"crash": f"{type(error).__name__}: {str(error)[:200]}"}
            print(part, name, results[part][name].get("units"), results[part][name].get("problem"), flush=True)
            OUT.write_text(json.dumps(_summed(results), indent=1) + "\n", encoding="utf-8")
    return 0


def _summed(results: dict[str, Any]) -> dict[str, Any]:
    for part in ("known", "drawn"):
        rows = results[part].values()
        cut = sum(row.get("units", 0) >= ENOUGH and row.get("problem") == "" for row in rows)
        results[f"{part}_summary"] = {
            "models": len(rows),
            "cut_into_4_or_more": cut,
            "share": round(cut / max(1, len(rows)), 4),
            "wrong": sum(bool(row.get("problem")) for row in rows),
            "crashes": sum("crash" in row for row in rows),
        }
    return results


if __name__ == "__main__":
    sys.exit(main())
