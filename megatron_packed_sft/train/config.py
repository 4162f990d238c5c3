"""The training configuration as dataclasses: conf/train.yaml and its groups are checked against these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

MISSING: Final = "???"  # OmegaConf's mark of a value that must be given

# What people coming from other trainers type, and what the key is called here.
LOOK_ALIKES: Final = {
    **dict.fromkeys(
        (
            "packing_length",
            "pack_length",
            "pack_size",
            "packed_sequence_size",
            "seq_length",
            "seq_len",
            "max_seq_length",
            "max_seq_len",
            "max_length",
            "max_model_len",
            "max_sequence_length",
        ),
        "data.sequence_length",
    ),
    **dict.fromkeys(
        ("effective_batch_size", "batch_size", "gbs", "gradient_accumulation_steps", "gradient_accumulation"),
        "train.global_batch_size (gradient accumulation follows from it)",
    ),
    **dict.fromkeys(
        ("per_device_train_batch_size", "mbs"), "train.global_batch_size (the micro batch of packed rows is 1)"
    ),
    **dict.fromkeys(("max_steps", "train_iters", "num_steps"), "train.steps"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "max_epochs"), "train.epochs"),
    **dict.fromkeys(("lr", "max_lr"), "optimizer.learning_rate"),
    "min_lr": "optimizer.min_learning_rate",
    "warmup_ratio": "optimizer.warmup_share",
    "warmup_steps": "optimizer.warmup_share (a share of all steps)",
    **dict.fromkeys(("data_path", "train_path"), "data.path"),
    **dict.fromkeys(("output_dir", "save", "save_dir"), "output"),
    **dict.fromkeys(("load", "resume_from_checkpoint"), "resume"),
    **dict.fromkeys(("save_interval", "save_steps"), "checkpoint.every"),
    **dict.fromkeys(("eval_interval", "eval_steps"), "validation.every"),
    **dict.fromkeys(("log_interval", "logging_steps"), "train.log_every"),
    **dict.fromkeys(("tp", "tensor_model_parallel_size", "tensor_parallel"), "parallel.tensor"),
    **dict.fromkeys(("pp", "pipeline_model_parallel_size", "pipeline_parallel"), "parallel.pipeline"),
    **dict.fromkeys(
        ("cp", "context", "context_parallel_size", "context_parallel"),
        "parallel.tensor or parallel.pipeline (this recipe does not split rows over ranks)",
    ),
}


@dataclass
class ModelConfig:
    """A Llama-like GPT: RMSNorm, SwiGLU, rotary positions, no biases.

    Args:
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads.
        num_query_groups: key/value heads; null is one per query head.
        ffn_hidden_size: inner width of the MLP.
        vocab_size: null takes what the data's manifests say; legacy files do not say it.
        tie_embeddings: share the input and output embedding.
        rotary_base: base of the rotary positions.
    """

    num_layers: int = MISSING  # type: ignore[assignment]
    hidden_size: int = MISSING  # type: ignore[assignment]
    num_attention_heads: int = MISSING  # type: ignore[assignment]
    num_query_groups: int | None = None
    ffn_hidden_size: int = MISSING  # type: ignore[assignment]
    vocab_size: int | None = None
    tie_embeddings: bool = False
    rotary_base: int = 10_000


@dataclass
class DataConfig:
    """What to train on.

    Args:
        path: a dataset directory, a shard, a legacy .npy, a glob, a token store (with `plan`), or a list of these.
        weights: one per path of a list: a blend in that proportion.
        plan: a plan's file; the path is a token store then.
        split: of dataset directories.
        sequence_length: positions of a row, and the only key for it; null takes the data's pack size,
            rounded up to a multiple of 16.
        tokenizer: folder or file of the tokenizer; its fingerprint is compared with the data's.
        allow_tokenizer_mismatch: accept a tokenizer with another fingerprint.
        eos_id: fills the end of rows when no tokenizer is given; null takes the data's padding id.
        shuffle: false takes the stored order.
        pad_to_max_length: give all batches the same shape; pipeline parallelism does it in any case.
        prefetch: batches made ahead.
        allow_mismatch: what may differ from the run that wrote a checkpoint, such as [seed].
    """

    path: Any = MISSING
    weights: list[float] | None = None
    plan: str | None = None
    split: str = "train"
    sequence_length: int | None = None
    tokenizer: str | None = None
    allow_tokenizer_mismatch: bool = False
    eos_id: int | None = None
    shuffle: bool = True
    pad_to_max_length: bool = False
    prefetch: int = 4
    allow_mismatch: list[str] = field(default_factory=list)


@dataclass
class OptimizerConfig:
    """Adam, with linear warm-up and a decay.

    Args:
        learning_rate: after the warm-up.
        min_learning_rate: where the decay ends.
        warmup_share: part of all steps that warm up.
        decay_style: `cosine`, `linear` or `constant`.
        weight_decay, beta1, beta2, eps: Adam's.
        clip_grad: largest gradient norm; 0 does not clip.
        precision: `float32`, `bfloat16` (with float32 main parameters; needs CUDA), or `auto`: what the device is
            best at.
        distributed: spread the optimizer state over the data-parallel ranks; needs CUDA and Transformer Engine.
    """

    learning_rate: float = 3e-4
    min_learning_rate: float = 0.0
    warmup_share: float = 0.03
    decay_style: str = "cosine"
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    precision: str = "auto"
    distributed: bool = False


@dataclass
class ParallelConfig:
    """How the ranks are divided; what is left over is data parallel.

    Args:
        tensor: ranks that share each layer.
        pipeline: stages the layers are spread over.
    """

    tensor: int = 1
    pipeline: int = 1


@dataclass
class StepConfig:
    """How long and in which steps.

    Args:
        steps: optimizer steps; null takes `epochs`.
        epochs: passes over the data, rounded up to whole steps.
        global_batch_size: per optimizer step and over all ranks; gradient accumulation follows from it.
        batch_unit: what it counts: `bins` (packed rows) or `sequences` (conversations, as before packing).
        micro_batch_size: packed rows go through the model one at a time, so 1.
        log_every: steps between two records of metrics.
    """

    steps: int | None = None
    epochs: float = 1.0
    global_batch_size: int = 8
    batch_unit: str = "bins"
    micro_batch_size: int = 1
    log_every: int = 1


@dataclass
class ValidationConfig:
    """Loss on data that is not trained on: the dataset's own split, if it has it, and further paths.

    Args:
        every: steps between two validations; 0 validates only at the start and the end.
        at_start: also before the first step.
        steps: global batches to take of each; null takes all.
        split: of the dataset directory in data.path.
        paths: further data; the metrics call them by their paths.
    """

    every: int = 0
    at_start: bool = True
    steps: int | None = None
    split: str = "validation"
    paths: list[str] = field(default_factory=list)


@dataclass
class CheckpointConfig:
    """When to save.

    Args:
        every: steps between two checkpoints; 0 saves only at the end, on SIGTERM and on Ctrl-C.
        keep: how many to keep, the newest ones; 0 keeps all.
    """

    every: int = 100
    keep: int = 2


@dataclass
class TrainConfig:
    """The whole of it.

    Example:
        >>> TrainConfig(data=DataConfig(path="my_dataset")).train.global_batch_size
        8

    Args:
        packed_storage: what data.path must be: `memmap_v1` or `legacy`, by choosing storage=...; `auto` looks.
        output: the run's directory: checkpoints, metrics.jsonl, config.yaml, tensorboard.
        resume: `auto` goes on from the newest whole checkpoint of `output`, `never` begins anew, or the path of a
            checkpoint.
        seed: of the model's first weights and of the data's order.
    """

    packed_storage: str = "memmap_v1"
    output: str = "runs/sft"
    resume: str = "auto"
    seed: int = 1234
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: StepConfig = field(default_factory=StepConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
