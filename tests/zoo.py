"""Small architectures of the kinds that users bring, each as a Task: the models of many tests."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from shoestring import SGD, Adam, Task


def classify(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def images(batch, channels=3, size=32, classes=10):
    return torch.randn(batch, channels, size, size), torch.randint(classes, (batch,))


def tokens(batch, length, vocabulary):
    return torch.randint(vocabulary, (batch, length)), torch.randint(vocabulary, (batch, length))


def predict_tokens(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def mlp(batch=64):
    layers = [
        nn.Linear(256, 512),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(512, 512),
        nn.GELU(),
        nn.Linear(512, 10),
    ]
    return Task(
        nn.Sequential(*layers),
        classify,
        (torch.randn(batch, 256), torch.randint(10, (batch,))),
        Adam(),
        name="mlp",
    )


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.one = nn.Conv2d(16, 16, 1)
        self.three = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 1, 1)
        self.fc = nn.Linear(48, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = torch.cat([self.one(x), self.three(x), self.pool(x)], 1)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def branches(batch=32):
    return Task(Branches(), classify, images(batch), SGD(momentum=0.9), name="branches")


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.bottom = self.block(3, 16), self.block(16, 32), self.block(32, 64)
        self.up2, self.up1 = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.merge2, self.merge1, self.head = self.block(64, 32), self.block(32, 16), nn.Conv2d(16, 2, 1)

    def block(self, i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.merge2(torch.cat([b, self.up2(c)], 1))
        return self.head(self.merge1(torch.cat([a, self.up1(b)], 1)))


def unet(batch=8):
    batch = torch.randn(batch, 3, 32, 32), torch.randint(2, (batch, 32, 32))
    return Task(UNet(), classify, batch, Adam(), name="unet")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(500, 64),
            nn.LSTM(64, 128, 2, batch_first=True),
            nn.Linear(128, 500),
        )

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


def lstm(batch=8):
    return Task(Recurrent(), predict_tokens, tokens(batch, 20, 500), Adam(), name="lstm")


class Encoder(nn.Module):
    def __init__(self, vocabulary=1000, width=128, depth=3):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(1, 512, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids) + self.place[:, : ids.shape[1]]))


def bert(batch=8):
    return Task(
        Encoder(),
        predict_tokens,
        tokens(batch, 32, 1000),
        Adam(decoupled=True, weight_decay=0.01),
        name="bert",
    )


class CausalBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Causal(nn.Module):
    """GPT-like; `tied` shares the embedding with the output layer."""

    def __init__(self, vocabulary=1000, width=128, depth=4, tied=False):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList([CausalBlock(width, 4) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(batch=8):
    return Task(Causal(), predict_tokens, tokens(batch, 64, 1000), Adam(), name="gpt")


def tied(batch=8):
    return Task(Causal(tied=True, depth=2), predict_tokens, tokens(batch, 48, 1000), Adam(), name="tied")


class Patches(nn.Module):
    def __init__(self, width=96, depth=3):
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.Sequential(
            *[
                nn.TransformerEncoderLayer(width, 3, 2 * width, 0.0, batch_first=True, norm_first=True)
                for _ in range(depth)
            ]
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2) + self.place).mean(1))


def vit(batch=16):
    return Task(Patches(), classify, images(batch), Adam(), name="vit")


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class ReturnsDataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(128, 256), nn.Linear(256, 10)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return Output(self.head(hidden), hidden)


def returns_dataclass(batch=64):
    def loss(model, batch):
        output = model(batch[0])
        return F.cross_entropy(output.logits, batch[1]) + 1e-3 * output.hidden.square().mean()

    return Task(
        ReturnsDataclass(),
        loss,
        (torch.randn(batch, 128), torch.randint(10, (batch,))),
        SGD(),
        name="dataclass",
    )


ZOO = (mlp, branches, unet, lstm, bert, gpt, tied, vit, returns_dataclass)
