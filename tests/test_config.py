"""Settings: flags, YAML files and Python mean the same, and mistakes name what to type instead."""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import methods
from raysim import Config, FleetConfig, TrainConfig
from raysim.errors import ConfigError
from raysim.record import config_yaml
from raysim.settings import expand_files, flags

MY_METHOD = '''\
"""A user's own method."""

from dataclasses import dataclass
from typing import Literal

from raysim import ClientState, Method


@dataclass(frozen=True)
class Mine(Method[ClientState, None]):
    strength: float = 0.5
    """How strong it is."""
    flavor: Literal["sweet", "sour"] = "sweet"
    """How it tastes."""
'''

# Far from the defaults, values of every kind: numbers, text, paths, lists, choices, truth values.
UNUSUAL = [
    *("--clients", "7", "--participation", "0.5", "--seed", "-3", "--backend", "local"),
    *("--address", "10.0.0.1:6379", "--actors", "clients", "--memory", "0.5"),
    *("--dashboard", "False", "--driver.cpus", "0.5"),
    *("--data.root", "/some/where", "--data.image-size", "64", "--data.partition", "iid"),
    *("--fleet.models", "cnn1", "resnet10", "--fleet.gpus", "cnn1=0.5", "resnet10=1"),
    *("--train.lr", "1e-3", "--train.clip", "2", "--train.drop-last", "False"),
    *("--eval.clients", "5", "--eval.fresh", "False"),
]

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A YAML file with this text."""

    def write(text: str) -> Path:
        path = tmp_path / f"settings{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def my_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A method file of the user's; what loading it leaves behind goes when the test does."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "raysim_user_my_method", None)
    path = tmp_path / "my_method.py"
    path.write_text(MY_METHOD)
    return path


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says while it exits."""
    with pytest.raises(SystemExit) as exit:
        Config.parse(argv)
    assert exit.value.code not in (0, None)
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


# Flags


def test_nothing_typed_gives_the_defaults() -> None:
    config = Config.parse([])
    assert config.to_tree() == Config().to_tree()
    assert (config.method, config.clients, config.participation) == ("fedre", 100, 0.1)
    assert config.hp == methods.get("fedre")()


def test_flags_may_come_in_any_order() -> None:
    pairs = [("--hp.d1", "64"), ("--clients", "10"), ("--method", "fedmrl"), ("--train.lr", "0.5")]
    forward = Config.parse([word for pair in pairs for word in pair])
    backward = Config.parse([word for pair in reversed(pairs) for word in pair])
    assert forward.to_tree() == backward.to_tree()
    assert (forward.clients, forward.hp.d1, forward.train.lr) == (10, 64, 0.5)


def test_equal_settings_make_equal_configs() -> None:
    argv = ["--method", "fedmrl", "--hp.d1", "64"]
    assert Config.parse(argv) == Config.parse(argv)
    assert Config.parse(argv) == Config(method="fedmrl", hp={"d1": 64})
    assert Config.parse(argv) != Config.parse([*argv, "--clients", "7"])


def test_a_parsed_config_survives_pickling() -> None:
    config = Config.parse(UNUSUAL)
    assert pickle.loads(pickle.dumps(config)).to_tree() == config.to_tree()


def test_a_flag_typed_twice_means_its_last_value() -> None:
    config = Config.parse(
        [
            "--clients",
            "3",
            "--fleet.models",
            "cnn1",
            "cnn2",
            "--clients",
            "4",
            "--fleet.models",
            "cnn3",
        ]
    )
    assert config.clients == 4
    assert config.fleet.models == ("cnn3",)


@pytest.mark.parametrize(
    "argv", [["--method=fedmrl", "--hp.d1=64"], ["--method", "fedmrl", "--hp.d1", "64"]]
)
def test_values_may_follow_an_equals_sign(argv: list[str]) -> None:
    assert Config.parse(argv).hp.d1 == 64


