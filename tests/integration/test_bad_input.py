"""Bad input gets one sentence that names the field and the remedy, an exit code, no traceback, and loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from kill_tools import segment_directories

import headrace
from headrace import build, cli, demo
from headrace.cli_common import output
from headrace.config import from_dict, load, to_toml
from headrace.errors import ConfigError, TaskError
from headrace.observe.jsonl import read_events
from headrace.run_directory import RunDirectory, latest_checkpoint

SMALL = {
    "run.steps": 4,
    "run.launcher": "inline",
    "run.console": "plain",
    "run.checkpoint_every": 2,
    "run.name": "run",
    "tasks.source": "tasks.jsonl",
    "reward.functions": ["rewards.py:letters"],
    "rollout.group_size": 4,
    "rollout.groups_per_step": 2,
}
REWARDS = """
def broken(completions): return [1.0 / 0]
def letters(completions): return [float(text.count("a")) for text in completions]
def short(completions): return [0.0]
def words(completions): return ["good"] * len(completions)
def number(completions): return 1.0
def huge(completions): return [1e38 * text.count("a") for text in completions]
def rows(fail=True): raise OSError("the server is down")
def nothing(): return None
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("bad-input")
    demo.prepare(directory, warm_steps=0)
    return directory / "model"


@pytest.fixture
def workplace(tmp_path, monkeypatch, model):
    """A directory with a run file that works, and what it names. Nothing is left in shared memory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    write_tasks(demo.tasks(32))
    settings = from_dict({**SMALL, "model.path": str(model)})
    (tmp_path / "run.toml").write_text(to_toml(settings))
    yield tmp_path
    assert segment_directories(os.getpid()) == []


def write_tasks(rows, name="tasks.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def command(workplace, monkeypatch, capsys):
    """``headrace ...`` in this process; returns (exit code, output, errors)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def refused(command):
    """The sentence a command is refused with."""

    def run(*overrides: str, arguments=("train", "run.toml"), code: int = 2) -> str:
        found, _, errors = command(*arguments, *(part for text in overrides for part in ("--set", text)))
        return sentence(found, errors, code)

    return run


def sentence(found: int, errors: str, code: int) -> str:
    assert found == code, errors
    assert errors.startswith("error: ") and errors.count("\n") == 1, errors
    return errors.removeprefix("error: ").strip()


