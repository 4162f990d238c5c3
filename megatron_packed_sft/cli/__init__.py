"""`packed-sft VERB`: one file per verb."""
