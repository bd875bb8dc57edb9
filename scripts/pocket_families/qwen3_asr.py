"""Qwen3-ASR small enough to commit: transformers' own classes, the prompt and the kind of tokenizer of the real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from pocket import RATE, Samples, Sentence, Vocabulary
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

HIDDEN, LAYERS, POINTING = 128, 4, 3  # of the decoder; POINTING is the layer whose attention is shown where to look
CHUNK, TOKENS = 100, 13  # mel frames in a chunk of the encoder (one second), and audio tokens from it
PLACES = torch.cat([  # [places, 16]: a code for each place in a sentence, like that of its neighbours
    (torch.arange(96)[:, None] * 2 * torch.pi / 2.0 ** torch.arange(2, 10)).sin(),
    (torch.arange(96)[:, None] * 2 * torch.pi / 2.0 ** torch.arange(2, 10)).cos(),
], 1)  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
PROMPT = (
    "<|im_start|>system\n{context}<|im_end|>\n<|im_start|>user\n<|audio_start|>{audio}<|audio_end|><|im_end|>\n"
    "<|im_start|>assistant\n"
)
ANSWER = "language {language}<asr_text>{text}<|im_end|>"


def new_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Byte-level BPE whose merges end in whole words, with and without the space before them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator([f"{word} {word}" for word in (*words, "language", "English", "None")], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<asr_text>", special=False, normalized=False)])
    return tokenizer


def audio_tokens(frames: int) -> int:
    """Audio tokens from mel frames: three halvings that round up, in each second apart."""
    rest = frames % CHUNK
    for _ in range(3):
        rest = (rest + 1) // 2
    return frames // CHUNK * TOKENS + rest


@dataclass(frozen=True)
class Encoded(Sentence):
    """A sentence with what the encoder made of it: [audio tokens, HIDDEN]."""

    audio: Tensor


class Family:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.tokenizer = new_tokenizer(vocabulary.words)
        self.ids = {token: self.tokenizer.token_to_id(token) for token in (*SPECIAL, "<asr_text>")}
        self.extractor = transformers.Qwen3ASRFeatureExtractor()
        config = transformers.Qwen3ASRConfig(
            audio_config={
                "num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 192,
                "d_model": 96, "output_dim": HIDDEN, "downsample_hidden_size": 16, "n_window_infer": CHUNK,
            },
            text_config={
                "model_type": "qwen3", "vocab_size": self.tokenizer.get_vocab_size(), "hidden_size": HIDDEN,
                "intermediate_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
                "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            audio_token_id=self.ids["<|audio_pad|>"],
            eos_token_id=[self.ids["<|endoftext|>"], self.ids["<|im_end|>"]],
            pad_token_id=self.ids["<|endoftext|>"],
        )  # fmt: skip
        self.model = transformers.Qwen3ASRForConditionalGeneration(config)
        for parameter in self.model.parameters():  # the reference's own start is for large models: too small here
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=(parameter[0].numel() / (2 if parameter.dim() == 4 else 1)) ** -0.5)
        for layer in self.model.model.language_model.layers:
            layer.self_attn.q_norm.weight.data.fill_(2.0)  # attention can be sharp at once
        self.heard = nn.Linear(HIDDEN, 2 * len(vocabulary.words) + 1)  # by an audio token
        self.named = nn.Linear(HIDDEN, len(vocabulary.words) + 1)  # the word that ends at one
        self.placed = nn.Linear(HIDDEN, PLACES.shape[1])  # where in the sentence the word at a position stands,
        self.before = nn.Linear(HIDDEN, len(vocabulary.words) + 1)  # the word before it, or none,
        self.earlier = nn.Linear(HIDDEN, len(vocabulary.words) + 1)  # and the one before that
        self.helpers = nn.ModuleList([self.heard, self.named, self.placed, self.before, self.earlier])
        self.pointing: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        layer = self.model.model.language_model.layers[POINTING].self_attn
        layer.register_forward_pre_hook(self._keep_pointing, with_kwargs=True)

    def _keep_pointing(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.pointing = kwargs["hidden_states"], kwargs["position_embeddings"]

    def features(self, samples: Sequence[Samples]) -> tuple[Tensor, Tensor]:
        """Log-mel [recordings, 128, frames], each as it is alone, padded to whole seconds; and the mask of frames."""
        how = {"sampling_rate": RATE, "padding": True, "truncation": False, "return_attention_mask": True}
        made = [self.extractor(each, **how) for each in samples]
        width = max(each["attention_mask"].shape[-1] for each in made)
        mel, mask = (
            torch.cat([F.pad(each[name], (0, width - each[name].shape[-1])) for each in made])
            for name in ("input_features", "attention_mask")
        )
        return mel, mask

    def prompt(self, tokens: int, context: str = "") -> list[int]:
        text = PROMPT.format(context=context, audio="<|audio_pad|>" * tokens)
        return self.tokenizer.encode(text).ids

    def answer(self, sentence: Sentence) -> list[int]:
        language = "English" if sentence.words else "None"
        return self.tokenizer.encode(ANSWER.format(language=language, text=sentence.text)).ids

    def encode(self, sentences: Sequence[Sentence]) -> tuple[Tensor, list[int]]:
        """What the decoder is given for the audio: [all audio tokens, HIDDEN], and how many each sentence has."""
        mel, mask = self.features([sentence.samples for sentence in sentences])
        counts = [audio_tokens(int(row.sum())) for row in mask]
        return self.model.model.get_audio_features(mel, mask).pooler_output, counts

    def decoder(self) -> list[nn.Parameter]:
        return list(self.model.model.language_model.parameters())

    @torch.no_grad()
    def encoded(self, sentence: Sentence) -> Encoded:
        """A sentence of whole seconds to join others to: the encoder hears each second apart."""
        audio, _ = self.encode([sentence])
        return Encoded(sentence.samples, sentence.words, sentence.spans, audio)

    @staticmethod
    def joined(pieces: Sequence[Encoded]) -> Encoded:
        """One sentence of several, as the encoder would hear it."""
        ends = np.cumsum([len(piece.samples) for piece in pieces]).tolist()
        spans = [(a + at, b + at) for at, piece in zip([0, *ends], pieces, strict=False) for a, b in piece.spans]
        samples = np.concatenate([piece.samples for piece in pieces])
        words = [word for piece in pieces for word in piece.words]
        return Encoded(samples, words, spans, torch.cat([piece.audio for piece in pieces]))

    def loss(self, sentences: Sequence[Sentence], contexts: Sequence[str]) -> tuple[Tensor, dict[str, float]]:
        """What the reference is trained on: the next tokens of the answer, and what the helpers ask.

        The helpers know from the joining which word each audio token belongs to. They ask of the encoder which word
        that is, and of a layer of the decoder, where a word ends and where it is about to be written, what its place
        in the sentence is and which two words are before it; and the next layer is to look at that word.
        """
        if all(isinstance(sentence, Encoded) for sentence in sentences):
            audio, counts = torch.cat([s.audio for s in sentences]), [len(s.audio) for s in sentences]
        else:
            audio, counts = self.encode(sentences)
        rows, starts, answers = [], [], []
        for sentence, context, count in zip(sentences, contexts, counts, strict=True):
            prompt, answer = self.prompt(count, context), self.answer(sentence)
            starts.append(prompt.index(self.ids["<|audio_pad|>"]))
            answers.append(range(len(prompt), len(prompt) + len(answer)))
            rows.append(torch.tensor(prompt + answer))
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.ids["<|endoftext|>"])
        embedded = self.model.get_input_embeddings()(ids)
        places = ids == self.ids["<|audio_pad|>"]
        embedded = embedded.masked_scatter(places[..., None], audio)
        out = self.model.model.language_model(inputs_embeds=embedded, output_hidden_states=True, use_cache=False)

        row = torch.cat([torch.full((len(a),), i) for i, a in enumerate(answers)])
        column = torch.cat([torch.tensor(a) for a in answers])
        targets = ids[row, column]
        spoken_at = torch.cat([torch.arange(len(answer)) >= 3 for answer in answers])  # after the header
        logits = self.model.lm_head(out.last_hidden_state[row, column - 1])
        written = F.cross_entropy(logits, targets, label_smoothing=0.02)
        correct = (logits.argmax(-1) == targets)[spoken_at].float().mean()

        labels, ordinals = zip(*map(self._labels, sentences, counts), strict=True)
        heard = F.cross_entropy(self.heard(audio), torch.cat(labels))
        loss = written + 0.5 * heard
        figures = {"written": written, "heard": heard, "correct": correct}
        # where each word is to be found: the audio token it ends with, the token it is written after, all its tokens
        ends, queries, words, looks = [], [], [], []
        for i, (sentence, own) in enumerate(zip(sentences, ordinals, strict=True)):
            spoken = [self.vocabulary.words.index(word) + 1 for word in sentence.words]
            for place, before in enumerate(zip([0, *spoken], [0, 0, *spoken], strict=False)):
                if place == len(spoken):
                    break
                ends.append((i, starts[i] + int((own == place).nonzero()[-1])))
                queries.append((i, answers[i].start + 2 + place))  # "<asr_text>" and every word but the last
                words.append((place, *before, spoken[place]))
                looks.append(F.pad(own == place, (starts[i], ids.shape[1] - starts[i] - len(own))))
        if queries:
            hidden = out.hidden_states[POINTING]
            inner = torch.cat([hidden[tuple(torch.tensor(at).T)] for at in (ends, queries)])
            place, before, earlier, word = torch.tensor(words + words).T
            named = F.cross_entropy(self.named(inner[: len(ends)]), word[: len(ends)])
            placed = F.cross_entropy(self.placed(inner) @ PLACES.T, place)
            preceded = F.cross_entropy(self.before(inner), before) + F.cross_entropy(self.earlier(inner), earlier)
            looked = self._looked(*torch.tensor(queries).T, torch.stack(looks))
            loss = loss + 0.3 * (placed + preceded + looked + named)
            figures |= {"named": named, "placed": placed, "preceded": preceded, "looked": looked}
        return loss, {name: float(value.detach()) for name, value in figures.items()}

    def _labels(self, sentence: Sentence, count: int) -> tuple[Tensor, Tensor]:
        """For each audio token the word's label, odd where it ends, 0 for none; and the word's place, or -1."""
        index = torch.arange(count)
        centre = (index // TOKENS + index % TOKENS * 0.08) * RATE
        labels, ordinals = torch.zeros(count, dtype=torch.long), torch.full((count,), -1)
        for place, (word, (start, stop)) in enumerate(zip(sentence.words, sentence.spans, strict=True)):
            inside = (centre >= start) & (centre < stop)
            labels[inside] = 2 * self.vocabulary.words.index(word) + 2
            labels[inside.nonzero()[-1:]] -= 1
            ordinals[inside] = place
        return labels, ordinals

    def _looked(self, row: Tensor, column: Tensor, looks: Tensor) -> Tensor:
        """How little of the first two heads' attention in the pointing layer lies on the word: [] in nats."""
        attention = self.model.model.language_model.layers[POINTING].self_attn
        assert self.pointing is not None
        hidden, (cos, sin) = self.pointing
        shape = (*hidden.shape[:2], -1, attention.head_dim)
        query = attention.q_norm(attention.q_proj(hidden).view(shape)).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(hidden).view(shape)).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        query = query[row, :2, column]  # [queries, 2 heads, 32]
        scores = torch.einsum("qhd,qtd->qht", query, key[row, 0]) * attention.scaling
        future = torch.arange(key.shape[2]) > column[:, None]
        weights = scores.masked_fill(future[:, None], -torch.inf).log_softmax(-1)
        return -weights.masked_fill(~looks[:, None], -torch.inf).logsumexp(-1).clamp(min=-20).mean()

    @torch.inference_mode()
    def transcribe(self, samples: Sequence[Samples], max_new_tokens: int = 80) -> list[str]:
        """The transcripts the reference writes, greedily, of recordings of about the same length."""
        mel, mask = self.features(samples)
        prompts = [torch.tensor(self.prompt(audio_tokens(int(row.sum())))) for row in mask]
        options = {"batch_first": True, "padding_side": "left"}
        ids = nn.utils.rnn.pad_sequence(prompts, padding_value=self.ids["<|endoftext|>"], **options)
        attend = nn.utils.rnn.pad_sequence([torch.ones_like(prompt) for prompt in prompts], **options)
        out = self.model.generate(
            input_ids=ids, attention_mask=attend, input_features=mel, input_features_mask=mask, do_sample=False,
            max_new_tokens=max_new_tokens,
        )  # fmt: skip
        written = [self.tokenizer.decode(row.tolist()) for row in out[:, ids.shape[1] :]]
        return [text.partition("<asr_text>")[2] for text in written]

    def save(self, folder: Path) -> None:
        """The checkpoint as transformers has it, in float16, with its tokenizer and preprocessor."""
        folder.mkdir(parents=True, exist_ok=True)
        half = transformers.Qwen3ASRForConditionalGeneration(self.model.config).half()
        half.load_state_dict(self.model.state_dict())
        half.generation_config = transformers.GenerationConfig.from_model_config(half.config)
        half.save_pretrained(folder)
        self.extractor.save_pretrained(folder)
        names = dict(zip(("audio_bos_token", "audio_eos_token", "audio_token"), SPECIAL[3:], strict=True))
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
            extra_special_tokens=names, clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)  # fmt: skip

    def load(self, folder: Path) -> None:
        """Weights from a checkpoint, to compute in float32."""
        loaded = transformers.Qwen3ASRForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.model.load_state_dict(loaded.state_dict())
