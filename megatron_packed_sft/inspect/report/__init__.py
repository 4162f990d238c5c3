"""`packed-sft report`: one self-contained HTML page about a dataset or a run. It opens from disk, without a network.

data ─ read_bins ─▶ charts, tables, suspicions ─▶ dataset_page ─┐
run ──────────────────────────────────────────▶ run_page ──────┴▶ write ─▶ NAME.report.html

`static/` has the page itself (HTML, CSS, JavaScript), `vendor/` the chart library.
"""
