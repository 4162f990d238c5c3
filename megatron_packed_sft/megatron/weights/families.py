"""The families of models that can be read and written: how their config.json becomes a shape, and what it must not say.

    config.json ─▶ family_of ─▶ Family ─▶ shape(config)       refuses by name what Megatron-Core's model would ignore
                                       ─▶ weights(shape)      which tensors there are, and where they go
                                       ─▶ config(shape)       the way back

A package adds a family by an entry point in the group `megatron_packed_sft.families`, under its `model_type`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_packed_sft.errors import InvalidInputError, UnsupportedFormatError
from megatron_packed_sft.megatron.weights.layout import ModelShape, Weight, dense_weights
from megatron_packed_sft.plugins import Registry

# Llama 3.1's scaling as Megatron-Core has it built in; only the factor can be chosen.
_LLAMA3_SCALING: Final = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
_SIZES: Final = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
}
_LARGEST: Final = 1 << 31
# The only value of each key that the model here can represent; the keys may be missing.
_FIXED: Final[Mapping[str, Any]] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "auto_map": None,
    "num_experts": None,
    "num_local_experts": None,
    "is_encoder_decoder": False,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of dense models.

    Args:
        name: its `model_type` in config.json.
        architecture: its class in transformers.
        fixed: keys of config.json and the only value of each that can be represented, besides those of all families.
        optional: keys that config.json may leave out, and what transformers then takes.
        qkv_bias: queries, keys and values have biases.
        qk_layernorm: queries and keys are normalized.
        weights: the weights of a shape; by default those with Llama's names.

    Example:
        >>> LLAMA.shape({"model_type": "llama", "hidden_act": "gelu"}, "config.json")
        Traceback (most recent call last):
        megatron_packed_sft.errors.UnsupportedFormatError: config.json: hidden_act is 'gelu', and only 'silu' can be \
represented; use another model
    """

    name: str
    architecture: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    optional: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_layernorm: bool = False
    weights: Callable[[ModelShape], Iterator[Weight]] = dense_weights

    def shape(self, config: Mapping[str, Any], where: str) -> ModelShape:
        """Return the shape that config.json describes, or refuse it.

        Args:
            config: the parsed file.
            where: its path, for messages.
        """
        config = {**self.optional, **config}
        for key, wanted in {**_FIXED, **self.fixed}.items():
            if config.get(key, wanted) != wanted and config.get(key) is not None:
                raise UnsupportedFormatError(
                    f"{where}: {key} is {config[key]!r}, and only {wanted!r} can be represented; {_remedy(key)}"
                )
        kinds = set(config.get("layer_types") or ["full_attention"])
        if kinds != {"full_attention"}:
            raise UnsupportedFormatError(
                f"{where}: layer_types has {', '.join(sorted(map(str, kinds)))}, and only full_attention can be "
                "represented; use another model"
            )
        rotary_base, scaling_factor = _rotary(config, where)
        sizes = {ours: _size(config, theirs, where) for theirs, ours in _SIZES.items()}
        shape = ModelShape.of_sizes(
            family=self.name,
            **sizes,
            tie_embeddings=_flag(config, "tie_word_embeddings", where),
            rotary_base=rotary_base,
            rotary_scaling_factor=scaling_factor,
            layernorm_epsilon=_number(config, "rms_norm_eps", 1e-6, where),
            qk_layernorm=self.qk_layernorm,
            qkv_bias=self.qkv_bias,
        )
        _refuse_uneven(shape, where)
        return shape

    def config(self, shape: ModelShape) -> dict[str, Any]:
        """Return the config.json of a shape, with the keys that describe the model."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(shape.rotary_base)}
        if shape.rotary_scaling_factor is not None:
            rope |= {"rope_type": "llama3", "factor": shape.rotary_scaling_factor, **_LLAMA3_SCALING}
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        return {
            "architectures": [self.architecture],
            "model_type": self.name,
            **{theirs: getattr(shape, ours) for theirs, ours in _SIZES.items()},
            "hidden_act": "silu",
            "rms_norm_eps": shape.layernorm_epsilon,
            "tie_word_embeddings": shape.tie_embeddings,
            # Both spellings: transformers 5 reads the first, earlier releases and other programs the others.
            "rope_parameters": rope,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if shape.rotary_scaling_factor is None else scaling,
            **self.fixed,
        }


LLAMA: Final = Family(name="llama", architecture="LlamaForCausalLM", fixed={"attention_bias": False})
MISTRAL: Final = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    fixed={"sliding_window": None},
    optional={"sliding_window": 4096, "num_key_value_heads": 8},
)
QWEN2: Final = Family(
    name="qwen2", architecture="Qwen2ForCausalLM", optional={"num_key_value_heads": 32}, qkv_bias=True
)
QWEN3: Final = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={"attention_bias": False},
    optional={"num_key_value_heads": 32, "head_dim": 128},
    qk_layernorm=True,
)

_HERE = "megatron_packed_sft.megatron.weights.families"
FAMILIES: Final[Registry[Family]] = Registry(
    "families",
    "model family",
    {
        "llama": f"{_HERE}:LLAMA",
        "mistral": f"{_HERE}:MISTRAL",
        "qwen2": f"{_HERE}:QWEN2",
        "qwen3": f"{_HERE}:QWEN3",
    },
)


def register_family(family: Family, *, replace: bool = False) -> None:
    """Add a family under its `model_type`, for this process.

    Example:
        >>> register_family(Family(name="my_llama", architecture="MyLlamaForCausalLM"))
        >>> "my_llama" in FAMILIES
        True
    """
    FAMILIES.register(family.name, family, replace=replace)


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a config.json; an architecture that is not one of them is refused by name.

    Example:
        >>> family_of({"model_type": "gpt2"}, "config.json")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        megatron_packed_sft.errors.UnsupportedFormatError: config.json: model_type 'gpt2' is not a known family; known \
are llama, mistral, qwen2, qwen3...
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedFormatError(
            f"{where}: model_type {name!r} is not a known family; known are {', '.join(FAMILIES.names())}"
        )
    family = FAMILIES[name]
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise UnsupportedFormatError(
            f"{where}: architectures is {architectures}, but a {name} model is a {family.architecture} here; use a "
            "causal language model"
        )
    return family


def _remedy(key: str) -> str:
    if key == "sliding_window":
        return "if no sequence is longer than that, set it to null in a copy of the file"
    if key == "quantization_config":
        return "use the weights from before they were quantized"
    if key == "auto_map":
        return "its own code is never run; use a model that transformers has built in"
    if key == "attention_dropout":
        return "set it to 0 in a copy of the file"
    return "use another model"


def _rotary(config: Mapping[str, Any], where: str) -> tuple[int, float | None]:
    """Return the base of the rotary positions and the factor of Llama 3.1's scaling, or refuse them."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(new, Mapping) or not isinstance(old, Mapping):
        raise UnsupportedFormatError(f"{where}: rope_parameters and rope_scaling must be objects; download it again")
    scaling = {**old, **new}  # transformers 5 writes the first
    base = scaling.get("rope_theta", config.get("rope_theta", 10_000.0))
    if not isinstance(base, int | float) or base != int(base) or not 0 < base < _LARGEST:
        raise UnsupportedFormatError(f"{where}: rope_theta is {base!r}; only whole numbers can be represented")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedFormatError(
            f"{where}: partial_rotary_factor is {scaling['partial_rotary_factor']}; only 1.0 can be represented"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return int(base), None
    if kind != "llama3":
        raise UnsupportedFormatError(
            f"{where}: the rotary positions are scaled by {kind!r}, and only llama3 can be represented; use another "
            "model"
        )
    for key, wanted in _LLAMA3_SCALING.items():
        if scaling.get(key) != wanted:
            raise UnsupportedFormatError(
                f"{where}: {key} of the rotary scaling is {scaling.get(key)}, and Megatron-Core has {wanted} built in; "
                "use another model"
            )
    return int(base), _number(scaling, "factor", None, where)


def _size(config: Mapping[str, Any], key: str, where: str) -> int | None:
    value = config.get(key)
    if value is None and key in ("num_key_value_heads", "head_dim"):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _LARGEST:
        raise UnsupportedFormatError(f"{where}: {key} is {value!r}; it must be a whole number above 0")
    return value


def _flag(config: Mapping[str, Any], key: str, where: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise UnsupportedFormatError(f"{where}: {key} is {value!r}; it must be true or false")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None, where: str) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _LARGEST:
        raise UnsupportedFormatError(f"{where}: {key} is {value!r}; it must be a number above 0")
    return float(value)


def _refuse_uneven(shape: ModelShape, where: str) -> None:
    if shape.num_attention_heads % shape.num_query_groups:
        raise UnsupportedFormatError(
            f"{where}: num_attention_heads {shape.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{shape.num_query_groups}; download it again"
        )
    if shape.head_dim % 2:
        raise UnsupportedFormatError(
            f"{where}: head_dim is {shape.head_dim}; rotary positions need an even width, so use another model"
        )


def shape_family(shape: ModelShape) -> Family:
    """Return the family of a shape; if its plugin is no longer installed, an error names it."""
    if shape.family not in FAMILIES:
        raise InvalidInputError(FAMILIES.unknown(shape.family))
    return FAMILIES[shape.family]
