"""Small models in the style of well-known libraries, which nobody wrote with tripwire in mind.

torchvision: layers by name in `nn.Sequential`, concatenated features, branches that only training
takes. peft: adapters in dicts, chosen by name. diffusers: configs, time embeddings, attention
processors. torch: `nn.Transformer`, recurrent layers that carry their state. Rows are like those
of architectures.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree
from models.architectures import Architecture, MakeInputs
from torch import nn

# --- torchvision ---------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    expansion: int = 1

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
        norm_layer: Callable[..., nn.Module] | None = None,
    ) -> None:
        super().__init__()
        norm_layer = norm_layer or nn.BatchNorm2d
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = norm_layer(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = norm_layer(planes)
        self.downsample = downsample
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers: tuple[int, ...] = (1, 1), num_classes: int = 10) -> None:
        super().__init__()
        self.inplanes = 8
        self.conv1 = nn.Conv2d(3, self.inplanes, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(self.inplanes)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._make_layer(8, layers[0])
        self.layer2 = self._make_layer(16, layers[1], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16 * BasicBlock.expansion, num_classes)

    def _make_layer(self, planes: int, blocks: int, stride: int = 1) -> nn.Sequential:
        downsample = None
        if stride != 1 or self.inplanes != planes * BasicBlock.expansion:
            downsample = nn.Sequential(
                nn.Conv2d(self.inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )
        layers = [BasicBlock(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes * BasicBlock.expansion
        layers += [BasicBlock(self.inplanes, planes) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def _forward_impl(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward_impl(x)


VGG_CFGS: dict[str, list[str | int]] = {"A": [8, "M", 16, "M"], "B": [8, 8, "M"]}


def _make_vgg_layers(cfg: list[str | int], batch_norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for v in cfg:
        if v == "M":
            layers += [nn.MaxPool2d(2, 2)]
        else:
            conv = nn.Conv2d(channels, int(v), 3, padding=1)
            layers += [conv, nn.BatchNorm2d(int(v))] if batch_norm else [conv]
            layers += [nn.ReLU(inplace=True)]
            channels = int(v)
    return nn.Sequential(*layers)


class VGG(nn.Module):
    def __init__(self, cfg: str = "A", dropout: float = 0.5) -> None:
        super().__init__()
        self.features = _make_vgg_layers(VGG_CFGS[cfg])
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            OrderedDict(
                fc6=nn.Linear(16 * 4, 16),
                relu6=nn.LeakyReLU(0.1),
                drop6=nn.Dropout(p=dropout),
                head=nn.Linear(16, 10),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def _make_divisible(v: float, divisor: int = 4) -> int:
    return max(divisor, int(v + divisor / 2) // divisor * divisor)


class Conv2dNormActivation(nn.Sequential):
    def __init__(self, inp: int, oup: int, kernel: int = 3, stride: int = 1, groups: int = 1):
        super().__init__(
            nn.Conv2d(inp, oup, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
            nn.BatchNorm2d(oup),
            nn.ReLU6(inplace=True),
        )
        self.out_channels = oup


class InvertedResidual(nn.Module):
    def __init__(self, inp: int, oup: int, stride: int, expand_ratio: int) -> None:
        super().__init__()
        self.stride = stride
        hidden_dim = round(inp * expand_ratio)
        self.use_res_connect = self.stride == 1 and inp == oup
        layers: list[nn.Module] = []
        if expand_ratio != 1:
            layers.append(Conv2dNormActivation(inp, hidden_dim, kernel=1))
        layers.extend(
            [
                Conv2dNormActivation(hidden_dim, hidden_dim, stride=stride, groups=hidden_dim),
                nn.Conv2d(hidden_dim, oup, 1, bias=False),
                nn.BatchNorm2d(oup),
            ]
        )
        self.conv = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, width_mult: float = 1.0) -> None:
        super().__init__()
        channel = _make_divisible(8 * width_mult)
        features: list[nn.Module] = [Conv2dNormActivation(3, channel, stride=2)]
        for t, c, s in ((1, 8, 1), (2, 12, 2), (2, 12, 1)):
            features.append(InvertedResidual(channel, c, s, t))
            channel = c
        features.append(Conv2dNormActivation(channel, 16, kernel=1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(p=0.2), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        return self.classifier(torch.flatten(x, 1))


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth_rate: int, bn_size: int, drop_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, bn_size * growth_rate, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bn_size * growth_rate)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(bn_size * growth_rate, growth_rate, 3, padding=1, bias=False)
        self.drop_rate = float(drop_rate)

    def bn_function(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))

    def forward(self, input: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        prev_features = [input] if isinstance(input, torch.Tensor) else input
        new_features = self.conv2(self.relu2(self.norm2(self.bn_function(prev_features))))
        if self.drop_rate > 0:
            new_features = F.dropout(new_features, p=self.drop_rate, training=self.training)
        return new_features


class DenseBlock(nn.ModuleDict):
    def __init__(self, num_layers: int, inputs: int, bn_size: int, growth_rate: int) -> None:
        super().__init__()
        for i in range(num_layers):
            layer = DenseLayer(inputs + i * growth_rate, growth_rate, bn_size, 0.1)
            self.add_module(f"denselayer{i + 1}", layer)

    def forward(self, init_features: torch.Tensor) -> torch.Tensor:
        features = [init_features]
        for _name, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self, growth_rate: int = 4, block_config: tuple[int, ...] = (2, 2)) -> None:
        super().__init__()
        self.features = nn.Sequential(
            OrderedDict(
                [
                    ("conv0", nn.Conv2d(3, 8, 3, 2, 1, bias=False)),
                    ("norm0", nn.BatchNorm2d(8)),
                    ("relu0", nn.ReLU(inplace=True)),
                    ("pool0", nn.MaxPool2d(3, 2, 1)),
                ]
            )
        )
        channels = 8
        for i, num_layers in enumerate(block_config):
            block = DenseBlock(num_layers, channels, 2, growth_rate)
            self.features.add_module(f"denseblock{i + 1}", block)
            channels += num_layers * growth_rate
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.features(x), inplace=True)
        out = torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1)
        return self.classifier(out)


InceptionOutputs = namedtuple("InceptionOutputs", ["logits", "aux_logits"])


class BasicConv2d(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, **kwargs: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, bias=False, **kwargs)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionA(nn.Module):
    def __init__(self, in_channels: int, pool_features: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(in_channels, 4, kernel_size=1)
        self.branch3x3_1 = BasicConv2d(in_channels, 4, kernel_size=1)
        self.branch3x3_2 = BasicConv2d(4, 6, kernel_size=3, padding=1)
        self.branch_pool = BasicConv2d(in_channels, pool_features, kernel_size=1)

    def _forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        branch1x1 = self.branch1x1(x)
        branch3x3 = self.branch3x3_2(self.branch3x3_1(x))
        branch_pool = self.branch_pool(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return [branch1x1, branch3x3, branch_pool]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._forward(x), 1)


class InceptionAux(nn.Module):
    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv0 = BasicConv2d(in_channels, 6, kernel_size=1)
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.adaptive_avg_pool2d(self.conv0(x), (1, 1))
        return self.fc(torch.flatten(x, 1))


class Inception(nn.Module):
    def __init__(self, aux_logits: bool = True, transform_input: bool = True) -> None:
        super().__init__()
        self.aux_logits = aux_logits
        self.transform_input = transform_input
        self.Conv2d_1a_3x3 = BasicConv2d(3, 8, kernel_size=3, stride=2)
        self.Mixed_5b = InceptionA(8, pool_features=4)
        self.AuxLogits: nn.Module | None = InceptionAux(14, 10) if aux_logits else None
        self.Mixed_5c = InceptionA(14, pool_features=2)
        self.dropout = nn.Dropout(p=0.5)
        self.fc = nn.Linear(12, 10)

    def _transform_input(self, x: torch.Tensor) -> torch.Tensor:
        if self.transform_input:
            x_ch0 = torch.unsqueeze(x[:, 0], 1) * (0.229 / 0.5) + (0.485 - 0.5) / 0.5
            x_ch1 = torch.unsqueeze(x[:, 1], 1) * (0.224 / 0.5) + (0.456 - 0.5) / 0.5
            x_ch2 = torch.unsqueeze(x[:, 2], 1) * (0.225 / 0.5) + (0.406 - 0.5) / 0.5
            x = torch.cat((x_ch0, x_ch1, x_ch2), 1)
        return x

    def _forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.Mixed_5b(self.Conv2d_1a_3x3(x))
        aux: torch.Tensor | None = None
        if self.AuxLogits is not None:
            if self.training or not self.dropout.training:
                aux = self.AuxLogits(x)
        x = F.adaptive_avg_pool2d(self.Mixed_5c(x), (1, 1))
        return self.fc(torch.flatten(self.dropout(x), 1)), aux

    def eager_outputs(self, x: torch.Tensor, aux: torch.Tensor | None) -> Any:
        if self.aux_logits:
            return InceptionOutputs(x, aux)
        return x

    def forward(self, x: torch.Tensor) -> Any:
        x, aux = self._forward(self._transform_input(x))
        return self.eager_outputs(x, aux)


class SkipNet(nn.Module):
    """A U-Net as in segmentation libraries: layers by name, skips kept in a list."""

    def __init__(self, in_channels: int = 3, out_channels: int = 1, init_features: int = 4) -> None:
        super().__init__()
        f = init_features
        self.encoder1 = SkipNet._block(in_channels, f, name="enc1")
        self.pool1 = nn.MaxPool2d(kernel_size=2, stride=2)
        self.encoder2 = SkipNet._block(f, f * 2, name="enc2")
        self.pool2 = nn.MaxPool2d(kernel_size=2, stride=2)
        self.bottleneck = SkipNet._block(f * 2, f * 4, name="bottleneck")
        self.upconv2 = nn.ConvTranspose2d(f * 4, f * 2, kernel_size=2, stride=2)
        self.decoder2 = SkipNet._block(f * 4, f * 2, name="dec2")
        self.upconv1 = nn.ConvTranspose2d(f * 2, f, kernel_size=2, stride=2)
        self.decoder1 = SkipNet._block(f * 2, f, name="dec1")
        self.conv = nn.Conv2d(f, out_channels, kernel_size=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for encoder, pool in ((self.encoder1, self.pool1), (self.encoder2, self.pool2)):
            x = encoder(x)
            skips.append(x)
            x = pool(x)
        x = self.bottleneck(x)
        ups = ((self.upconv2, self.decoder2), (self.upconv1, self.decoder1))
        for (up, decoder), skip in zip(ups, skips[::-1], strict=True):
            x = decoder(torch.cat((up(x), skip), dim=1))
        return torch.sigmoid(self.conv(x))

    @staticmethod
    def _block(in_channels: int, features: int, name: str) -> nn.Sequential:
        return nn.Sequential(
            OrderedDict(
                [
                    (name + "conv1", nn.Conv2d(in_channels, features, 3, padding=1, bias=False)),
                    (name + "norm1", nn.BatchNorm2d(num_features=features)),
                    (name + "relu1", nn.ReLU(inplace=True)),
                ]
            )
        )


# --- peft ----------------------------------------------------------------------------------------


class LoraLayer:
    adapter_layer_names = ("lora_A", "lora_B")
    other_param_names = ("r", "lora_alpha", "scaling", "lora_dropout")

    def __init__(self, base_layer: nn.Module) -> None:
        self.base_layer = base_layer
        self.r: dict[str, int] = {}
        self.lora_alpha: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.lora_dropout = nn.ModuleDict({})
        self.lora_A = nn.ModuleDict({})
        self.lora_B = nn.ModuleDict({})
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self._active_adapter: str | list[str] = "default"

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)

    @property
    def disable_adapters(self) -> bool:
        return self._disable_adapters

    @property
    def active_adapters(self) -> list[str]:
        if isinstance(self._active_adapter, str):
            return [self._active_adapter]
        return self._active_adapter

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, dropout: float) -> None:
        base: Any = self.base_layer
        self.r[adapter_name] = r
        self.lora_alpha[adapter_name] = lora_alpha
        layer = nn.Dropout(p=dropout) if dropout > 0.0 else nn.Identity()
        self.lora_dropout.update(nn.ModuleDict({adapter_name: layer}))
        self.lora_A[adapter_name] = nn.Linear(base.in_features, r, bias=False)
        self.lora_B[adapter_name] = nn.Linear(r, base.out_features, bias=False)
        self.scaling[adapter_name] = lora_alpha / r


class LoraLinear(nn.Module, LoraLayer):
    def __init__(self, base_layer: nn.Module, adapter_name: str, r: int = 2) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self.fan_in_fan_out = False
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=4, dropout=0.0)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters or self.merged:
            return self.base_layer(x, *args, **kwargs)
        result = self.base_layer(x, *args, **kwargs)
        torch_result_dtype = result.dtype
        for active_adapter in self.active_adapters:
            if active_adapter not in self.lora_A.keys():  # noqa: SIM118
                continue
            lora_A = self.lora_A[active_adapter]
            lora_B = self.lora_B[active_adapter]
            dropout = self.lora_dropout[active_adapter]
            scaling = self.scaling[active_adapter]
            x = x.to(lora_A.weight.dtype)
            result = result + lora_B(lora_A(dropout(x))) * scaling
        return result.to(torch_result_dtype)


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class PeftModel(nn.Module):
    """A base model whose linear layers were replaced, and which is reached through attributes."""

    def __init__(self, base_model: nn.Module, targets: tuple[str, ...], adapters: tuple[str, ...]):
        super().__init__()
        self.base_model = base_model
        self.peft_config = {name: SimpleNamespace(r=2, target_modules=targets) for name in adapters}
        for parent in list(base_model.modules()):
            for name, child in list(parent.named_children()):
                if name in targets:
                    layer = LoraLinear(child, adapters[0])
                    for other in adapters[1:]:
                        layer.update_layer(other, 2, 8, 0.0)
                    setattr(parent, name, layer)
        self.set_adapter(list(adapters[:1]))

    def set_adapter(self, names: list[str]) -> None:
        for module in self.modules():
            if isinstance(module, LoraLinear):
                module._active_adapter = names

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_model(x)


def _peft() -> nn.Module:
    base = nn.Sequential(OrderedDict(block0=Mlp(), norm=nn.LayerNorm(16), block1=Mlp()))
    return PeftModel(base, ("up_proj", "down_proj"), ("default", "other"))


# --- diffusers -----------------------------------------------------------------------------------


class FrozenDict(OrderedDict):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            setattr(self, key, value)
        self.__frozen = True

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "_FrozenDict__frozen") and self.__frozen:
            raise Exception(f"You cannot use ``__setattr__`` on a {type(self).__name__} instance.")
        super().__setattr__(name, value)


def register_to_config(init: Any) -> Any:
    @functools.wraps(init)
    def inner_init(self: Any, **kwargs: Any) -> None:
        defaults = {"in_channels": 4, "channels": 8, "groups": 4, "heads": 2, "freq_shift": 0}
        settings = {**defaults, **kwargs}
        init(self, **settings)
        self._internal_dict = FrozenDict(settings)

    return inner_init


def get_timestep_embedding(
    timesteps: torch.Tensor,
    embedding_dim: int,
    flip_sin_to_cos: bool = False,
    downscale_freq_shift: float = 1,
    max_period: int = 10000,
) -> torch.Tensor:
    half_dim = embedding_dim // 2
    exponent = -math.log(max_period) * torch.arange(start=0, end=half_dim, dtype=torch.float32)
    exponent = exponent / (half_dim - downscale_freq_shift)
    emb = timesteps[:, None].float() * torch.exp(exponent)[None, :]
    emb = torch.cat([torch.sin(emb), torch.cos(emb)], dim=-1)
    if flip_sin_to_cos:
        emb = torch.cat([emb[:, half_dim:], emb[:, :half_dim]], dim=-1)
    return emb


class Timesteps(nn.Module):
    def __init__(self, num_channels: int, flip_sin_to_cos: bool, downscale_freq_shift: float):
        super().__init__()
        self.num_channels = num_channels
        self.flip_sin_to_cos = flip_sin_to_cos
        self.downscale_freq_shift = downscale_freq_shift

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        return get_timestep_embedding(
            timesteps,
            self.num_channels,
            flip_sin_to_cos=self.flip_sin_to_cos,
            downscale_freq_shift=self.downscale_freq_shift,
        )


class TimestepEmbedding(nn.Module):
    def __init__(self, in_channels: int, time_embed_dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_channels, time_embed_dim)
        self.act = nn.SiLU()
        self.linear_2 = nn.Linear(time_embed_dim, time_embed_dim)
        self.post_act = None

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        sample = self.linear_2(self.act(self.linear_1(sample)))
        if self.post_act is not None:
            sample = self.post_act(sample)
        return sample


ACTIVATION_FUNCTIONS = {"swish": nn.SiLU(), "silu": nn.SiLU(), "gelu": nn.GELU()}


class ResnetBlock2D(nn.Module):
    def __init__(self, channels: int, temb_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels, eps=1e-6)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time_emb_proj = nn.Linear(temb_channels, channels)
        self.time_embedding_norm = "default"
        self.norm2 = nn.GroupNorm(groups, channels, eps=1e-6)
        self.dropout = nn.Dropout(0.0)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.nonlinearity = ACTIVATION_FUNCTIONS["swish"]
        self.output_scale_factor = 1.5
        self.conv_shortcut = None

    def forward(self, input_tensor: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        hidden_states = self.conv1(self.nonlinearity(self.norm1(input_tensor)))
        temb = self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
        if self.time_embedding_norm == "default":
            hidden_states = self.norm2(hidden_states + temb)
        else:
            hidden_states = self.norm2(hidden_states)
        hidden_states = self.conv2(self.dropout(self.nonlinearity(hidden_states)))
        if self.conv_shortcut is not None:
            input_tensor = self.conv_shortcut(input_tensor)
        return (input_tensor + hidden_states) / self.output_scale_factor


class AttnProcessor:
    def __call__(self, attn: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        query = attn.head_to_batch_dim(attn.to_q(hidden_states))
        key = attn.head_to_batch_dim(attn.to_k(hidden_states))
        value = attn.head_to_batch_dim(attn.to_v(hidden_states))
        hidden_states = torch.bmm(attn.get_attention_scores(query, key), value)
        return attn.to_out[0](attn.batch_to_head_dim(hidden_states))


class ScaledAttnProcessor:
    def __init__(self, scale: float = 0.5) -> None:
        self.scale = scale

    def __call__(self, attn: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden_states.shape
        heads = [
            layer(hidden_states).view(batch, length, attn.heads, -1).transpose(1, 2)
            for layer in (attn.to_q, attn.to_k, attn.to_v)
        ]
        found = F.scaled_dot_product_attention(*heads, scale=self.scale)
        return attn.to_out[0](found.transpose(1, 2).reshape(batch, length, width))


class Attention(nn.Module):
    def __init__(self, query_dim: int, heads: int, processor: Any = None) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (query_dim // heads) ** -0.5
        self.group_norm = nn.GroupNorm(4, query_dim)
        self.residual_connection = True
        self.rescale_output_factor = 1.25
        self.to_q = nn.Linear(query_dim, query_dim, bias=False)
        self.to_k = nn.Linear(query_dim, query_dim, bias=False)
        self.to_v = nn.Linear(query_dim, query_dim, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(query_dim, query_dim), nn.Dropout(0.0)])
        self.set_processor(processor or AttnProcessor())

    def set_processor(self, processor: Any) -> None:
        self.processor = processor

    def head_to_batch_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        batch, length, dim = tensor.shape
        tensor = tensor.reshape(batch, length, self.heads, dim // self.heads)
        return tensor.permute(0, 2, 1, 3).reshape(batch * self.heads, length, dim // self.heads)

    def batch_to_head_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        batch, length, dim = tensor.shape
        tensor = tensor.reshape(batch // self.heads, self.heads, length, dim)
        return tensor.permute(0, 2, 1, 3).reshape(batch // self.heads, length, dim * self.heads)

    def get_attention_scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        empty = torch.zeros(query.shape[0], query.shape[1], key.shape[1])
        scores = torch.baddbmm(empty, query, key.transpose(-1, -2), beta=0, alpha=self.scale)
        return scores.softmax(dim=-1)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        residual = hidden_states
        batch, channel, height, width = hidden_states.shape
        hidden_states = self.group_norm(hidden_states).view(batch, channel, -1).transpose(1, 2)
        hidden_states = self.processor(self, hidden_states)
        hidden_states = hidden_states.transpose(-1, -2).reshape(batch, channel, height, width)
        if self.residual_connection:
            hidden_states = hidden_states + residual
        return hidden_states / self.rescale_output_factor


class BaseOutput(OrderedDict):
    """By key and by attribute; None is left out of the keys."""

    def __init_subclass__(cls) -> None:
        torch.utils._pytree.register_pytree_node(
            cls,
            torch.utils._pytree._dict_flatten,
            lambda values, context: cls(**torch.utils._pytree._dict_unflatten(values, context)),
            serialized_type_name=f"{cls.__module__}.{cls.__name__}",
        )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, str):
            return dict(self.items())[k]
        return self.to_tuple()[k]

    def __setattr__(self, name: Any, value: Any) -> None:
        if name in self.keys() and value is not None:  # noqa: SIM118
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self[k] for k in self.keys())  # noqa: SIM118


@dataclasses.dataclass
class UNetOutput(BaseOutput):
    sample: torch.Tensor
    residual: torch.Tensor | None = None


class UNet2D(nn.Module):
    config_name = "config.json"

    @register_to_config
    def __init__(self, in_channels: int, channels: int, groups: int, heads: int, freq_shift: int):
        super().__init__()
        self.sample_size = 8
        self.conv_in = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.time_proj = Timesteps(channels, True, freq_shift)
        self.time_embedding = TimestepEmbedding(channels, 2 * channels)
        self.resnets = nn.ModuleList(
            ResnetBlock2D(channels, 2 * channels, groups) for _ in range(2)
        )
        self.attentions = nn.ModuleList(
            [Attention(channels, heads), Attention(channels, heads, ScaledAttnProcessor())]
        )
        self.conv_norm_out = nn.GroupNorm(groups, channels)
        self.conv_act = nn.SiLU()
        self.conv_out = nn.Conv2d(channels, in_channels, 3, padding=1)

    @property
    def config(self) -> FrozenDict:
        return self._internal_dict

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, return_dict: bool = True):
        if self.config.center_input_sample if hasattr(self.config, "center_input_sample") else 0:
            sample = 2 * sample - 1.0
        emb = self.time_embedding(self.time_proj(timestep).to(dtype=sample.dtype))
        sample = self.conv_in(sample)
        skip_sample = sample
        for resnet, attn in zip(self.resnets, self.attentions, strict=True):
            sample = attn(resnet(sample, emb))
        sample = self.conv_out(self.conv_act(self.conv_norm_out(sample + skip_sample)))
        if not return_dict:
            return (sample,)
        return UNetOutput(sample=sample)


# --- torch's own ---------------------------------------------------------------------------------


class PositionalEncoding(nn.Module):
    pe: torch.Tensor

    def __init__(self, d_model: int, dropout: float = 0.1, max_len: int = 32) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x + self.pe[: x.size(0)])


class Seq2Seq(nn.Module):
    """The translation tutorial: nn.Transformer between embeddings and a generator."""

    def __init__(self, vocab: int = 30, emb_size: int = 16) -> None:
        super().__init__()
        with warnings.catch_warnings():  # nested tensors need batch_first
            warnings.simplefilter("ignore")
            self.transformer = nn.Transformer(emb_size, 2, 1, 1, dim_feedforward=32, dropout=0.1)
        self.generator = nn.Linear(emb_size, vocab)
        self.tok_emb = nn.Embedding(vocab, emb_size)
        self.positional_encoding = PositionalEncoding(emb_size)
        self.emb_size = emb_size

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.positional_encoding(self.tok_emb(tokens.long()) * math.sqrt(self.emb_size))

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        tgt_mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[0])
        outs = self.transformer(self.embed(src), self.embed(tgt), None, tgt_mask)
        return self.generator(outs)


class CrossAttention(nn.Module):
    """nn.MultiheadAttention over another sequence, with its weights returned."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True, kdim=8, vdim=8)
        self.norm = nn.LayerNorm(width)
        self.need_weights = True

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, Any]:
        mixed, weights = self.attn(x, memory, memory, need_weights=self.need_weights)
        return self.norm(x + mixed), weights


