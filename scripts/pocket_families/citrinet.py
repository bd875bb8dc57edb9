"""Citrinet small enough to commit: NeMo's layers under NeMo's names in plain PyTorch, saved as NeMo saves a model.

The demonstration model (digits.py) is a larger one of the same layers.
"""

from __future__ import annotations

import io
import tarfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jiwer
import sentencepiece
import torch
import torch.nn.functional as F
import yaml
from pocket import Samples, Sentence, Vocabulary
from torch import Tensor, nn
from torchaudio.functional import melscale_fbanks

from transcribe.audio.normalized import Framing, normalized_log_mel

BANDS = 80


def new_tokenizer(words: Sequence[str], pieces: int) -> bytes:
    """A SentencePiece model of these words in which most are more than one piece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(list(words) * 4), model_writer=model, vocab_size=pieces, model_type="bpe",
        normalization_rule_name="identity", bos_id=-1, eos_id=-1, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def block(filters: int, kernel: int, repeat: int, stride: int = 1, dropout: float = 0.05) -> dict[str, Any]:
    """One entry of NeMo's `jasper`, as Citrinets have them."""
    striding = {"stride_last": True, "residual_mode": "stride_add"} if stride > 1 else {}
    return {
        "filters": filters, "repeat": repeat, "kernel": [kernel], "stride": [stride], "dilation": [1],
        "dropout": dropout, "residual": repeat > 1, "separable": True, "se": True, "kernel_size_factor": 1.0,
        **striding,
    }  # fmt: skip


class Gate(nn.Module):
    """Squeeze-and-excitation over the valid frames: [batch, channels, time]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        linears = nn.Linear(channels, channels // 8, bias=False), nn.Linear(channels // 8, channels, bias=False)
        self.fc = nn.Sequential(linears[0], nn.ReLU(), linears[1])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mean = (x * mask).sum(-1) / mask.sum(-1)
        return x * torch.sigmoid(self.fc(mean))[:, :, None]


class Conv(nn.Module):
    """A convolution that keeps the length, under the name NeMo's wrapper gives it."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Block(nn.Module):
    def __init__(self, inputs: int, c: dict[str, Any]) -> None:
        super().__init__()
        filters, (kernel,), (stride,) = c["filters"], c["kernel"], c["stride"]
        layers: list[nn.Module] = []
        for index in range(c["repeat"]):
            last = index == c["repeat"] - 1
            channels = inputs if index == 0 else filters
            layers += [Conv(channels, channels, kernel, stride if last else 1, channels), Conv(channels, filters),
                       nn.BatchNorm1d(filters, eps=1e-3)]  # fmt: skip
            layers += [Gate(filters)] if last else [nn.ReLU(), nn.Dropout(c["dropout"])]
        self.mconv = nn.ModuleList(layers)
        around = nn.ModuleList([Conv(inputs, filters, 1, stride), nn.BatchNorm1d(filters, eps=1e-3)])
        self.res = nn.ModuleList([around]) if c["residual"] else None
        self.stride, self.dropout = stride, c["dropout"]

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        given = x * mask_of(x, lengths)
        for layer in self.mconv:
            if isinstance(layer, Conv):
                x = layer(x * mask_of(x, lengths))
                lengths = (lengths - 1) // layer.conv.stride[0] + 1
            else:
                x = layer(x, mask_of(x, lengths)) if isinstance(layer, Gate) else layer(x)
        for layer in self.res[0] if self.res is not None else ():
            given = layer(given)
        x = x if self.res is None else x + given
        return F.dropout(F.relu(x), self.dropout, self.training), lengths


def mask_of(x: Tensor, lengths: Tensor) -> Tensor:
    """1 for frames of a clip, 0 for padding: [batch, 1, time]."""
    return (torch.arange(x.shape[-1]) < lengths[:, None]).to(x.dtype)[:, None]


