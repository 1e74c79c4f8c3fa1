"""Settings: ways in and out, and a clear sentence for everything that cannot work."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import NoneType
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algos.catalog import OF_A_RUN, PARAMETERS
from headrace.algos.pivots import PARAMETERS as PIVOT_PARAMETERS
from headrace.config import Settings, changed_fields, fingerprint, from_dict, load, require, to_toml
from headrace.config.moved import MOVED
from headrace.config.names import FIELDS, nearest
from headrace.config.reference import render
from headrace.config.resume import MAY_CHANGE
from headrace.errors import ConfigError

# A valid value for every setting, different from its default, and what must come along for it to be accepted.
OTHER_VALUES = {
    "run.dir": "elsewhere",
    "run.name": "first",
    "run.seed": 7,
    "run.steps": 20,
    "distill.teachers": {"math": "teachers/math", "earlier": "snapshot:4"},
    "distill.divergence": "forward",
    "distill.coef": 0.5,
    "distill.top_k": 8,
    "run.launcher": "inline",
    "run.checkpoint_every": 0,
    "run.keep_checkpoints": 5,
    "run.console": "off",
    "run.stall_s": 5.0,
    "model.path": "some/model",
    "model.dtype": "bfloat16",
    "model.device": "cpu",
    "tasks.source": "tasks:rows",
    "tasks.prompt_column": "question",
    "tasks.limit": 10,
    "tasks.shuffle": False,
    "tasks.system_prompt": 'Be "brief".\nPlease.',
    "tasks.options": {"size": 3, "nested": {"a b": [1, 2.5, "x", {"deep": True}]}},
    "rollout.group_size": 4,
    "rollout.groups_per_step": 2,
    "rollout.max_tokens": 32,
    "rollout.temperature": 0.7,
    "rollout.top_k": 5,
    "rollout.top_p": 0.9,
    "rollout.min_p": 0.1,
    "rollout.stop": ("</answer>", "\t"),
    "rollout.max_lag": 3,
    "rollout.over_provision": 1.5,
    "rollout.quorum": 0.8,
    "rollout.staleness": "drop",
    "rollout.drop_zero_variance": True,
    "rollout.attempt_s": 30.0,
    "reward.functions": ("rewards:exact", "rewards:length"),
    "reward.weights": (1.0, 0.5),
    "reward.timeout_s": 1.5,
    "reward.error_budget": 0.5,
    "reward.workers": 1,
    "scoring.process": "judges:steps",
    "scoring.steps": "tokens:16",
    "scoring.abort_below": -0.5,
    "algo.advantage": "reinforce++",
    "algo.loss": "gspo",
    "algo.clip_low": 3e-4,
    "algo.clip_high": 4e-4,
    "algo.aggregation": "seq-mean-token-mean",
    "algo.corrections": ("seq-tis", "opsm"),
    "algo.options": {
        "seq-tis.cap": 5.0,
        "truncated.mode": "mask",
        "kl.reference": "engine",
        "overlong.tokens": 16,
    },
    "algo.guard": "stop",
    "algo.routing": "live",
    "algo.kl_coef": 0.01,
    "pivots.branches": 4,
    "pivots.options": {"gamma": 2.0, "delimiters": ["|"]},
    "trainer.learning_rate": 3e-4,
    "trainer.betas": (0.8, 0.95),
    "trainer.weight_decay": 0.1,
    "trainer.grad_clip": 0.5,
    "trainer.warmup_steps": 5,
    "trainer.schedule": "cosine",
    "trainer.row_tokens": 2048,
    "trainer.ranks": 2,
    "trainer.expert_ranks": 2,
    "trainer.offload": "all",
    "trainer.minibatches": 2,
    "trainer.on_nonfinite": "skip",
    "lora.rank": 4,
    "lora.alpha": 4.0,
    "lora.targets": ("q_proj", "v_proj"),
    "lora.dora": True,
    "engine.count": 2,
    "engine.max_running": 8,
    "engine.kv_tokens": 4096,
    "engine.memory_share": 0.5,
    "model.eager": True,
    "weights.mode": "block",
    "weights.transport": "files",
    "weights.bundle": "delta",
}


def refusal(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


def write(directory: Path, text: str) -> Path:
    path = directory / "run.toml"
    path.write_text(text)
    return path


def test_defaults_are_accepted():
    settings = load(None)
    assert settings == Settings()
    assert settings.rollout.max_lag == 1
    assert settings.model.path is None


def test_file_then_overrides_in_order(tmp_path):
    path = write(tmp_path, 'rollout.max_lag = 3\n[run]\nseed = 5\nname = "from-file"\n')
    settings = load(path, ["run.seed=6", "run.seed=7", "trainer.betas = [0.5, 0.6]"])
    assert settings.rollout.max_lag == 3
    assert settings.run.name == "from-file"
    assert settings.run.seed == 7
    assert settings.trainer.betas == (0.5, 0.6)


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("run.name=hello", "run", "name", "hello"),
        ("run.name=2026", "run", "name", "2026"),
        ("run.name=2026-11-15", "run", "name", "2026-11-15"),
        ("run.name='quoted'", "run", "name", "quoted"),
        ("run.name=a=b", "run", "name", "a=b"),
        ("run.steps=1_000", "run", "steps", 1000),
        ("run.stall_s=5", "run", "stall_s", 5.0),
        ("tasks.shuffle=false", "tasks", "shuffle", False),
        ("rollout.stop=END", "rollout", "stop", ("END",)),
        ("rollout.stop=['a', 'b']", "rollout", "stop", ("a", "b")),
        ("tasks.options.a.b=2", "tasks", "options", {"a": {"b": 2}}),
    ],
)
def test_override_values(override, section, field, value):
    assert getattr(getattr(load(None, [override]), section), field) == value


def test_empty_override_restores_the_default(tmp_path):
    path = write(tmp_path, "[tasks]\nlimit = 3\n")
    assert load(path).tasks.limit == 3
    assert load(path, ["tasks.limit="]).tasks.limit is None


def test_override_extends_a_table_of_the_file(tmp_path):
    path = write(tmp_path, "[tasks.options]\na = 1\n")
    assert load(path, ["tasks.options.b=2"]).tasks.options == {"a": 1, "b": 2}


def test_from_dict_takes_sections_and_dotted_names_and_leaves_them_alone():
    values = {"run": {"seed": 3}, "rollout.stop": ["x"], "tasks.options": {"a": 1}, "tasks.options.b": 2}
    settings = from_dict(values)
    assert settings.run.seed == 3
    assert settings.rollout.stop == ("x",)
    assert settings.tasks.options == {"a": 1, "b": 2}
    assert values["tasks.options"] == {"a": 1}


def test_settings_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        load(None).run.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rollout.groupsize", "rollout.group_size"),
        ("rolout.group_size", "rollout.group_size"),
        ("algo.max_lag", "rollout.max_lag"),
        ("max_lag", "rollout.max_lag"),
        ("trainer.lr", "trainer.learning_rate"),
        ("train.learning_rate", "trainer.learning_rate"),
        ("rollout.max_new_tokens", "rollout.max_tokens"),
        ("rollout.group_size.x", "rollout.group_size"),
        ("model.dtype.", "model.dtype"),
    ],
)
def test_unknown_name_suggests_the_nearest(name, meant):
    assert nearest(name) == meant
    assert refusal(f"{name}=1") == f"{name} is not a setting: did you mean {meant}?"


@pytest.mark.parametrize("name", MOVED)
def test_a_name_that_has_moved_says_where_to(name):
    said = refusal(f"{name}=1")
    assert name not in FIELDS
    assert said == f"{name} is no longer a setting: {MOVED[name]}."
    # What it names exists: the quoted names are parameters, the dotted ones settings or tables of theirs.
    parameters = {parameter.name for parameter in PARAMETERS}
    assert set(re.findall(r'"([a-z-]+\.[a-z_]+)"', said)) <= parameters
    dotted = re.findall(r"(?<![\"\w.])([a-z_]+\.[a-z_]+)(?![\"\w])", said.partition(":")[2])
    assert set(dotted) - {"headrace.warm_start"} <= FIELDS.keys()


@pytest.mark.parametrize(
    ("table", "companions", "parameters"),
    [
        (
            "algo.options",
            ["algo.advantage=rae", "algo.kl_coef=0.1", "scoring.process=judge:steps"],
            [p for p in PARAMETERS if p.owner in ("truncated", "guard", *OF_A_RUN)],
        ),
        ("pivots.options", ["pivots.branches=4"], PIVOT_PARAMETERS),
    ],
)
def test_a_parameter_of_the_wrong_type_is_refused_like_a_setting(table, companions, parameters):
    for parameter in parameters:
        said = refusal(*companions, f"{table}.{parameter.name}=true")
        assert said == (
            f'{table} has "{parameter.name}" = True: set it to {parameter.takes}, or leave it out.'
        )


def test_unknown_name_without_a_near_one_points_to_the_list():
    assert refusal("foo.bar=1") == "foo.bar is not a setting: docs/settings.md lists every setting."


def test_unknown_names_in_a_file_are_all_named(tmp_path):
    path = write(tmp_path, "[rolout]\ngroup_size = 4\n[run]\nsede = 1\n[empty]\n")
    first, second, third = refusal(path=path).splitlines()
    assert first == "rolout.group_size is not a setting: did you mean rollout.group_size?"
    assert second == "run.sede is not a setting: did you mean run.seed?"
    assert third.startswith("empty is not a setting")


def test_section_given_a_value():
    assert refusal("rollout=3") == (
        "rollout is a section, not a setting: set its fields by name, for example rollout.group_size."
    )


@pytest.mark.parametrize(
    ("override", "given", "expected"),
    [
        ("rollout.group_size=eight", '"eight"', "a whole number of at least 1"),
        ("rollout.group_size=2.0", "2.0", "a whole number of at least 1"),
        ("rollout.group_size=true", "true", "a whole number of at least 1"),
        ("rollout.max_lag=-1", "-1", "a whole number of at least 0"),
        ("rollout.top_p=1.5", "1.5", "a number above 0 and at most 1"),
        ("run.stall_s=inf", "inf", "a number above 0"),
        ("run.stall_s=nan", "nan", "a number above 0"),
        ("tasks.shuffle=yes", '"yes"', "true or false"),
        ("tasks.limit=0", "0", "a whole number of at least 1, or leave it out"),
        ("model.dtype=float16", '"float16"', "one of auto, float32, bfloat16"),
        ("rollout.stop=[1]", "1", "a list of texts"),
        ("reward.weights=x", '"x"', "a list of numbers, or leave it out"),
        ("trainer.betas=[0.9]", "[0.9]", "two numbers of at least 0 and below 1"),
        ("trainer.betas=[0.9, 1.0]", "1.0", "two numbers of at least 0 and below 1"),
        ("tasks.options=3", "3", "a table of texts, numbers, booleans, lists and tables"),
    ],
)
def test_wrong_value_names_field_given_and_expected(override, given, expected):
    name = override.partition("=")[0]
    assert refusal(override) == f"{name} was given {given}: set it to {expected}."


def test_long_values_are_shortened_in_messages():
    message = refusal("rollout.group_size=" + "x" * 500)
    assert len(message) < 200


def test_none_in_a_table_is_refused():
    with pytest.raises(ConfigError, match=r"^tasks\.options was given .*None"):
        from_dict({"tasks": {"options": {"a": [None]}}})


def test_every_wrong_value_is_reported_at_once():
    lines = refusal("run.steps=0", "engine.count=0").splitlines()
    assert [line.split()[0] for line in lines] == ["run.steps", "engine.count"]


@pytest.mark.parametrize("override", ["run.seed", "=3", "seed"])
def test_malformed_override(override):
    assert refusal(override) == f'The override "{override}" has no value: write it as section.field=value.'


def test_missing_file(tmp_path):
    path = tmp_path / "absent.toml"
    assert refusal(path=path) == f"The settings file {path} does not exist: check the path."


def test_directory_instead_of_file(tmp_path):
    assert refusal(path=tmp_path).startswith(f"The settings file {tmp_path} cannot be read: ")


def test_file_that_is_not_text(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(path=path)


def test_syntax_error_names_the_line(tmp_path):
    message = refusal(path=write(tmp_path, "[run]\nseed = 1\nsteps 3\n"))
    assert "not valid TOML" in message
    assert "line 3" in message


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (["rollout.top_k=8193"], ["rollout.top_k", "8192 kept ids are recorded", "= 8192"]),
        (["rollout.top_k=5", "rollout.temperature=0"], ["rollout.temperature", "above 0"]),
        (["rollout.temperature=0"], ["rollout.temperature", "above 0"]),
        (["rollout.group_size=1"], ["rollout.group_size", "algo.advantage"]),
        (["distill.coef=0.5"], ["distill names nobody", "set distill.teachers"]),
        (["distill.top_k=8"], ["distill names nobody", "set distill.teachers"]),
        (
            ["distill.teachers={a = 'x'}", "distill.top_k=8"],
            ["distill.top_k is 8", "distill.divergence to forward or reverse"],
        ),
        (["distill.teachers={a = 'snapshot:0'}"], ["distill.teachers has snapshot:0", "snapshot:N"]),
        (["distill.teachers={a = 'snapshot:1', b = 'snapshot:2'}"], ["snapshot:1 and snapshot:2", "once"]),
        (['distill.teachers={"a b" = "x"}'], ["distill.teachers", '"a b"']),
        (['distill.teachers={none = "x"}'], ["distill.teachers", "other than none"]),
        (["distill.teachers={a = 'snapshot:2'}", "weights.bundle=delta"], ["snapshot:2", "weights.bundle"]),
        (
            ["distill.teachers={a = 'snapshot:2'}", "weights.transport=collective"],
            ["distill.teachers has snapshot:2", "weights.transport"],
        ),
        (["rollout.group_size=1", "algo.advantage=rloo"], ["rollout.group_size", "rloo"]),
        (["rollout.group_size=1", "algo.advantage=dr-grpo"], ["rollout.group_size", "dr-grpo"]),
        (
            ["rollout.group_size=1", "algo.advantage=reinforce++", "rollout.drop_zero_variance=true"],
            ["rollout.drop_zero_variance"],
        ),
        (
            ["algo.advantage=rae", "rollout.drop_zero_variance=true"],
            ["rollout.drop_zero_variance", "earlier steps"],
        ),
        (["algo.advantage=rae", "pivots.branches=4"], ["pivots.branches is 4", "algo.advantage = rae"]),
        (["algo.advantage=rae", "algo.options.rae.decay=1"], ["rae.decay", "below 1"]),
        (["algo.options.rae.decay=0.9"], ["rae.decay", "rae is not in use"]),
        (
            ["algo.options.echo.coef=0.1", "distill.teachers={a = 'x'}", "distill.divergence=forward"],
            ["echo.coef", "distill.divergence = sampled"],
        ),
        (["rollout.group_size=1", "algo.advantage=vcpo"], ["rollout.group_size", "vcpo"]),
        (["algo.advantage=vcpo", "trainer.ranks=2"], ["algo.advantage is vcpo", "trainer.ranks = 1"]),
        (["algo.advantage=vcpo", "rollout.quorum=0.8"], ["algo.advantage is vcpo", "rollout.quorum = 1"]),
        (["algo.advantage=vcpo", "scoring.process=judge:steps"], ["vcpo", "leave scoring.process out"]),
        (["rollout.over_provision=2.5"], ["rollout.over_provision", "at most 2", "rollout.max_lag to 2"]),
        (["rollout.over_provision=1.1", "rollout.max_lag=0"], ["rollout.over_provision", "at most 1"]),
        (["rollout.quorum=0.8", "rollout.max_lag=0"], ["rollout.quorum", "rollout.max_lag to 1"]),
        (["rollout.quorum=0.8", "pivots.branches=4"], ["rollout.quorum = 1", "pivots.branches"]),
        (["rollout.quorum=0.8", "scoring.process=judge:steps"], ["rollout.quorum = 1", "scoring.process"]),
        (["trainer.minibatches=65"], ["trainer.minibatches", "at most 64"]),
        (["trainer.ranks=4", "trainer.expert_ranks=3"], ["trainer.expert_ranks", "trainer.ranks = 4"]),
        (["trainer.ranks=2", "run.launcher=inline"], ["trainer.ranks", "run.launcher = local"]),
        (["trainer.ranks=2", "trainer.offload=moments"], ["trainer.offload", "trainer.ranks is 2"]),
        (["trainer.ranks=2", "trainer.offload=first_moments"], ["trainer.offload is first_moments"]),
        (["trainer.offload=moments", "lora.rank=4"], ["trainer.offload", "lora.rank is 4", "or all"]),
        (["weights.bundle=delta", "lora.rank=4"], ["weights.bundle is delta", "lora.rank is 4", "= auto"]),
        (["trainer.warmup_steps=101"], ["trainer.warmup_steps", "run.steps = 100"]),
        (["trainer.warmup_steps=100", "trainer.schedule=linear"], ["the whole run", "below run.steps = 100"]),
        (["algo.options.kl.estimator=k2"], ["kl.estimator", "kl is not in use"]),
        (["algo.kl_coef=0.1", "algo.options.kl.estimator=k1"], ["kl.estimator", "one of k2, k3"]),
        (
            ["algo.kl_coef=0.1", "algo.options.kl.estimator=k1", "algo.options.kl.reference=engine"],
            ["kl.estimator", "inside the reward", "set algo.advantage = reinforce++ with it"],
        ),
        (
            ["algo.kl_coef=0.1", "algo.options.kl.estimator=k1", "algo.advantage=reinforce++"],
            ["kl.estimator", 'set "kl.reference" = engine with it'],
        ),
        (["algo.options.kl.estimator=k1"], ["kl.estimator", "kl is not in use"]),
        (
            ["algo.kl_coef=0.1", "algo.options.kl.estimator=k1", "algo.advantage=reinforce++", "lora.rank=4"],
            ["lora.rank is 4", '"kl.estimator" to one of k2, k3, or lora.rank = 0'],
        ),
        (
            ["algo.kl_coef=0.1", "algo.options.kl={estimator='k1', reference='engine'}", "lora.rank=4"],
            ["lora.rank is 4", '"kl.estimator" to one of k2, k3, or lora.rank = 0'],
        ),
        (["algo.options.kl.reference=engine"], ["kl.reference", "kl is not in use"]),
        (
            ["algo.options.kl.reference=engine", "algo.kl_coef=0.1", "lora.rank=4"],
            ["lora.rank", '"kl.reference" in algo.options to trainer'],
        ),
        (
            ["algo.loss=decoupled", "algo.corrections=tis"],
            ["algo.corrections has tis", "algo.loss = decoupled"],
        ),
        (["algo.loss=gspo", "algo.corrections=icepop"], ["algo.corrections", "seq-tis or seq-mis"]),
        (["algo.corrections=['tis', 'mis']"], ["algo.corrections", "counted twice"]),
        (["algo.corrections=['opsm', 'opsm']"], ["algo.corrections", "name it once"]),
        (["algo.corrections=imaginary"], ["algo.corrections", "imaginary", "m2po"]),
        (["algo.loss=sapo", "algo.clip_high=0.3"], ["algo.clip_high", "sapo", "unset"]),
        (["algo.options.tis.cap=3.0"], ["algo.options", "tis.cap", "not in use"]),
        (["algo.corrections=tis", "algo.options.tis.cup=3.0"], ["tis.cup", "did you mean tis.cap?"]),
        (["algo.corrections=tis", "algo.options.tis.cap=high"], ["tis.cap", "a number above 0"]),
        (["algo.corrections=tis", "algo.options.tis.cap=true"], ["tis.cap", "a number above 0"]),
        (["algo.options.ppo.dual_clip=1.2"], ["ppo.dual_clip", "above 1 + clip_high (1.28)"]),
        (["algo.corrections=icepop", "algo.options.icepop.low=9.0"], ["icepop.low", "icepop.high"]),
        (["algo.options.truncated.mode=drop"], ["truncated.mode", "one of keep, mask, penalise"]),
        (
            ["algo.options.guard.route_flips=0.1", "algo.routing=live"],
            ["guard.route_flips", "algo.routing = keep"],
        ),
        (["scoring.process=m:f", "algo.advantage=lite-ppo"], ["lite-ppo", "scoring.process"]),
        (["algo.options.truncated.penalty=0.5"], ["truncated.penalty", '"truncated.mode" = "penalise"']),
        (["algo.guard=off", "algo.options.guard.mismatch=0.5"], ["guard.mismatch", "guard is not in use"]),
        (
            ["algo.corrections=tis", "algo.clip_high=0.3"],
            ["algo.clip_high", "corrections = tis", "trainer.minibatches"],
        ),
        (
            ["algo.loss=decoupled", "algo.clip_low=0.1"],
            ["algo.clip_low", "loss = decoupled", "trainer.minibatches"],
        ),
        (
            ["algo.loss=sapo", "algo.corrections=mis", "algo.options.sapo.tau_neg=2.0"],
            ["sapo.tau_neg", "corrections = mis", "trainer.minibatches"],
        ),
        (
            ["algo.advantage=maxrl", "algo.options.overlong.tokens=16"],
            ["algo.advantage", '"overlong.tokens" = 0'],
        ),
        (["algo.options.overlong.tokens=256"], ["overlong.tokens", "rollout.max_tokens = 256"]),
        (["algo.options.overlong.tokens=1.5"], ["overlong.tokens", "a whole number of at least 0"]),
        (["algo.options.overlong.penalty=0.5"], ["overlong.penalty", '"overlong.tokens" above 0']),
        (["algo.options.balance.coef=-1"], ["balance.coef", "a number of at least 0"]),
        (["algo.options.balance.coef=nan"], ["algo.options was given nan"]),
        (["algo.options.balance.coef=inf"], ["algo.options was given inf"]),
        (["algo.options.process.form=min"], ["process.form", "process is not in use"]),
        (["algo.options.lucky=1"], ['"lucky"', "ppo.dual_clip", "overlong.tokens", "guard.mismatch"]),
        (["tasks.source=a.jsonl", "tasks.options.n=3"], ["tasks.options", "leave tasks.options out"]),
        (["tasks.source=hf:a", "tasks.options.name=b"], ["tasks.options has name", "split and subset"]),
        (["tasks.source=hf:a", "tasks.options.split=3"], ["tasks.options has split", "each a text"]),
        (["reward.functions=['a:b']", "reward.weights=[1, 2]"], ["reward.weights", "reward.functions"]),
        (["reward.functions=exact"], ["reward.functions", "module:function"]),
        (["engine.kv_tokens=100"], ["engine.kv_tokens", "rollout.max_tokens = 256"]),
        (["pivots.branches=1"], ["pivots.branches", "2 or more"]),
        (["pivots.options={gamma=2.0}"], ["pivots.options", "pivots.branches"]),
        (
            ["scoring.steps=tokens:4", "scoring.abort_below=0.5"],
            ["scoring.steps and scoring.abort_below", "scoring.process"],
        ),
        (["pivots.branches=4", "pivots.options={depth=2}"], ['pivots.options has "depth"', "per_group"]),
        (["pivots.branches=4", "pivots.options={per_group=0}"], ["per_group", "of at least 1"]),
        (["pivots.branches=4", "pivots.options={per_group=1.5}"], ["per_group", "a whole number"]),
        (["pivots.branches=4", "pivots.options={gamma='high'}"], ["gamma", "a number of at least 0"]),
        (["pivots.branches=4", "pivots.options={gamma=true}"], ["gamma", "a number of at least 0"]),
        (["pivots.branches=4", "pivots.options={delimiters=[1]}"], ["delimiters", "a list of texts"]),
        (
            ["pivots.branches=4", "pivots.options={segments=4, segment_tokens=3}"],
            ["segment_tokens", "leave one out"],
        ),
        (
            ["pivots.branches=4", "pivots.options={delimiters=['a'], segments=3}"],
            ["pivots.options", "leave one out"],
        ),
    ],
)
def test_impossible_combination_is_one_sentence(overrides, fields):
    message = refusal(*overrides)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    assert all(field in message for field in fields)


def test_parameters_may_be_written_with_quoted_names_as_tables_or_one_by_one(tmp_path):
    texts = ['options = {"tis.cap" = 3.0}', "options.tis.cap = 3.0", "options = {tis = {cap = 3.0}}"]
    for text in texts:
        settings = load(write(tmp_path, f'[algo]\ncorrections = ["tis"]\n{text}\n'))
        assert settings.algo.options == {"tis.cap": 3.0}
    assert load(None, ["algo.corrections=tis", "algo.options.tis.cap=3.0"]).algo == settings.algo


def test_bounds_act_with_several_minibatches_or_an_interpolated_prox():
    load(None, ["algo.corrections=tis", "algo.clip_high=0.3", "trainer.minibatches=2"])
    load(None, ["algo.loss=decoupled", "algo.clip_high=0.3", "algo.options.decoupled.prox=interpolated"])
    load(None, ["algo.loss=decoupled", "algo.options.decoupled.cap=3.0"])


def test_combinations_are_checked_on_direct_construction_too():
    with pytest.raises(ConfigError, match=r"rollout\.group_size"):
        Settings.model_validate({"rollout": {"group_size": 1}})


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.ranks": 4},
        {"trainer.ranks": 4, "lora.dora": True},
        {"trainer.ranks": 4, "trainer.expert_ranks": 2},
        {"trainer.ranks": 2, "trainer.expert_ranks": 2, "lora.targets": ["experts"]},
        {"trainer.offload": "all"},
    ],
)
def test_adapters_are_trained_over_ranks(changes):
    assert from_dict({"lora.rank": 4, **changes}).lora.rank == 4


def test_single_attempts_are_fine_with_a_batch_baseline():
    assert load(None, ["rollout.group_size=1", "algo.advantage=reinforce++"]).rollout.group_size == 1


def test_sampling_without_training_may_truncate_and_be_greedy():
    settings = load(None, ["rollout.top_p=0.5", "rollout.temperature=0"], training=False)
    assert settings.rollout.top_p == 0.5


def test_required_settings_are_named():
    with pytest.raises(ConfigError, match=r"^model\.path is not set: .*--set model\.path="):
        require(Settings(), "model.path")
    with pytest.raises(ConfigError, match=r"^reward\.functions is not set"):
        require(Settings(), "reward.functions")
    require(load(None, ["model.path=x"]), "model.path", "run.dir", "run.seed")


def test_other_values_cover_every_setting():
    assert OTHER_VALUES.keys() == FIELDS.keys()


def test_toml_round_trip_of_every_setting(tmp_path):
    settings = from_dict(OTHER_VALUES, training=False)
    values = settings.model_dump()
    for name, value in OTHER_VALUES.items():
        section, field = name.split(".")
        assert values[section][field] == value, name
    assert load(write(tmp_path, to_toml(settings)), training=False) == settings
    assert load(write(tmp_path, to_toml(Settings()))) == Settings()


plain = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
tables = st.dictionaries(
    st.text(),
    st.recursive(plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3)),
    max_size=3,
)


@given(text=st.text(), options=tables, rate=st.floats(min_value=1e-300, max_value=1e300))
def test_toml_round_trip_of_any_text_and_number(text, options, rate):
    values = {
        "tasks.system_prompt": text,
        "rollout.stop": [text, text],
        "tasks.options": options,
        "trainer.learning_rate": rate,
    }
    settings = from_dict(values)
    assert settings.tasks.options == options
    assert from_dict(tomllib.loads(to_toml(settings))) == settings


@pytest.mark.parametrize("name", FIELDS)
def test_fingerprint_follows_exactly_the_fields_a_resume_must_keep(name):
    # All companions first, then one field changed back to its default, so that every state is a valid one.
    after = Settings.model_validate(_nested(OTHER_VALUES), context={"training": False})
    section, field = name.split(".")
    default = FIELDS[name].get_default(call_default_factory=True)
    changed = getattr(after, section).model_copy(update={field: default})
    before = after.model_copy(update={section: changed})
    must_keep = name not in MAY_CHANGE
    assert tuple(changed_fields(before, after)) == ((name,) if must_keep else ())
    assert (fingerprint(before) != fingerprint(after)) == must_keep


def _nested(values: dict) -> dict:
    tree: dict = {}
    for name, value in values.items():
        section, field = name.split(".")
        tree.setdefault(section, {})[field] = value
    return tree


def test_what_may_change_on_resume_exists():
    assert FIELDS.keys() >= MAY_CHANGE
    assert {"run.steps", "run.console", "run.checkpoint_every", "weights.mode"} <= MAY_CHANGE


def test_not_set_is_the_only_meaning_of_none():
    for name, field in FIELDS.items():
        if NoneType in get_args(field.annotation):
            assert field.default is None, name


def test_every_setting_is_documented_and_the_page_is_current():
    for name, field in FIELDS.items():
        assert field.description and field.description.strip().endswith((".", ")")), name
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text() == render(), "docs/settings.md is out of date: run `make docs`"
    assert re.findall(r"^\| `([a-z_.]+)`", render(), re.MULTILINE) == list(FIELDS)
