"""Record what NeMo computes with tiny random Citrinets, for tests that compare without NeMo.

    python scripts/record_nemo.py tests/data/nemo        # in an environment with nemo_toolkit; see docs/pocket.md

Each model is saved by NeMo itself, as the archive that it publishes models in. The clips are run as one padded batch,
so what is recorded is what NeMo's masks leave of each. `recorded.safetensors` has the features of each clip, by model
and clip encoder output and log-probabilities, at the clip's own length, and as metadata the texts.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sentencepiece
import torch
from nemo.collections.asr.models import EncDecCTCModelBPE
from omegaconf import OmegaConf
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from nemo_clips import clips

PIECES = 40
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards boxed my jug of liquid hazy mixture"


def block(filters: int, kernel: int, repeat: int = 1, stride: int = 1, **more: Any) -> dict[str, Any]:
    shape = {"filters": filters, "repeat": repeat, "kernel": [kernel], "stride": [stride], "dilation": [1]}
    return {**shape, "dropout": 0.1, "residual": repeat > 1, "separable": True, "se": True, **more}


MODELS = {
    # As Citrinets are: striding blocks stride last, around and through.
    "gamma-1": [
        block(24, 5),
        block(24, 11, 3, 2, stride_last=True, residual_mode="stride_add", kernel_size_factor=1.0),
        block(24, 13, 2, kernel_size_factor=1.0),
        block(32, 13, 2, 2, stride_last=True, residual_mode="stride_add", kernel_size_factor=1.0),
        block(40, 41, kernel_size_factor=1.0),
    ],
    # Kernels cut to a quarter, some of which come out even and are rounded up; residuals without a stride.
    "gamma-0.25": [
        block(24, 5, stride=2),
        block(24, 33, 3, residual_mode="add", kernel_size_factor=0.25),
        block(32, 39, 2, kernel_size_factor=0.25, dilation=[2], se_reduction_ratio=4),
        block(32, 11, stride=2, kernel_size_factor=0.25),
        block(40, 41, 2, kernel_size_factor=0.25, se=False),
    ],
}


def configuration(blocks: list[dict[str, Any]], tokenizer: str) -> Any:
    return OmegaConf.create({
        "sample_rate": 16000,
        "tokenizer": {"dir": tokenizer, "type": "bpe"},
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor", "sample_rate": 16000,
            "normalize": "per_feature", "window_size": 0.025, "window_stride": 0.01, "window": "hann", "features": 80,
            "n_fft": 512, "frame_splicing": 1, "dither": 1e-5, "pad_to": 16,
        },
        "encoder": {
            "_target_": "nemo.collections.asr.modules.ConvASREncoder", "feat_in": 80, "activation": "relu",
            "conv_mask": True, "jasper": blocks,
        },
        "decoder": {
            "_target_": "nemo.collections.asr.modules.ConvASRDecoder", "feat_in": blocks[-1]["filters"],
            "num_classes": -1, "vocabulary": [],
        },
    })  # fmt: skip


def randomise(model: torch.nn.Module) -> None:
    """Weights that keep activations near 1, and normalisations that are none of their defaults."""
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "featurizer" in name or "num_batches" in name:
                continue
            noise = torch.randn(value.shape, generator=random)
            if value.dim() > 1:
                value.copy_(noise * (2.0 / value[0].numel()) ** 0.5)
            elif name.endswith("running_var"):
                value.copy_(noise.abs() + 0.5)
            else:
                value.copy_(0.2 * noise + (1.0 if name.endswith("weight") else 0.0))
        model.decoder.decoder_layers[0].weight.mul_(3.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recorded: dict[str, torch.Tensor] = {}
    texts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as tokenizer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([WORDS] * 4), model_prefix=f"{tokenizer}/tokenizer", vocab_size=PIECES,
            model_type="unigram", normalization_rule_name="identity", hard_vocab_limit=False, bos_id=-1, eos_id=-1,
            minloglevel=2,
        )  # fmt: skip
        pieces = Path(tokenizer, "tokenizer.vocab").read_text().splitlines()
        Path(tokenizer, "vocab.txt").write_text("\n".join(line.split("\t")[0] for line in pieces[1:]) + "\n")
        for name, blocks in MODELS.items():
            model = EncDecCTCModelBPE(configuration(blocks, tokenizer)).eval()
            randomise(model)
            model.cfg.tokenizer.dir = "tokenizer"  # rather than where it was for a moment
            model.save_to(str(folder / f"{name}.nemo"))
            run(model, name, recorded, texts)
    save_file(recorded, folder / "recorded.safetensors", texts)
    (folder / "recorded.safetensors").chmod(0o644)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{size / 1e3:.0f} kB in {folder}: {texts}")


@torch.inference_mode()
def run(model: EncDecCTCModelBPE, name: str, recorded: dict[str, torch.Tensor], texts: dict[str, str]) -> None:
    waves = [torch.from_numpy(clip) for clip in clips()]
    lengths = torch.tensor([len(wave) for wave in waves])
    batch = torch.nn.utils.rnn.pad_sequence(waves, batch_first=True)
    mel, mel_lengths = model.preprocessor(input_signal=batch, length=lengths)
    encoded, frames = model.encoder(audio_signal=mel, length=mel_lengths)
    log_probs = model.decoder(encoder_output=encoded)
    decoded = model.decoding.ctc_decoder_predictions_tensor(log_probs, decoder_lengths=frames)
    for index, hypothesis in enumerate(decoded):
        time, count = int(mel_lengths[index]), int(frames[index])
        recorded[f"{index}.features"] = mel[index, :, :time].T.contiguous()
        recorded[f"{name}.{index}.encoded"] = encoded[index, :, :count].T.contiguous()
        recorded[f"{name}.{index}.log_probs"] = log_probs[index, :count].contiguous()
        texts[f"{name}.{index}"] = hypothesis.text


if __name__ == "__main__":
    main()
