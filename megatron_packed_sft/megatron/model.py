"""Build a GPT model of Megatron-Core from plain arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from megatron_packed_sft.errors import InvalidInputError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from megatron_packed_sft.megatron.backend import Backend


def build_gpt_model(
    *,
    num_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    vocab_size: int,
    max_sequence_length: int,
    backend: Backend,
    num_query_groups: int | None = None,
    ffn_hidden_size: int | None = None,
    normalization: str = "RMSNorm",
    swiglu: bool = True,
    qk_layernorm: bool = False,
    add_bias_linear: bool = False,
    tie_embeddings: bool = False,
    rotary_base: int = 10000,
    rotary_percent: float = 1.0,
    rotary_scaling_factor: float | None = None,
    dtype: torch.dtype | None = None,
    pre_process: bool | None = None,
    post_process: bool | None = None,
    make_vocab_size_divisible_by: int = 128,
    calculate_per_token_loss: bool = True,
    **transformer_config: Any,
) -> GPTModel:
    """Build this rank's part of a GPT model with rotary positions; call `start_distributed` first.

    Args:
        num_layers: of the whole model, over all pipeline stages.
        hidden_size: width.
        num_attention_heads: of the whole model.
        vocab_size: of the tokenizer; see `make_vocab_size_divisible_by`.
        max_sequence_length: largest number of positions in a batch.
        backend: from `choose_backend`.
        num_query_groups: key/value heads, when there are fewer than query heads.
        ffn_hidden_size: width of the MLP; by default four times `hidden_size`.
        normalization: `RMSNorm` or `LayerNorm`.
        swiglu: a gated MLP with SiLU instead of GELU.
        qk_layernorm: normalize queries and keys.
        add_bias_linear: whether linear layers have biases.
        tie_embeddings: share the input and output embeddings.
        rotary_base, rotary_percent: of the rotary positions.
        rotary_scaling_factor: Llama 3.1's scaling of the rotary positions; by default there is none.
        dtype: of the weights; by default the backend's.
        pre_process, post_process: whether this part has the embedding and the output layer; by default the first and
            the last pipeline stage have.
        make_vocab_size_divisible_by: the vocabulary is padded to a multiple of this times the tensor-parallel size;
            the padding never gets a probability.
        calculate_per_token_loss: average gradients over the trained tokens of the global batch, not over bins.
        transformer_config: further fields of Megatron-Core's `TransformerConfig`, such as `hidden_dropout`; a pipeline
            whose batches differ in length needs `variable_seq_lengths=True`.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = backend.default_dtype if dtype is None else dtype
    on_cpu = backend.device_type == "cpu"
    if on_cpu and dtype not in (torch.float32, torch.float64):
        raise InvalidInputError(f"Megatron's optimizer does not support {dtype} on CPU; use torch.float32")
    if num_query_groups is not None and (num_query_groups < 1 or num_attention_heads % num_query_groups):
        raise InvalidInputError(
            f"num_attention_heads {num_attention_heads} is not a multiple of num_query_groups {num_query_groups}; "
            "change one of them"
        )
    _refuse_other_models(transformer_config)
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    fields = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "num_query_groups": num_query_groups,
        "ffn_hidden_size": ffn_hidden_size,
        "normalization": normalization,
        "gated_linear_unit": swiglu,
        "activation_func": torch.nn.functional.silu if swiglu else torch.nn.functional.gelu,
        "qk_layernorm": qk_layernorm,
        "add_bias_linear": add_bias_linear,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "use_cpu_initialization": on_cpu,
        "calculate_per_token_loss": calculate_per_token_loss,
        "moe_token_dispatcher_type": "alltoall",  # the default refuses variable_seq_lengths, even without experts
        "cuda_graph_scope": [],  # the same as its default, which warns that it is deprecated
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
    }
    try:
        config = TransformerConfig(**{**fields, **transformer_config})
    except (AssertionError, TypeError, ValueError) as error:
        raise InvalidInputError(f"Megatron-Core refuses this model: {error}; change the model's arguments") from None
    padded_size = padded_vocab_size(vocab_size, make_vocab_size_divisible_by, tensor_parallel)
    model = GPTModel(
        config=config,
        transformer_layer_spec=backend.layer_spec(config, normalization=normalization, qk_layernorm=qk_layernorm),
        vocab_size=padded_size,
        max_sequence_length=max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage() if pre_process is None else pre_process,
        post_process=parallel_state.is_pipeline_last_stage() if post_process is None else post_process,
        share_embeddings_and_output_weights=tie_embeddings,
        position_embedding_type="rope",
        rotary_percent=rotary_percent,
        rotary_base=rotary_base,
        rope_scaling=rotary_scaling_factor is not None,
        rope_scaling_factor=rotary_scaling_factor or 1.0,
    )
    if model.post_process:
        own = padded_size // tensor_parallel
        _hide_padding(model, vocab_size - own * parallel_state.get_tensor_model_parallel_rank(), own)
    return model.to(backend.device, dtype)  # torch's norms ignore params_dtype


def _hide_padding(model: GPTModel, num_real: int, num_logits: int) -> None:
    """Give the padding of the vocabulary no probability; otherwise the loss would depend on the tensor-parallel size.

    Args:
        model: with an output layer.
        num_real: ids of the vocabulary from the first one of this rank on.
        num_logits: ids of this rank, padding included.
    """
    first = max(num_real, 0)
    if first >= num_logits:
        return

    def hide(_: torch.nn.Module, __: Any, output: tuple[torch.Tensor, Any]) -> None:
        logits = output[0]
        # In place, because logits are the largest tensor of a step.
        logits[..., first - num_logits :] = torch.finfo(logits.dtype).min

    model.output_layer.register_forward_hook(hide)


def _refuse_other_models(transformer_config: Mapping[str, Any]) -> None:
    """Refuse models that the layer spec here does not build; they would silently be plain ones."""
    for name, kind in {
        "num_moe_experts": "a mixture of experts (MoE)",
        "mtp_num_layers": "multi-token prediction (MTP)",
        "multi_latent_attention": "multi-latent attention",
    }.items():
        if transformer_config.get(name):
            raise InvalidInputError(
                f"{name}={transformer_config[name]} asks for {kind}, which is not supported; leave it out"
            )


def padded_vocab_size(vocab_size: int, divisible_by: int = 128, tensor_parallel: int = 1) -> int:
    """Return the vocabulary size padded so that it divides over tensor-parallel ranks.

    Example:
        >>> padded_vocab_size(32001, tensor_parallel=2)
        32256
    """
    if min(vocab_size, divisible_by, tensor_parallel) < 1:
        raise InvalidInputError(
            f"vocab_size {vocab_size}, make_vocab_size_divisible_by {divisible_by} and the tensor-parallel size "
            f"{tensor_parallel} must be at least 1"
        )
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple
