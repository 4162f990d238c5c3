"""Hydra applications: typed configuration in, exit code out, one sentence for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft.config import composition
from megatron_packed_sft.config.application import as_yaml, run_application
from megatron_packed_sft.config.schema import keys
from megatron_packed_sft.errors import InvalidInputError, ShardError
from megatron_packed_sft.prepare.config import PrepareConfig
from megatron_packed_sft.train.config import TrainConfig


@dataclass
class Inner:
    """How to pack.

    Args:
        pack_size: tokens of a bin.
        seed, stride: two numbers that are explained together, in more than one line of the docstring, so that the
            help must wrap it.
    """

    pack_size: int = 4096
    seed: int = 0
    stride: int = 0


@dataclass
class Named:
    path: str = "???"
    weight: float = 1.0


@dataclass
class Settings:
    output: str = "???"
    packing: Inner = field(default_factory=Inner)
    packed_storage: str = "none"
    extra: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Named] = field(default_factory=dict)
    quiet: bool = False


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "conf"
    (directory / "storage").mkdir(parents=True)
    for name in ("memmap_v1", "legacy"):
        (directory / "storage" / f"{name}.yaml").write_text(f"# @package _global_\npacked_storage: {name}\n")
    (directory / "sample.yaml").write_text("defaults: [{storage: memmap_v1}, _self_]\n")
    monkeypatch.setattr(composition, "config_directory", lambda: directory)
    monkeypatch.chdir(tmp_path)
    return directory


def run(*arguments: str, task: Any = None) -> tuple[int, list[Settings]]:
    seen: list[Settings] = []
    code = run_application(
        task or seen.append,
        name="sample",
        schema=Settings,
        description="Does nothing.",
        examples="  packed-sft sample output=x",
        flags={"--quiet": "quiet=true"},
        argv=arguments,
    )
    return code, seen


def test_the_task_gets_an_instance_of_the_schema(conf: Path) -> None:
    code, [settings] = run("output=x", "packing.pack_size=8", "storage=legacy", "--quiet")
    assert code == 0
    assert settings == Settings("x", Inner(8), "legacy", {}, quiet=True)


def test_the_working_directory_stays_clean(conf: Path) -> None:
    run("output=x")
    assert os.listdir(conf.parent) == ["conf"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "output has no value; add output=..."),
        (["output=x", "packing.pack_sze=3"], "packing.pack_sze is not a key; did you mean packing.pack_size?"),
        (["output=x", "pack_size=3"], "pack_size is not a key; did you mean packing.pack_size?"),
        (["output=x", "packing_length=3"], "packing_length is not a key; use packing.pack_size"),
        (["output=x", "+packing_length=3"], "packing_length is not a key; use packing.pack_size"),
        (["output=x", "zzz=3"], "zzz is not a key; --help lists them all"),
        (
            ["output=x", "packing.pretrained=3"],
            "packing.pretrained is not a key; packing has the keys pack_size, seed, stride\n",
        ),
        (["output=x", "packing.pack_size=many"], "packing.pack_size is 'many'; it must be an integer"),
        (["output=x", "packing.pack_size=1.5"], "packing.pack_size is 1.5; it must be an integer"),
        (["output=x", "packing.pack_size=true"], "packing.pack_size is True; it must be an integer"),
        (["output=x", "packing=3"], "packing is 3; it must be a group of keys"),
        (["output=x", "quiet=maybe"], "quiet is 'maybe'; it must be true or false"),
        (["output=x", "output.y=3"], "output is {'y': 3}; it must be text"),
        (["output=${nowhere}"], "output: Interpolation key 'nowhere' not found"),
        (["output=x", "storage=other"], "storage is 'other'; choose one of legacy, memmap_v1"),
        (["output=x", "hydra.verbose=true"], "hydra.verbose is one of Hydra's own settings"),
        (["output=x", "hydra/job_logging=none"], "hydra/job_logging is one of Hydra's own settings"),
        (["output=x", '"a".b=true'], "'\"a\".b' is not a setting; a key has letters, digits, _ and"),
        (["output=[x(1).jsonl]"], "output=[x(1).jsonl] cannot be read, "),
        (["output=[x(1).jsonl]"], "write \"output='[x(1).jsonl]'\""),
        (["output={it's"], r"""write "output='{it\'s'""" + '"'),
        (
            ["output=a,b.jsonl"],
            "output=a,b.jsonl is several values; for plain text write \"output='a,b.jsonl'\", for a",
        ),
        (["output"], "'output' is not a setting; write KEY=VALUE"),
        (["output=x", "sources.forum.pth=y"], "sources.forum.pth is not a key; did you mean sources.forum.path?"),
        (["output=x", "sources.forum.output=y"], "sources.forum.output is not a key; sources.forum has the keys path"),
        (
            ["output=x", "sources.forum={path: y, weight: heavy}"],
            "sources.forum.weight is 'heavy'; it must be a number",
        ),
        (["output=x", "sources.forum.weight=2"], "sources.forum.path has no value"),
        (["--output", "x"], "--output is not an option; settings have no dashes: write output=x\n"),
        (["--output=x"], "--output is not an option; settings have no dashes: write output=x\n"),
        (["--packing.pack-size", "8"], "--packing.pack-size is not an option; settings have no dashes: write "),
        (["--packing-length", "8"], "--packing-length is not an option; use packing.pack_size, written KEY=VALUE"),
        (["--quite", "output=x"], "--quite is not an option; did you mean --quiet?"),
        (["-o", "x"], "-o is not an option; settings are written KEY=VALUE"),
        (["output=x", "--cfg"], "--cfg needs a value"),
        (["output=x", "--config-name", "mine"], "there is no mine.yaml in "),
        (["output=x", "--config-dir", "nowhere"], "--config-dir nowhere is not a directory"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_keys_path(
    conf: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    code, seen = run(*arguments)
    output = capfd.readouterr()
    assert (code, seen, output.out) == (2, [], "")
    assert sentence in output.err
    assert output.err.startswith("packed-sft sample: error: ")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        "/data/naïve 東京.jsonl", "year=2024/month=05/x.jsonl", "x[1].jsonl", "it's (1).jsonl", "back\\slash(", "a(\\",
        "quote\\'s", "{", "~/a~b^c.jsonl",
    ],
)  # fmt: skip
def test_plain_text_that_means_something_to_hydra_reaches_the_task_as_it_is(conf: Path, text: str) -> None:
    code, [settings] = run(f"output=./{text}")
    assert code == 0
    assert settings.output == f"./{text}"


