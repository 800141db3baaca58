"""Train the bundled checkpoint from the running interpreter's standard library.

    python models/train.py --out models/stdlib-9m --context 256
    python models/train.py --out models/stdlib-9m --context 512 --resume --decay --mix code=1,chat=1

One process, CPU or CUDA, no network. The learning rate is constant after a short warm-up; with `--decay` it falls
linearly to zero over `--tokens`. A run can be stopped at any time and goes on from its last evaluation.
Writes a Hugging Face folder (weights in bfloat16, tokenizer, chat template) and prints one JSON line per evaluation.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from corpus import FACTS, Turn, conversations, is_held_out, source_files
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MAX_POSITIONS = 2048  # declared limit; quality beyond the trained context is not claimed
PIECE = 2048  # tokens; long files are cut up before shuffling
MIX = "code=3,chat=3,test=1"  # how often each kind occurs in one pass
# Line breaks take the following indentation with them, so that an indent costs one token.
WORDS = r"\n[ \t]*| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- else -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""


def train_tokenizer(texts: list[str], vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Byte-level BPE; every text round-trips exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def render(tokenizer: PreTrainedTokenizerFast, chat: list[Turn]) -> str:
    return str(tokenizer.apply_chat_template(chat, tokenize=False))


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    return [e.ids for e in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]


def load_documents(
    tokenizer: PreTrainedTokenizerFast | None,
) -> tuple[PreTrainedTokenizerFast, dict[str, list[list[int]]]]:
    """The tokenizer (trained when not given) and token ids of each kind of document, plus the held-out code."""
    files = list(source_files())
    train = [(module, source) for module, source in files if not is_held_out(module)]
    code = [source for module, source in train if module.split(".")[0] != "test"]
    test = [source for module, source in train if module.split(".")[0] == "test"]
    held_out = [source for module, source in files if is_held_out(module) and module.split(".")[0] != "test"]
    chats = conversations(train)
    if tokenizer is None:
        sample = [turn["content"] for chat in chats[::4] for turn in chat]
        tokenizer = train_tokenizer(code + sample)
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    texts = {
        "code": [bos + text + eos for text in code],
        "test": [bos + text + eos for text in test],
        "held_out": [bos + text + eos for text in held_out],
        "chat": [render(tokenizer, chat) for chat in chats],
        "quiz": [render(tokenizer, chat) for chat in conversations(train, seed=1, only=FACTS)],
    }
    return tokenizer, {kind: encode(tokenizer, values) for kind, values in texts.items()}


def sequences(documents: dict[str, list[list[int]]], mix: dict[str, int], context: int, seed: int) -> torch.Tensor:
    """One shuffled pass over the mix, packed end to end: [n, context + 1] ids."""
    rng = random.Random(seed)
    # Long files are cut into pieces first, so that a sequence mixes kinds as the whole does.
    pieces = [
        doc[start : start + PIECE]
        for kind, times in mix.items()
        for _ in range(times)
        for doc in documents[kind]
        for start in range(0, len(doc), PIECE)
    ]
    rng.shuffle(pieces)
    flat = torch.tensor([token for piece in pieces for token in piece], dtype=torch.int16)
    count = (len(flat) - 1) // context
    starts = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) * context
    return flat.unfold(0, context + 1, 1)[starts]


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=320,
        intermediate_size=880,
        num_hidden_layers=6,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    # Compiled, the plain formula trains faster on a CPU than its fused kernel.
    return LlamaForCausalLM._from_config(config, attn_implementation="eager")


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, documents: list[list[int]], context: int, batch: int = 16) -> float:
    """Mean loss in nats per token over the held-out code, cut into sequences of `context`."""
    flat = torch.tensor([token for doc in documents for token in doc])
    rows = flat[: len(flat) // context * context].view(-1, context)
    total = 0.0
    for chunk in rows.split(batch):
        total += float(model(input_ids=chunk.to(model.device), labels=chunk.to(model.device)).loss) * len(chunk)
    return total / len(rows)


def report(figures: dict[str, float]) -> None:
    print(json.dumps(figures), flush=True)


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.do_sample = False
    copy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--state", type=Path, default=Path("train-state.pt"), help="where to keep what --resume needs")
    parser.add_argument("--tokens", type=float, default=20e6, help="tokens of this run")
    parser.add_argument("--context", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--mix", default=MIX, help="how often each kind of document occurs in one pass")
    parser.add_argument("--batch", type=int, default=4096, help="tokens per optimizer step")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=float, default=4e5, help="tokens of the linear warm-up")
    parser.add_argument("--decay", action="store_true", help="let the learning rate fall to zero over this run")
    parser.add_argument("--save-every", type=float, default=1e6, help="tokens between evaluations")
    parser.add_argument("--resume", action="store_true", help="continue from --state")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    state = torch.load(args.state, weights_only=True) if args.resume else None
    known = PreTrainedTokenizerFast.from_pretrained(args.out) if args.resume else None
    tokenizer, documents = load_documents(known)
    tokenizer.save_pretrained(args.out)
    report({kind: sum(map(len, docs)) for kind, docs in documents.items()})

    model = build_model(tokenizer).to(args.device)
    optimizer = build_optimizer(model)
    first = 0  # tokens seen by earlier runs
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["seen"]
    report({"parameters": sum(p.numel() for p in model.parameters()), "seen": first})

    @torch.compile
    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    rows = args.batch // args.context
    mix = {kind: int(times) for kind, times in (part.split("=") for part in args.mix.split(","))}
    data = sequences(documents, mix, args.context, seed=0)
    steps_per_pass = len(data) // rows
    data_pass = 0
    started, losses = time.time(), []
    seen = last_saved = first
    while seen < first + args.tokens:
        step = seen // args.batch
        if step // steps_per_pass != data_pass:
            data_pass = step // steps_per_pass
            data = sequences(documents, mix, args.context, seed=data_pass)
        start = step % steps_per_pass * rows
        batch = data[start : start + rows].long().to(args.device)
        rate = min(1.0, (seen + args.batch) / args.warmup)
        if args.decay:
            rate *= 1 - (seen - first) / args.tokens
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seen += args.batch
        if len(losses) == 50:
            report({"seen": seen, "loss": round(sum(losses) / 50, 3), "seconds": round(time.time() - started)})
            losses.clear()
        if seen - last_saved >= args.save_every or seen >= first + args.tokens:
            report({"seen": seen, "held_out_loss": round(evaluate(model, documents["held_out"], args.context), 4)})
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen": seen}, args.state)
            export(model, tokenizer, args.out)
            last_saved = seen


if __name__ == "__main__":
    main()