def test_underscores_are_as_good_as_dashes() -> None:
    config = Config.parse(["--train.batch_size", "8", "--eval.batch-size", "9"])
    assert (config.train.batch_size, config.eval.batch_size) == (8, 9)


def test_truth_values_are_typed_out() -> None:
    config = Config.parse(
        ["--dashboard", "False", "--train.shuffle", "False", "--eval.fresh", "True"]
    )
    assert (config.dashboard, config.train.shuffle, config.eval.fresh) == (False, False, True)


def test_values_have_the_types_of_their_fields() -> None:
    config = Config.parse([*UNUSUAL, "--out", "some/folder"])
    assert config.out == Path("some/folder")
    assert config.data.root == Path("/some/where")
    assert config.fleet.models == ("cnn1", "resnet10")
    assert (config.seed, config.memory, config.train.clip) == (-3, 0.5, 2.0)
    assert (config.eval.clients, config.actors) == ("5", "clients")


@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        (["--cleints", "3"], "--clients"),
        (["--train.lrr", "3"], "--train.lr"),
        (["--trian.lr", "3"], "--train.lr"),
        (["--hp.server-rl", "3"], "--hp.server-lr"),
        (["--method", "fedmrl", "--hp.d2", "3"], "--hp.d1"),
        (["--fleet.model", "cnn1"], "--fleet.models"),
    ],
)
def test_a_misspelled_flag_exits_and_names_the_nearest(
    argv: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(argv, capsys)
    assert "Unrecognized options" in said
    assert nearest in said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--clients", "many"], "--clients"),
        (["--clients", "1.5"], "--clients"),
        (["--backend", "rya"], "('ray', 'local')"),
        (["--dashboard", "maybe"], "--dashboard"),
        (["--train.lr"], "--train.lr"),
    ],
)
def test_a_value_of_the_wrong_kind_exits_and_names_the_flag(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(argv, capsys)


def test_the_text_of_a_method_file_is_not_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--source" in refusal(["--source", "import os"], capsys)


def test_flags_of_another_method_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--hp.d1" in refusal(["--method", "fedavg", "--hp.d1", "3"], capsys)


def test_help_prints_the_groups_and_the_flags_of_the_method(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit:
        Config.parse(["--method", "fedmrl", "--help"])
    assert exit.value.code == 0
    said = capsys.readouterr().out
    for group in ("data", "fleet", "train", "eval", "driver", "hp"):
        assert f"{group} options" in said
    for flag in ("--clients INT", "--backend {ray,local}", "--hp.d1 INT", "--config FILE"):
        assert flag in said
    assert "--hp.server-lr" not in said
    assert "--source" not in said


# YAML files


def test_a_file_wins_over_defaults_and_flags_win_over_the_file(write: Write) -> None:
    path = write("clients: 10\nrounds: 5\n")
    before = Config.parse(["--rounds", "7", "--config", str(path)])
    after = Config.parse(["--config", str(path), "--rounds", "7"])
    assert before.to_tree() == after.to_tree()
    assert (after.clients, after.rounds, after.seed) == (10, 7, 0)


def test_the_later_of_two_files_wins(write: Write) -> None:
    first, second = write("clients: 10\nrounds: 5\n"), write("clients: 20\n")
    config = Config.parse(["--config", str(first), f"--config={second}"])
    assert (config.clients, config.rounds) == (20, 5)


def test_groups_may_be_nested_or_dotted(write: Write) -> None:
    nested = write("train:\n  lr: 0.5\n  batch_size: 8\nhp:\n  server_lr: 2\n")
    dotted = write("train.lr: 0.5\ntrain.batch-size: 8\nhp.server_lr: 2\n")
    assert Config.load(nested).to_tree() == Config.load(dotted).to_tree()
    assert Config.load(nested).train == TrainConfig(lr=0.5, batch_size=8)
    assert Config.load(nested).hp.server_lr == 2.0


def test_lists_numbers_and_truth_values_are_read(write: Write) -> None:
    fleet = "fleet: {models: [cnn1, resnet10], gpus: []}"
    config = Config.load(write(f"{fleet}\neval: {{clients: 3, fresh: false}}\nactors: 4\n"))
    assert config.fleet == FleetConfig(models=("cnn1", "resnet10"), gpus=())
    assert (config.eval.clients, config.eval.fresh, config.actors) == ("3", False, "4")


def test_an_empty_list_takes_back_an_earlier_one(write: Write) -> None:
    first, second = write("fleet: {gpus: [cnn1=0.5]}"), write("fleet: {gpus: []}")
    assert Config.parse(["--config", str(first)]).fleet.gpus == ("cnn1=0.5",)
    assert Config.parse(["--config", str(first), "--config", str(second)]).fleet.gpus == ()


def test_null_means_none(write: Write) -> None:
    first = write("memory: 2\nout: here\naddress: auto\ntrain: {clip: 1}\ndata: {image_size: 8}")
    second = write("memory: null\nout: null\naddress: null\ntrain: {clip: ~}\ndata: {image_size:}")
    config = Config.parse(["--config", str(first), "--config", str(second)])
    assert (config.memory, config.out, config.address) == (None, None, None)
    assert (config.train.clip, config.data.image_size) == (None, None)


def test_a_float_that_yaml_takes_for_text_is_a_float(write: Write) -> None:
    assert yaml.safe_load("1e-3") == "1e-3"
    assert Config.load(write("train: {lr: 1e-3}\nhp: {server_lr: 5E-2}")).train.lr == 0.001


def test_the_method_of_a_file_brings_its_own_settings(write: Write) -> None:
    path = write("method: fedmrl\nhp: {d1: 64}\n")
    assert Config.load(path).hp == methods.get("fedmrl")(d1=64)
    assert Config.parse(["--hp.d1", "32", "--config", str(path)]).hp.d1 == 32


def test_an_empty_file_changes_nothing(write: Write) -> None:
    assert Config.load(write("# nothing yet\n")).to_tree() == Config().to_tree()


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("cleints: 3", "--clients"),
        ("trian: {lr: 0.1}", "--train.lr"),
        ("train: {lrr: 0.1}", "--train.lr"),
        ("hp: {server_rl: 0.1}", "--hp.server-lr"),
    ],
)
def test_a_typo_in_a_file_exits_and_names_the_nearest(
    text: str, nearest: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nearest in refusal(["--config", str(write(text))], capsys)


def test_a_file_is_held_to_the_same_rules_as_flags(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"--train\.lr must be more than 0, got -1"):
        Config.load(write("train: {lr: -1}"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clients: [1", "not valid YAML"),
        ("- clients\n- 3\n", "expected settings such as 'clients: 100'"),
        ("just text", "expected settings such as 'clients: 100'"),
        ("a: !unknown 1", "not valid YAML"),
    ],
)
def test_a_file_that_is_not_settings_is_refused_by_name(
    text: str, words: str, write: Write
) -> None:
    path = write(text)
    with pytest.raises(ConfigError, match=words) as error:
        Config.load(path)
    assert str(error.value).startswith(f"--config {path}: ")


def test_yaml_cannot_run_code(write: Write, tmp_path: Path) -> None:
    trace = tmp_path / "was-here"
    with pytest.raises(ConfigError, match="not valid YAML"):
        Config.load(write(f'out: !!python/object/apply:os.system ["touch {trace}"]'))
    assert not trace.exists()


@pytest.mark.parametrize("argv", [["--config"], ["--clients", "3", "--config"]])
def test_config_needs_a_file(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="--config needs the path of a YAML file"):
        Config.parse(argv)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml: cannot read the file \(No such file"):
        Config.load(tmp_path / "no.yaml")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the file \(Is a directory"):
        Config.load(tmp_path)


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rounds.parquet"
    path.write_bytes(b"PAR1\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"^--config .*rounds\.parquet: "):
        Config.load(path)


def test_a_tree_becomes_flags() -> None:
    tree = {
        "clients": 3,
        "train": {"lr": 0.1, "clip": None},
        "fleet": {"models": ["a", "b"]},
        "hp": {},
    }
    expected = "--clients 3 --train.lr 0.1 --train.clip None --fleet.models a b"
    assert list(flags(tree)) == expected.split()


def test_the_flags_of_a_file_come_before_all_others(write: Write) -> None:
    path = write("rounds: 5")
    words = expand_files(["--clients", "3", "--config", str(path), "--seed", "1"])
    assert words == ["--rounds", "5", "--clients", "3", "--seed", "1"]


# What a run writes down, read again


@pytest.mark.parametrize("name", methods.names())
@pytest.mark.parametrize("argv", [[], UNUSUAL], ids=["defaults", "unusual"])
def test_a_written_config_repeats_the_run(name: str, argv: list[str], write: Write) -> None:
    config = Config.parse(["--method", name, *argv])
    again = Config.parse(["--config", str(write(config_yaml(config)))])
    assert again.to_tree() == config.to_tree()
    assert again.hp == config.hp
    assert type(again.hp) is methods.get(name)


def test_a_written_config_gives_an_equal_one(write: Write) -> None:
    config = Config.parse(UNUSUAL)
    assert Config.load(write(config_yaml(config))) == config


def test_a_written_config_does_not_repeat_the_folder(write: Write) -> None:
    config = Config.parse(["--out", "runs/first"])
    assert Config.load(write(config_yaml(config))).out is None


@pytest.mark.parametrize("name", methods.names())
@pytest.mark.parametrize("argv", [[], UNUSUAL], ids=["defaults", "unusual"])
def test_a_tree_gives_the_config_again(name: str, argv: list[str]) -> None:
    config = Config.parse(["--method", name, "--out", "here", *argv])
    again = Config.from_tree(config.to_tree())
    assert again.to_tree() == config.to_tree()
    assert again.hp == config.hp
    assert (again.out, again.data, again.fleet) == (config.out, config.data, config.fleet)


def test_a_tree_is_plain() -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        if isinstance(value, list):
            return all(map(plain, value))
        return value is None or type(value) in (bool, int, float, str)

    assert plain(Config.parse([*UNUSUAL, "--out", "here"]).to_tree())


def test_an_unknown_key_of_a_tree_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'train\.lrr' .*'train\.lr'"):
        Config.from_tree({"train": {"lrr": 1}})
    with pytest.raises(ConfigError, match=r"unknown setting 'cleints' .*'clients'"):
        Config.from_tree({"cleints": 1})


# From Python


def test_hyper_parameters_may_be_a_mapping() -> None:
    assert Config(hp={"server_lr": 0.1}).hp == methods.get("fedre")(server_lr=0.1)
    assert Config(method="fedmrl", hp={"d1": 3}).hp == methods.get("fedmrl")(d1=3)


def test_hyper_parameters_may_be_the_method_itself() -> None:
    method = methods.get("fedmrl")(d1=3)
    assert Config(method="fedmrl", hp=method).hp is method


def test_a_whole_number_is_good_enough_for_a_float() -> None:
    value = Config(hp={"server_lr": 1}).hp.server_lr
    assert (value, type(value)) == (1.0, float)


def test_an_unknown_hyper_parameter_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'hp\.serve_lr' .*'hp\.server_lr'"):
        Config(hp={"serve_lr": 0.1})


def test_an_unknown_method_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="unknown method 'fedree' in --method; did you mean 'fedre'"
    ):
        Config(method="fedree")
    with pytest.raises(ConfigError, match="did you mean 'fedre'"):
        Config.parse(["--method", "fedree"])


@pytest.mark.parametrize(
    ("tree", "flag"),
    [
        ({"backend": "rya"}, "backend"),
        ({"train": {"optimizer": "sdg"}}, "train.optimizer"),
        ({"method": "fedavg", "hp": {"weighting": "sample"}}, "hp.weighting"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_from_python_too(
    tree: dict[str, Any], flag: str
) -> None:
    with pytest.raises(ConfigError, match=flag):
        Config.from_tree(tree)


# Changing some settings


def test_dotted_keys_change_a_copy() -> None:
    config = Config()
    other = config.replace(
        {"train.lr": 0.5, "clients": 7, "hp.server_lr": 2, "train.batch-size": 8}
    )
    assert (other.train.lr, other.clients, other.hp.server_lr, other.train.batch_size) == (
        0.5,
        7,
        2.0,
        8,
    )
    assert config.to_tree() == Config().to_tree()
    assert (
        other.replace(
            {"train.lr": 0.05, "clients": 100, "hp.server_lr": 0.01, "train.batch_size": 16}
        )
        == config
    )


def test_a_changed_list_is_a_tuple_and_a_changed_path_a_path() -> None:
    other = Config().replace(
        {"fleet.models": ["cnn1", "cnn2"], "out": "here", "data.root": "there"}
    )
    assert other.fleet.models == ("cnn1", "cnn2")
    assert (other.out, other.data.root) == (Path("here"), Path("there"))


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("cleints", "clients"),
        ("train.lrr", "train.lr"),
        ("trian.lr", "train.lr"),
        ("hp.serve_lr", "hp.server_lr"),
        ("clients.lr", "clients"),
        ("method.fed", "method"),
        ("train.lr.x", "train.lr"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^unknown setting '{key}' in config; did you mean '{nearest}'"
    ):
        Config().replace({key: 1})


def test_a_change_is_held_to_the_same_rules() -> None:
    with pytest.raises(ConfigError, match="--participation must be in"):
        Config().replace({"participation": 2.0})


def test_another_method_starts_from_its_own_defaults() -> None:
    config = Config(hp={"server_lr": 2})
    assert config.replace({"method": "fedmrl"}).hp == methods.get("fedmrl")()
    assert config.replace({"method": "local"}).hp == methods.get("local")()


def test_another_method_may_come_with_its_own_settings() -> None:
    other = Config().replace({"method": "fedmrl", "hp.d1": 50})
    assert other.hp == methods.get("fedmrl")(d1=50)
    dashed = Config().replace({"hp.shared-model": "cnn1", "method": "fedmrl"})
    assert dashed.hp == methods.get("fedmrl")(shared_model="cnn1")


def test_another_method_does_not_take_settings_that_it_has_not() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'hp\.server_lr'"):
        Config().replace({"method": "fedmrl", "hp.server_lr": 0.5})


# Rules


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("clients", "0", "at least 1"),
        ("clients", "-5", "at least 1"),
        ("participation", "0", r"in \(0, 1\]"),
        ("participation", "1.01", r"in \(0, 1\]"),
        ("participation", "-0.1", r"in \(0, 1\]"),
        ("participation", "nan", r"in \(0, 1\]"),
        ("rounds", "0", "at least 1"),
        ("cpus", "-1", "at least 0"),
        ("gpus", "-0.5", "at least 0"),
        ("gpus", "nan", "at least 0"),
        ("memory", "0", "more than 0 GiB"),
        ("memory", "-1", "more than 0 GiB"),
        ("actors", "0", "auto, clients or a number"),
        ("actors", "-1", "auto, clients or a number"),
        ("actors", "1.5", "auto, clients or a number"),
        ("actors", "many", "auto, clients or a number"),
        ("actors", "²", "auto, clients or a number"),
        ("train.epochs", "0", "at least 1"),
        ("train.batch-size", "0", "at least 1"),
        ("train.lr", "0", "more than 0"),
        ("train.lr", "-0.1", "more than 0"),
        ("train.lr", "nan", "more than 0"),
        ("eval.every", "0", "at least 1"),
        ("eval.batch-size", "0", "at least 1"),
        ("eval.clients", "none", "all, cohort or a number"),
        ("eval.clients", "0", "all, cohort or a number"),
        ("eval.clients", "²", "all, cohort or a number"),
    ],
)
def test_a_value_out_of_range_names_the_flag_the_rule_and_what_was_found(
    flag: str, value: str, rule: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--{flag} must be {rule}, got ") as error:
        Config.parse([f"--{flag}={value}"])
    assert error.value.exit_code == 2
    found = str(error.value).rpartition("got ")[2]
    assert found in (value, f"{value}.0")


@pytest.mark.parametrize(
    "argv",
    [
        ["--clients", "1"],
        ["--participation", "1"],
        ["--participation", "1e-9"],
        ["--cpus", "0", "--gpus", "0.01", "--memory", "0.1"],
        ["--actors", "1"],
        ["--actors", "clients"],
        ["--eval.clients", "1"],
        ["--eval.clients", "cohort"],
        ["--seed", "-1"],
    ],
    ids=" ".join,
)
def test_values_at_the_edge_of_their_range_are_taken(argv: list[str]) -> None:
    Config.parse(argv)


def test_more_than_one_gpu_is_a_whole_number() -> None:
    """Ray refuses 1.5 GPUs for an actor, so we do, before anything starts."""
    assert Config.parse(["--gpus", "2"]).gpus == 2
    with pytest.raises(ConfigError, match=r"--gpus .*1\.5"):
        Config.parse(["--gpus", "1.5"])


# A method of the user's own


def test_a_method_file_brings_its_own_flags(my_method: Path) -> None:
    config = Config.parse(["--hp.strength", "2", "--method", str(my_method), "--hp.flavor", "sour"])
    assert type(config.hp).__name__ == "Mine"
    assert (config.hp.strength, config.hp.flavor) == (2.0, "sour")


def test_help_shows_the_docstrings_of_a_method_file(
    my_method: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        Config.parse(["--method", str(my_method), "--help"])
    said = capsys.readouterr().out
    assert "--hp.strength FLOAT" in said
    assert "How strong it is." in said


def test_a_wrong_flag_of_a_method_file_names_the_nearest(
    my_method: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--hp.strength" in refusal(["--method", str(my_method), "--hp.strenght", "2"], capsys)


def test_the_text_of_a_method_file_travels_with_the_config(my_method: Path) -> None:
    """Other machines do not have the file: from the command line as from Python."""
    typed = Config.parse(["--method", str(my_method), "--hp.strength", "2"])
    coded = Config(method=str(my_method), hp={"strength": 2})
    ready = Config(method=str(my_method), hp=typed.hp)
    my_method.unlink()
    for config in (typed, coded, ready):
        assert config.source == MY_METHOD
        again = Config.from_tree(config.to_tree())
        assert (type(again.hp).__name__, again.hp.strength) == ("Mine", 2.0)


def test_a_method_of_ours_has_no_text_to_carry() -> None:
    assert Config.parse([]).source is None
    assert Config().source is None


def test_settings_of_a_method_file_can_be_changed(my_method: Path) -> None:
    config = Config(method=str(my_method))
    my_method.unlink()
    other = config.replace({"hp.strength": 3})
    assert (other.hp.strength, other.source) == (3.0, MY_METHOD)
    back = other.replace({"method": "fedre"})
    assert back.source is None
    assert back.hp == methods.get("fedre")()


def test_a_written_config_finds_its_method_file_from_any_folder(
    my_method: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(my_method.parent)
    config = Config.parse(["--method", "my_method.py", "--hp.strength", "2"])
    path = write(config_yaml(config))
    monkeypatch.chdir("/")
    assert Config.load(path).hp == config.hp