class RunByHydra:
    """What a foreign target would be: leaves a sign when it is called."""

    ran = False

    def __init__(self, **_: Any) -> None:
        type(self).ran = True


@pytest.mark.parametrize("options", [[], ["--multirun", "packing.pack_size=8,16"]])
def test_nothing_that_a_configuration_names_is_called(conf: Path, options: list[str]) -> None:
    target = {"_target_": f"{__name__}.RunByHydra"}
    (conf.parent / "mine.yaml").write_text(json.dumps({"defaults": ["sample", "_self_"], "extra": {"x": target}}))
    code, seen = run("--config-dir", str(conf.parent), "--config-name", "mine", "output=x", *options)
    assert code == 0
    assert seen[0].extra == {"x": target}
    assert not RunByHydra.ran


@pytest.mark.parametrize(
    "own",
    [
        {"job": {"env_set": {"PYTHONPATH": "/evil"}, "env_copy": ["NOT_SET_ANYWHERE"]}},
        {"callbacks": {"x": {"_target_": f"{__name__}.RunByHydra"}}},
        {"launcher": {"_target_": f"{__name__}.RunByHydra"}},
        {"job_logging": {"handlers": {"x": {"()": f"{__name__}.RunByHydra"}}}},
        {"searchpath": [f"pkg://{__name__}"]},
    ],
    ids=str,
)
def test_hydras_own_settings_in_a_file_are_refused_and_have_no_effect_in_a_group(
    conf: Path, own: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    environment = dict(os.environ)
    mine = ["--config-dir", str(conf.parent), "--config-name", "mine", "output=x"]
    (conf.parent / "mine.yaml").write_text(json.dumps({"defaults": ["sample", "_self_"], "hydra": own}))
    assert run(*mine) == (2, [])
    said = capfd.readouterr().err
    assert "mine.yaml sets hydra: Hydra's own settings have no effect here; leave them out\n" in said
    assert said.count("\n") == 1
    own.pop("searchpath", None)  # only the main file may set it, says Hydra
    own.get("job", {}).pop("env_copy", None)
    (conf / "storage" / "legacy.yaml").write_text("# @package _global_\n" + json.dumps({"hydra": own}))
    (conf.parent / "mine.yaml").write_text(json.dumps({"defaults": ["sample", {"override storage": "legacy"}]}))
    assert run(*mine)[0] == 0
    assert not RunByHydra.ran
    assert dict(os.environ) == environment


def test_a_file_of_the_users_own_includes_ours_and_its_groups(conf: Path) -> None:
    own = conf.parent / "it's, my own"
    (own / "storage").mkdir(parents=True)
    (own / "storage" / "third.yaml").write_text("# @package _global_\npacked_storage: third\n")
    (own / "mine.yaml").write_text("defaults: [sample, {override storage: third}, _self_]\npacking: {pack_size: 8}\n")
    code, [settings] = run("--config-dir", str(own), "--config-name", "mine.yaml", "output=packed_${packing.pack_size}")
    assert code == 0
    assert settings == Settings("packed_8", Inner(8), "third")


def test_every_wrong_key_of_a_file_is_named(conf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (conf.parent / "mine.yaml").write_text("defaults: [sample, _self_]\nzzz: 1\npacking: {pack_sze: 8}\n")
    assert run("--config-dir", str(conf.parent), "--config-name", "mine", "output=x") == (2, [])
    assert [line.split(": ", 2)[2][:30] for line in capfd.readouterr().err.splitlines()] == [
        "zzz is not a key; --help lists",
        "packing.pack_sze is not a key;",
    ]


def test_hydra_is_used_through_its_public_modules_only() -> None:
    package = Path(composition.__file__).parents[1]
    for file in package.rglob("*.py"):
        text = file.read_text()
        assert "hydra._internal" not in text, file
        assert "hydra.utils" not in text, file


def test_every_combination_of_a_multirun_is_run(conf: Path) -> None:
    code, seen = run("output=x", "packing.pack_size=8,16", "--multirun")
    assert code == 0
    assert [settings.packing.pack_size for settings in seen] == [8, 16]


def test_a_multirun_leaves_nothing_in_the_working_directory_and_goes_on_after_a_mistake(
    conf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def task(settings: Settings) -> None:
        if settings.packing.pack_size < 16:
            raise InvalidInputError(f"{settings.packing.pack_size} is too small")
        print(settings.packing.pack_size)

    assert run("--multirun", "output=x", "packing.pack_size=4,8,16", "--quiet", task=task)[0] == 2
    shown = capfd.readouterr()
    assert shown.err == "packed-sft sample: error: 4 is too small\npacked-sft sample: error: 8 is too small\n"
    assert shown.out == "16\n"
    assert os.listdir(conf.parent) == ["conf"]


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_names_that_users_make_up_need_no_plus(conf: Path, plus: str) -> None:
    code, [settings] = run(
        "output=x", f"{plus}sources.forum.path=a.jsonl", f"{plus}sources.forum.weight=2", f"{plus}extra.thinking=false"
    )
    assert code == 0
    assert settings.sources == {"forum": Named("a.jsonl", 2.0)}
    assert settings.extra == {"thinking": False}


def test_options_may_stand_between_settings(conf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("output=x", "--cfg", "job", "--quiet", "packing.pack_size=8") == (0, [])
    shown = capfd.readouterr().out
    assert "pack_size: 8" in shown
    assert "quiet: true" in shown


def test_an_interrupt_is_one_sentence(conf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def task(_: Settings) -> None:
        raise KeyboardInterrupt

    assert run("output=x", task=task)[0] == 130
    assert capfd.readouterr().err == "packed-sft sample: interrupted; run the same command again to resume\n"


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "megatron_packed_sft", "prepare", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == b""
        assert run.wait() == 1


def test_cfg_job_prints_the_configuration_and_does_not_run(conf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, seen = run("output=x", "packing.pack_size=8", "--cfg", "job")
    assert (code, seen) == (0, [])
    assert "pack_size: 8" in capfd.readouterr().out


def test_help_shows_examples_flags_groups_and_what_every_key_means(
    conf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("--help") == (0, [])
    shown = capfd.readouterr().out
    for wanted in ("Does nothing.", "packed-sft sample output=x", "--quiet", "storage             legacy, memmap_v1"):
        assert wanted in shown
    assert "  packing.pack_size=4096        tokens of a bin.\n" in shown
    assert shown.count("explained together") == 2


@pytest.mark.parametrize("schema", [PrepareConfig, TrainConfig])
def test_every_key_of_the_applications_has_a_meaning(schema: type) -> None:
    assert [key.path for key in keys(schema) if not key.meaning] == []


@pytest.mark.parametrize(("error", "code"), [(InvalidInputError("wrong row"), 2), (ShardError("broken"), 1)])
def test_our_errors_are_one_sentence_and_others_are_not_hidden(
    conf: Path, capfd: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def fail(_: Settings) -> None:
        raise error

    assert run("output=x", task=fail)[0] == code
    assert capfd.readouterr().err == f"packed-sft sample: error: {error}\n"

    def stumble(_: Settings) -> None:
        raise RuntimeError("a bug")

    assert run("output=x", task=stumble)[0] == 1
    [sentence] = capfd.readouterr().err.splitlines()
    assert sentence.startswith("packed-sft sample: error: unexpected RuntimeError: a bug; please report it")
    kept = Path(sentence.partition("with the traceback in ")[2])
    assert 'raise RuntimeError("a bug")' in kept.read_text()
    kept.unlink()


def test_debug_shows_the_traceback_before_the_sentence(conf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for error, code in ((InvalidInputError("wrong row"), 2), (RuntimeError("a bug"), 1)):

        def fail(_: Settings, error: Exception = error) -> None:
            raise error

        assert run("output=x", "--debug", task=fail)[0] == code
        shown = capfd.readouterr().err
        assert shown.startswith("Traceback (most recent call last):\n")
        assert "raise error" in shown
        assert (
            f"packed-sft sample: error: {'' if code == 2 else 'unexpected RuntimeError: '}{error}"
            in shown.splitlines()[-1]
        )


def test_a_bug_on_another_rank_is_not_hidden(
    conf: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stumble(_: Settings) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("output=x", task=stumble)[0] == 1
    assert "error: unexpected RuntimeError: a bug on rank 3; " in capfd.readouterr().err


def test_the_exit_code_of_the_task_is_handed_on(conf: Path) -> None:
    assert run("output=x", task=lambda _: 3)[0] == 3


def test_yaml_of_a_configuration_gives_it_again(conf: Path) -> None:
    assert "pack_size: 16" in as_yaml(Settings("x", Inner(16)))
