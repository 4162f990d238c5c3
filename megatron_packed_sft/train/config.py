"""The keys of the training configuration: conf/train.yaml and its groups are checked against these dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

MISSING: Final = "???"  # OmegaConf's marker for a required value


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
        dropout: share of the attention weights and of the residual stream's additions that training drops.
        freeze: parameters that are not trained: embeddings, output, norms, first_N_layers, or patterns of
            Megatron-Core's names such as decoder.layers.0.mlp.*, with layers counted over the whole model.
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
    dropout: float = 0.0
    freeze: list[str] = field(default_factory=list)


@dataclass
class DataConfig:
    """The data to train on.

    Args:
        path: packed data: a dataset directory (its train split) or a split in it, a shard, legacy .npy, Parquet file,
            glob, token store; a directory of flat .npy or .bin files (a token stream); PREFIX or PREFIX.idx of
            Megatron's indexed datasets; a URL of a dataset; a list of these, or names for them such as {chats: PATH,
            web: PATH}.
        weights: blend the paths in this proportion: one per path of a list, or by name such as {chats: 0.7, web: 0.3};
            or weights that change over the run, such as {start: {chats: 1, web: 0}, end: {chats: 0.5, web: 0.5}, from:
            0.8, to: 1.0}, where from and to are shares of the run.
        plan: a plan file, when data.path is a token store.
        samples: with packing_mode=static: the dotted name of a function that gets data.path and returns a map-style
            dataset of encoded samples with a fingerprint, such as my_package.my_samples; needs data.allow_code.
        allow_code: import and call the function that data.samples names.
        sequence_length: positions of a batch; null takes the data's pack size, rounded up to a multiple of 16. Token
            streams need it: they are cut into windows of so many predictions. With packing_mode=static, what a pack of
            several samples holds at most.
        pack_sequences: tell the documents of a token stream's windows apart, by their EOS.
        file_pattern: which files of a token stream's directory, such as '*.npy'; null takes all .npy or all .bin files.
        dtype: of a token stream's .bin files; null takes what is recorded beside them, else their sizes decide.
        tokenizer: tokenizer folder or file; its fingerprint is compared with the data's.
        eos_id: padding id when no tokenizer is given, and what ends the documents of a token stream; null takes the
            tokenizer's, or the one recorded with the data.
        shuffle: reshuffle the bins every epoch; false keeps the stored order.
        shard_window: shuffle so many shards at a time, in shuffled order, for data larger than its cache; null shuffles
            all bins.
        cache_dir: where shards of URLs are fetched to, once per node; null is $PACKED_SFT_CACHE_DIR, or the user's
            cache.
        cache_size: how large that cache may become, such as 200GB; null is 80 % of what is free there.
        verify: when a bin is compared with its checksum: first_read, always or never.
        allow_mismatch: what may differ from the run that wrote the checkpoint, such as [seed]; tokenizer also accepts a
            tokenizer, or weights with one, that differs from the data's, and paths made with different ones;
            chat_template also paths made with different chat templates.
    """

    path: Any = MISSING
    weights: Any = None
    plan: str | None = None
    samples: str | None = None
    allow_code: bool = False
    sequence_length: int | None = None
    pack_sequences: bool = False
    file_pattern: str | None = None
    dtype: str | None = None
    tokenizer: str | None = None
    eos_id: int | None = None
    shuffle: bool = True
    shard_window: int | None = None
    cache_dir: str | None = None
    cache_size: str | None = None
    verify: str = "first_read"
    allow_mismatch: list[str] = field(default_factory=list)


@dataclass
class OptimizerConfig:
    """Adam with linear warm-up and a decay.

    Args:
        learning_rate: peak learning rate, reached after the warm-up.
        min_learning_rate: learning rate at the end of the decay.
        warmup_share: share of all steps that warm up.
        decay_style: cosine, linear, constant or wsd (warm up, stay, decay at the end).
        wsd_share: share of all steps at the end that decay (by 1 - sqrt), with decay_style=wsd.
        weight_decay: decoupled weight decay.
        no_weight_decay: parameters that do not decay: norms, biases, embeddings, or patterns of Megatron-Core's names.
        betas: decays of Adam's first and second moments.
        clip_grad: largest gradient norm; 0 turns clipping off.
        precision: float32, bfloat16 (CUDA only, with float32 main parameters), or auto: the best for the device.
        fp8: compute matrix products in fp8: delayed, tensorwise, blockwise or mxfp8; needs CUDA, Transformer Engine and
            precision bfloat16.
        distributed: spread the optimizer state over the data-parallel ranks; needs CUDA and Transformer Engine.
    """

    learning_rate: float = 3e-4
    min_learning_rate: float = 0.0
    warmup_share: float = 0.03
    decay_style: str = "cosine"
    wsd_share: float = 0.1
    weight_decay: float = 0.01
    no_weight_decay: list[str] = field(default_factory=lambda: ["norms", "biases"])
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    clip_grad: float = 1.0
    precision: str = "auto"
    fp8: str | None = None
    distributed: bool = False


@dataclass
class ParallelConfig:
    """How the ranks are divided; the rest is data parallelism.

    Args:
        tensor: ranks that share each layer.
        pipeline: stages that the layers are spread over.
        context: ranks that share each sequence; needs CUDA and Transformer Engine, and data prepared for it
            (packing.for_parallel).
        sequence_parallel: tensor-parallel ranks also split the activations between their matrix multiplications; needs
            CUDA and Transformer Engine.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence_parallel: bool = False


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
    """The batch of a step, the loss, and the length of the run.

    Args:
        steps: optimizer steps; null trains for train.epochs.
        epochs: passes over the data, rounded up to whole steps.
        global_batch_size: batch per optimizer step, over all ranks; null takes train.gradient_accumulation per rank.
        gradient_accumulation: batch per step and rank; only with train.global_batch_size=null.
        batch_unit: the unit of the batch size: bins, or sequences as before packing.
        loss: per_token is the mean over trained tokens, per_conversation lets every conversation count the same.
        log_every: steps between two metrics records.
        recompute: activations to compute again in the backward pass instead of keeping them: none, selective (inside
            attention) or full (everything but each layer's input).
    """

    steps: int | None = None
    epochs: float = 1.0
    global_batch_size: int | None = 8
    gradient_accumulation: int | None = None
    batch_unit: str = "bins"
    loss: str = "per_token"
    log_every: int = 1
    recompute: str = "none"