class RNNModel(nn.Module):
    """The word language model example: an encoder, a recurrent module, a decoder, a state."""

    def __init__(self, rnn_type: str, ntoken: int = 30, ninp: int = 12, nhid: int = 12) -> None:
        super().__init__()
        self.ntoken = ntoken
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(ntoken, ninp)
        if rnn_type in ("LSTM", "GRU"):
            self.rnn = getattr(nn, rnn_type)(ninp, nhid, 2, dropout=0.2)
        else:
            self.rnn = nn.RNN(ninp, nhid, 2, nonlinearity="relu", dropout=0.2)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.weight = self.encoder.weight
        self.rnn_type = rnn_type
        self.nhid = nhid
        self.nlayers = 2

    def init_hidden(self, bsz: int) -> Any:
        weight = next(self.parameters())
        if self.rnn_type == "LSTM":
            shape = (self.nlayers, bsz, self.nhid)
            return weight.new_zeros(*shape), weight.new_zeros(*shape)
        return weight.new_zeros(self.nlayers, bsz, self.nhid)

    def forward(self, input: torch.Tensor, hidden: Any = None) -> tuple[torch.Tensor, Any]:
        if hidden is None:
            hidden = self.init_hidden(input.shape[1])
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden


class StatefulRNN(nn.Module):
    """A recurrent cell that keeps its state between calls, as in reinforcement learning."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)
        self.policy = nn.Sequential(OrderedDict(hidden=nn.Linear(width, width), act=nn.Tanh()))
        self.hidden: torch.Tensor | None = None

    def reset(self) -> None:
        self.hidden = None

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if self.hidden is None:
            self.hidden = torch.zeros_like(observation)
        self.hidden = self.cell(observation, self.hidden).detach()
        return self.policy(self.hidden)


# --- rows ----------------------------------------------------------------------------------------


def _row(name: str, make: Callable[[], nn.Module], inputs: MakeInputs) -> Architecture:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make().eval()

    return Architecture(name, "libraries", build, inputs)


def _floats(**shapes: tuple[int, ...]) -> MakeInputs:
    def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    return inputs


def _tokens(**shapes: tuple[int, ...]) -> MakeInputs:
    def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {n: torch.randint(0, 30, s, generator=generator) for n, s in shapes.items()}

    return inputs


def _noisy(seed: int = 0) -> dict[str, torch.Tensor]:
    return {**_floats(sample=(2, 4, 8, 8))(seed), "timestep": torch.tensor([3 + seed, 500])}


_IMAGE = _floats(x=(2, 3, 16, 16))

LIBRARIES: tuple[Architecture, ...] = (
    _row("resnet", ResNet, _IMAGE),
    _row("vgg", VGG, _IMAGE),
    _row("mobilenet", MobileNetV2, _IMAGE),
    _row("densenet", DenseNet, _IMAGE),
    _row("inception", Inception, _IMAGE),
    _row("skip-net", SkipNet, _IMAGE),
    _row("peft-lora", _peft, _floats(x=(2, 5, 16))),
    _row("diffusers-unet", UNet2D, _noisy),
    _row("nn-transformer", Seq2Seq, _tokens(src=(6, 2), tgt=(5, 2))),
    _row("cross-attention", CrossAttention, _floats(x=(2, 5, 16), memory=(2, 3, 8))),
    _row("word-lstm", functools.partial(RNNModel, "LSTM"), _tokens(input=(5, 2))),
    _row("word-gru", functools.partial(RNNModel, "GRU"), _tokens(input=(5, 2))),
    _row("word-rnn", functools.partial(RNNModel, "RNN"), _tokens(input=(5, 2))),
    _row("stateful-rnn", StatefulRNN, _floats(observation=(2, 8))),
)
