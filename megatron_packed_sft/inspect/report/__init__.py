"""One self-contained HTML page about a dataset or a run: no network, opens from disk.

data ─ lengths ─▶ figures ─┐
     └ reading ─▶ suspicions ─▶ bins_in_page ─┴▶ dataset_page ─┐
run  ──────────────────────────────────────────▶ run_page ─────┴▶ assemble ─▶ report.html

`static/` holds the page itself (HTML, CSS, JavaScript) and `vendor/` the chart library; `assemble` puts them and the
numbers, as JSON, into one file.
"""
