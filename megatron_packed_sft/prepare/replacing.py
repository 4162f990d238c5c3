"""What may be replaced at the output: nothing but an earlier preparation, and one of other settings only when asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_packed_sft.errors import TargetExistsError
from megatron_packed_sft.prepare.publish_stage import published_provenance
from megatron_packed_sft.remote.objects import try_writing
from megatron_packed_sft.remote.uploads import refuse_existing
from megatron_packed_sft.support.paths import redacted

_MOST_DIFFERENCES = 5
# What a preparation is made from; the rest of its provenance follows from these.
_DECIDING = ("tokenizer", "chat_template", "settings")
_DECIDING_OF_SOURCE = ("schema", "mapping", "weight", "split", "files")


def refuse_other_files(output: Path | str) -> None:
    """Refuse an output, a path or a URL, with anything in it that no preparation made, or where nobody may write."""
    if published_provenance(output) is not None:
        return
    if isinstance(output, str):
        refuse_existing(output)
        try_writing(output)
        return
    if not output.exists():
        return
    if not output.is_dir():
        raise TargetExistsError(f"output {output} is a file; choose another output")
    names = sorted(entry.name for entry in output.iterdir())
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise TargetExistsError(f"output {output} holds other files ({shown}); choose another output")


def refuse_replacing(
    output: Path | str, provenance: Mapping[str, Any], *, overwrite: bool, by_size: bool = False
) -> None:
    """Refuse to replace a dataset of other settings or inputs, unless the user asked for it; say what differs.

    Args:
        output: a path or a URL.
        provenance: what would be published.
        overwrite: what the user said.
        by_size: the checksums of the files are not known; their names and sizes are compared.
    """
    published = published_provenance(output)
    if published is None or overwrite:
        return
    differences = list(_differences(_deciding(published, by_size), _deciding(provenance, by_size), ""))
    if not differences:
        return
    shown = ", ".join(differences[:_MOST_DIFFERENCES])
    if len(differences) > _MOST_DIFFERENCES:
        shown += f" and {len(differences) - _MOST_DIFFERENCES} more"
    raise TargetExistsError(
        f"output {redacted(str(output))} holds a dataset that was made differently: {shown}; add --overwrite to "
        "replace it, or choose another output"
    )


def _deciding(provenance: Mapping[str, Any], by_size: bool) -> dict[str, Any]:
    sources = provenance.get("sources") or {}
    if by_size:
        sources = {
            name: {**one, "files": [{**file, "checksum": None} for file in one.get("files") or ()]}
            for name, one in sources.items()
        }
    return {
        **{name: provenance.get(name) for name in _DECIDING},
        "sources": {
            name: {key: source.get(key) for key in _DECIDING_OF_SOURCE}
            for name, source in sources.items()
            if isinstance(source, Mapping)
        },
    }


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    """Yield what differs, as `packing.pack_size 1024 -> 512`; keys that older versions did not note are left out."""
    if old == new:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            inner = f"{path}.{key}" if path else key
            if key in old and key in new:
                yield from _differences(old[key], new[key], inner.removeprefix("settings."))
            elif path == "sources":
                yield f"source {key} is {'gone' if key in old else 'new'}"
        return
    if path.endswith(".files"):
        yield f"{path} changed ({', '.join(sorted(_changed_files(old, new)))})"
        return
    yield f"{path} {_shown(old)} -> {_shown(new)}"


def _changed_files(old: Any, new: Any) -> set[str]:
    known = [{json.dumps(file, sort_keys=True) for file in files or []} for files in (old, new)]
    changed = known[0] ^ known[1]
    return {str(json.loads(file).get("name")) for file in changed} or {"their order"}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
