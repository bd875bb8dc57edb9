"""Citrinet against NeMo, which ran the same archives on the same clips for scripts/record_nemo.py."""

from dataclasses import replace

import pocket
import pytest
import torch
from comparing import SWITCHES, open_model, relative
from nemo_clips import clips
from safetensors import safe_open
from transcribe.models import citrinet

from transcribe.options import Request

DATA = pocket.DATA / "nemo"
MODELS = ("gamma-1", "gamma-0.25")


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def recorded():
    with safe_open(DATA / "recorded.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return tensors, file.metadata()


@pytest.fixture(scope="module")
def model(name):
    return open_model(DATA / f"{name}.nemo")


def waves():
    return [torch.from_numpy(clip) for clip in clips()]


def log_probs_of(model, wave):
    return torch.cat(list(model.log_probs(model.encode(wave))))


def test_each_clip_of_a_padded_batch_is_what_nemo_leaves_of_it(name, model, recorded):
    tensors, texts = recorded
    for index, wave in enumerate(waves()):
        features = model.engine(model.network.encoder.front_end, wave)
        encoded, log_probs = model.encode(wave), log_probs_of(model, wave)
        for stage, found in (("features", features), ("encoded", encoded), ("log_probs", log_probs)):
            expected = tensors[f"{index}.features" if stage == "features" else f"{name}.{index}.{stage}"]
            assert found.shape == expected.shape
            assert relative(found, expected) < 1e-5, (index, stage)
            assert (found - expected).abs().max() < 1e-4, (index, stage)
        assert model.transcribe(wave, Request()).text == texts[f"{name}.{index}"].strip()


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_change_no_bit(name, model, switch, monkeypatch):
    if switch == "poison":
        monkeypatch.setenv("TRANSCRIBE_POISON", "1")
    other = open_model(DATA / f"{name}.nemo", **({} if switch == "poison" else switch))
    for wave in waves():
        assert torch.equal(log_probs_of(other, wave), log_probs_of(model, wave))


def test_companions_change_no_bit(name, model):
    alone = [log_probs_of(open_model(DATA / f"{name}.nemo"), wave) for wave in waves()]
    for order in ((0, 1, 2), (2, 1, 0), (1, 1, 2)):
        for index in order:
            assert torch.equal(log_probs_of(model, waves()[index]), alone[index])


def test_the_arena_of_citrinet_256_is_two_buffers(name):
    """What goes around and what goes through at the first blocks' rate, with little beside them."""
    model = open_model(DATA / f"{name}.nemo")
    shape = [*model.config.blocks]
    wide = [replace(block, inputs=256 if i else 80, filters=256) for i, block in enumerate(shape)]
    encoder = citrinet.Encoder(replace(model.config, blocks=tuple(wide)))
    frames = 4800 // wide[0].strides[0]  # of 48 s
    plan = model.engine.plan(encoder, torch.zeros(48 * 16_000))
    assert plan.arena_bytes < 2.05 * frames * 256 * 4 + 2**20