def subprocess_command(*arguments: str, before: str = "") -> tuple[int, str]:
    """The real thing, in a shell that first does ``before``; returns (exit code, errors)."""
    line = f'{before} exec "$0" -m headrace.cli "$@"'
    ended = subprocess.run(
        ["sh", "-c", line, sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return ended.returncode, ended.stderr


def finishes(command, *arguments: str) -> None:
    """The run in ``runs/run`` can be resumed and then holds every attempt once."""
    code, _, errors = command("train", "--resume", "runs/run", *arguments)
    assert (code, errors) == (0, "")
    attempts = json.loads(Path("runs/run/summary.json").read_text())["run_attempts"]
    assert attempts["trained"] == 4 * 2 * 4


def drops() -> list[tuple[str, str]]:
    events = read_events("runs/run/events.jsonl")
    return [(event["reason"], event["detail"]) for event in events if event["event"] == "drop"]


def test_a_misspelt_setting_suggests_the_nearest(workplace):
    code, errors = subprocess_command("train", "run.toml", "--set", "rollout.grup_size=4")
    expected = "rollout.grup_size is not a setting: did you mean rollout.group_size?"
    assert sentence(code, errors, 2) == expected
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rollout.max_lag=many"], ["rollout.max_lag", "whole number of at least 0"]),
        (["rollout.group_size=1"], ["rollout.group_size", "algo.advantage", "set"]),
        (["rollout.top_k=9000"], ["rollout.top_k", "set rollout.top_k = 8192 or less"]),
        (["model.path=/nowhere"], ["model.path", "/nowhere does not exist", "check the path"]),
        (
            ["model.path=nobody/nothing"],
            ["model.path", "neither a directory nor a model that can be fetched"],
        ),
        (["model.path=."], ["model.path: . has no tokenizer.json"]),
        (["tasks.source="], ["tasks.source is not set", ".jsonl"]),
        (["tasks.source=absent.jsonl"], ["tasks.source", "absent.jsonl does not exist", "check the path"]),
        (["tasks.source=strange"], ["tasks.source", "'strange' is not understood", "name a .jsonl file"]),
        (["tasks.source=rewards.py:absent"], ["tasks.source", "no 'absent'"]),
        (["tasks.source=rewards.py:rows"], ["tasks.source", "OSError: the server is down (rewards.py:8)"]),
        (["tasks.source=rewards.py:rows", "tasks.options={a=1}"], ["tasks.source", "'a'", "tasks.options"]),
        (["tasks.source=rewards.py:nothing"], ["tasks.source", "a NoneType", "give a list of rows"]),
        (["tasks.prompt_column=question"], ["no column 'question'", "set tasks.prompt_column"]),
        (["reward.functions="], ["reward.functions is not set", "name at least one"]),
        (["reward.functions=rewards.py:leters"], ["reward.functions", "did you mean 'letters'?"]),
        (["reward.weights=[1, 2]"], ["reward.weights has 2 entries for 1"]),
        (["rollout.stop=['ab']"], ["rollout.stop: 'ab' is 2 tokens", "one token"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(refused, command, overrides, parts):
    message = refused(*overrides)
    assert all(part in message for part in parts), message
    # Nothing stands in the way of the same run with the mistake put right.
    assert command("train", "run.toml", "--set", "run.steps=1")[0] == 0


def test_an_empty_dataset_is_refused(refused):
    write_tasks([], "empty.jsonl")
    message = refused("tasks.source=empty.jsonl")
    assert "tasks.source: empty holds no tasks" in message and "at least one row" in message


def test_a_tokenizer_without_a_padding_token_is_refused(refused, model):
    edited = json.loads((model / "tokenizer_config.json").read_text())
    del edited["pad_token"]
    Path("copy").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (Path("copy") / name).write_bytes((model / name).read_bytes())
    (Path("copy") / "tokenizer_config.json").write_text(json.dumps(edited))
    message = refused("model.path=copy")
    assert "copy names no padding token: set pad_token in its tokenizer_config.json" in message
    assert not Path("runs").exists()


def test_chat_messages_without_a_chat_template_are_refused_before_anything_starts(refused):
    write_tasks([{"prompt": [{"role": "user", "content": "abcd"}]}])
    message = refused()
    assert "no chat template: use text prompts, or put a chat_template.jinja" in message
    assert not Path("runs").exists()


def test_the_traceback_is_shown_when_asked_for(command):
    code, _, errors = command("train", "run.toml", "--set", "model.path=/nowhere", "--traceback")
    assert code == 2
    assert "Traceback (most recent call last)" in errors
    assert errors.splitlines()[-1] == "error: model.path: /nowhere does not exist; check the path"


def test_values_given_in_python_are_checked_too(workplace, model):
    settings = {**SMALL, "model.path": str(model), "run.console": "off", "run.steps": 1}
    with pytest.raises(TaskError, match=r"^tasks: .*a int: give a list of rows"):
        headrace.train(tasks=5, reward=demo.exact, settings=settings)
    with pytest.raises(TaskError, match=r"^tasks: give rows, not the text 'tasks.jsonl'.*tasks\.source"):
        headrace.train(tasks="tasks.jsonl", reward=demo.exact, settings=settings)
    with pytest.raises(ConfigError, match=r"^reward is 5: give a function"):
        headrace.train(tasks=demo.tasks(4), reward=5, settings=settings)
    assert not Path("runs").exists()
    assert headrace.train(tasks=iter(demo.tasks(4)), reward=demo.exact, settings=settings).num_steps == 1


def test_a_prompt_longer_than_the_context_costs_its_own_group_only(command):
    rows = demo.tasks(16)
    rows[3] = {"prompt": "a" * 100, "answer": "a"}
    write_tasks(rows)
    code, output, errors = command("train", "run.toml", "--set", "tasks.shuffle=false")
    assert (code, errors) == (0, "")
    [(reason, detail)] = drops()
    assert reason == "over-length"
    assert "task tasks/3 has a prompt of 100 tokens" in detail and "shorten or remove the task" in detail
    assert "over-length" in output
    attempts = json.loads(Path("runs/run/summary.json").read_text())["attempts"]
    assert attempts["trained"] == 4 * 2 * 4
    assert attempts["dropped:over-length"] == 4


def test_prompts_that_are_all_too_long_end_the_run(refused):
    write_tasks([{"prompt": "a" * 100, "answer": "a"}])
    assert "40 groups had prompts too long for the model" in refused()


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("short", "returned 1 values for 4 completions"),
        ("words", "returned a str for completion 0 instead of a number"),
        ("number", "returned a float instead of a list"),
    ],
)
def test_a_reward_of_the_wrong_shape_drops_groups_until_the_error_budget_ends_the_run(
    refused, command, function, fault
):
    message = refused(f"reward.functions=rewards.py:{function}", code=1)
    assert "groups failed, over reward.error_budget = 0.1" in message
    assert f"reward '{function}' failed" in message and fault in message
    assert len(drops()) == 4
    assert all(reason == "failed" and fault in detail for reason, detail in drops())
    # With the function mended, the same run goes on.
    text = Path("rewards.py").read_text().replace(f"def {function}(", "def broken(")
    Path("rewards.py").write_text(text.replace("def letters(", f"def {function}("))
    finishes(command)


@pytest.mark.parametrize(("launcher", "log"), [("inline", "controller"), ("local", "scorer")])
def test_a_reward_that_raises_is_told_with_its_line_and_its_traceback_is_in_a_log(refused, launcher, log):
    message = refused("reward.functions=rewards.py:broken", f"run.launcher={launcher}", code=1)
    assert "it raised ZeroDivisionError: float division by zero (rewards.py:2)" in message
    text = Path(f"runs/run/logs/{log}.log").read_text()
    assert text.count("return [1.0 / 0]") == 1 and "ZeroDivisionError: float division by zero" in text


def test_the_traceback_of_a_reward_that_raised_is_shown_when_asked_for(command):
    arguments = ("train", "run.toml", "--set", "reward.functions=rewards.py:broken", "--traceback")
    code, _, errors = command(*arguments)
    assert code == 1 and "return [1.0 / 0]" in errors


def test_a_gradient_that_is_not_finite_ends_the_run_or_is_skipped_and_said(refused, command):
    overrides = ("reward.functions=rewards.py:huge", "algo.advantage=dr-grpo")
    message = refused(*overrides, code=1)
    assert "step 1" in message and "not finite" in message
    assert "learning_rate" in message and "on_nonfinite" in message
    code, output, errors = command("train", "--resume", "runs/run", "--set", "trainer.on_nonfinite=skip")
    assert (code, errors) == (0, "")
    assert output.count("was skipped: the gradient norm is not finite") == 4
    first, last = (Path("runs/run/checkpoints") / name for name in ("step-00000002", "step-00000004"))
    assert (first / "model.safetensors").read_bytes() == (last / "model.safetensors").read_bytes()


def test_a_full_disk_at_a_checkpoint_keeps_the_last_one_and_the_run_finishes_once_there_is_room(command):
    # Files of at most 700 KB: the weights of step 0 fit, the optimizer's state of step 2 does not.
    code, errors = subprocess_command("train", "run.toml", before="ulimit -f 1400;")
    message = sentence(code, errors, 1)
    assert "could not be written" in message and "free space" in message
    assert latest_checkpoint(Path("runs/run")).name == "step-00000000"
    assert [path.name for path in Path("runs/run/checkpoints").iterdir()] == ["step-00000000"]
    finishes(command)


@pytest.mark.parametrize(
    ("steps", "left"),
    [(0, "before anything was trained; runs/run may be used again"), (2, "headrace train --resume runs/run")],
)
def test_a_run_that_is_ended_at_once_says_what_is_left(command, monkeypatch, steps, left):
    resumed = ()
    if steps:
        assert command("train", "run.toml", "--set", f"run.steps={steps}")[0] == 0
        resumed = ("--resume", "runs/run")

    async def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "cluster", interrupted)
    code, _, errors = command("train", "run.toml", *resumed)
    assert code == 130
    assert errors.startswith("ended at once") and errors.strip().endswith(left)


def test_a_demo_that_is_stopped_says_so(command, monkeypatch):
    stopped = SimpleNamespace(
        interrupted=True, num_steps=3, rewards=(), summary=SimpleNamespace(as_dict=dict)
    )
    monkeypatch.setattr(demo, "run", lambda **_: stopped)
    code, _, errors = command("demo")
    assert (code, errors) == (130, "stopped at step 3; a demo is not resumed: start it again\n")


def test_an_adapter_of_rank_0_is_none(workplace, monkeypatch):
    chosen = []
    monkeypatch.setattr(demo.api, "train", lambda *, settings, **_: chosen.append(settings))
    for overrides in (["lora.rank=0"], ["lora.rank=4"], ["lora.alpha=8.0"]):
        demo.run(overrides=overrides, warm_steps=0)
    assert [settings.lora.rank for settings in chosen] == [0, 4, 8]
    whole, *adapters = [settings.trainer.learning_rate for settings in chosen]
    assert whole == demo.SETTINGS["trainer.learning_rate"]
    assert set(adapters) == {demo.ADAPTER_SETTINGS["trainer.learning_rate"]}


def test_what_is_piped_is_not_broken_into_lines(capsys, monkeypatch):
    """What is captured here is no terminal either."""
    monkeypatch.delenv("COLUMNS", raising=False)
    output().print(" ".join(["word"] * 60))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_resume_under_changed_settings_names_them(refused, command):
    assert command("train", "run.toml", "--set", "run.steps=2")[0] == 0
    resume = ("train", "--resume", "runs/run")
    before = Path("runs/run/settings.toml").read_text()
    message = refused("rollout.group_size=8", "trainer.learning_rate=0.5", arguments=resume)
    assert message == (
        "resume: rollout.group_size is 8, the run has 4; trainer.learning_rate is 0.5, the run has 1e-06: set them "
        "back, or start a new run from the last checkpoint of runs/run"
    )
    assert Path("runs/run/settings.toml").read_text() == before
    finishes(command, "--set", "run.steps=4")


def test_a_resumed_run_keeps_its_name_and_place(command):
    assert command("train", "run.toml", "--set", "run.steps=2")[0] == 0
    finishes(command, "--set", "run.steps=4", "--set", "run.name=other", "--set", "run.dir=elsewhere")
    kept = load(Path("runs/run/settings.toml")).run
    assert (kept.name, kept.dir, kept.steps) == ("run", "runs", 4)
    assert not Path("elsewhere").exists() and not Path("runs/other").exists()


def everything(run_dir: Path) -> dict[Path, bytes]:
    """Every file of a run but the lock, which holds its last user."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.name != "lock")
    return {path: path.read_bytes() for path in files}


def test_a_resume_of_a_complete_run_says_so_and_touches_nothing(command):
    assert command("train", "run.toml", "--set", "run.steps=2")[0] == 0
    before = everything(Path("runs/run"))
    # The reward is not even looked for, let alone a worker started.
    Path("rewards.py").unlink()
    for more in ((), ("--set", "run.stall_s=60", "--json", "summary.json")):
        code, output, errors = command("train", "--resume", "runs/run", *more)
        assert (code, errors) == (0, "")
        assert output == "the run in runs/run is complete at step 2; raise run.steps to go on with it\n"
    assert everything(Path("runs/run")) == before
    assert json.loads(Path("summary.json").read_text())["num_steps"] == 0
    result = headrace.train(resume="runs/run")
    assert (result.num_steps, result.interrupted, result.rewards) == (2, False, ())
    assert result.model_dir.name == "step-00000002"


def test_a_resume_to_fewer_steps_than_were_taken_is_refused_and_stores_nothing(refused, command):
    assert command("train", "run.toml", "--set", "run.steps=3")[0] == 0
    before = everything(Path("runs/run"))
    message = refused("run.steps=2", arguments=("train", "--resume", "runs/run"))
    assert message.startswith("run.steps is 2, but the run in runs/run is at step 3 already")
    assert "set run.steps to more than 3 to go on" in message
    assert everything(Path("runs/run")) == before
    finishes(command, "--set", "run.steps=4")


def test_settings_of_a_resume_that_cannot_begin_are_not_kept(refused, command):
    assert command("train", "run.toml", "--set", "run.steps=2")[0] == 0
    before = everything(Path("runs/run"))
    tasks = Path("tasks.jsonl").read_text()
    Path("tasks.jsonl").unlink()
    assert "tasks.source" in refused("run.steps=4", arguments=("train", "--resume", "runs/run"))
    assert everything(Path("runs/run")) == before
    Path("tasks.jsonl").write_text(tasks)
    finishes(command, "--set", "run.steps=4")


def test_a_resume_without_the_runs_own_environment_is_refused_and_so_is_one_with_another(refused, command):
    """Attempts of one turn would otherwise go on where the run's had several, and nobody would see it."""

    def rude(renderer, sampling):
        raise AssertionError("an environment that must not be made")

    RunDirectory.create(load(Path("run.toml")), environment="Game").close()
    message = refused(arguments=("train", "--resume", "runs/run"))
    assert message.startswith("resume: the run in runs/run has an environment of its own (Game)")
    assert "headrace.train(environment=..., resume=...)" in message
    assert command("train", "run.toml", "--set", "run.steps=2")[0] == 0
    with pytest.raises(ConfigError, match="runs/run was started without an environment of its own"):
        headrace.train(environment=rude, resume="runs/run")
    finishes(command, "--set", "run.steps=4")


def test_an_environment_that_is_made_already_is_refused(workplace, model):
    with pytest.raises(ConfigError, match=r"environment is a Game, .* give its class, or a function"):
        headrace.train(environment=Game(), settings=load(Path("run.toml")))
    assert not Path("runs").exists()


class Game:
    async def run(self, task, policy):
        raise AssertionError("must not be run")


def test_a_run_is_no_model_and_its_last_checkpoint_is_named(refused, command):
    assert command("train", "run.toml", "--set", "run.steps=2")[0] == 0
    message = refused("model.path=runs/run", "run.name=other")
    assert message == (
        "model.path: runs/run is a run, not a model; name one of its checkpoints, such as "
        "runs/run/checkpoints/step-00000002"
    )
    arguments = ("--set", "model.path=runs/run/checkpoints/step-00000002", "--set", "run.name=other")
    assert command("train", "run.toml", *arguments)[0] == 0


def test_a_directory_that_holds_a_run_is_not_overwritten(refused, command):
    assert command("train", "run.toml", "--set", "run.steps=2")[0] == 0
    message = refused()
    assert message.startswith("run.name: runs/run already holds a run; resume it with --resume runs/run")
    finishes(command, "--set", "run.steps=4")


def test_a_directory_in_use_is_refused_and_its_user_named(workplace, model):
    running = RunDirectory.create(from_dict({**SMALL, "model.path": str(model)}))
    try:
        for arguments in (["run.toml"], ["--resume", "runs/run"]):
            message = sentence(*subprocess_command("train", *arguments), 2)
            assert message.startswith(f"run.name: runs/run is in use by process {os.getpid()}; wait for it")
    finally:
        running.close()


def test_a_resume_of_nothing_and_a_place_that_cannot_be_written_are_refused(refused, workplace):
    message = refused(arguments=("train", "--resume", "runs/absent"))
    assert message == "resume: runs/absent holds no run (there is no settings.toml); check the path"
    (workplace / "file").write_text("")
    message = refused("run.dir=file", code=1)
    assert "run.dir: file/run cannot be written" in message and "choose another run.dir" in message