@dataclass
class ValidationConfig:
    """Loss on held-out data: the dataset's own validation split, if it has one, and any further paths.

    Args:
        every: steps between two validations; 0 validates only at the start and the end.
        steps: global batches to take from each dataset; null takes all.
        paths: further data to validate on: a list, named by path in the metrics, or named such as {maths: PATH, code:
            PATH}.
        patience: stop early after so many validations in a row without a lower loss on the dataset's own validation
            split, or else on the first of validation.paths; null trains to the end.
        num_samples: prompts of the same data to answer greedily at each validation, written to output/samples.
        sample_tokens: the most tokens of an answer.
    """

    every: int = 0
    steps: int | None = None
    paths: Any = None
    patience: int | None = None
    num_samples: int = 0
    sample_tokens: int = 64


@dataclass
class LoggerConfig:
    """Where metrics go besides metrics.jsonl.

    Args:
        names: tensorboard, wandb, mlflow; several at once, or none. They write files below output. What else they do is
            up to their own environment variables, such as WANDB_MODE=online and MLFLOW_TRACKING_URI.
    """

    names: list[str] = field(default_factory=lambda: ["tensorboard"])


@dataclass
class CheckpointConfig:
    """When to save, and where to copy to.

    Args:
        every: steps between two checkpoints; 0 saves only at the end, on SIGTERM and on Ctrl-C.
        keep: how many of the newest checkpoints, and of their copies, to keep; 0 keeps all.
        copy_to: a URL such as s3://bucket/run, or another directory: every checkpoint is copied there in the
            background, and resume=auto takes the newest of both places; null copies nothing.
    """

    every: int = 100
    keep: int = 2
    copy_to: str | None = None


@dataclass
class TrainConfig:
    """A training run.

    Args:
        packed_storage: the storage that data.path must have, such as memmap_v1 or legacy; auto accepts any.
        packing_mode: prepared trains on bins that were packed before; static packs a token store, or the samples of
            data.samples, when the run starts.
        dataloader_drop_last: static packs are made a multiple of the data-parallel ranks by dropping the last ones;
            false repeats the first ones.
        packing_allow_single_long: a sample longer than data.sequence_length is a static pack of its own; false leaves
            it out.
        packing_full_is_oversized: a sample of exactly data.sequence_length counts as longer, too.
        output: the run's directory: checkpoints, metrics.jsonl, config.yaml, tensorboard.
        resume: auto resumes from the newest checkpoint in output or checkpoint.copy_to, never starts from scratch; or a
            checkpoint's path or URL, or the URL of a copied run, which means its newest.
        seed: seed of the initial weights and of the data order.
        model: the model's shape.
        data: the data to train on.
        optimizer: optimizer and learning-rate schedule.
        parallel: how the ranks are divided.
        peft: all weights, or adapters.
        train: batch size and length of the run.
        validation: when and on what to validate.
        checkpoint: when to save.
        logger: where metrics go besides metrics.jsonl.
        json: print a summary as JSON on stdout at the end, and everything else on stderr.
    """

    packed_storage: str = "auto"
    packing_mode: str = "prepared"
    dataloader_drop_last: bool = False
    packing_allow_single_long: bool = True
    packing_full_is_oversized: bool = False
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
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    json: bool = False
