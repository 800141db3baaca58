"""Tiny random models of many families: the table behind the coverage test.

Class names are looked up when a model is built, so that an older transformers that lacks a family can import this file.
Sliding windows, chunks and local attention are smaller than a prompt of 24 tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

VOCAB = 61
WINDOW = 8  # sliding windows and chunks, in tokens

# What a config takes of these, by whichever name it knows; an entry's own settings come on top.
DEFAULTS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,  # tied ones make a random model repeat its last token
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 64),
    "head_dim": 12,
    # image encoders: 16 patches, merged to 4 where the model merges
    "image_size": 16,
    "patch_size": 4,
    **dict.fromkeys(("embed_dim", "out_hidden_size", "projection_dim"), 48),
    **dict.fromkeys(("depth", "spatial_merge_size"), 2),
    "num_position_embeddings": 16,
    # mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    "router_jitter_noise": 0.0,
    # multi-head latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


@dataclass(frozen=True)
class Family:
    """build(): a random model in eval mode. inputs(with_image), for a composite one: generate()'s arguments."""

    name: str
    model_class: str  # in transformers; an older version may lack it
    settings: dict[str, Any] = field(default_factory=dict)  # of its config
    note: str = ""
    attention: str = "sdpa"
    dtype: torch.dtype = torch.float64
    spread: float = 1.0  # factor on all matrices, where the text would not depend on the context otherwise
    inputs: Callable[[bool], dict[str, Any]] | None = None
    fails_in: str = ""  # the version of transformers in which plain generate() raises

    @property
    def exists(self) -> bool:
        """Whether this transformers has the model, and its plain generate() runs."""
        return hasattr(transformers, self.model_class) and transformers.__version__ != self.fails_in

    def build(self) -> Any:
        model_class = getattr(transformers, self.model_class)
        config = make_config(model_class.config_class, **self.settings)
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation=self.attention).to(self.dtype).eval()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the grouped kernels take no float64
        for name, weight in model.named_parameters():
            if not weight.any() and not name.endswith("bias"):  # what training starts at zero
                weight.data.normal_(std=0.5)
            if weight.dim() > 1:
                weight.data *= self.spread
        if "indexed_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
            # The padding token's zeros make all keys equal, and which of them topk() takes depends on the shape.
            embedding = model.get_input_embeddings().weight.data
            embedding[0] = embedding[1:3].mean(dim=0)
        if self.inputs is not None:
            model.get_output_embeddings().weight.data[-10:] = 0  # a greedy text holds no image tokens
        model.generation_config.eos_token_id = None  # random models would stop anywhere
        model.generation_config.pad_token_id = 0
        return model


def make_config(config_class: Any, **settings: Any) -> Any:
    """A config from the defaults it knows and the settings."""
    known = inspect.signature(config_class.__init__).parameters
    settings = copy.deepcopy(settings)  # configs write into what they are given
    for name, value in settings.items():
        if callable(value):
            settings[name] = value()
    return config_class(**{name: value for name, value in DEFAULTS.items() if name in known} | settings)


def family(name: str, model_class: str, note: str = "", **others: Any) -> Family:
    """others: fields of `Family`, and settings of the model's config."""
    fields = {key: others.pop(key) for key in ("attention", "dtype", "spread", "inputs", "fails_in") if key in others}
    return Family(name, model_class, others, note, **fields)


def of_each_class(families: Sequence[Family], often: str) -> list[Any]:
    """The first family of each class as parameters of a test; those not named in `often` run with the long tests."""
    firsts = {found.model_class: found for found in reversed(families)}
    names = set(often.split())
    assert names <= {found.name for found in firsts.values()}
    return [
        pytest.param(found, id=found.name, marks=() if found.name in names else pytest.mark.long)
        for found in firsts.values()
    ]


def named(name: str, **changes: Any) -> Family:
    """changes: fields of `Family`, and settings beside its own."""
    found = next(found for found in (*FAMILIES, *OTHERS, *RECURRENT) if found.name == name)
    fields = vars(found) | found.settings | changes
    del fields["settings"]
    return family(**fields)


def before(version: str) -> bool:
    """Whether this transformers is older."""
    return Version(transformers.__version__) < Version(version)


def rope(rope_type: str, **settings: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0} | settings


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
YARN16 = YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
LONGROPE = rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5], long_factor=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
HALF_ROTARY = rope("default", partial_rotary_factor=0.5)
SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
SLIDING = {"sliding_window": WINDOW, "layer_types": SLIDING_AND_FULL}

LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # multi-head latent attention
INDEXED = {"index_topk": 32, "index_head_dim": 16, "index_n_heads": 64}  # the 32 best keys of each query

FAMILIES = [
    family("llama", "LlamaForCausalLM"),
    family("llama-llama3-rope", "LlamaForCausalLM", rope_parameters=LLAMA3),
    family("llama-yarn-rope", "LlamaForCausalLM", rope_parameters=YARN),
    family("llama-linear-rope", "LlamaForCausalLM", rope_parameters=rope("linear", factor=4.0)),
    family("mistral", "MistralForCausalLM", sliding_window=None),
    family("mistral-window", "MistralForCausalLM", sliding_window=WINDOW),
    family("mixtral", "MixtralForCausalLM"),
    family("mixtral-window", "MixtralForCausalLM", sliding_window=WINDOW),
    family("qwen2", "Qwen2ForCausalLM"),
    family("qwen2-window", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    family("qwen3", "Qwen3ForCausalLM"),
    family("qwen3-window", "Qwen3ForCausalLM", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    family("qwen2_moe", "Qwen2MoeForCausalLM"),
    family("qwen3_moe", "Qwen3MoeForCausalLM"),
    family("gemma", "GemmaForCausalLM"),
    family("gemma2", "Gemma2ForCausalLM", attention="eager", **SLIDING, query_pre_attn_scalar=12),
    family("gemma3_text", "Gemma3ForCausalLM", spread=1.5, **SLIDING, query_pre_attn_scalar=12),
    family("gemma3n_text", "Gemma3nForCausalLM", "the last two layers share the keys of the first two",
           num_hidden_layers=4, layer_types=SLIDING_AND_FULL * 2, num_kv_shared_layers=2, sliding_window=WINDOW,
           vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, laurel_rank=8, altup_num_inputs=2,
           activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0]),
    family("gemma4_text", "Gemma4ForCausalLM", "the last two layers share the keys of the first two",
           num_hidden_layers=4, layer_types=SLIDING_AND_FULL * 2, num_kv_shared_layers=2, sliding_window=WINDOW,
           vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8),
    family("gemma4_text-moe", "Gemma4ForCausalLM", **SLIDING,
           hidden_size_per_layer_input=0, enable_moe_block=True, attention_k_eq_v=True,
           num_global_key_value_heads=2),
    family("vaultgemma", "VaultGemmaForCausalLM", attention="eager", **SLIDING, query_pre_attn_scalar=12),
    family("phi", "PhiForCausalLM"),
    family("phi3", "Phi3ForCausalLM"),
    family("phi3-window", "Phi3ForCausalLM", sliding_window=WINDOW),
    family("phi3-longrope-below", "Phi3ForCausalLM", "24 + 40 tokens stay below the boundary", rope_parameters=LONGROPE,
           original_max_position_embeddings=256),
    family("phi3-longrope-across", "Phi3ForCausalLM", "the text crosses the boundary", rope_parameters=LONGROPE,
           original_max_position_embeddings=40),
    family("phi3-longrope-beyond", "Phi3ForCausalLM", "the prompt is beyond the boundary", rope_parameters=LONGROPE,
           original_max_position_embeddings=16),
    family("phimoe", "PhimoeForCausalLM"),
    family("phimoe-window", "PhimoeForCausalLM", sliding_window=WINDOW),
    family("gpt2", "GPT2LMHeadModel"),
    family("gpt_neo", "GPTNeoForCausalLM", "local attention over 8 tokens", attention="eager", window_size=WINDOW,
           attention_types=[[["global", "local"], 1]]),
    family("gpt_neox", "GPTNeoXForCausalLM", spread=2.0),
    family("gpt_neox_japanese", "GPTNeoXJapaneseForCausalLM", attention="eager"),
    family("gptj", "GPTJForCausalLM", attention="eager", rotary_dim=8, n_embd=64, spread=1.0),
    family("codegen", "CodeGenForCausalLM", attention="eager" if before("5.24") else "sdpa", rotary_dim=8, spread=2.0),
    family("gpt_bigcode", "GPTBigCodeForCausalLM", multi_query=True),
    family("gpt_bigcode-multi-head", "GPTBigCodeForCausalLM", multi_query=False),
    family("opt", "OPTForCausalLM"),
    family("opt-post-norm", "OPTForCausalLM", do_layer_norm_before=False, word_embed_proj_dim=32),
    family("bloom", "BloomForCausalLM", "ALiBi", attention="eager"),
    family("falcon", "FalconForCausalLM"),
    family("falcon-new-decoder", "FalconForCausalLM", new_decoder_architecture=True, spread=2.0),
    family("falcon-alibi", "FalconForCausalLM", "ALiBi", alibi=True),
    family("mpt", "MptForCausalLM", "ALiBi", attention="eager", use_cache=True),
    family("xglm", "XGLMForCausalLM", "its eager attention fails in float64", attention="eager", dtype=torch.float32),
    family("biogpt", "BioGptForCausalLM"),
    family("starcoder2", "Starcoder2ForCausalLM"),
    family("starcoder2-window", "Starcoder2ForCausalLM", sliding_window=WINDOW),
    family("stablelm", "StableLmForCausalLM", rope_parameters=HALF_ROTARY),
    family("stablelm-parallel", "StableLmForCausalLM", rope_parameters=HALF_ROTARY, use_parallel_residual=True,
           qk_layernorm=True),
    family("olmo", "OlmoForCausalLM", clip_qkv=1.0),
    family("olmo2", "Olmo2ForCausalLM"),
    family("olmo3", "Olmo3ForCausalLM", **SLIDING),
    family("olmoe", "OlmoeForCausalLM"),
    family("flex_olmo", "FlexOlmoForCausalLM"),
    family("cohere", "CohereForCausalLM", logit_scale=1.0),
    family("cohere2", "Cohere2ForCausalLM", logit_scale=1.0, **SLIDING),
    family("cohere2_moe", "Cohere2MoeForCausalLM", logit_scale=1.0, **SLIDING),
    family("granite", "GraniteForCausalLM", attention_multiplier=0.3, residual_multiplier=0.8),
    family("granite_swa", "GraniteSWAForCausalLM", attention="eager", attention_multiplier=0.3, **SLIDING),
    family("granitemoe", "GraniteMoeForCausalLM", attention_multiplier=0.3),
    family("granitemoe_swa", "GraniteMoeSWAForCausalLM", attention="eager", attention_multiplier=0.3, **SLIDING),
    family("granitemoeshared", "GraniteMoeSharedForCausalLM", attention_multiplier=0.3),
    family("smollm3", "SmolLM3ForCausalLM", no_rope_layers=[1, 0]),
    family("smollm3-window", "SmolLM3ForCausalLM", no_rope_layers=[1, 0], use_sliding_window=True, **SLIDING),
    family("exaone4", "Exaone4ForCausalLM", **SLIDING),
    family("exaone_moe", "ExaoneMoeForCausalLM", **SLIDING),
    family("nemotron", "NemotronForCausalLM"),
    family("glm", "GlmForCausalLM"),
    family("glm4", "Glm4ForCausalLM"),
    family("glm4_moe", "Glm4MoeForCausalLM"),
    family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", **LATENT),
    family("deepseek_v2", "DeepseekV2ForCausalLM", **LATENT, first_k_dense_replace=1),
    family("deepseek_v3", "DeepseekV3ForCausalLM", **LATENT, first_k_dense_replace=1, n_group=2, topk_group=1),
    family("gpt_oss", "GptOssForCausalLM", **SLIDING, attention="eager"),
    family("llama4_text", "Llama4ForCausalLM", "chunks of 8 tokens; attention temperature from position 8 on",
           no_rope_layers=[1, 0], attention_chunk_size=WINDOW, floor_scale=8, attn_scale=0.5),
    family("llama4_text-no-temperature", "Llama4ForCausalLM", "chunks of 8 tokens", no_rope_layers=[1, 0],
           attention_chunk_size=WINDOW, attn_temperature_tuning=False),
    family("ministral", "MinistralForCausalLM", **SLIDING),
    family("ministral3", "Ministral3ForCausalLM", "attention temperature from position 16 on", rope_parameters=YARN16),
    family("mistral4", "Mistral4ForCausalLM", **LATENT | {"head_dim": 16}, rope_parameters=YARN16),
    family("seed_oss", "SeedOssForCausalLM"),
    family("apertus", "ApertusForCausalLM"),
    family("helium", "HeliumForCausalLM"),
    family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
    family("ernie4_5", "Ernie4_5ForCausalLM"),
    family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    family("persimmon", "PersimmonForCausalLM"),
    family("minimax_m2", "MiniMaxM2ForCausalLM"),
    family("dbrx", "DbrxForCausalLM", attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
           ffn_config={"ffn_hidden_size": 48, "hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}),
    family("lfm2", "Lfm2ForCausalLM", "chains of guesses", layer_types=["conv", "full_attention"]),
    family("lfm2_moe", "Lfm2MoeForCausalLM", "chains of guesses", layer_types=["conv", "full_attention"],
           num_dense_layers=1),
    family("lfm3", "Lfm3ForCausalLM", "chains of guesses", layer_types=["conv", *SLIDING_AND_FULL], num_hidden_layers=3,
           sliding_window=WINDOW),
    family("afmoe", "AfmoeForCausalLM", **SLIDING),
    family("arcee", "ArceeForCausalLM"),
    family("aria_text", "AriaTextForCausalLM"),
    family("axk1", "AXK1ForCausalLM", **LATENT, n_group=2, topk_group=1),
    family("bitnet", "BitNetForCausalLM"),
    family("cwm", "CwmForCausalLM", **SLIDING),
    family("diffllama", "DiffLlamaForCausalLM"),
    family("doge", "DogeForCausalLM"),
    family("dots1", "Dots1ForCausalLM", **SLIDING),
    family("flint", "FlintForCausalLM", attention="eager", **SLIDING),
    family("hrm_text", "HrmTextForCausalLM"),
    family("hy_v3", "HYV3ForCausalLM"),
    family("hyperclovax", "HyperCLOVAXForCausalLM"),
    family("jais2", "Jais2ForCausalLM", spread=1.5),
    family("jetmoe", "JetMoeForCausalLM", kv_channels=12),
    family("kolibri1", "Kolibri1ForCausalLM", sliding_window=WINDOW),
    family("laguna", "LagunaForCausalLM", **SLIDING),
    family("longcat_flash", "LongcatFlashForCausalLM", **LATENT, zero_expert_num=2, expert_ffn_hidden_size=32),
    family("mellum", "MellumForCausalLM", **SLIDING),
    family("mimo_v2_flash", "MiMoV2FlashForCausalLM", attention="eager", **SLIDING),
    family("minicpm3", "MiniCPM3ForCausalLM", **LATENT, dim_model_base=48),
    family("modernbert-decoder", "ModernBertDecoderForCausalLM", local_attention=2 * WINDOW,
           layer_types=SLIDING_AND_FULL),
    family("nanochat", "NanoChatForCausalLM"),
    family("solar_open", "SolarOpenForCausalLM"),
    family("youtu", "YoutuForCausalLM", **LATENT),
    family("beam", "BeamForCausalLM", sliding_window=WINDOW),
    family("gemma4_unified_text", "Gemma4UnifiedForCausalLM", **SLIDING),
]  # fmt: skip

# Compressed keys, causal heads of models made for something else: lookahead or the original code.
OTHERS = [
    family("doge-window", "DogeForCausalLM", "keeps the 8 highest keys", keep_window_size=WINDOW),
    family("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", layer_types=["minimax_m3_sparse", "full_attention"],
           index_head_dim=16, index_block_size=4, index_topk_blocks=2, dense_intermediate_size=64),
    family("ctrl", "CTRLLMHeadModel", attention="eager"),
    family("deepseek_v4", "DeepseekV4ForCausalLM", "keys compressed by groups of 4 and 8", attention="eager",
           sliding_window=WINDOW, head_dim=16,
           layer_types=["compressed_sparse_attention", "heavily_compressed_attention"], qk_rope_head_dim=8,
           compress_rate_csa=4, compress_rate_hca=8, num_key_value_heads=1, index_topk=4, index_head_dim=16,
           index_n_heads=8, o_groups=2, o_lora_rank=16),
    family("git", "GitForCausalLM", "without padding", attention="eager",
           vision_config={"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                          "image_size": 16, "patch_size": 4}),
    family("moshi", "MoshiForCausalLM", sliding_window=512),
    family("openai-gpt", "OpenAIGPTLMHeadModel", "no cache", attention="eager", spread=2.0),
    family("xlnet", "XLNetLMHeadModel", attention="eager", dtype=torch.float32, d_inner=64, spread=3.0),
    family("bert", "BertLMHeadModel", is_decoder=True, spread=3.0),
    family("bert-generation", "BertGenerationDecoder", is_decoder=True),
    family("big_bird", "BigBirdForCausalLM", attention="eager", is_decoder=True, attention_type="original_full",
           spread=2.0),
    family("electra", "ElectraForCausalLM", is_decoder=True, spread=2.0),
    family("megatron-bert", "MegatronBertForCausalLM", attention="eager", is_decoder=True, spread=3.0),
    family("rembert", "RemBertForCausalLM", attention="eager", is_decoder=True, input_embedding_size=48,
           output_embedding_size=48),
    family("roberta", "RobertaForCausalLM", is_decoder=True, spread=4.0),
    family("roberta-prelayernorm", "RobertaPreLayerNormForCausalLM", is_decoder=True),
    family("roc_bert", "RoCBertForCausalLM", is_decoder=True, pronunciation_vocab_size=VOCAB, shape_vocab_size=VOCAB,
           pronunciation_embed_dim=8, shape_embed_dim=8, spread=1.5),
    family("roformer", "RoFormerForCausalLM", attention="eager", is_decoder=True, spread=1.5),
    family("xmod", "XmodForCausalLM", is_decoder=True, default_language="en_XX", spread=2.0),
    family("bart", "BartForCausalLM", spread=2.0),
    family("bigbird_pegasus", "BigBirdPegasusForCausalLM", attention="eager"),
    family("blenderbot", "BlenderbotForCausalLM"),
    family("mbart", "MBartForCausalLM"),
    family("mvp", "MvpForCausalLM", attention="eager", spread=2.0),
    family("pegasus", "PegasusForCausalLM"),
    family("trocr", "TrOCRForCausalLM", attention="eager", spread=2.0),
    family("whisper", "WhisperForCausalLM", "no logits_to_keep"),
]  # fmt: skip

MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 64}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
INKLING = {"sliding_window_size": WINDOW, "d_rel": 8, "rel_extent": 512, "swa_head_dim": 12} | dict.fromkeys(
    ("swa_num_attention_heads", "swa_num_key_value_heads"), 4
)
LINEAR_AND_FULL = ["linear_attention", "full_attention"]
LINEAR_AND_INDEXED = ["linear_attention", "indexed_attention"]
QWEN4 = {"hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
         "indexer_budget": 8, "indexer_compress_ratio": 4}  # fmt: skip

# Layers that carry a state from token to token, and queries that select keys: chains of guesses, or the original code.
RECURRENT = [
    family("mamba", "MambaForCausalLM", attention="eager", state_size=8),
    family("mamba2", "Mamba2ForCausalLM", attention="eager", head_dim=24, state_size=8, n_groups=1, chunk_size=64),
    family("falcon_mamba", "FalconMambaForCausalLM", attention="eager", state_size=8),
    family("jamba", "JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8,
           use_mamba_kernels=False),
    family("falcon_h1", "FalconH1ForCausalLM", **MAMBA2, mamba_d_ssm=96),
    family("qwen3_next", "Qwen3NextForCausalLM", layer_types=LINEAR_AND_FULL, **LINEAR),
    family("qwen3_5_text", "Qwen3_5ForCausalLM", layer_types=LINEAR_AND_FULL, **LINEAR),
    family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", layer_types=LINEAR_AND_FULL, **LINEAR),
    family("qwen4_exp_text", "Qwen4ExpForCausalLM", layer_types=LINEAR_AND_INDEXED, **LINEAR, **QWEN4),
    family("rwkv", "RwkvForCausalLM", attention="eager", context_length=512, spread=2.0),
    family("recurrent_gemma", "RecurrentGemmaForCausalLM", attention="eager", block_types=["recurrent", "attention"],
           lru_width=48, attention_window_size=WINDOW, w_init_variance_scale=1.0, spread=2.0),
    family("bamba", "BambaForCausalLM", **MAMBA2, attn_layer_indices=[1]),
    family("zamba", "ZambaForCausalLM", attention="eager", layers_block_type=["mamba", "hybrid"], mamba_d_state=8,
           use_mamba_kernels=False, attention_hidden_size=96, attention_head_dim=24),
    family("zamba2", "Zamba2ForCausalLM", layers_block_type=["mamba", "hybrid"], n_mamba_heads=4, mamba_d_state=8,
           chunk_size=16, use_mamba_kernels=False, adapter_rank=8),
    family("granitemoehybrid", "GraniteMoeHybridForCausalLM", layer_types=["mamba", "attention"], **MAMBA2),
    family("granitemoehybrid-attention-only", "GraniteMoeHybridForCausalLM", "has no state after all",
           layer_types=["attention", "attention"], **MAMBA2, position_embedding_type="rope"),
    family("nemotron_h", "NemotronHForCausalLM", hybrid_override_pattern="M*-", mamba_num_heads=4, mamba_head_dim=24,
           ssm_state_size=8, n_groups=1, chunk_size=16, use_mamba_kernels=False),
    family("minimax", "MiniMaxForCausalLM", layer_types=LINEAR_AND_FULL, block_size=16),
    family("kimi_linear", "KimiLinearForCausalLM", layer_types=LINEAR_AND_FULL, linear_head_dim=8, linear_num_heads=4,
           **LATENT),
    family("bailing_hybrid", "BailingHybridForCausalLM", layer_types=LINEAR_AND_FULL, **LATENT),
    family("olmo_hybrid", "OlmoHybridForCausalLM", layer_types=LINEAR_AND_FULL),
    family("xlstm", "xLSTMForCausalLM", attention="eager", hidden_size=64, qk_dim_factor=1.0),
    family("zaya", "ZayaForCausalLM", num_experts_per_tok=1, router_hidden_size=16, spread=3.0),
    family("axk2", "AXK2ForCausalLM", **LATENT, **INDEXED),
    family("deepseek_v32", "DeepseekV32ForCausalLM", first_k_dense_replace=1, n_group=2, topk_group=1, **LATENT,
           **INDEXED),
    family("dots3_note_text", "Dots3NoteForCausalLM", **LATENT, **INDEXED, sliding_window=WINDOW,
           layer_types=["indexed_attention", "sliding_attention"], shared_experts_intermediate_size=32,
           swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_q_lora_rank=16, swa_kv_lora_rank=16,
           swa_head_dim=16, swa_qk_nope_head_dim=8, swa_v_head_dim=12),
    family("glm_moe_dsa", "GlmMoeDsaForCausalLM", first_k_dense_replace=1, **LATENT, **INDEXED),
    family("hy_v4", "HYV4ForCausalLM", attention="eager", **LATENT, **INDEXED),
    family("inkling_text", "InklingForCausalLM", layer_types=["hybrid_sliding", "hybrid"],
           mlp_layer_types=["dense", "sparse"], **INKLING, logits_mup_width_multiplier=1.0, n_shared_experts=2),
    family("inkling2_text", "Inkling2ForCausalLM", attention="eager", dtype=torch.float32,
           layer_types=["hybrid_sliding", "hybrid"], **INKLING, unpadded_vocab_size=VOCAB),
]  # fmt: skip

# Those that are served.
CHAINS = set(
    """
    axk2 bailing_hybrid bamba deepseek_v32 dots3_note_text falcon_h1 glm_moe_dsa granitemoehybrid
    granitemoehybrid-attention-only hy_v4 inkling_text inkling2_text kimi_linear mamba2 nemotron_h olmo_hybrid
    qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text zamba2 zaya
    """.split()  # noqa: SIM905
)


IMAGE = VOCAB - 1  # the token that stands for a piece of an image; text prompts avoid the last ten ids


def part(config_class: str, **settings: Any) -> Callable[[], Any]:
    """A config within a config; the class by name."""
    return lambda: make_config(getattr(transformers, config_class), **settings)


def picture(
    num_tokens: int, *, before: tuple[int, ...] = (), type_ids: str | None = None, **tensors: Any
) -> Callable[[bool], dict[str, torch.Tensor]]:
    """generate() arguments for a prompt of 24 tokens, with or without an image in front of its last 8.

    num_tokens: of the image. before: token ids that introduce it. type_ids: the argument that marks its tokens with 1.
    tensors: the encoder's inputs: a tuple is the shape of random float64 values, a list is the values.
    """

    def inputs(with_image: bool) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(3, IMAGE - 10, (1, 24), generator=random)
        arguments = {}
        if with_image:
            image = torch.tensor([[*before, *[IMAGE] * num_tokens]])
            ids = torch.cat([ids[:, :16], image, ids[:, 16:]], dim=1)
            for name, value in tensors.items():
                arguments[name] = (
                    torch.rand(value, generator=random, dtype=torch.float64)
                    if isinstance(value, tuple)
                    else torch.tensor(value)
                )
            if type_ids:
                arguments[type_ids] = (ids == IMAGE).long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | arguments

    return inputs


def composite(name: str, model_class: str, inputs: Callable[[bool], Any], note: str = "", **others: Any) -> Family:
    return family(name, model_class, note, inputs=inputs, **others)


PIXELS = (1, 3, 16, 16)
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
# Qwen's encoders take patches in a row: 16 of 3 channels, 2 frames, 4 x 4 pixels.
QWEN = picture(4, before=(IMAGE - 3,), type_ids="mm_token_type_ids", pixel_values=(16, 96), image_grid_thw=[[1, 4, 4]])
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": IMAGE - 1, "vision_end_token_id": IMAGE - 2,
            "vision_start_token_id": IMAGE - 3}  # fmt: skip
GLM_IDS = {"image_token_id": IMAGE, "video_token_id": IMAGE - 1, "image_end_token_id": IMAGE - 2,
           "image_start_token_id": IMAGE - 3, "video_start_token_id": IMAGE - 4, "video_end_token_id": IMAGE - 5}  # fmt: skip
GEMMA3 = part("Gemma3TextConfig", **SLIDING, query_pre_attn_scalar=12)
LLAMA = part("LlamaConfig")

# Text beside an encoder, and with an image in the prompt.
COMPOSITE = [
    composite("gemma3", "Gemma3ForConditionalGeneration",
              picture(4, before=(IMAGE - 1,), type_ids="token_type_ids", pixel_values=PIXELS), text_config=GEMMA3,
              vision_config=part("SiglipVisionConfig"), mm_tokens_per_image=4, image_token_index=IMAGE,
              boi_token_index=IMAGE - 1, eoi_token_index=IMAGE - 2),
    composite("qwen2_vl", "Qwen2VLForConditionalGeneration", QWEN,
              text_config=part("Qwen2VLTextConfig", rope_parameters=MROPE), vision_config=part("Qwen2VLVisionConfig"),
              **QWEN_IDS),
    composite("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", QWEN,
              text_config=part("Qwen2_5_VLTextConfig", rope_parameters=MROPE),
              vision_config=part("Qwen2_5_VLVisionConfig", window_size=16, fullatt_block_indexes=[1]), **QWEN_IDS),
    composite("qwen3_vl", "Qwen3VLForConditionalGeneration", QWEN,
              text_config=part("Qwen3VLTextConfig", rope_parameters=MROPE),
              vision_config=part("Qwen3VLVisionConfig", deepstack_visual_indexes=[0]), **QWEN_IDS),
    composite("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", QWEN,
              text_config=part("Qwen3VLMoeTextConfig", rope_parameters=MROPE),
              vision_config=part("Qwen3VLMoeVisionConfig", deepstack_visual_indexes=[0]), **QWEN_IDS),
    composite("qwen3_5", "Qwen3_5ForConditionalGeneration", QWEN, "chains of guesses",
              text_config=part("Qwen3_5TextConfig", rope_parameters=MROPE, layer_types=LINEAR_AND_FULL, **LINEAR),
              vision_config=part("Qwen3_5VisionConfig"), **QWEN_IDS),
    composite("glm4v", "Glm4vForConditionalGeneration", QWEN,
              text_config=part("Glm4vTextConfig", rope_parameters=HALF_ROTARY | {"mrope_section": [1, 1, 1]}),
              vision_config=part("Glm4vVisionConfig"), **GLM_IDS),
    composite("qwen4_exp", "Qwen4ExpForConditionalGeneration", QWEN, "chains of guesses",
              text_config=part("Qwen4ExpTextConfig", rope_parameters=MROPE, layer_types=LINEAR_AND_INDEXED, **LINEAR,
                               **QWEN4),
              vision_config=part("Qwen4ExpVisionConfig"), **QWEN_IDS),
    composite("glm5_next", "Glm5NextForConditionalGeneration", QWEN, "chains of guesses",
              text_config=part("Glm5NextTextConfig", layer_types=LINEAR_AND_INDEXED,
                               mlp_layer_types=["dense", "sparse"], linear_head_dim=8, linear_num_heads=4,
                               num_key_value_heads=4, qk_rope_head_dim=0, index_n_heads=64, index_head_dim=16,
                               index_topk=WINDOW, index_kpool=4, hc_mult=2),
              vision_config=part("Glm5NextVisionConfig"), **GLM_IDS),
    composite("llava", "LlavaForConditionalGeneration", picture(16, pixel_values=PIXELS), text_config=LLAMA,
              vision_config=part("CLIPVisionConfig"), image_token_index=IMAGE),
    composite("llava_next", "LlavaNextForConditionalGeneration",
              picture(36, pixel_values=(1, 2, 3, 16, 16), image_sizes=[[16, 16]]), text_config=LLAMA,
              vision_config=part("CLIPVisionConfig"), image_token_index=IMAGE, image_grid_pinpoints=[[16, 16]]),
    composite("llava_onevision", "LlavaOnevisionForConditionalGeneration",
              picture(36, pixel_values=(1, 2, 3, 16, 16), image_sizes=[[16, 16]]), text_config=part("Qwen2Config"),
              vision_config=part("SiglipVisionConfig", vision_use_head=False), image_token_index=IMAGE,
              video_token_index=IMAGE - 1, image_grid_pinpoints=[[16, 16]]),
    composite("mistral3", "Mistral3ForConditionalGeneration", picture(4, pixel_values=PIXELS, image_sizes=[[16, 16]]),
              text_config=part("MistralConfig", sliding_window=WINDOW), vision_config=part("PixtralVisionConfig"),
              image_token_index=IMAGE),
    composite("mistral_large4", "MistralLarge4ForConditionalGeneration",
              picture(4, pixel_values=PIXELS, image_sizes=[[16, 16]]), "chains of guesses",
              text_config=part("MistralLarge4TextConfig", **LATENT, **INDEXED),
              vision_config=part("PixtralVisionConfig"), image_token_index=IMAGE),
    composite("paligemma", "PaliGemmaForConditionalGeneration", picture(16, pixel_values=PIXELS),
              text_config=part("GemmaConfig"), vision_config=part("SiglipVisionConfig", vision_use_head=False),
              image_token_index=IMAGE),
    composite("idefics2", "Idefics2ForConditionalGeneration", picture(4, pixel_values=(1, 1, 3, 16, 16)),
              text_config=part("MistralConfig", sliding_window=None), vision_config=part("Idefics2VisionConfig"),
              perceiver_config={"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4,
                                "resampler_head_dim": 12, "num_key_value_heads": 2, "hidden_size": 48},
              image_token_id=IMAGE),
    composite("idefics3", "Idefics3ForConditionalGeneration", picture(4, pixel_values=(1, 1, 3, 16, 16)),
              text_config=LLAMA, vision_config=part("Idefics3VisionConfig"), image_token_id=IMAGE),
    composite("smolvlm", "SmolVLMForConditionalGeneration", picture(4, pixel_values=(1, 1, 3, 16, 16)),
              text_config=LLAMA, vision_config=part("SmolVLMVisionConfig"), image_token_id=IMAGE),
    composite("internvl", "InternVLForConditionalGeneration", picture(4, pixel_values=PIXELS),
              text_config=part("Qwen2Config"),
              vision_config=part("InternVLVisionConfig", image_size=[16, 16], patch_size=[4, 4]), image_token_id=IMAGE),
    composite("aya_vision", "AyaVisionForConditionalGeneration", picture(4, pixel_values=PIXELS), spread=1.5,
              text_config=part("Cohere2Config", logit_scale=1.0, **SLIDING),
              vision_config=part("SiglipVisionConfig", vision_use_head=False), image_token_index=IMAGE),
    composite("lfm2_vl", "Lfm2VlForConditionalGeneration",
              picture(4, pixel_values=(1, 16, 48), spatial_shapes=[[4, 4]], pixel_attention_mask=[[1] * 16]),
              "chains of guesses", text_config=part("Lfm2Config", layer_types=["conv", "full_attention"]),
              projector_hidden_size=48,
              vision_config=part("Siglip2VisionConfig", vision_use_head=False, num_patches=16), image_token_id=IMAGE),
    composite("llama4", "Llama4ForConditionalGeneration", picture(4, pixel_values=PIXELS), "chunks of 8 tokens",
              fails_in="5.24.0",
              text_config=part("Llama4TextConfig", no_rope_layers=[1, 0], attention_chunk_size=WINDOW, floor_scale=8),
              vision_config=part("Llama4VisionConfig", vision_output_dim=48, projector_input_dim=48,
                                 projector_output_dim=48, intermediate_size=192), image_token_index=IMAGE,
              boi_token_index=IMAGE - 1, eoi_token_index=IMAGE - 2),
    composite("mllama", "MllamaForConditionalGeneration",
              picture(1, pixel_values=(1, 1, 1, 3, 16, 16), aspect_ratio_ids=[[1]], aspect_ratio_mask=[[[1]]],
                      cross_attention_mask=[[[[0]]] * 16 + [[[1]]] * 9]), "cross attention to the image",
              text_config=part("MllamaTextConfig", cross_attention_layers=[1]),
              vision_config=part("MllamaVisionConfig", num_global_layers=1, vision_output_dim=96, max_num_tiles=1,
                                 intermediate_layers_indices=[0], supported_aspect_ratios=[[1, 1]]),
              image_token_index=IMAGE),
    composite("gemma4", "Gemma4ForConditionalGeneration",
              picture(4, before=(IMAGE - 1,), type_ids="mm_token_type_ids", pixel_values=(1, 16, 48),
                      image_position_ids=[[[i % 4, i // 4] for i in range(16)]]),
              text_config=part("Gemma4TextConfig", **SLIDING,
                               vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8),
              vision_config=part("Gemma4VisionConfig", pooling_kernel_size=2, position_embedding_size=16),
              audio_config=None, image_token_id=IMAGE, boi_token_id=IMAGE - 1, eoi_token_id=IMAGE - 2,
              video_token_id=IMAGE - 3, boa_token_id=IMAGE - 4, eoa_token_index=IMAGE - 5, audio_token_id=IMAGE - 6),
]  # fmt: skip
