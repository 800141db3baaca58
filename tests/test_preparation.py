"""`lade.warmup` and `lade warmup`: what calls would compile and capture is there before them."""

import pytest
import torch
from support import compare, prompt, tiny_llama

import lade
from lade.commands import main
from lade.forward import base as forward_base

pytestmark = pytest.mark.usefixtures("static_blocks")
TREE = {"MODE": "tree", "MAX_BLOCK": 16, "COMPILE": 0, "USE_FLASH": 0}


@pytest.fixture
def model():
    return tiny_llama(num_hidden_layers=1)


@pytest.mark.parametrize(
    ("arguments", "batch_size"), [({"do_sample": False}, 1), ({"do_sample": True, "top_k": 20}, 2)]
)
def test_trees(arguments, batch_size, model, graphs):
    lade.config_lade(**TREE, CUDA_GRAPH=1)
    found = lade.warmup(model, 24, 40, batch_size, **arguments)
    assert found.block_tokens == (8, 16)
    assert found.captured_steps >= 4
    assert found.reasons == ()
    assert len(graphs) == 2  # of each size one
    for seed in range(2):
        inputs = prompt(seed=seed, batch_size=batch_size)
        compare(model, inputs, max_new_tokens=40, **arguments)
        assert lade.last_stats().captured_steps == lade.last_stats().steps - 1
    assert len(graphs) == 2


def test_with_another_default_device(model):
    """Random ids are made on the host."""
    lade.config_lade(**TREE)
    with torch.device("meta"):
        lade.warmup(model, prompt_tokens=24, max_new_tokens=16)
    compare(model, max_new_tokens=20)


def test_rows_of_a_model_without_a_pad_token(model):
    model.generation_config.pad_token_id = model.config.pad_token_id = None
    lade.config_lade(**TREE)
    assert lade.warmup(model, 24, 40, 2).seconds > 0


def test_without_it_calls_capture(model, graphs):
    """The control of the test above; as does a call whose cache is of another size."""
    lade.config_lade(**TREE, CUDA_GRAPH=1)
    model.generate(**prompt(), max_new_tokens=40, do_sample=False)
    first = len(graphs)
    assert first > 0
    lade.warmup(model, 24, 40)
    assert len(graphs) == 2
    model.generate(**prompt(400), max_new_tokens=40, do_sample=False)
    assert len(graphs) > 2


def test_compiled(model):
    lade.config_lade(**TREE | {"COMPILE": 1})
    found = lade.warmup(model, 24, 40, do_sample=False)
    assert found.block_tokens == (8, 16)
    assert found.compiled_steps >= 4
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch._dynamo.utils.counters.clear()
        model.generate(**prompt(), max_new_tokens=40, do_sample=False)
    assert lade.last_stats().reasons.get("compile") is None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_random_numbers_stay_as_they_were(model):
    lade.config_lade(**TREE)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = lade.warmup(model, 24, 40, do_sample=True)
    assert torch.equal(torch.rand(3), expected)
    assert found.block_tokens == ()  # on a CPU nothing is captured


@pytest.mark.parametrize(("name", "value"), [("prompt_tokens", 0), ("max_new_tokens", 1.5), ("batch_size", True)])
def test_wrong_numbers(name, value, model):
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got {value}"):
        lade.warmup(model, **{name: value})


@pytest.mark.parametrize("is_on", ["1", "0"])
def test_short_calls_capture_here_in_a_block_of_code_too(is_on, model, graphs, monkeypatch):
    monkeypatch.setenv("USE_LADE", is_on)
    with lade.enabled(**TREE, CUDA_GRAPH="auto"):
        assert lade.warmup(model, 24, 40, do_sample=False).captured_steps > 0


def test_where_lade_does_not_run(model, monkeypatch):
    monkeypatch.setenv("USE_LADE", "0")
    with pytest.raises(RuntimeError, match="lade does not run: USE_LADE is not set"):
        lade.warmup(model, 24, 40, do_sample=False)
    model.generate(**prompt(), max_new_tokens=2)
    monkeypatch.setenv("USE_LADE", "1")
    with pytest.raises(RuntimeError, match="lade does not run: "):
        lade.warmup(model, 24, 40, do_sample=False, num_beams=2)
    lade.restore_all()  # the figures of an earlier call stay
    with pytest.raises(RuntimeError, match="the patch is not on"):
        lade.warmup(model, 24, 40, do_sample=False)


def test_command(graphs, checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(forward_base, "GRAPH_DEVICES", ("cpu",))
    lade.config_lade(COMPILE=0, CUDA_GRAPH=1, USE_FLASH=0)
    options = ("--prompt_tokens", "20,40", "--max_new_tokens", "64", "--dtype", "float32", "--mode", "tree")
    assert main(["warmup", *options, "--model_path", checkpoint, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("prompts of 20 tokens: ")
    assert "blocks captured or compiled: 8, 16, 32, 64" in lines[1]
    assert lines[2].startswith("prompts of 40 tokens: ")


def test_command_refuses(capsys):
    with pytest.raises(SystemExit):
        main(["warmup", "--prompt_tokens", "few"])
    assert "--prompt_tokens must be integers, separated by commas, got 'few'" in capsys.readouterr().err
