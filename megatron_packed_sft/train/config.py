"""The keys of the training configuration: conf/train.yaml and its groups are checked against these dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

MISSING: Final = "???"  # OmegaConf's marker for a required value

# Keys that users of other trainers type, and what the key is called here.
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
        ("effective_batch_size", "batch_size", "gbs"),
        "train.global_batch_size (gradient accumulation follows from it)",
    ),
    "gradient_accumulation_steps": "train.gradient_accumulation",
    **dict.fromkeys(("per_device_train_batch_size", "mbs"), "train.micro_batch_size"),
    **dict.fromkeys(("max_steps", "train_iters", "num_steps"), "train.steps"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "max_epochs"), "train.epochs"),
    **dict.fromkeys(("lr", "max_lr"), "optimizer.learning_rate"),
    **dict.fromkeys(("lora_rank", "lora_r"), "peft.rank"),
    "lora_alpha": "peft.alpha",
    "lora_dropout": "peft.dropout",
    "lora_target_modules": "peft.target_modules",
    "min_lr": "optimizer.min_learning_rate",
    "warmup_ratio": "optimizer.warmup_share",
    "warmup_steps": "optimizer.warmup_share (a share of all steps)",
    **dict.fromkeys(("data_path", "train_path"), "data.path"),
    **dict.fromkeys(("output_dir", "save", "save_dir"), "output"),
    **dict.fromkeys(("load", "resume_from_checkpoint"), "resume"),
    **dict.fromkeys(
        ("model_name_or_path", "pretrained_model_name_or_path", "pretrained_checkpoint", "hf_path"), "model.path"
    ),
    **dict.fromkeys(("save_interval", "save_steps"), "checkpoint.every"),
    **dict.fromkeys(("eval_interval", "eval_steps"), "validation.every"),
    **dict.fromkeys(("log_interval", "logging_steps"), "train.log_every"),
    **dict.fromkeys(("tp", "tensor_model_parallel_size", "tensor_parallel"), "parallel.tensor"),
    **dict.fromkeys(("pp", "pipeline_model_parallel_size", "pipeline_parallel"), "parallel.pipeline"),
    **dict.fromkeys(
        ("cp", "context", "context_parallel_size", "context_parallel"),
        "parallel.tensor or parallel.pipeline (this recipe does not split bins over ranks)",
    ),
}


@dataclass
class ModelConfig:
    """A Llama-like GPT (RMSNorm, SwiGLU, rotary positions, no biases), or the model of a Hugging Face folder.

    Args:
        path: Hugging Face folder with the weights to start from (model=from_pretrained); all sizes come from it.
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads.
        num_query_groups: key/value heads; null means one per query head.
        ffn_hidden_size: inner width of the MLP.
        vocab_size: vocabulary size; null takes the one recorded with the data.
        tie_embeddings: share the input and output embeddings; null means false.
        rotary_base: base of the rotary positions; null means 10000.
    """

    path: str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    vocab_size: int | None = None
    tie_embeddings: bool | None = None
    rotary_base: int | None = None


@dataclass
class DataConfig:
    """The data to train on.

    Args:
        path: packed data: a dataset directory, shard, legacy .npy, Parquet file, glob, token store, or a list of these.
        weights: one per path of a list: blend the paths in this proportion.
        plan: a plan file, when data.path is a token store.
        split: the split of a dataset directory to train on.
        sequence_length: positions of a batch; null takes the data's pack size, rounded up to a multiple of 16.
        tokenizer: tokenizer folder or file; its fingerprint is compared with the data's.
        allow_tokenizer_mismatch: accept a tokenizer, or weights with one, that differs from the data's, and paths
            made with different tokenizers.
        allow_template_mismatch: accept paths made with different chat templates.
        eos_id: padding id when no tokenizer is given; null takes the one recorded with the data.
        shuffle: reshuffle the bins every epoch; false keeps the stored order.
        pad_to_max_length: pad all batches to one shape; always on with pipeline parallelism.
        prefetch: batches to make ahead.
        allow_mismatch: what may differ from the run that wrote the checkpoint, such as [seed].
    """

    path: Any = MISSING
    weights: list[float] | None = None
    plan: str | None = None
    split: str = "train"
    sequence_length: int | None = None
    tokenizer: str | None = None
    allow_tokenizer_mismatch: bool = False
    allow_template_mismatch: bool = False
    eos_id: int | None = None
    shuffle: bool = True
    pad_to_max_length: bool = False
    prefetch: int = 4
    allow_mismatch: list[str] = field(default_factory=list)


@dataclass
class OptimizerConfig:
    """Adam with linear warm-up and a decay.

    Args:
        learning_rate: peak learning rate, reached after the warm-up.
        min_learning_rate: learning rate at the end of the decay.
        warmup_share: share of all steps that warm up.
        decay_style: cosine, linear or constant.
        weight_decay: decoupled weight decay.
        beta1: decay of Adam's first moment.
        beta2: decay of Adam's second moment.
        eps: Adam's epsilon.
        clip_grad: largest gradient norm; 0 turns clipping off.
        precision: float32, bfloat16 (CUDA only, with float32 main parameters), or auto: the best for the device.
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
    """How the ranks are divided; whatever remains is data parallelism.

    Args:
        tensor: ranks that share each layer.
        pipeline: stages that the layers are spread over.
    """

    tensor: int = 1
    pipeline: int = 1


