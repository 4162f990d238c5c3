"""A package that extends megatron_packed_sft through entry points; see CONTRIBUTING.md, Plugins."""
