"""Libraries that end in `generate()`: the same outputs with lade as without, and proof that lookahead ran.

`pip install -e .[clients]`, then `pytest -m clients`; a client that is not installed is skipped, and a bare `pytest`
leaves all of them out. With LADE_CLIENTS_PAGE=docs/works-with.md the results of the run are written to that file; a run
of some clients (-k) changes their rows.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import torch
import transformers
from support import BUNDLED, ENVIRONMENT, tiny_llama
from torch.utils._pytree import tree_flatten
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import lade
from lade.models import adapter_for
from lade.models.self_check import WAITS

pytestmark = pytest.mark.clients

PAGE = os.environ.get("LADE_CLIENTS_PAGE")
MODEL = str(BUNDLED)
CODE = "def read_file(path):\n    with open(path) as file:\n        return file.read()\n\ndef write_file(path, text):\n    with open(path"
OTHER = "import os\n\ndef find(root):\n    for name in os.listdir("
QUESTION = "What does shutil.copytree do?"
NEW = 40
rows: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True)
class Client:
    """One way to call `generate()`. run: given a model and a tokenizer, returns what is to be equal."""

    name: str
    package: str  # whose version is shown, and without which the test is skipped
    what: str
    run: Callable[..., object]
    reason: str | None = None  # part of the reason why plain generate() runs; None where lookahead does
    note: str = ""


CLIENTS: list[Client] = []


def client(name, package, what, **others):
    def add(run):
        CLIENTS.append(Client(name, package, what, run, **others))
        return run

    return add


# The clients.


@client("transformers `pipeline`", "transformers", "`text-generation`, greedy, sampled, and in batches of two")
def through_pipeline(model, tokenizer):
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    sampled = {"do_sample": True, "temperature": 0.7, "num_return_sequences": 2}
    return (
        write(CODE, max_new_tokens=NEW, do_sample=False),
        write(CODE, max_new_tokens=NEW, **sampled),
        write([CODE, OTHER], max_new_tokens=NEW, do_sample=False, batch_size=2),
    )


@client(
    "`transformers serve`", "fastapi", "chat completions and completions over HTTP, streamed and not",
    note="`lade -m transformers.cli.transformers serve MODEL`",
)  # fmt: skip
def served(model, tokenizer):
    return over_http()


@client(
    "`transformers serve --continuous-batching`", "fastapi", "chat completions over HTTP",
    reason="continuous batching", note="a loop of transformers' own, with a cache of its own",
)  # fmt: skip
def served_in_one_batch(model, tokenizer):
    # On a CPU its cache takes a share of all memory unless told otherwise.
    return over_http(continuous_batching=True, cb_num_blocks=64, cb_block_size=32, cb_max_batch_tokens=128)


def over_http(**options):
    with serving(**options) as url:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": NEW}
        answer = json.loads(post(f"{url}/v1/chat/completions", chat))["choices"][0]["message"]["content"]
        if options:
            return answer
        streamed = post(f"{url}/v1/chat/completions", chat | {"stream": True})
        pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])
        completion = {"model": MODEL, "prompt": CODE, "max_tokens": NEW}
        return answer, text, json.loads(post(f"{url}/v1/completions", completion))["choices"][0]["text"]


@contextmanager
def serving(**options):
    """The address of `transformers serve` in this process."""
    from transformers.cli.serve import Serve

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    url = f"http://localhost:{port}"
    server = Serve(force_model=MODEL, dtype="float32", device="cpu", port=port, non_blocking=True, **options)
    try:
        wait_for(server, f"{url}/health")
        yield url
    finally:
        server.kill_server()


def wait_for(server, url):
    """Until it answers, or its thread has ended."""
    while server._thread.is_alive():
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError("the server has ended")


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


@client("`transformers chat`", "rich", "a question, over `transformers serve`")
def chat_command(model, tokenizer):
    with serving() as url:
        command = [sys.executable, "-m", "transformers.cli.transformers", "chat", MODEL, f"{url}/v1"]
        said = subprocess.run(
            [*command, f"max_new_tokens={NEW}", "do_sample=False"],
            input=f"{QUESTION}\n!exit\n",
            capture_output=True,
            text=True,
            check=False,
            env=ENVIRONMENT,
        )
        assert said.returncode == 0, said.stderr
        return [line for line in said.stdout.splitlines() if "tok/s" not in line]


@client("dspy", "dspy", "a question, over `transformers serve`")
def dspy(model, tokenizer):
    import dspy

    with serving() as url:
        client = dspy.LM(
            f"openai/{MODEL}", api_base=f"{url}/v1", api_key="none", temperature=0, max_tokens=NEW, cache=False
        )
        return client(QUESTION)


@client(
    "lm-evaluation-harness", "lm_eval", "`generate_until` in batches of two",
    note="`lade -m lm_eval run ...`; tasks that only score given texts (`loglikelihood`) call no `generate()`",
)  # fmt: skip
def lm_eval(model, tokenizer):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    arguments = {"until": ["\n\n"], "max_gen_toks": NEW, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (text, arguments), number) for number, text in enumerate([CODE, OTHER, CODE])
    ]
    return harness.generate_until(requests, disable_tqdm=True)


@client("peft", "peft", "LoRA, two adapters, merged and not")
def lora(model, tokenizer):
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    model.add_adapter("other", config)
    found = [write(model, tokenizer)]
    model.set_adapter("other")
    found.append(write(model, tokenizer))
    return *found, write(model.merge_and_unload(), tokenizer)


def test_plain_lora_of_peft_is_known():
    """What tests/test_adapters.py shows of a layer that is alike."""
    peft = pytest.importorskip("peft")
    for use_dora in (False, True):
        model = tiny_llama()
        peft.get_peft_model(model, peft.LoraConfig(use_dora=use_dora))
        assert bool(adapter_for(model).code.classes) == use_dora


@client(
    "peft, prompt tuning", "peft", "eight virtual tokens",
    reason="prompt", note="peft prepares each step's inputs itself; prefix tuning and P-tuning likewise",
)  # fmt: skip
def prompt_tuning(model, tokenizer):
    import peft

    torch.manual_seed(1)
    return write(
        peft.get_peft_model(model, peft.PromptTuningConfig(num_virtual_tokens=8, task_type="CAUSAL_LM")), tokenizer
    )


@client("TRL", "trl", "rollouts and two steps of the GRPO trainer", note="the weights after training are equal, too")
def grpo(model, tokenizer):
    import datasets
    import trl

    completions = []

    def reward(completion_ids, **_):
        completions.append(completion_ids)
        return [float(sum(ids) % 17) for ids in completion_ids]

    settings = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=24,
        learning_rate=1e-3, report_to=[], use_cpu=True, bf16=False, save_strategy="no", seed=3, disable_tqdm=True,
        logging_strategy="no", gradient_checkpointing=False,
    )  # fmt: skip
    dataset = datasets.Dataset.from_dict({"prompt": [CODE, OTHER] * 2})
    model.warnings_issued = {}
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=reward, args=settings, train_dataset=dataset, processing_class=tokenizer
    )
    trainer.train()
    return completions, {name: weight.clone() for name, weight in model.state_dict().items()}


@client("accelerate", "accelerate", "`Accelerator.prepare_model`; `cpu_offload`, which moves weights in layer by layer")
def prepared(model, tokenizer):
    import accelerate

    found = write(accelerate.Accelerator(cpu=True).prepare_model(model, evaluation_mode=True), tokenizer)
    return found, write(accelerate.cpu_offload(model, execution_device=torch.device("cpu")), tokenizer)


@client(
    "torchao", "torchao", "`Int8WeightOnlyConfig`",
    note="quantised *activations* round what a block changed: [compatibility](compatibility.md#what-differs)",
)  # fmt: skip
def torchao(model, tokenizer):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return write(model, tokenizer)


@client("optimum-quanto", "optimum-quanto", "weights in 8 bits")
def quanto(model, tokenizer):
    from optimum.quanto import freeze, qint8, quantize

    quantize(model, weights=qint8)
    freeze(model)
    return write(model, tokenizer)


@client("hqq", "hqq", "weights in 4 bits")
def hqq(model, tokenizer):
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    settings = BaseQuantizeConfig(nbits=4, group_size=64)
    AutoHQQHFModel.quantize_model(model, quant_config=settings, compute_dtype=torch.float32, device="cpu")
    return write(model, tokenizer)


@client("compressed-tensors", "compressed-tensors", "weights in 8 bits, one scale per row")
def compressed(model, tokenizer):
    from compressed_tensors import quantization

    weights = quantization.QuantizationArgs(num_bits=8, strategy="channel")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    config = quantization.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for part in model.modules():
        if hasattr(part, "weight_scale"):
            part.weight_scale.data = part.weight.detach().abs().amax(dim=1, keepdim=True) / 127
    return write(model, tokenizer)


@client(
    "optimum-quanto, cache", "optimum-quanto", "keys and values in 4 bits", reason="cache_implementation='quantized'"
)
def quantised_cache(model, tokenizer):
    settings = {"backend": "quanto", "nbits": 4}
    return write(model, tokenizer, cache_implementation="quantized", cache_config=settings)


@client("lighteval", "lighteval", "`greedy_until` in a batch of two")
def lighteval(model, tokenizer):
    from lighteval.models.transformers.transformers_model import TransformersModel, TransformersModelConfig
    from lighteval.tasks.requests import Doc, SamplingMethod

    folder = shutil.copytree(MODEL, Path(tempfile.mkdtemp()) / "model")  # it keeps answers in the model's folder
    settings = TransformersModelConfig(
        model_name=str(folder), dtype="float32", batch_size=2, device="cpu", max_length=512
    )
    arguments = {"choices": [""], "gold_index": 0, "sampling_methods": [SamplingMethod.GENERATIVE]}
    docs = [
        Doc(query=text, id=str(number), task_name="task", generation_size=NEW, stop_sequences=["\n\n"], **arguments)
        for number, text in enumerate([CODE, OTHER])
    ]
    return [answer.text for answer in TransformersModel(settings).greedy_until(docs)]


@client("diffusers", "diffusers", "an image of Ernie's pipeline, whose language model writes the prompt anew")
def an_image(model, tokenizer):
    import diffusers

    torch.manual_seed(2)
    tokenizer.model_max_length = NEW  # of the new prompt
    image = diffusers.ErnieImagePipeline(
        diffusers.ErnieImageTransformer2DModel(
            hidden_size=32, num_attention_heads=2, num_layers=1, ffn_hidden_size=32, in_channels=16, out_channels=16,
            text_in_dim=model.config.hidden_size, rope_axes_dim=(8, 4, 4),
        ),
        diffusers.AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",), block_out_channels=(8,),
            layers_per_block=1, latent_channels=4, norm_num_groups=2,
        ),
        model.model, tokenizer, diffusers.FlowMatchEulerDiscreteScheduler(), pe=model, pe_tokenizer=tokenizer,
    )  # fmt: skip
    image.set_progress_bar_config(disable=True)
    drawn = image(QUESTION, height=32, width=32, num_inference_steps=2, output_type="np")
    return drawn.revised_prompts, drawn.images.tolist()


@client("inspect-ai", "inspect-ai", "two questions to `hf/`, sampled")
def inspect_ai(model, tokenizer):
    import inspect_ai
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.solver import generate

    samples = [Sample(input=text, target="") for text in (QUESTION, "What does os.walk do?")]
    asked = get_model(
        "hf/local", model_path=MODEL, tokenizer_path=MODEL, device="cpu", memoize=False, torch_dtype=torch.float32
    )
    task = inspect_ai.Task(dataset=samples, solver=generate())
    log, *_ = inspect_ai.eval(task, model=asked, max_tokens=NEW, seed=1, log_dir=tempfile.mkdtemp(), display="none")
    assert log.status == "success", log.error
    return [sample.output.completion for sample in log.samples]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer"},
        "done": {"type": "boolean"},
    },
    "required": ["name", "size", "done"],
    "additionalProperties": False,
}


@client("xgrammar", "xgrammar", "a JSON schema, as a logits processor", note="a processor serves one call")
def xgrammar(model, tokenizer):
    import xgrammar as xgr

    info = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgr.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    text = write(model, tokenizer, logits_processor=[xgr.contrib.hf.LogitsProcessor(grammar)])
    assert text[0].lstrip().startswith('{"name"')
    return text


@client("outlines", "outlines", "a regular expression")
def outlines(model, tokenizer):
    import outlines
    from outlines.types import Regex

    generator = outlines.Generator(
        outlines.from_transformers(model, tokenizer), Regex(r"[a-z]{3,9}(, [a-z]{3,9}){4,6}")
    )
    text = generator(CODE, max_new_tokens=NEW)
    assert re.match(r"[a-z]{3,9}, ", text)
    return text


@client(
    "lm-format-enforcer", "lm-format-enforcer", "a JSON schema: its `TokenEnforcer` as `prefix_allowed_tokens_fn`",
    note="its `integrations.transformers` does not import with transformers 5, with lade or without",
)  # fmt: skip
def lm_format_enforcer(model, tokenizer):
    from lmformatenforcer import JsonSchemaParser, TokenEnforcer, TokenEnforcerTokenizerData

    zero = tokenizer.encode("0")[-1]  # behind which a word begins with its space
    texts = [(token, tokenizer.decode([zero, token])[1:], tokenizer.decode([token])) for token in range(len(tokenizer))]
    regular = [
        (token, text, len(text) > len(alone)) for token, text, alone in texts if token not in tokenizer.all_special_ids
    ]
    data = TokenEnforcerTokenizerData(regular, tokenizer.decode, tokenizer.eos_token_id, False, len(tokenizer))
    enforcer = TokenEnforcer(data, JsonSchemaParser(SCHEMA))

    def allowed(row, tokens):
        return enforcer.get_allowed_tokens(tokens.tolist()).allowed_tokens

    text = write(model, tokenizer, prefix_allowed_tokens_fn=allowed)
    assert '"name"' in text[0]
    return text


@client("smolagents", "smolagents", "`TransformersModel`: an answer, a stop sequence, and a streamed answer")
def smolagents(model, tokenizer):
    from smolagents import TransformersModel

    agent = TransformersModel(MODEL, device_map="cpu", torch_dtype="float32", max_new_tokens=NEW, do_sample=False)
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    return (
        agent.generate(messages).content,
        agent.generate(messages, stop_sequences=["and"]).content,
        "".join(delta.content or "" for delta in agent.generate_stream(messages)),
    )


@client("langchain-huggingface", "langchain-huggingface", "`HuggingFacePipeline`: `invoke`, `batch` and `stream`")
def langchain(model, tokenizer):
    from langchain_huggingface import HuggingFacePipeline

    write = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=NEW, do_sample=False)
    chain = HuggingFacePipeline(pipeline=write)
    return chain.invoke(CODE), chain.batch([CODE, OTHER]), "".join(chain.stream(OTHER))


# The test.


def write(model, tokenizer, **arguments):
    """Greedy and sampled text behind a piece of source; the second without processors that serve one call only."""
    inputs = tokenizer(CODE, return_tensors="pt")
    torch.manual_seed(0)
    greedy = tokenizer.decode(
        model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **arguments)[0, inputs.input_ids.shape[1] :]
    )
    if "logits_processor" in arguments:
        return (greedy,)
    sampled = model.generate(**inputs, max_new_tokens=NEW, do_sample=True, temperature=0.7, **arguments)
    return greedy, tokenizer.decode(sampled[0])


def equal(one, other):
    """Whether nested results are the same, tensors bit by bit."""
    (ours, shape), (theirs, other_shape) = tree_flatten(one), tree_flatten(other)
    pairs = zip(ours, theirs, strict=False)
    return shape == other_shape and all(
        torch.equal(*pair) if isinstance(pair[0], torch.Tensor) else pair[0] == pair[1] for pair in pairs
    )


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client(client, lade_on, monkeypatch, caplog):
    try:
        version = metadata.version(client.package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{client.package} is not installed")
    lade.config_lade(MAX_BLOCK=16)
    results = []
    for switch in ("0", "1"):
        monkeypatch.setenv("USE_LADE", switch)
        lade.log_history(clear=True)
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        torch.manual_seed(0)
        others = set(threading.enumerate())
        results.append(client.run(model, AutoTokenizer.from_pretrained(MODEL)))
        for thread in set(threading.enumerate()) - others:  # of streams: the text is there before the call has ended
            thread.join(timeout=10)
        if switch == "0":  # the control: nothing but the switch lets lookahead run
            assert all(stats.steps == 0 and "USE_LADE" in stats.fallback_reason for stats in lade.log_history())
    assert equal(*results)
    calls = lade.log_history()
    if client.reason is not None:
        reasons = {stats.fallback_reason for stats in calls} or {
            record.args[0] for record in caplog.records if record.name == "lade"
        }
        assert len(reasons) == 1
        assert client.reason in min(reasons)
        result = f"no: {min(reasons)}"
    else:
        # Code that lade does not know is tried out in a later call.
        calls = [stats for stats in calls if stats.fallback_reason != WAITS]
        assert calls
        assert [stats.fallback_reason for stats in calls] == [None] * len(calls)
        row_steps = sum(stats.steps * stats.batch_size for stats in calls)
        tokens = sum(stats.generated_tokens for stats in calls)
        assert any(size > 1 for stats in calls for size in stats.block_tokens)
        result = f"{len(calls)}; {tokens / row_steps:.2f}"
    rows[client.name] = (
        transformers.__version__ if client.name.startswith("`transformers") else version,
        client.what,
        result,
        client.note,
    )


@pytest.fixture(scope="module", autouse=True)
def page():
    yield
    if PAGE and rows:
        write_page(Path(PAGE))


def write_page(path):
    """Replace the page's rows and versions. Where these are the same, the rows of clients that have not run stay."""
    found = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}"
    text = path.read_text(encoding="utf-8")
    if found in text:
        for line in re.findall(r"^\| (?!client )(.*) \|$", text, re.MULTILINE):
            name, *row = line.split(" | ")
            rows.setdefault(name, tuple(row))
    ordered = sorted(rows.items(), key=lambda row: row[0].strip("`").lower())
    table = "".join(f"| {name} | {' | '.join(row)} |\n" for name, row in ordered)
    text = re.sub(r"(?<=\()transformers .*(?=, a CPU\))", found, text)
    path.write_text(re.sub(r"(?<=---\|\n)(\|.*\n)*", lambda _: table, text), encoding="utf-8")