class Network(nn.Module):
    """Modules under NeMo's names: its state dictionary is a model's."""

    def __init__(self, blocks: Sequence[dict[str, Any]], pieces: int) -> None:
        super().__init__()
        filters = melscale_fbanks(257, 0.0, 8000.0, BANDS, 16_000, norm="slaney", mel_scale="slaney")
        self.preprocessor, self.encoder, self.decoder = nn.Module(), nn.Module(), nn.Module()
        self.preprocessor.featurizer = nn.Module()
        self.preprocessor.featurizer.register_buffer("window", torch.hann_window(400, periodic=False))
        self.preprocessor.featurizer.register_buffer("fb", filters.T[None].contiguous())
        widths = [BANDS, *(each["filters"] for each in blocks)]
        self.encoder.encoder = nn.ModuleList(map(Block, widths, blocks))
        self.decoder.decoder_layers = nn.Sequential(nn.Conv1d(widths[-1], pieces + 1, 1))

    def features(self, samples: Sequence[Samples]) -> tuple[Tensor, Tensor]:
        """The front end: [clips, bands, time] and the frames of each."""
        featurizer = self.preprocessor.featurizer
        made = [normalized_log_mel(torch.from_numpy(each), featurizer.fb[0], featurizer.window, Framing())
                for each in samples]  # fmt: skip
        return nn.utils.rnn.pad_sequence(made, batch_first=True).transpose(1, 2), torch.tensor([len(m) for m in made])

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities [clips, time, pieces + blank] and the frames of each clip."""
        for layer in self.encoder.encoder:
            features, lengths = layer(features, lengths)
        return self.decoder.decoder_layers(features).transpose(1, 2).log_softmax(-1), lengths


def save_archive(path: Path, network: Network, blocks: Sequence[dict[str, Any]], tokenizer: bytes) -> None:
    """The model as a NeMo archive, its weights in float16."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    pieces = [processor.id_to_piece(id) for id in range(processor.get_piece_size())]
    config = {
        "target": "nemo.collections.asr.models.ctc_bpe_models.EncDecCTCModelBPE", "sample_rate": 16_000,
        "tokenizer": {"dir": "tokenizer", "type": "bpe", "model_path": "nemo:tokenizer.model"},
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor", "sample_rate": 16_000,
            "normalize": "per_feature", "window_size": 0.025, "window_stride": 0.01, "window": "hann",
            "features": BANDS, "n_fft": 512, "frame_splicing": 1, "dither": 1e-5, "pad_to": 16,
        },
        "encoder": {
            "_target_": "nemo.collections.asr.modules.ConvASREncoder", "feat_in": BANDS, "activation": "relu",
            "conv_mask": True, "jasper": list(blocks),
        },
        "decoder": {
            "_target_": "nemo.collections.asr.modules.ConvASRDecoder", "feat_in": blocks[-1]["filters"],
            "num_classes": len(pieces), "vocabulary": pieces,
        },
    }  # fmt: skip
    weights = io.BytesIO()
    halved = {name: value.half() if value.is_floating_point() else value for name, value in
              network.state_dict().items()}  # fmt: skip
    torch.save(OrderedDict(halved), weights)
    files = {
        "model_config.yaml": yaml.safe_dump(config, sort_keys=False).encode(), "tokenizer.model": tokenizer,
        "model_weights.ckpt": weights.getvalue(),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


class Family:
    # Short sentences, then longer ones: there is nothing to count, so no stage of the decoder alone.
    stages = ((900, 4e-3, 2.0, 8.0), (300, 1e-3, 8.0, 29.0))
    pieces = 100
    blocks = (
        block(64, 5, 1), block(64, 11, 2, 2), block(64, 13, 2), block(80, 13, 2, 2), block(80, 15, 2),
        block(96, 15, 2, 2), block(96, 17, 2), block(128, 19, 1),
    )  # fmt: skip
    file = "pocket.nemo"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.proto = new_tokenizer(vocabulary.words, self.pieces)
        self.tokenizer = sentencepiece.SentencePieceProcessor(model_proto=self.proto)
        self.model = Network(self.blocks, self.tokenizer.get_piece_size())
        self.helpers = nn.Module()

    def loss(self, sentences: Sequence[Sentence], contexts: Sequence[str]) -> tuple[Tensor, dict[str, float]]:
        """CTC, and of the words that are greedily read, how many are right."""
        self.model.train()
        features, lengths = self.model.features([sentence.samples for sentence in sentences])
        log_probs, frames = self.model(features, lengths)
        targets = [torch.tensor(self.tokenizer.encode(sentence.text)) for sentence in sentences]
        sizes = torch.tensor([len(target) for target in targets])
        blank = log_probs.shape[-1] - 1
        loss = F.ctc_loss(log_probs.transpose(0, 1), torch.cat(targets).long(), frames, sizes, blank, "sum", True)
        spoken = [i for i, sentence in enumerate(sentences) if sentence.words]
        read = self._read(log_probs.detach(), frames)
        wrong = jiwer.wer([sentences[i].text for i in spoken], [read[i] for i in spoken]) if spoken else 0.0
        loss = loss / max(1, int(sizes.sum()))
        return loss, {"loss": float(loss.detach()), "correct": 1.0 - wrong}

    def _read(self, log_probs: Tensor, frames: Tensor) -> list[str]:
        texts = []
        for row, count in zip(log_probs, frames.tolist(), strict=True):
            tokens = row[:count].argmax(-1).unique_consecutive()
            texts.append(self.tokenizer.decode(tokens[tokens < log_probs.shape[-1] - 1].tolist()).strip())
        return texts

    @torch.inference_mode()
    def transcribe(self, samples: Sequence[Samples]) -> list[str]:
        self.model.eval()
        return self._read(*self.model(*self.model.features(samples)))

    def save(self, folder: Path) -> None:
        save_archive(folder / self.file, self.model, self.blocks, self.proto)

    def load(self, folder: Path) -> None:
        with tarfile.open(folder / self.file) as tar:
            weights = tar.extractfile("model_weights.ckpt")
            assert weights is not None
            state = torch.load(io.BytesIO(weights.read()), weights_only=True)
        self.model.load_state_dict(state)