@dataclass
class PeftConfig:
    """Which weights are trained: all of them, or adapters beside frozen ones.

    Args:
        method: none trains all weights; lora trains adapters of a low rank.
        rank: of the adapters.
        alpha: the adapters count alpha / rank.
        dropout: share of the adapters' inputs that is dropped in training; a resumed run draws other ones.
        target_modules: the layers that get adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2.
    """

    method: str = "none"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: list[str] = field(default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])


@dataclass
class StepConfig:
    """What a step is, and how many there are.

    Args:
        steps: optimizer steps; null trains for train.epochs.
        epochs: passes over the data, rounded up to whole steps.
        global_batch_size: batch per optimizer step, over all ranks; null derives it from the next two keys.
        gradient_accumulation: micro batches per step and rank; only with train.global_batch_size=null.
        micro_batch_size: accepted for the batch arithmetic; packed bins always run one at a time.
        batch_unit: what the batch counts: bins, or sequences as before packing.
        loss: per_token is the mean over trained tokens, per_conversation lets every conversation count the same.
        log_every: steps between two metrics records.
    """

    steps: int | None = None
    epochs: float = 1.0
    global_batch_size: int | None = 8
    gradient_accumulation: int | None = None
    micro_batch_size: int = 1
    batch_unit: str = "bins"
    loss: str = "per_token"
    log_every: int = 1


@dataclass
class ValidationConfig:
    """Loss on held-out data: the dataset's own validation split, if it has one, and any further paths.

    Args:
        every: steps between two validations; 0 validates only at the start and the end.
        at_start: also validate before the first step.
        steps: global batches to take from each dataset; null takes all.
        split: the split of the dataset directory in data.path to validate on.
        paths: further data to validate on; metrics name each by its path.
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
        keep: how many of the newest checkpoints to keep; 0 keeps all.
    """

    every: int = 100
    keep: int = 2


@dataclass
class TrainConfig:
    """A training run.

    Args:
        packed_storage: the storage that data.path must have, such as memmap_v1 or legacy; auto accepts any.
        output: the run's directory: checkpoints, metrics.jsonl, config.yaml, tensorboard.
        resume: auto resumes from the newest checkpoint in output, never starts from scratch, or a checkpoint's path.
        seed: seed of the initial weights and of the data order.
        model: the model's shape.
        data: the data to train on.
        optimizer: optimizer and learning-rate schedule.
        parallel: how the ranks are divided.
        peft: all weights, or adapters.
        train: batch size and length of the run.
        validation: when and on what to validate.
        checkpoint: when to save.
    """

    packed_storage: str = "auto"
    output: str = "runs/sft"
    resume: str = "auto"
    seed: int = 1234
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    train: StepConfig = field(default_factory=StepConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
