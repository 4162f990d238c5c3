"""The arguments of `create_sft_dataset` for tests that name single options."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_packed_sft.data.options import BatchOptions, OpenOptions, StaticPacking
from megatron_packed_sft.storage.token_stream.options import StreamOptions


def grouped(**options: Any) -> dict[str, Any]:
    """Return the options in their objects: `contract="hf", compact=True` becomes `contract=BatchOptions("hf", ...)`."""
    kinds = {"contract": BatchOptions, "stream": StreamOptions, "opening": OpenOptions, "packing_mode": StaticPacking}
    arguments: dict[str, Any] = {}
    for argument, kind in kinds.items():
        names = {field.name for field in dataclasses.fields(kind)} - {"contract", "seq_length", "spelling"}
        if argument == "contract":
            names -= {"pad_seq_to_mult"} if options.get("packing_mode") == "static" else set()
        if given := {name: options.pop(name) for name in names & options.keys()}:
            if argument == "contract":
                given["contract"] = options.pop("contract", "mcore")
            if argument == "packing_mode":
                options.pop("packing_mode")
            arguments[argument] = kind(**given)
    return {**options, **arguments}
