"""The `worldtokens` command: help without torch, exit statuses, error messages."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import types

import pytest

import worldtokens
from worldtokens import cli
from worldtokens.errors import InputError


def command(*args, **options):
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "worldtokens", *args],
        capture_output=True, text=True, timeout=120, **options,
    )  # fmt: skip


@pytest.mark.parametrize("args", [["--help"], ["--version"], []])
def test_help_and_version_are_fast_and_import_no_torch(args, tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command(*args, cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    if args == ["--version"]:
        assert done.stdout.strip() == f"worldtokens {worldtokens.__version__}"
    else:
        assert all(name in done.stdout for name in cli.COMMANDS)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "worldtokens.cli" in loaded
    assert not loaded & {"torch", "numpy", "rich", "yaml", "jsonargparse", "argparse"}
    # processor time, since wall time depends on other load
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_every_command_exists():
    """Each entry of the table names a callable and has a line of help."""
    import importlib

    for where, line in cli.COMMANDS.values():
        module, _, function = where.partition(":")
        assert callable(getattr(importlib.import_module(module), function)) and line


@pytest.fixture
def fake(monkeypatch):
    """Installs a subcommand `fake` with the behaviour that the test passes."""

    def install(act):
        module = types.ModuleType("fake_command")
        module.main = act
        monkeypatch.setitem(sys.modules, "fake_command", module)
        monkeypatch.setitem(cli.COMMANDS, "fake", ("fake_command:main", "for a test"))

    return install


def test_arguments_and_status_pass_through(fake):
    seen = []
    fake(lambda argv: seen.append(argv) or 7)
    assert cli.run(["fake", "--help", "x"]) == 7 and seen == [["--help", "x"]]
    fake(lambda argv: None)
    with pytest.raises(SystemExit) as e:
        cli.main(["fake"])
    assert e.value.code == 0


def test_an_input_error_is_one_line_and_status_2(fake, capsys, monkeypatch):
    def act(argv):
        raise InputError("cat.jpg: found 3 bytes, expected an image")

    fake(act)
    monkeypatch.delenv("WORLDTOKENS_DEBUG", raising=False)
    assert cli.run(["fake"]) == 2
    assert capsys.readouterr().err == "worldtokens: cat.jpg: found 3 bytes, expected an image\n"
    monkeypatch.setenv("WORLDTOKENS_DEBUG", "1")
    with pytest.raises(InputError):
        cli.run(["fake"])


def test_an_interrupt_is_status_130_and_a_bug_is_a_traceback(fake):
    def interrupt(argv):
        raise KeyboardInterrupt

    def bug(argv):
        raise ZeroDivisionError

    fake(interrupt)
    assert cli.run(["fake"]) == 130
    fake(bug)
    with pytest.raises(ZeroDivisionError):
        cli.run(["fake"])


def test_unknown_commands_get_a_hint(capsys):
    assert cli.run(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err
    assert cli.run(["zzz"]) == 2
    assert "the commands are demo, train" in capsys.readouterr().err


def test_train_help_and_errors(capsys):
    assert cli.run(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert "clip_emoji" in out and "--optim.lr" in out and "--resume" in out
    assert cli.run(["train", "--optim.lr", "1"]) == 2
    assert "the recipe comes first" in capsys.readouterr().err
    assert cli.run(["train", "clip_emoji", "--optim.lrr", "1"]) == 2
    err = capsys.readouterr().err
    assert "lrr" in err and len(err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopping_a_real_run_saves_it(tmp_path, number, status):
    """Ctrl-C, sent to the whole process group with its workers: no traceback, and the run can be resumed."""
    args = [
        sys.executable,
        "-m",
        "worldtokens",
        "train",
        "clip_emoji",
        "--train.out",
        str(tmp_path / "run"),
    ]
    args += [
        "--train.log_every",
        "1",
        "--train.workers",
        "1",
        "--train.batch_size",
        "16",
        "--train.device",
        "cpu",
    ]
    args += ["--train.tensorboard", "false", "--model.trunk.depth", "1", "--data.validation", "null"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    job = subprocess.Popen(
        args, stdout=-1, stderr=-1, text=True, env=env, start_new_session=True, cwd=tmp_path
    )
    assert "step 1/" in job.stdout.readline()
    os.killpg(job.pid, number) if number == signal.SIGINT else job.send_signal(number)
    out, err = job.communicate(timeout=120)
    assert job.returncode == status and "Traceback" not in err, err
    assert "--resume" in out
    step = json.loads((tmp_path / "run" / "last" / "state.json").read_text())["step"]
    assert step >= 1
    more = subprocess.run(
        [*args, "--resume", "--train.steps", str(step + 2)],
        capture_output=True,
        text=True,
        env=env,
        timeout=240,
    )
    assert f"trained {step + 2} steps" in more.stdout, more.stderr
